"""Functions with the signatures of kernel libraries, computed by the definition of attention, with checks.

A call with a wrong keyword, type or shape fails here as it would there. The definition is written down once,
in float64 and with loops, and shares nothing with the code under test.
"""

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn


def by_definition(
    query: torch.Tensor,  # [tokens, heads, width]
    keys: torch.Tensor,  # [blocks, block_tokens, kv_heads, width]
    values: torch.Tensor,
    starts: list[int],
    contexts: list[int],
    tables: list[list[int]],
    scale: float,
) -> torch.Tensor:
    """Causal attention, aligned at the end of each context: softmax of scaled products, times values."""
    size = keys.shape[1]
    group = query.shape[1] // keys.shape[2]
    out = torch.zeros((*query.shape[:2], values.shape[-1]), dtype=torch.float64)
    for i, context in enumerate(contexts):
        places = [(tables[i][t // size], t % size) for t in range(context)]
        own_keys = torch.stack([keys[b, o] for b, o in places]).double()
        own_values = torch.stack([values[b, o] for b, o in places]).double()
        length = starts[i + 1] - starts[i]
        for j in range(length):
            row = starts[i] + j
            seen = context - length + j + 1
            for head in range(query.shape[1]):
                k, v = own_keys[:seen, head // group], own_values[:seen, head // group]
                weights = torch.softmax(k @ query[row, head].double() * scale, dim=0)
                out[row, head] = weights @ v
    return out.to(query.dtype)


def flash2_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """flash_attn.flash_attn_with_kvcache, for queries that came with nothing new for the cache."""
    assert causal
    assert q.dim() == 4
    batch, length, heads, width = q.shape
    starts = [i * length for i in range(batch + 1)]
    flat = q.reshape(batch * length, heads, width)
    found = _checked(flat, k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale)
    return found.view(batch, length, heads, -1)


def flash2_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:
    """flash_attn.flash_attn_varlen_func with a block table."""
    assert causal
    bounds = _bounds(cu_seqlens_k)
    contexts = torch.tensor([b - a for a, b in pairwise(bounds)], dtype=torch.int32)
    starts = _bounds(cu_seqlens_q)
    assert max_seqlen_q == max(b - a for a, b in pairwise(starts))
    assert max_seqlen_k == int(contexts.max())
    return _checked(q, k, v, starts, contexts, block_table, softmax_scale)


def flash3_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """flash_attn_interface.flash_attn_with_kvcache of flash-attn 3, batched or with lengths of its own."""
    assert causal
    if cu_seqlens_q is None:
        return flash2_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=page_table,
            softmax_scale=softmax_scale, causal=True,
        )  # fmt: skip
    starts = _bounds(cu_seqlens_q)
    assert max_seqlen_q == max(b - a for a, b in pairwise(starts))
    return _checked(q, k_cache, v_cache, starts, cache_seqlens, page_table, softmax_scale)


def torch_varlen(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn with a block table; the signature is the installed torch's."""
    given = inspect.signature(varlen_attn).bind(*args, **kwargs).arguments
    query, keys = given["query"], given["key"]
    starts = _bounds(given["cu_seq_q"])
    contexts = given["seqused_k"]
    assert given["window_size"] == (-1, 0)
    assert given["max_q"] == max(b - a for a, b in pairwise(starts))
    assert given["max_k"] >= int(contexts.max())
    assert given["enable_gqa"] or query.shape[1] == keys.shape[2]
    _bounds(given["cu_seq_k"])
    return _checked(query, keys, given["value"], starts, contexts, given["block_table"], given["scale"])


def _checked(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: list[int],
    contexts: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    for tensor in (query, keys, values):
        assert tensor.stride(-1) == 1, "the last axis must be contiguous"
    assert contexts.dtype is torch.int32
    assert tables.dtype is torch.int32
    assert tables.stride(-1) == 1
    assert starts[-1] == len(query)
    assert len(contexts) == len(tables) == len(starts) - 1
    assert 0 <= int(tables.min()) <= int(tables.max()) < len(keys)
    assert int(contexts.max()) <= tables.shape[1] * keys.shape[1]
    return by_definition(query, keys, values, starts, contexts.tolist(), tables.tolist(), scale)


def _bounds(cumulated: torch.Tensor) -> list[int]:
    assert cumulated.dtype is torch.int32
    bounds: list[int] = cumulated.tolist()
    assert bounds[0] == 0
    assert bounds == sorted(bounds)
    return bounds
