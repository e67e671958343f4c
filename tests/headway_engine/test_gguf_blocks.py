"""Quantized blocks of GGUF files as codes: the same weights as gguf's own reader gives."""

import gguf
import numpy as np
import pytest
from gguf import quants

from headway_engine import gguf_blocks
from support.random_blocks import HALF_AT, random_blocks

TYPES = {
    # name: (bits of a code, weights of a group, offsets)
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (8, 32, False),
    "Q5_1": (8, 32, True),
    "Q8_0": (8, 32, False),
    "Q4_K": (4, 32, True),
    "Q5_K": (8, 32, True),
    "Q6_K": (8, 16, False),
}


@pytest.mark.parametrize("name", TYPES)
def test_blocks_become_codes_with_the_same_weights(name: str) -> None:
    """To the bit; types with scales of scales to the rounding of those to half precision."""
    raw = random_blocks(name, rows=5, blocks=3)
    found = gguf_blocks.grouped(raw, name)
    wanted = quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    bits, group, offsets = TYPES[name]
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
    assert set(gguf_blocks._TYPES) == set(TYPES) == set(HALF_AT)
    for name in ("F16", "F32", "BF16", "Q2_K", "IQ4_XS"):
        assert not gguf_blocks.kept_packed(name)
