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

PAGED = "headway_paged"
PROBE = "headway_probe"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and widths of one layer's keys and values."""

    heads: int
    key_width: int
    value_width: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.heads * (self.key_width + self.value_width) * dtype.itemsize


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
        self.keys = [_zeros((blocks, s.heads, block_tokens, s.key_width), dtype, device) for s in shapes]
        self.values = [_zeros((blocks, s.heads, block_tokens, s.value_width), dtype, device) for s in shapes]

    def scrub(self, blocks: Seq[int]) -> None:
        """Zero these blocks; for contents that turned out not to be numbers."""
        index = torch.tensor(list(blocks), device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor[index] = 0


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows first_row .. first_row + length of the step: positions start .. start + length of one sequence."""

    first_row: int
    length: int
    start: int
    blocks: torch.Tensor  # [ceil((start + length) / block_tokens)]


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
    """Attention by torch alone: decodes padded to the longest in one call, chunks one by one.

    The first `decodes` rows are one token each of as many sequences.
    """

    cache: KeyValueCache
    row_blocks: torch.Tensor  # [tokens] block that takes each token's keys and values
    row_offsets: torch.Tensor  # [tokens] place inside that block
    decode_tables: torch.Tensor  # [decodes, blocks] padded with the row's first block
    decode_mask: torch.Tensor  # [decodes, 1, 1, blocks * block_tokens], true where there is context
    prefills: tuple[PrefillChunk, ...]

    @property
    def decodes(self) -> int:
        return self.decode_tables.shape[0]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """See PagedBatch."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.row_blocks, :, self.row_offsets] = key[0].transpose(0, 1).to(keys.dtype)
        values[self.row_blocks, :, self.row_offsets] = value[0].transpose(0, 1).to(values.dtype)
        heads, tokens = query.shape[1], query.shape[2]
        grouped = heads != keys.shape[1]
        out = query.new_empty((tokens, heads, values.shape[-1]))
        if decodes := self.decodes:
            out[:decodes] = sdpa(
                query[0, :, :decodes].transpose(0, 1).unsqueeze(2),
                _gather(keys, self.decode_tables),
                _gather(values, self.decode_tables),
                attn_mask=self.decode_mask,
                scale=scaling,
                enable_gqa=grouped,
            ).squeeze(2)
        for chunk in self.prefills:
            rows = slice(chunk.first_row, chunk.first_row + chunk.length)
            if chunk.start == 0:
                mask, chunk_keys, chunk_values = None, key[:, :, rows], value[:, :, rows]
            else:
                context = chunk.start + chunk.length
                mask = _causal_mask(chunk, query.device)
                chunk_keys = _gather(keys, chunk.blocks[None])[:, :, :context]
                chunk_values = _gather(values, chunk.blocks[None])[:, :, :context]
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
    """Make the attention functions known to transformers; harmless when repeated."""
    AttentionInterface.register(PAGED, paged_attention)
    AttentionInterface.register(PROBE, probe_attention)


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


def probe_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    probe: dict[int, LayerShape] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Plain causal attention that notes the shape of each layer's keys and values in `probe`."""
    if probe is not None:
        probe[module.layer_idx] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
    grouped = query.shape[1] != key.shape[1]
    out = sdpa(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def make_batch(
    cache: KeyValueCache,
    decodes: Seq[tuple[int, Seq[int]]],  # (context with this token, block table)
    prefills: Seq[tuple[int, int, Seq[int]]],  # (start, length, block table)
    device: torch.device,
) -> PaddedBatch:
    """The batch of one step: first the decodes in order, then the prefill chunks in order."""
    size = cache.block_tokens
    blocks: list[np.ndarray[Any, Any]] = []
    positions: list[np.ndarray[Any, Any]] = []
    longest = max((context for context, _ in decodes), default=0)
    width = math.ceil(longest / size)
    tables = np.zeros((len(decodes), width), dtype=np.int64)
    for row, (context, table) in enumerate(decodes):
        used = math.ceil(context / size)
        tables[row, used:] = table[0]  # its own: what is no number in one sequence stays there
        tables[row, :used] = table[:used]
    if decodes:
        contexts = np.array([context for context, _ in decodes], dtype=np.int64)
        positions.append(contexts - 1)
        blocks.append(tables[np.arange(len(decodes)), (contexts - 1) // size])
        mask = np.arange(width * size)[None, :] < contexts[:, None]
    else:
        mask = np.zeros((0, 0), dtype=np.bool_)
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
        decode_tables=torch.from_numpy(tables).to(device),
        decode_mask=torch.from_numpy(mask).to(device)[:, None, None, :],
        prefills=tuple(chunks),
    )


def _gather(cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
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
