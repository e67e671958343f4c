"""Quantized blocks of GGUF's types with random contents."""

from typing import Any

import gguf
import numpy as np

HALF_AT = {
    # name: {byte of a block at which a half-precision number stands: largest number there}
    "Q4_0": {0: 0.01},
    "Q4_1": {0: 0.01, 2: 0.01},
    "Q5_0": {0: 0.01},
    "Q5_1": {0: 0.01, 2: 0.01},
    "Q8_0": {0: 0.01},
    "Q4_K": {0: 2e-4, 2: 1.5e-3},
    "Q5_K": {0: 1e-4, 2: 1.5e-3},
    "Q6_K": {208: 5e-5},
}
"""Numbers that a model might have: its weights are then some hundredths."""


def random_blocks(name: str, rows: int, blocks: int, seed: int = 7) -> "np.ndarray[Any, Any]":
    """A matrix of blocks, uint8 [rows, bytes of a row]: random bytes, but for scales and offsets."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    chance = np.random.default_rng(seed)
    raw = chance.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at, most in HALF_AT[name].items():
        numbers = chance.uniform(most / 2, most, (rows, blocks)).astype(np.float16)
        raw[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return raw.reshape(rows, -1)
