"""Small copies: which layers and tokens they have, and that nothing of the model changes with them."""

from typing import Any

import pytest
import torch
from torch import nn

from headway_engine import small_copy as copies
from headway_engine.float32_pass import logits
from headway_engine.model import load, resolve
from headway_engine.model_source import default_cache_dir
from headway_engine.small_copy import CannotCopy, chosen_layers, small_copy
from support.architectures import SERVED, in_memory, names

IDS = tuple(range(3, 299, 5))


def deep(layers: int = 5) -> Any:
    uri = f"random://llama?hidden=32&heads=4&kv_heads=2&layers={layers}&vocab=300&context=97&seed=1"
    source = resolve(uri, "main", default_cache_dir())
    return load(source, dtype="bfloat16", device="cpu", max_model_len=0, progress=lambda _: None)


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ("a", [0]),
        ("aaaa", [0, 3]),
        ("abab", [0, 1]),
        ("aabb", [0, 2]),
        ("aaaaab", [0, 5]),
        ("abcdef", [0, 1, 2, 3]),
    ],
)
def test_there_is_one_layer_of_each_kind(kinds: str, chosen: list[int]) -> None:
    """The first; and the last, where all are alike."""
    assert chosen_layers(kinds) == chosen


@pytest.mark.parametrize("row", range(len(SERVED)), ids=names(SERVED))
def test_a_copy_of_all_layers_gives_the_logits_of_the_model(row: int) -> None:
    """Tokens are numbered anew, and their logits are those that they had; whatever the architecture."""
    model = in_memory(row, torch.float32)
    small = small_copy(model, IDS)
    assert small.ids == IDS
    new = torch.tensor([[5, 9, 0, 41, 17, 3]])
    expected = logits(model.module, torch.tensor(IDS)[new])[..., list(IDS)]
    assert torch.allclose(logits(small.model.module, new), expected, atol=1e-5)


def test_layers_are_left_out_and_numbered_anew() -> None:
    """First and last of five, as the model itself would compute those two."""
    model: Any = deep()
    small = small_copy(model, IDS)
    assert list(small.model.layer_shapes) == [0, 1]
    assert [layer.self_attn.layer_idx for layer in small.model.module.model.layers] == [0, 1]  # type: ignore[union-attr]
    assert small.model.config.num_hidden_layers == 2
    model.module.model.layers = nn.ModuleList([model.module.model.layers[0], model.module.model.layers[4]])
    new = torch.tensor([[5, 9, 0, 41]])
    expected = logits(model.module, torch.tensor(IDS)[new])[..., list(IDS)]
    assert torch.equal(logits(small.model.module, new), expected)


def test_a_copy_is_in_the_memory_of_the_model_until_it_is_widened() -> None:
    """Of its own are only the rows of the vocabulary."""
    model: Any = deep()
    small = small_copy(model, IDS)
    weight = small.model.module.model.layers[1].mlp.up_proj.weight  # type: ignore[union-attr]
    assert weight.data_ptr() == model.module.model.layers[4].mlp.up_proj.weight.data_ptr()
    assert small.model.module.lm_head.weight.shape == (len(IDS), 32)
    wide = small.widened()
    assert {p.dtype for p in wide.model.module.parameters()} == {torch.float32}
    assert {p.dtype for p in small.model.module.parameters()} == {torch.bfloat16}


def test_who_empties_a_copy_empties_nothing_else() -> None:
    """Neither the model nor a wide copy; embeddings and head that are one stay one."""
    model: Any = deep()
    small = small_copy(model, IDS)
    before = [p.clone() for p in model.module.parameters()]
    wide, taken = small.widened(), small.model
    assert taken.module.lm_head.weight is taken.module.model.embed_tokens.weight
    for parameter in taken.module.parameters():
        parameter.data = parameter.data.new_empty(0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))
    assert all(p.numel() for p in wide.model.module.parameters())
    again = small_copy(model, IDS)
    for parameter in small_copy(model, IDS).model.module.parameters():
        parameter.data = parameter.data.new_empty(0)
    assert all(p.numel() for p in again.model.module.parameters())


def test_settings_of_a_copy_are_its_own() -> None:
    """Who sets its attention does not set the model's."""
    model: Any = deep()
    small = small_copy(model, IDS)
    one, other = small.model, small.widened().model
    one.config.rms_norm_eps = 7.0
    assert one.config is one.module.config
    assert other.config is other.module.config
    assert model.config.rms_norm_eps == other.config.rms_norm_eps != 7.0
    assert model.config.num_hidden_layers == 5


def test_embeddings_of_a_form_of_their_own_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cannot be taken from codes: then the copy has the model's vocabulary."""
    model: Any = deep()
    packed = model.module.lm_head.weight
    monkeypatch.setattr(copies, "_is_packed", lambda tensor: tensor is packed)
    small = small_copy(model, IDS)
    assert small.ids == tuple(range(300))
    assert logits(small.model.module, torch.tensor([[1, 2]])).shape == (1, 2, 300)


@pytest.mark.parametrize(
    ("tensor", "packed"),
    [
        (torch.zeros(2, 2), False),
        (torch.zeros(1, 8, dtype=torch.int64), False),  # positions
        (torch.zeros(2, 2, dtype=torch.bool), False),  # a mask
        (torch.zeros(2, 2, dtype=torch.uint8), True),
        (torch.zeros(2, 2, dtype=torch.int32), True),
        (torch.zeros(2, 2).to(torch.float8_e4m3fn), True),
    ],
)
def test_codes_of_a_quantization_are_not_widened(tensor: torch.Tensor, packed: bool) -> None:
    """Nor is anything beside them in the same module."""
    module = nn.Module()
    module.register_buffer("codes", tensor)
    module.register_buffer("scales", torch.ones(2, dtype=torch.float16))
    widenable = copies.widenable(module)
    assert (widenable == []) == packed


def test_a_model_without_a_list_of_layers_is_not_guessed_at() -> None:
    model: Any = deep()
    model.module.model.layers = nn.Sequential(*model.module.model.layers)
    with pytest.raises(CannotCopy, match="keeps its 5 layers in no list"):
        small_copy(model, IDS)
