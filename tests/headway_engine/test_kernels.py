"""Attention of the C++ kernels against its definition in float64, any shape, in every instruction set."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.attention import KeyValueCache, LayerShape
from headway_engine.fused import native
from support import kernels

BLOCKS = 40


@dataclass(frozen=True)
class Case:
    """One step: chunks of (start, length), each of a sequence of its own."""

    kv_heads: int
    group: int
    key_width: int
    value_width: int
    block_tokens: int
    chunks: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    threads: int
    seed: int


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype, whole: bool) -> Case:
    """Contexts inside a block, across blocks and tiles. `whole`: sizes that fill vectors and tiles."""
    widths = st.sampled_from([32, 64, 96, 128])
    blocks = st.sampled_from([16, 32, 64])
    if not whole:
        widths, blocks = st.sampled_from([48, 16]) | st.integers(1, 70), st.integers(1, 20)
    key_width = draw(widths)
    block_tokens = draw(blocks)
    longest = min(150, block_tokens * BLOCKS // 4)
    chunk = st.tuples(st.integers(0, longest - 1), st.integers(1, longest)).map(
        lambda c: (c[0], min(c[1], longest - c[0]))
    )
    decode = st.integers(0, longest - 1).map(lambda start: (start, 1))
    return Case(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        key_width=key_width,
        value_width=draw(st.just(key_width) | widths),
        block_tokens=block_tokens,
        chunks=tuple(draw(st.lists(decode | chunk, min_size=1, max_size=4))),
        dtype=dtype,
        threads=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1 << 30)),
    )


def by_definition(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """Softmax attention in float64; query [rows, heads, width], the others [context, kv_heads, width]."""
    group = query.shape[1] // keys.shape[1]
    k = keys.repeat_interleave(group, dim=1)
    v = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,thd->hrt", query, k) * query.shape[2] ** -0.5
    places = start + torch.arange(query.shape[0])
    scores.masked_fill_(torch.arange(keys.shape[0])[None, None] > places[None, :, None], -torch.inf)
    return torch.einsum("hrt,thd->rhd", scores.softmax(-1), v)


def check(case: Case, library: Any) -> None:
    chance = torch.Generator().manual_seed(case.seed)
    shuffled = list(range(BLOCKS))
    random.Random(case.seed).shuffle(shuffled)
    shape = LayerShape(heads=case.kv_heads, key_width=case.key_width, value_width=case.value_width)
    cache = KeyValueCache([shape], BLOCKS, case.block_tokens, case.dtype, torch.device("cpu"))
    cache.keys[0].fill_(float("nan"))  # what nobody may look at
    cache.values[0].fill_(float("nan"))
    drawn, parts = [], []
    for start, length in case.chunks:
        context = start + length
        table = [shuffled.pop() for _ in range(-(-context // case.block_tokens))]
        parts.append((start, length, table))
        keys = torch.randn(context, case.kv_heads, case.key_width, generator=chance)
        values = torch.randn(context, case.kv_heads, case.value_width, generator=chance)
        keys, values = keys.to(case.dtype).float(), values.to(case.dtype).float()
        for t in range(start):
            block, offset = table[t // case.block_tokens], t % case.block_tokens
            cache.keys[0][block, :, offset] = keys[t].to(case.dtype)
            cache.values[0][block, :, offset] = values[t].to(case.dtype)
        query = torch.randn(length, case.kv_heads * case.group, case.key_width, generator=chance)
        query = query.to(case.dtype).float()  # as a model of this type has them
        drawn.append((query, keys, values, start))
    step = native.spans(parts, case.block_tokens)
    batch = native.KernelBatch(native.declare(library), cache, step, case.threads)
    rows = [
        torch.cat(part).transpose(0, 1)[None].contiguous()
        for part in (
            [query for query, _, _, _ in drawn],
            [keys[start:] for _, keys, _, start in drawn],
            [values[start:] for _, _, values, start in drawn],
        )
    ]
    found = batch.attend(0, *rows, scaling=None)
    wanted = torch.cat([by_definition(q.double(), k.double(), v.double(), at) for q, k, v, at in drawn])
    found = found.reshape(wanted.shape).double()
    if case.dtype is torch.float32 or not library.hw_multiplies_bf16():
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
        return
    # Weights may be rounded to 8 bits: so much of the largest value at worst, and far less of all of them.
    largest = max(float(v.abs().max()) for _, _, v, _ in drawn)
    assert (found - wanted).abs().max() <= largest / 256
    assert (found - wanted).norm() <= 0.004 * wanted.norm()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", kernels.SETS)
def test_attention_is_what_it_is_by_definition(chosen: str, dtype: torch.dtype, whole: bool) -> None:
    """Decodes and prompts together, heads that share keys, blocks anywhere in memory."""
    library = kernels.loaded(chosen)

    @settings(max_examples=20, deadline=None)
    @given(cases(dtype, whole))
    def holds(case: Case) -> None:
        check(case, library)

    holds()
