"""Kernels of others that may be installed: flash-attn 3, flash-attn 2, torch's own paged varlen attention.

Each takes the functions it calls, so that a test can put functions of the same signature in their place.
Caches are handed over as [blocks, block_tokens, kv_heads, width], a view that keeps the last axis
contiguous, which is all that these kernels ask for. Knows nothing of what is preferred: see `choice`.
"""

from collections.abc import Callable
from typing import Any

import torch

from headway_engine.lean.kernels import Decodes, Prefills

Function = Callable[..., Any]


class FlashAttention3:
    """`flash_attn_interface` of the flash-attn 3 package: any block size, Hopper."""

    name = "flash-attn 3"
    reads_padding = False

    def __init__(self, with_kvcache: Function) -> None:
        self._with_kvcache = with_kvcache

    def decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Decodes, scale: float
    ) -> torch.Tensor:
        """See PagedKernel."""
        return _flash_decode(self._with_kvcache, query, keys, values, rows, scale, page_table=rows.tables)

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Prefills, scale: float
    ) -> torch.Tensor:
        """See PagedKernel."""
        out: torch.Tensor = self._with_kvcache(
            query,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            cache_seqlens=rows.contexts,
            page_table=rows.tables,
            cu_seqlens_q=rows.starts,
            max_seqlen_q=max(rows.lengths),
            softmax_scale=scale,
            causal=True,
        )
        return out


class FlashAttention2:
    """The flash-attn 2 package: blocks of whole 256 tokens."""

    name = "flash-attn 2"
    reads_padding = False

    def __init__(self, with_kvcache: Function, varlen: Function) -> None:
        self._with_kvcache = with_kvcache
        self._varlen = varlen

    def decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Decodes, scale: float
    ) -> torch.Tensor:
        """See PagedKernel."""
        return _flash_decode(self._with_kvcache, query, keys, values, rows, scale, block_table=rows.tables)

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Prefills, scale: float
    ) -> torch.Tensor:
        """See PagedKernel."""
        out: torch.Tensor = self._varlen(
            query,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            cu_seqlens_q=rows.starts,
            cu_seqlens_k=_bounds(rows.contexts),
            max_seqlen_q=max(rows.lengths),
            max_seqlen_k=max(rows.ends),
            softmax_scale=scale,
            causal=True,
            block_table=rows.tables,
        )
        return out


def _flash_decode(
    with_kvcache: Function,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Decodes,
    scale: float,
    **table: torch.Tensor,
) -> torch.Tensor:
    """Both packages' call for decodes; they differ in what they call the block tables."""
    out: torch.Tensor = with_kvcache(
        query[:, None],
        keys.transpose(1, 2),
        values.transpose(1, 2),
        cache_seqlens=rows.contexts,
        softmax_scale=scale,
        causal=True,
        **table,
    )
    return out[:, 0]


class TorchVarlen:
    """`torch.nn.attention.varlen`: cuDNN's kernel, or flash-attn 3 where that was activated in torch."""

    name = "torch varlen"
    reads_padding = False

    def __init__(self, varlen_attn: Function) -> None:
        self._varlen_attn = varlen_attn

    def decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Decodes, scale: float
    ) -> torch.Tensor:
        """See PagedKernel."""
        starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        return self._attend(query, keys, values, starts, rows.contexts, 1, rows.longest, rows.tables, scale)

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Prefills, scale: float
    ) -> torch.Tensor:
        """See PagedKernel."""
        longest, end = max(rows.lengths), max(rows.ends)
        return self._attend(query, keys, values, rows.starts, rows.contexts, longest, end, rows.tables, scale)

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        contexts: torch.Tensor,
        longest: int,
        end: int,
        tables: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        out: torch.Tensor = self._varlen_attn(
            query.contiguous(),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            starts,
            _bounds(contexts),
            longest,
            end,
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != keys.shape[1],
            seqused_k=contexts,
            block_table=tables.contiguous(),
        )
        return out


def _bounds(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: where each begins, and the end of the last, computed where the lengths are."""
    sums = lengths.cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(sums, (1, 0))
