"""Rotary scaling of GGUF files, which transformers does not read: in blocks and unpacked."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headway_engine.float32_pass import logits
from headway_engine.model import LoadedModel, load
from headway_engine.model_error import ModelError
from headway_engine.model_source import resolve
from support import tiny_gguf

IDS = (torch.arange(100)[None] * 37 + 11) % 259

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


LLAMA3_BASE = 500_000.0


def llama3_factors(factor: float, original: int = 8192, width: int = 8) -> "np.ndarray[Any, Any]":
    """As llama.cpp's converter writes them."""
    found = []
    for i in range(0, width, 2):
        frequency = LLAMA3_BASE ** -(i / width)
        length = 2 * math.pi / frequency
        smooth = (original / length - 1) / (4 - 1)
        found.append(
            1.0
            if length < original / 4
            else factor
            if length > original
            else 1 / ((1 - smooth) / factor + smooth)
        )
    return np.array(found)


def loaded(gguf: Path, keep_blocks: bool) -> LoadedModel:
    source = resolve(f"file://{gguf}", "main", gguf.parent / "cache")
    return load(
        source,
        dtype="float32",
        device="cpu",
        max_model_len=0,
        progress=lambda _: None,
        keep_blocks=keep_blocks,
    )


def frequencies(model: LoadedModel) -> torch.Tensor:
    module: Any = model.module
    found: torch.Tensor = module.model.rotary_emb.inv_freq
    return found


def wanted(architecture: str, base: float = 10000.0, **rope: Any) -> torch.Tensor:
    width = 128 if architecture == "qwen3" else 8
    config = LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        head_dim=width,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": base, **rope},
    )
    found, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return found


@pytest.mark.parametrize("keep_blocks", [True, False])
@pytest.mark.parametrize(
    ("architecture", "rope", "expected"),
    [
        ("llama", {"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            "qwen2",
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            "qwen3",
            {"type": "yarn", "factor": 2.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_scaling_in_the_metadata_is_computed(
    architecture: str, rope: dict[str, Any], expected: dict[str, Any], keep_blocks: bool, tmp_path: Path
) -> None:
    """As transformers computes it for the same model in a folder."""
    gguf = tiny_gguf.write(tmp_path / "m.gguf", architecture=architecture, types=lambda _: "Q8_0", rope=rope)
    model = loaded(gguf, keep_blocks)
    assert model.in_blocks is keep_blocks
    torch.testing.assert_close(frequencies(model), wanted(architecture, **expected))
    plain = tiny_gguf.write(tmp_path / "plain.gguf", architecture=architecture, types=lambda _: "Q8_0")
    assert not torch.allclose(
        logits(model.module, IDS), logits(loaded(plain, keep_blocks).module, IDS), rtol=1e-2
    )


@pytest.mark.parametrize("keep_blocks", [True, False])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_of_frequencies_are_those_of_llama_3(
    factor: float, keep_blocks: bool, tmp_path: Path
) -> None:
    gguf = tiny_gguf.write(
        tmp_path / "m.gguf",
        types=lambda _: "Q8_0",
        rope_freqs=llama3_factors(factor),
        rope_base=LLAMA3_BASE,
    )
    expected = wanted("llama", LLAMA3_BASE, rope_type="llama3", factor=factor, **LLAMA3)
    torch.testing.assert_close(frequencies(loaded(gguf, keep_blocks)), expected)


@pytest.mark.parametrize("rope", [None, {"type": "none"}, {"type": "linear", "factor": 1.0}])
def test_no_scaling_is_none(rope: dict[str, Any] | None, tmp_path: Path) -> None:
    gguf = tiny_gguf.write(tmp_path / "m.gguf", types=lambda _: "Q8_0", rope=rope, rope_freqs=np.ones(4))
    plain = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(frequencies(loaded(gguf, keep_blocks=True)), plain)


@pytest.mark.parametrize("keep_blocks", [True, False])
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rope": {"type": "longrope", "factor": 4.0}}, r"scaled \(longrope\)"),
        ({"rope_freqs": llama3_factors(8.0, original=2048)}, r"by rope_freqs\.weight, unlike Llama 3's"),
    ],
)
def test_what_cannot_be_read_is_refused(
    more: dict[str, Any], words: str, keep_blocks: bool, tmp_path: Path
) -> None:
    """It would answer wrongly, and no check compares with anything but transformers' reading."""
    gguf = tiny_gguf.write(tmp_path / "m.gguf", types=lambda _: "Q8_0", **more)
    with pytest.raises(ModelError, match=rf"{words}.*; use the model as a Hugging Face folder"):
        loaded(gguf, keep_blocks)
