"""The kernels' C interface: the structures of the C++ headers in ctypes, and arrays of one step.

Layouts here and there must be the same. Calls release the interpreter lock. Knows nothing of transformers.
"""

import ctypes
import enum
from collections.abc import Sequence as Seq
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headway_engine.attention import KeyValueCache

Array = np.ndarray[Any, Any]


class CChunk(ctypes.Structure):
    _fields_ = (("first", c_int32), ("length", c_int32), ("start", c_int32), ("table", c_int32))


class CCache(ctypes.Structure):
    _fields_ = (
        ("kv_heads", c_int32),
        ("block_tokens", c_int32),
        ("key_width", c_int32),
        ("value_width", c_int32),
    )


class Element(enum.IntEnum):
    """How a packed matrix holds its weights: C's Element."""

    SINGLE = 0
    BRAIN = 1
    HALF = 2
    PAIRS = 3
    FOUR = 4
    FOUR_OFFSET = 5
    EIGHT = 6
    EIGHT_OFFSET = 7


class CMatrix(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        *((name, c_int32) for name in ("rows", "columns", "element", "group")),
    )


class CRows(ctypes.Structure):
    """C's PlainRows: where rows of a product come from and go to."""

    _fields_ = (("from_", c_void_p), ("to", c_void_p), ("rows", c_int64), ("is_short", c_int32))


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, CMatrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm_in", "norm_mid")),
        *((name, c_void_p) for name in ("qkv_bias", "o_bias", "query_norm", "key_norm", "keys", "values")),
    )


class CModel(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "width", "inner")),
        *((name, c_int32) for name in ("vocabulary", "block_tokens", "threads", "short_cache", "short_sums")),
        ("epsilon", c_float),
        ("scale", c_float),
        ("layer", POINTER(CLayer)),
        ("head", CMatrix),
        ("embedding", CMatrix),
        *((name, c_void_p) for name in ("norm", "cosines", "sines")),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("tokens", "chunks", "samples", "pooled")),
        *((name, c_void_p) for name in ("ids", "positions", "slots", "chunk", "tables", "sampled")),
        *((name, c_void_p) for name in ("pooled_rows", "logits", "states", "workspace")),
    )


WISH = np.dtype(
    [("uniform", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("warmth", "f4"), ("top_k", "i4")], align=True
)
"""How a row is drawn: C's Wish."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Whose tokens the rows of a step are, as the kernels want it. Holds the memory that C reads."""

    tokens: int
    chunks: Array  # int32 [chunks, 4]: CChunk
    tables: Array  # int32
    slots: Array  # int64 [tokens]
    positions: Array  # int32 [tokens]


def spans(parts: Seq[tuple[int, int, Seq[int]]], block_tokens: int) -> Spans:
    """Spans of (start, length, block table), in row order."""
    chunks = np.empty((len(parts), 4), dtype=np.int32)
    tables: list[int] = []
    total = sum(length for _, length, _ in parts)
    slots = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int32)
    row = 0
    for i, (start, length, table) in enumerate(parts):
        used = table[: -(-(start + length) // block_tokens)]
        chunks[i] = (row, length, start, len(tables))
        tables.extend(used)
        if length == 1:
            slots[row] = used[-1] * block_tokens + start % block_tokens
            positions[row] = start
        else:
            place = np.arange(start, start + length)
            positions[row : row + length] = place
            blocks = np.array(used, dtype=np.int64)
            slots[row : row + length] = blocks[place // block_tokens] * block_tokens + place % block_tokens
        row += length
    return Spans(total, chunks, np.array(tables, dtype=np.int32), slots, positions)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Argument and result types of every entry point."""
    library.hw_panel_columns.restype = c_int32
    library.hw_workspace.argtypes = (POINTER(CModel), c_int64)
    library.hw_workspace.restype = c_int64
    library.hw_multiplies_bf16.restype = c_int32
    library.hw_packed_bytes.argtypes = (c_int32,) * 5
    library.hw_packed_bytes.restype = c_int64
    library.hw_pack.argtypes = (
        *(c_void_p,) * 3, *(c_int32,) * 4, c_void_p, c_int32, c_int32,
    )  # fmt: skip
    library.hw_pack.restype = None
    library.hw_gather_rows.argtypes = (POINTER(CMatrix), c_void_p, POINTER(CRows), c_int32)
    library.hw_gather_rows.restype = c_int32
    library.hw_linear.argtypes = (POINTER(CMatrix), POINTER(CRows), c_void_p, c_int32, c_int32)
    library.hw_linear.restype = c_int32
    library.hw_run.argtypes = (POINTER(CModel), POINTER(CStep))
    library.hw_run.restype = c_int32
    library.hw_attend.argtypes = (
        POINTER(CCache), c_int32, c_float, c_int32, c_int32, *(c_void_p,) * 9, c_int32, c_int32,
    )  # fmt: skip
    library.hw_attend.restype = c_int32
    library.hw_sample_workspace.argtypes = (c_int32, c_int32)
    library.hw_sample_workspace.restype = c_int64
    library.hw_sample.argtypes = (c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32)
    library.hw_sample.restype = None
    library.hw_highest.argtypes = (c_void_p, c_int32, c_int32, c_void_p, c_int32)
    library.hw_highest.restype = None
    return library


def pointer(array: Array) -> int:
    return int(array.ctypes.data)


@dataclass(frozen=True, slots=True)
class KernelBatch:
    """A PagedBatch whose attention is the C++ kernel."""

    library: ctypes.CDLL
    cache: KeyValueCache
    step: Spans
    threads: int

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """See PagedBatch. The kernel computes in float32 whatever the model's type."""
        q, k, v = (t[0].transpose(0, 1).float().contiguous() for t in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        out = _attend(self.library, self.step, scale, q, k, v, keys, values, self.threads)
        return out.to(query.dtype)


def _attend(
    library: ctypes.CDLL,
    step: Spans,
    scale: float,
    query: torch.Tensor,  # [tokens, heads, width] float32, contiguous
    key: torch.Tensor,  # [tokens, kv_heads, width] float32, contiguous
    value: torch.Tensor,
    keys: torch.Tensor,  # [blocks, kv_heads, block_tokens, width]
    values: torch.Tensor,
    threads: int,
) -> torch.Tensor:
    """Write the step's keys and values to their slots, then attend; [tokens, heads, value_width]."""
    out = torch.empty((step.tokens, query.shape[1], values.shape[-1]))
    cache = CCache(keys.shape[1], keys.shape[2], keys.shape[3], values.shape[3])
    code = library.hw_attend(
        ctypes.byref(cache), query.shape[1], scale, step.tokens, len(step.chunks),
        pointer(step.chunks), pointer(step.tables), pointer(step.slots),
        query.data_ptr(), key.data_ptr(), value.data_ptr(),
        keys.data_ptr(), values.data_ptr(), out.data_ptr(),
        int(keys.dtype is torch.bfloat16), threads,
    )  # fmt: skip
    if code:
        raise MemoryError("no memory for attention")
    return out
