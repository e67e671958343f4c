"""Attention over a paged cache of keys and values, as an attention function that transformers calls.

One step is one flat row of tokens; what belongs to whom travels beside it as the forward keyword argument
`paged`. Keys and values of the step are written to their slots first, so every query finds its whole
context in the cache. Knows nothing of sequences, requests or sampling.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

from headway_engine.listening import LayerShape
from headway_engine.resident import make_resident

PAGED = "headway_paged"


def gather_cap_bytes(device: torch.device) -> int:
    """How much of a layer's keys and values the decodes of PaddedBatch copy at a time, unless one context
    alone is more. Few large copies keep an accelerator busy; a CPU has no use for more than its cache."""
    return (32 if device.type == "cpu" else 256) << 20


RESIDENT_BYTES = 768 << 20
"""Of the cache on a CPU, what is backed by memory before the first request comes, so that its prefill does
not pay for it: the working set of some ten to a hundred sequences. The rest is taken when it is needed."""


class KeyValueCache:
    """Keys and values of all layers: per layer two tensors [blocks, heads, block_tokens, width].

    The memory is zeroed lazily on a CPU: untouched blocks cost nothing, and padding never reads a NaN.
    """

    def __init__(
        self,
        shapes: Seq[LayerShape],
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        self.blocks = blocks
        # Of the largest layer.
        self.block_bytes = block_tokens * max((s.bytes_per_token(dtype) for s in shapes), default=0)
        self.keys = [_zeros((blocks, s.heads, block_tokens, s.key_width), dtype, device) for s in shapes]
        self.values = [_zeros((blocks, s.heads, block_tokens, s.value_width), dtype, device) for s in shapes]

    def warm(self) -> None:
        """Have the blocks that are taken first backed by memory, on a CPU. To be called when the model has
        settled: what its loading takes and gives back would come on top."""
        tensors = [t for t in (*self.keys, *self.values) if t.device.type == "cpu"]
        share = min(1.0, RESIDENT_BYTES / max(1, sum(t.nbytes for t in tensors)))
        make_resident([(t.data_ptr(), int(t.nbytes * share)) for t in tensors], torch.get_num_threads())

    def write(
        self,
        layer: int,
        blocks: torch.Tensor,  # [tokens]
        offsets: torch.Tensor,  # [tokens] places inside these blocks
        key: torch.Tensor,  # [1, heads, tokens, width]
        value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put tokens' keys and values of a layer in their places; the layer's whole keys and values."""
        keys, values = self.keys[layer], self.values[layer]
        keys[blocks, :, offsets] = key[0].transpose(0, 1).to(keys.dtype)
        values[blocks, :, offsets] = value[0].transpose(0, 1).to(values.dtype)
        return keys, values

    def not_finite(self, blocks: Seq[int]) -> tuple[int, ...]:
        """Those of these blocks that hold what is no number."""
        index = self._index(blocks)
        whole = torch.ones(len(blocks), dtype=torch.bool, device=index.device)
        for tensor in (*self.keys, *self.values):
            whole &= torch.isfinite(tensor[index]).flatten(1).all(dim=1)
        return tuple(index[~whole].tolist())

    def wipe(self, blocks: Seq[int]) -> None:
        """Zero these blocks."""
        index = self._index(blocks)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0)

    def _index(self, blocks: Seq[int]) -> torch.Tensor:
        return torch.tensor(list(blocks), dtype=torch.long, device=self.keys[0].device)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows first_row .. first_row + length of the step: positions start .. start + length of one sequence."""

    first_row: int
    length: int
    start: int
    blocks: torch.Tensor  # [ceil((start + length) / block_tokens)]


@dataclass(frozen=True, slots=True)
class DecodeSlice:
    """Decodes of about the same context, few enough for their copied contexts to be small."""

    rows: torch.Tensor  # [decodes] rows of the step
    tables: torch.Tensor  # [decodes, blocks] padded with the row's first block
    mask: torch.Tensor  # [decodes, 1, 1, blocks * block_tokens], true where there is context


class PagedBatch(Protocol):
    """Whose tokens a step holds, and a way to attend with them."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, tokens, width]
        key: torch.Tensor,  # [1, kv_heads, tokens, width]
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Write the step's keys and values into `layer`, then attend; [tokens, heads, value_width]."""
        ...


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Attention by torch alone: decodes slice by slice, padded to the slice's longest; chunks one by one."""

    cache: KeyValueCache
    row_blocks: torch.Tensor  # [tokens] block that takes each token's keys and values
    row_offsets: torch.Tensor  # [tokens] place inside that block
    decodes: tuple[DecodeSlice, ...]
    prefills: tuple[PrefillChunk, ...]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """See PagedBatch."""
        keys, values = self.cache.write(layer, self.row_blocks, self.row_offsets, key, value)
        _, heads, tokens, _ = query.shape
        grouped = heads != keys.shape[1]
        out = query.new_empty((tokens, heads, values.shape[-1]))
        for part in self.decodes:
            rows_of_part = query[0, :, part.rows].transpose(0, 1)
            out[part.rows] = attend_singles(rows_of_part, keys, values, part.tables, part.mask, scaling)
        for chunk in self.prefills:
            rows = slice(chunk.first_row, chunk.first_row + chunk.length)
            if chunk.start == 0:
                mask, chunk_keys, chunk_values = None, key[:, :, rows], value[:, :, rows]
            else:
                context = chunk.start + chunk.length
                mask = _causal_mask(chunk, query.device)
                chunk_keys = gather(keys, chunk.blocks[None])[:, :, :context]
                chunk_values = gather(values, chunk.blocks[None])[:, :, :context]
            attended = sdpa(
                query[:, :, rows],
                chunk_keys,
                chunk_values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out


def register() -> None:
    """Make the attention function known to transformers; harmless when repeated."""
    AttentionInterface.register(PAGED, paged_attention)


def paged_attention(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, width]
    key: torch.Tensor,  # [1, kv_heads, tokens, width]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: PagedBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values, then attend. Returns ([1, tokens, heads, value_width], None)."""
    if paged is None:
        raise RuntimeError("headway_paged attention was called without its paged batch")
    return paged.attend(module.layer_idx, query, key, value, scaling).unsqueeze(0), None


def make_batch(
    cache: KeyValueCache,
    decodes: Seq[tuple[int, Seq[int]]],  # (context with this token, block table)
    prefills: Seq[tuple[int, int, Seq[int]]],  # (start, length, block table)
    device: torch.device,
    gather_cap: int | None = None,
) -> PaddedBatch:
    """The batch of one step: first the decodes in order, then the prefill chunks in order.

    `gather_cap`: bytes of a layer that decodes copy at a time; gather_cap_bytes of the device if not given.
    """
    size = cache.block_tokens
    blocks: list[np.ndarray[Any, Any]] = []
    positions: list[np.ndarray[Any, Any]] = []
    if decodes:
        last = np.array([context - 1 for context, _ in decodes], dtype=np.int64)
        positions.append(last)
        blocks.append(np.array([table[at // size] for at, (_, table) in zip(last, decodes, strict=True)]))
    cap = gather_cap_bytes(device) if gather_cap is None else gather_cap
    groups = slices([math.ceil(context / size) for context, _ in decodes], cap // cache.block_bytes)
    chunks: list[PrefillChunk] = []
    first_row = len(decodes)
    for start, length, table in prefills:
        used_table = np.array(table[: math.ceil((start + length) / size)], dtype=np.int64)
        place = np.arange(start, start + length)
        positions.append(place)
        blocks.append(used_table[place // size])
        chunks.append(PrefillChunk(first_row, length, start, torch.from_numpy(used_table).to(device)))
        first_row += length
    place = np.concatenate(positions)
    return PaddedBatch(
        cache=cache,
        row_blocks=torch.from_numpy(np.concatenate(blocks)).to(device),
        row_offsets=torch.from_numpy(place % size).to(device),
        decodes=tuple(_decode_slice(rows, decodes, size, device) for rows in groups),
        prefills=tuple(chunks),
    )


def slices(widths: Seq[int], most_blocks: int) -> list[list[int]]:
    """Rows in groups, by width in blocks: a group padded to its widest row has at most `most_blocks`, or is
    one row."""
    groups: list[list[int]] = []
    for row in sorted(range(len(widths)), key=lambda row: widths[row]):
        if groups and (len(groups[-1]) + 1) * widths[row] <= most_blocks:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _decode_slice(
    rows: list[int], decodes: Seq[tuple[int, Seq[int]]], size: int, device: torch.device
) -> DecodeSlice:
    contexts = np.array([decodes[row][0] for row in rows], dtype=np.int64)
    tables = padded_tables([decodes[row] for row in rows], size)
    mask = np.arange(tables.shape[1] * size)[None, :] < contexts[:, None]
    return DecodeSlice(
        rows=torch.tensor(rows, device=device),
        tables=torch.from_numpy(tables).to(device),
        mask=torch.from_numpy(mask).to(device)[:, None, None, :],
    )


def padded_tables(rows: Seq[tuple[int, Seq[int]]], size: int) -> np.ndarray[Any, Any]:
    """Block tables, int32, as wide as the longest context needs, each padded with its own first block: what
    is no number in one sequence stays there."""
    used = [math.ceil(context / size) for context, _ in rows]
    tables = np.empty((len(rows), max(used, default=0)), dtype=np.int32)
    for row, (count, (_, table)) in enumerate(zip(used, rows, strict=True)):
        tables[row, :count] = table[:count]
        tables[row, count:] = table[0]
    return tables


def attend_singles(
    query: torch.Tensor,  # [rows, heads, width]
    keys: torch.Tensor,  # [blocks, kv_heads, block_tokens, width]
    values: torch.Tensor,
    tables: torch.Tensor,  # [rows, blocks]
    mask: torch.Tensor,  # [rows, 1, 1, blocks * block_tokens]
    scale: float | None,
) -> torch.Tensor:
    """One query a row, by torch's attention over contexts copied out of the cache: [rows, heads, width]."""
    rows, heads, width = query.shape
    attended = sdpa(
        # The heads that share keys stand as so many queries, or sdpa might repeat the keys for each.
        query.reshape(rows, keys.shape[1], -1, width),
        gather(keys, tables),
        gather(values, tables),
        attn_mask=mask,
        scale=scale,
    )
    return attended.reshape(rows, heads, -1)


def gather(cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """[blocks, heads, block_tokens, width] by [rows, n] -> [rows, heads, n * block_tokens, width]."""
    rows, n = tables.shape
    _, heads, size, width = cache.shape
    found = cache.index_select(0, tables.reshape(-1)).view(rows, n, heads, size, width)
    return found.transpose(1, 2).reshape(rows, heads, n * size, width)


def _causal_mask(chunk: PrefillChunk, device: torch.device) -> torch.Tensor:
    """[length, context]: a query sees the positions up to its own."""
    columns = torch.arange(chunk.start + chunk.length, device=device)
    rows = torch.arange(chunk.start, chunk.start + chunk.length, device=device)
    return columns[None, :] <= rows[:, None]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zero pages, which cost nothing until touched; torch.zeros would write them.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
