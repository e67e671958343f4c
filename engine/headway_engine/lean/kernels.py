"""Paged attention behind one small Protocol, and the batch of a step that calls it.

The cache is [blocks, kv_heads, block_tokens, width] a layer, as in `attention`; queries are [rows, heads,
width]. A kernel sees block tables, lengths and contexts, and nothing of sequences or layers. `GatherKernel`
is the obvious one, in torch alone: what every other is compared with.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from headway_engine.attention import KeyValueCache, attend_singles, gather, padded_tables

Array = np.ndarray[Any, Any]

_ALIGNED = 4
"""Integers of 32 bits: kernels like what they read to begin at whole 16 bytes."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """One query a row. Everything of it may be static memory that a graph reads again at each replay, so
    `longest` is a bound and not a fact."""

    tables: torch.Tensor  # int32 [rows, blocks], each padded with blocks that are safe to read
    contexts: torch.Tensor  # int32 [rows] tokens to attend to, this one included
    longest: int  # no context is longer


@dataclass(frozen=True, slots=True)
class Prefills:
    """Several queries a sequence, the last of them at the end of its context."""

    starts: torch.Tensor  # int32 [sequences + 1] first row of each, and the number of rows
    contexts: torch.Tensor  # int32 [sequences]
    tables: torch.Tensor  # int32 [sequences, blocks]
    lengths: tuple[int, ...]  # queries of each, on the host
    ends: tuple[int, ...]  # contexts, on the host


class PagedKernel(Protocol):
    """Attention of queries with keys and values that are in the cache already, causal."""

    name: str
    reads_padding: bool
    """It reads whole tables, so that they should be no wider than needed."""

    def decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Decodes, scale: float
    ) -> torch.Tensor:
        """[rows, heads, value_width]. Without a look at a device's values, so that a graph can hold it."""
        ...

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Prefills, scale: float
    ) -> torch.Tensor:
        """[tokens, heads, value_width]."""
        ...


class GatherKernel:
    """Copies the contexts out of the cache and attends with torch's own attention."""

    name = "torch"
    reads_padding = True

    def decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Decodes, scale: float
    ) -> torch.Tensor:
        """See PagedKernel."""
        length = rows.tables.shape[1] * keys.shape[2]
        places = torch.arange(length, dtype=torch.int32, device=query.device)
        mask = (places[None, :] < rows.contexts[:, None])[:, None, None, :]
        return attend_singles(query, keys, values, rows.tables, mask, scale)

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Prefills, scale: float
    ) -> torch.Tensor:
        """See PagedKernel. One call a sequence."""
        out = query.new_empty((query.shape[0], query.shape[1], values.shape[-1]))
        first = 0
        for i, (length, end) in enumerate(zip(rows.lengths, rows.ends, strict=True)):
            used = math.ceil(end / keys.shape[2])
            columns = torch.arange(end, device=query.device)
            attended = sdpa(
                query[first : first + length].transpose(0, 1)[None],
                gather(keys, rows.tables[i : i + 1, :used])[:, :, :end],
                gather(values, rows.tables[i : i + 1, :used])[:, :, :end],
                attn_mask=columns[None, :] <= columns[end - length :, None],
                scale=scale,
                enable_gqa=query.shape[1] != keys.shape[1],
            )
            out[first : first + length] = attended[0].transpose(0, 1)
            first += length
        return out


@dataclass(frozen=True, slots=True)
class KernelBatch:
    """A step as kernels want it: the decodes first, then the prefill chunks. A PagedBatch of `attention`."""

    cache: KeyValueCache
    kernel: PagedKernel
    row_blocks: torch.Tensor  # [tokens] block that takes each token's keys and values
    row_offsets: torch.Tensor  # [tokens] place inside that block
    decodes: Decodes | None
    prefills: Prefills | None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, tokens, width]
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """See PagedBatch."""
        keys, values = self.cache.write(layer, self.row_blocks, self.row_offsets, key, value)
        rows = query[0].transpose(0, 1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        singles = self.decodes.contexts.shape[0] if self.decodes else 0
        found: list[torch.Tensor] = []
        if self.decodes:
            found.append(self.kernel.decode(rows[:singles], keys, values, self.decodes, scale))
        if self.prefills:
            found.append(self.kernel.prefill(rows[singles:], keys, values, self.prefills, scale))
        return found[0] if len(found) == 1 else torch.cat(found)


def kernel_batch(
    cache: KeyValueCache,
    kernel: PagedKernel,
    decodes: Seq[tuple[int, Seq[int]]],  # (context with this token, block table)
    prefills: Seq[tuple[int, int, Seq[int]]],  # (start, length, block table)
    device: torch.device,
) -> KernelBatch:
    """The batch of one step, its numbers sent to the device in one copy."""
    size = cache.block_tokens
    contexts = [context for context, _ in decodes]
    ends = [start + length for start, length, _ in prefills]
    lengths = [length for _, length, _ in prefills]
    tables = padded_tables(decodes, size)
    long_tables = padded_tables(
        [(end, table) for end, (_, _, table) in zip(ends, prefills, strict=True)], size
    )
    positions = [np.array(contexts, dtype=np.int32) - 1]
    blocks = [tables[np.arange(len(decodes)), positions[0] // size]]
    for i, (start, length, _) in enumerate(prefills):
        place = np.arange(start, start + length, dtype=np.int32)
        positions.append(place)
        blocks.append(long_tables[i, place // size])
    place = np.concatenate(positions)
    parts = send(
        [
            np.concatenate(blocks),
            place % size,
            np.array(contexts, dtype=np.int32),
            tables,
            np.cumsum([0, *lengths], dtype=np.int32),
            np.array(ends, dtype=np.int32),
            long_tables,
        ],
        device,
    )
    return KernelBatch(
        cache=cache,
        kernel=kernel,
        row_blocks=parts[0].long(),
        row_offsets=parts[1].long(),
        decodes=Decodes(parts[3], parts[2], max(contexts)) if decodes else None,
        prefills=Prefills(parts[4], parts[5], parts[6], tuple(lengths), tuple(ends)) if prefills else None,
    )


def send(arrays: Seq[Array], device: torch.device) -> list[torch.Tensor]:
    """int32 arrays as tensors on the device, in one copy: each copy of its own would cost as much again."""
    begins = np.cumsum([0, *(-(-a.size // _ALIGNED) * _ALIGNED for a in arrays)])
    flat = np.zeros(begins[-1], dtype=np.int32)
    for begin, array in zip(begins, arrays, strict=False):
        flat[begin : begin + array.size] = array.reshape(-1)
    sent = torch.from_numpy(flat).to(device)
    return [sent[b : b + a.size].view(a.shape) for b, a in zip(begins.tolist(), arrays, strict=False)]
