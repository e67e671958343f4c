"""GGUF's quantized blocks as codes, scales and offsets: the same weights, in the form the kernels pack.

One function for each type of block; layouts are those of ggml's `ggml-common.h` and `ggml-quants.c`. Types
of 4 bits become codes of 4 bits, those of 5, 6 and 8 bits codes of 8. Nothing is rounded, except for types
with scales of scales (the K types): their products are kept in half precision. Knows nothing of files.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headway_engine.grouped_codes import GroupedCodes

Array = np.ndarray[Any, Any]

_K_BLOCK = 256  # weights of a block of the K types
_K_GROUPS = 8  # of 32 weights each, but for Q6_K


def kept_packed(type_name: str) -> bool:
    """Whether blocks of this type (gguf's name of it) can be kept as they are."""
    return type_name in _TYPES


def grouped(raw: Array, type_name: str) -> GroupedCodes:
    """A matrix of blocks, uint8 [rows, bytes of a row], as codes. Raises KeyError for an unknown type."""
    return _TYPES[type_name](np.ascontiguousarray(raw))


def _blocks(raw: Array, size: int) -> Array:
    return raw.reshape(raw.shape[0], -1, size)


def _half(blocks: Array, at: int) -> Array:
    """The half-precision number at this byte of every block, [rows, blocks] float16."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(quarters: Array) -> Array:
    """Low halves of all bytes, then the high ones: [..., n] to [..., 2 n]."""
    return np.concatenate([quarters & 15, quarters >> 4], axis=-1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """The 32 bits from this byte on, as 0 or 16."""
    bits = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return bits.astype(np.uint8) << 4


def _codes(bits: int, codes: Array, scales: Array, offsets: Array | None = None) -> GroupedCodes:
    rows = codes.shape[0]
    half = [
        None if a is None else torch.from_numpy(a.astype(np.float16).reshape(rows, -1))
        for a in (scales, offsets)
    ]
    assert half[0] is not None
    return GroupedCodes(bits, torch.from_numpy(codes.reshape(rows, -1)), half[0], half[1])


def _q4_0(raw: Array) -> GroupedCodes:
    blocks = _blocks(raw, 18)
    return _codes(4, _nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(raw: Array) -> GroupedCodes:
    blocks = _blocks(raw, 20)
    return _codes(4, _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(raw: Array) -> GroupedCodes:
    blocks = _blocks(raw, 22)
    codes = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)) + np.uint8(128 - 16)
    return _codes(8, codes, _half(blocks, 0))


def _q5_1(raw: Array) -> GroupedCodes:
    blocks = _blocks(raw, 24)
    return _codes(8, _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(raw: Array) -> GroupedCodes:
    blocks = _blocks(raw, 34)
    return _codes(8, blocks[..., 2:] ^ np.uint8(128), _half(blocks, 0))


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """Scales and offsets [rows, blocks, 8] float32 of Q4_K, Q5_K: twelve bytes hold eight pairs of 6 bits."""
    packed = blocks[..., 4:16]
    low, high, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=-1).astype(np.float32)
    offsets = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=-1).astype(np.float32)
    d, least = (_half(blocks, at).astype(np.float32)[..., None] for at in (0, 2))
    return d * scales, -least * offsets


def _k_nibbles(quarters: Array) -> Array:
    """Of 128 bytes: the low halves of 32 bytes are a group, their high halves the next one."""
    return _nibbles(quarters.reshape(*quarters.shape[:-1], 4, 32)).reshape(*quarters.shape[:-1], _K_BLOCK)


def _q4_k(raw: Array) -> GroupedCodes:
    blocks = _blocks(raw, 144)
    return _codes(4, _k_nibbles(blocks[..., 16:]), *_k_scales(blocks))


def _q5_k(raw: Array) -> GroupedCodes:
    blocks = _blocks(raw, 176)
    high = blocks[..., 16:48]  # bit g of byte i belongs to weight i of group g
    bits = np.concatenate([(high >> g & 1) << 4 for g in range(_K_GROUPS)], axis=-1)
    return _codes(8, _k_nibbles(blocks[..., 48:]) | bits, *_k_scales(blocks))


def _q6_k(raw: Array) -> GroupedCodes:
    blocks = _blocks(raw, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)  # half of the block, which 32 bytes
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    parts = []
    for nibble in (0, 4):
        for which in (0, 1):
            shift = nibble + 2 * which  # of the two high bits
            parts.append((low[..., which, :] >> nibble & 15) | (high >> shift & 3) << 4)
    codes = np.stack(parts, axis=-2).reshape(*blocks.shape[:2], _K_BLOCK)
    scales = (
        blocks[..., 192:208].view(np.int8).astype(np.float32)
        * _half(blocks, 208).astype(np.float32)[..., None]
    )
    return _codes(8, (codes + np.uint8(128 - 32)).astype(np.uint8), scales)


_TYPES: dict[str, Callable[[Array], GroupedCodes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
