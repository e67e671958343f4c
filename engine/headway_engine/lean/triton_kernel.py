"""Paged attention in Triton, for the cache's own layout and any block size: a kernel that is always there.

torch's CUDA builds bring Triton along, so an accelerator without a package of kernels still reads each key
and value once, where the gather would copy them first. One program takes one sequence, one head of keys and a
tile of queries (with all query heads that share those keys), and walks the block table with a running
softmax; for decodes, which are few and long, several programs split a context and a second kernel joins them.
Importing this module needs Triton; running it, an accelerator or Triton's interpreter.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from headway_engine.lean.kernels import Decodes, Prefills

_device_of: Any = torch.cuda.device_of

LEAST_ROWS = 16
"""Rows that a matrix product needs: query heads that share keys are padded to them."""

SPLIT_TOKENS = 512
"""A decode's context is cut into parts of at least so many tokens."""

MOST_SPLITS = 16
"""More parts than this cost more to join than they gain."""

ENOUGH_PROGRAMS = 256
"""About two for each processor of a large device: with as many sequences and heads, nothing is split."""


class TritonKernel:
    """See PagedKernel."""

    name = "triton"
    reads_padding = False

    def decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Decodes, scale: float
    ) -> torch.Tensor:
        """See PagedKernel."""
        count, heads, _ = query.shape
        width = values.shape[-1]
        out = torch.empty((count, heads, width), dtype=query.dtype, device=query.device)
        splits = decode_splits(count * keys.shape[1], rows.longest)
        if splits == 1:
            _launch(query, keys, values, out, out, None, rows.contexts, rows.tables, scale, 1, 1, 1)
            return out
        partial = torch.empty((splits, count, heads, width), dtype=torch.float32, device=query.device)
        logs = torch.empty((splits, count, heads), dtype=torch.float32, device=query.device)
        _launch(query, keys, values, partial, logs, None, rows.contexts, rows.tables, scale, 1, 1, splits)
        with _device_of(query):
            _join[(count, heads)](
                partial,
                logs,
                out,
                count * heads,
                SPLITS=splits,
                WIDTH=width,
                WIDTH_PAD=_power(width),
                enable_fp_fusion=True,
            )
        return out

    def prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Prefills, scale: float
    ) -> torch.Tensor:
        """See PagedKernel."""
        out = torch.empty((*query.shape[:2], values.shape[-1]), dtype=query.dtype, device=query.device)
        group = query.shape[1] // keys.shape[1]
        # float32 has no tensor cores that keep its precision, and takes twice the memory of a processor.
        tile = max(1, (LEAST_ROWS if query.dtype is torch.float32 else 64) // _power(group))
        tiles = -(-max(rows.lengths) // tile)
        _launch(query, keys, values, out, out, rows.starts, rows.contexts, rows.tables, scale, tile, tiles, 1)
        return out


def decode_splits(programs: int, longest: int) -> int:
    """Parts of each context: a power of two, since each number is a kernel that must be compiled."""
    wanted = min(MOST_SPLITS, ENOUGH_PROGRAMS // programs, longest // SPLIT_TOKENS)
    return 1 << max(0, wanted.bit_length() - 1)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    starts: torch.Tensor | None,
    contexts: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
    tile: int,
    tiles: int,
    splits: int,
) -> None:
    if query.stride(-1) != 1:
        query = query.contiguous()
    count, kv_heads = contexts.shape[0], keys.shape[1]
    group = query.shape[1] // kv_heads
    grid = (count, kv_heads, tiles * splits)
    with _device_of(query):
        _attend[grid](
            query,
            keys,
            values,
            out,
            logs,
            contexts if starts is None else starts,
            contexts,
            tables,
            scale * 1.4426950408889634,  # exponentials are taken to base 2
            count * query.shape[1],
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            values.stride(0),
            values.stride(1),
            values.stride(2),
            tables.stride(0),
            SINGLE=starts is None,
            BLOCK=keys.shape[2],
            GROUP=group,
            KV_HEADS=kv_heads,
            WIDTH=keys.shape[3],
            VALUE_WIDTH=values.shape[3],
            WIDTH_PAD=max(LEAST_ROWS, _power(keys.shape[3])),
            VALUE_PAD=max(LEAST_ROWS, _power(values.shape[3])),
            QUERIES=tile,
            ROWS=max(LEAST_ROWS, _power(tile * group)),
            KEYS=32 if query.dtype is torch.float32 else 64,
            SPLITS=splits,
            PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
            num_warps=4,
            enable_fp_fusion=True,
        )


def _attend_body(  # type: ignore[no-untyped-def]  # Triton reads annotations
    query,  # [tokens, heads, WIDTH]
    keys,  # [blocks, KV_HEADS, BLOCK, WIDTH]
    values,
    out,  # [tokens, heads, VALUE_WIDTH], or [SPLITS, tokens, heads, VALUE_WIDTH] in float32
    logs,  # [SPLITS, tokens, heads]: logarithm, to base 2, of each part's weight
    starts,
    contexts,
    tables,
    scale,
    split_rows,  # tokens * heads
    query_row,
    query_head,
    key_block,
    key_head,
    key_row,
    value_block,
    value_head,
    value_row,
    table_row,
    SINGLE: tl.constexpr,  # noqa: N803 - compile-time constants are spelt so in Triton
    BLOCK: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    VALUE_WIDTH: tl.constexpr,  # noqa: N803
    WIDTH_PAD: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    QUERIES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    tile = tl.program_id(2) // SPLITS
    split = tl.program_id(2) % SPLITS
    context = tl.load(contexts + sequence)
    if SINGLE:
        first = sequence
        length = 1
    else:
        first = tl.load(starts + sequence)
        length = tl.load(starts + sequence + 1) - first
    if tile * QUERIES >= length:
        return
    row = tl.arange(0, ROWS)
    token = tile * QUERIES + row // GROUP
    asked = (row < QUERIES * GROUP) & (token < length)
    position = context - length + token
    column = tl.arange(0, WIDTH_PAD)
    value_column = tl.arange(0, VALUE_PAD)
    q_rows = (first + token).to(tl.int64) * query_row + (head * GROUP + row % GROUP) * query_head
    q = tl.load(
        query + q_rows[:, None] + column[None, :],
        mask=asked[:, None] & (column < WIDTH)[None, :],
        other=0.0,
    )
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    # Keys past the last query of the tile are nobody's; a split takes a whole number of tiles of them.
    end = tl.minimum(context, context - length + (tile + 1) * QUERIES)
    share = tl.cdiv(tl.cdiv(end, KEYS), SPLITS) * KEYS
    begin = split * share
    end = tl.minimum(end, begin + share)
    for at in range(begin, end, KEYS):
        place = at + tl.arange(0, KEYS)
        inside = place < end
        block = tl.load(tables + sequence.to(tl.int64) * table_row + place // BLOCK, mask=inside, other=0)
        block = block.to(tl.int64)
        k_rows = block * key_block + head * key_head + (place % BLOCK) * key_row
        k = tl.load(
            keys + k_rows[None, :] + column[:, None],
            mask=inside[None, :] & (column < WIDTH)[:, None],
            other=0.0,
        )
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = inside[None, :] & (place[None, :] <= position[:, None]) & asked[:, None]
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        # Rows that have seen nothing yet stay at minus infinity, and minus infinity from itself is no number.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(highest - base)
        v_rows = block * value_block + head * value_head + (place % BLOCK) * value_row
        v = tl.load(
            values + v_rows[:, None] + value_column[None, :],
            mask=inside[:, None] & (value_column < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        found = found * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        total = total * fade + tl.sum(weight, 1)
        highest = higher
    safe = tl.where(total > 0.0, total, 1.0)
    o_rows = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP
    if SPLITS > 1:
        o_rows += split.to(tl.int64) * split_rows
        tl.store(logs + o_rows, tl.where(total > 0.0, highest + tl.log2(safe), -float("inf")), mask=asked)
    tl.store(
        out + o_rows[:, None] * VALUE_WIDTH + value_column[None, :],
        (found / safe[:, None]).to(out.dtype.element_ty),
        mask=asked[:, None] & (value_column < VALUE_WIDTH)[None, :],
    )


def _join_body(  # type: ignore[no-untyped-def]
    partial,  # float32 [SPLITS, rows, heads, WIDTH]
    logs,
    out,
    split_rows,
    SPLITS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    WIDTH_PAD: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, WIDTH_PAD)
    highest = tl.full([], -float("inf"), tl.float32)
    for split in range(SPLITS):
        highest = tl.maximum(highest, tl.load(logs + split * split_rows + row))
    total = tl.full([], 0.0, tl.float32)
    found = tl.zeros([WIDTH_PAD], tl.float32)
    for split in range(SPLITS):
        at = split * split_rows + row
        weight = tl.exp2(tl.load(logs + at) - highest)
        total += weight
        part = tl.load(partial + at * WIDTH + column, mask=column < WIDTH, other=0.0)
        found += weight * part
    tl.store(out + row * WIDTH + column, (found / total).to(out.dtype.element_ty), mask=column < WIDTH)


# What changes from step to step must not make a kernel of its own: compiling takes seconds.
_jit: Any = triton.jit
_attend = _jit(
    _attend_body,
    do_not_specialize=["split_rows", "table_row"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables"],
)
_join = _jit(_join_body, do_not_specialize=["split_rows"])
