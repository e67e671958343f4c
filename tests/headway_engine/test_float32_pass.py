"""A model's own pass in float32: as if its weights had been wide from the start, and none of them changes."""

import copy
from typing import Any

import pytest
import torch

from headway_engine import float32_pass
from headway_engine.float32_pass import float32_logits, logits
from support import tiny_models
from support.architectures import SERVED, in_memory, names

IDS = torch.tensor([[7, 250, 3, 0, 99, 12], [5, 5, 41, 298, 7, 1]])
COLUMNS = torch.tensor([2, 7, 100, 299])


@pytest.mark.parametrize("row", range(len(SERVED)), ids=names(SERVED))
@pytest.mark.parametrize("large", [1, 1 << 20], ids=["in kept memory", "in new memory"])
def test_it_is_the_pass_of_widened_weights(row: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every architecture, whatever its modules do with their weights."""
    monkeypatch.setattr(float32_pass, "_LARGE", large)
    module: Any = in_memory(row, torch.bfloat16).module
    wide = copy.deepcopy(module)
    for parameter in wide.parameters():
        parameter.data = parameter.data.float()
    expected = logits(wide, IDS)[..., COLUMNS]
    found = float32_logits(module, IDS, COLUMNS)
    assert found.shape == (2, 6, 4)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(module, IDS)[..., COLUMNS], expected, rtol=1e-4, atol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    """Weights, their type, their memory, hooks and attention; also where the pass fails half-way."""
    module: Any = tiny_models.fresh("llama", dtype="bfloat16").module
    before = {name: (p.dtype, p.data_ptr()) for name, p in module.named_parameters()}
    attention = module.config._attn_implementation
    float32_logits(module, IDS, COLUMNS)
    broken = module.model.layers[1].mlp.act_fn
    hook = broken.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        float32_logits(module, IDS, COLUMNS)
    hook.remove()
    assert {name: (p.dtype, p.data_ptr()) for name, p in module.named_parameters()} == before
    assert module.config._attn_implementation == attention
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_no_more_than_one_module_is_wide_at_a_time() -> None:
    """Memory for the widest weight is all that it takes."""
    module: Any = tiny_models.fresh("llama", dtype="bfloat16").module
    widest = max(p.numel() for name, p in module.named_parameters() if "embed" not in name)
    wide: list[int] = []

    def note(*_: Any) -> None:
        wide.append(sum(p.numel() for p in module.parameters() if p.dtype is torch.float32))

    for part in module.modules():
        part.register_forward_hook(note)
    float32_logits(module, IDS, COLUMNS)
    assert 0 < max(wide) <= widest
