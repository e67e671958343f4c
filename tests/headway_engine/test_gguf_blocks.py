"""Quantized blocks of GGUF files as codes: the same weights as gguf's own reader gives."""

from typing import Any

import gguf
import numpy as np
import pytest
from gguf import quants

from headway_engine import gguf_blocks

TYPES = {
    # name: (bits of a code, weights of a group, offsets, bytes at which half-precision numbers stand)
    "Q4_0": (4, 32, False, (0,)),
    "Q4_1": (4, 32, True, (0, 2)),
    "Q5_0": (8, 32, False, (0,)),
    "Q5_1": (8, 32, True, (0, 2)),
    "Q8_0": (8, 32, False, (0,)),
    "Q4_K": (4, 32, True, (0, 2)),
    "Q5_K": (8, 32, True, (0, 2)),
    "Q6_K": (8, 16, False, (208,)),
}


def random_blocks(name: str, rows: int, blocks: int) -> "np.ndarray[Any, Any]":
    """Random bytes, but for scales, which are numbers that a model might have."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    chance = np.random.default_rng(7)
    raw = chance.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in TYPES[name][3]:
        scales = chance.uniform(0.001, 0.01, (rows, blocks)).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", TYPES)
def test_blocks_become_codes_with_the_same_weights(name: str) -> None:
    """To the bit; types with scales of scales to the rounding of those to half precision."""
    raw = random_blocks(name, rows=5, blocks=3)
    found = gguf_blocks.grouped(raw, name)
    wanted = quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    bits, group, offsets, _ = TYPES[name]
    assert (found.bits, found.group, found.offsets is not None) == (bits, group, offsets)
    assert int(found.codes.max()) < 1 << bits
    if name.endswith("_K"):
        # Code times scale, plus offset, each scale off by 2^-11 at most.
        most = np.abs(wanted).max() * 2**-10
        np.testing.assert_allclose(found.weights().numpy(), wanted, atol=most, rtol=0)
    else:
        np.testing.assert_array_equal(found.weights().numpy(), wanted)


def test_types_that_are_not_kept_are_known_as_such() -> None:
    """They are unpacked, and nobody asks for their codes."""
    assert set(gguf_blocks._TYPES) == set(TYPES)
    for name in ("F16", "F32", "BF16", "Q2_K", "IQ4_XS"):
        assert not gguf_blocks.kept_packed(name)
