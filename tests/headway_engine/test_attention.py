"""Paged attention against plain attention over the whole context, and what its cache promises."""

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine import attention
from headway_engine.attention import KeyValueCache, LayerShape, make_batch, paged_attention, slices
from headway_engine.resident import make_resident
from support.engine_server import resident_bytes

CPU = torch.device("cpu")


class Layer:
    """What an attention function sees of a model."""

    layer_idx = 0


def plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """[tokens, heads, width] over contexts [context, kv_heads, width], written out in float64."""
    tokens, heads, _ = query.shape
    group = heads // keys.shape[1]
    out = torch.zeros((tokens, heads, values.shape[-1]), dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            seen = start + t + 1
            scores = keys[:seen, h // group].double() @ query[t, h].double() * scale
            out[t, h] = torch.softmax(scores, dim=0) @ values[:seen, h // group].double()
    return out


cases = st.tuples(
    st.lists(st.integers(1, 40), max_size=4),  # contexts of decodes
    st.lists(st.tuples(st.integers(0, 20), st.integers(2, 17)), max_size=3),  # (start, length) of chunks
    st.sampled_from([(4, 2), (4, 4), (6, 1), (8, 2)]),  # heads, kv_heads
    st.sampled_from([4, 8, 12, 64]),  # width
    st.sampled_from([1, 3, 16]),  # block size
    st.sampled_from([None, 0, 2_000, 20_000]),  # bytes copied at a time for decodes
    st.integers(0, 10_000),
).filter(lambda case: bool(case[0] or case[1]))


@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_any_mixture_of_decodes_and_chunks_attends_to_its_own_context(case: Any) -> None:
    """Every row equals plain attention over its own sequence; neighbours and stale blocks never show."""
    contexts, chunks, (heads, kv_heads), width, size, gather_cap, seed = case
    torch.manual_seed(seed)
    spans = [(context - 1, 1) for context in contexts] + chunks
    needed = [-(-(start + length) // size) for start, length in spans]
    order = torch.randperm(sum(needed) + 3).tolist()
    tables = [[order.pop() for _ in range(n)] for n in needed]
    cache = KeyValueCache([LayerShape(kv_heads, width, width)], sum(needed) + 3, size, torch.float32, CPU)
    cache.keys[0].normal_()
    cache.values[0].normal_()
    everything = [
        (torch.randn(s + n, kv_heads, width), torch.randn(s + n, kv_heads, width)) for s, n in spans
    ]
    for (start, _), table, (keys, values) in zip(spans, tables, everything, strict=True):
        for position in range(start):
            cache.keys[0][table[position // size], :, position % size] = keys[position]
            cache.values[0][table[position // size], :, position % size] = values[position]
    batch = make_batch(
        cache,
        [(context, tables[i]) for i, context in enumerate(contexts)],
        [(s, n, tables[len(contexts) + i]) for i, (s, n) in enumerate(chunks)],
        CPU,
        gather_cap,
    )
    queries = [torch.randn(n, heads, width) for _, n in spans]
    fresh_keys = torch.cat([k[s:] for (s, _), (k, _) in zip(spans, everything, strict=True)])
    fresh_values = torch.cat([v[s:] for (s, _), (_, v) in zip(spans, everything, strict=True)])
    out, _ = paged_attention(
        Layer(),
        torch.cat(queries).transpose(0, 1)[None],
        fresh_keys.transpose(0, 1)[None],
        fresh_values.transpose(0, 1)[None],
        None,
        scaling=0.3,
        paged=batch,
    )
    expected = torch.cat(
        [plain(q, k, v, s, 0.3) for q, (k, v), (s, _) in zip(queries, everything, spans, strict=True)]
    )
    torch.testing.assert_close(out[0].double(), expected, atol=2e-5, rtol=1e-4)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 200))
def test_slices_hold_every_row_once_and_stay_under_the_cap(widths: list[int], most: int) -> None:
    """Padding counts: the widest row of a slice is the width of all. A row alone may be more than the cap."""
    groups = slices(widths, most)
    assert sorted(row for group in groups for row in group) == list(range(len(widths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(widths[row] for row in group) <= most
    in_order = [widths[row] for group in groups for row in group]
    assert in_order == sorted(in_order)  # like goes with like, or short rows would be padded to long ones


def test_one_long_context_does_not_pad_the_short_ones_past_the_cap() -> None:
    """31 rows of one block and one of 1000: what is copied at a time stays small."""
    shape = LayerShape(2, 8, 8)
    cache = KeyValueCache([shape, LayerShape(1, 4, 4)], 1100, 4, torch.float32, CPU)
    cap = 1000 * cache.block_bytes
    decodes = [(4, [i]) for i in range(31)] + [(4000, list(range(31, 1031)))]
    batch = make_batch(cache, decodes, [], CPU, cap)
    assert cache.block_bytes == 4 * shape.bytes_per_token(torch.float32)
    assert [tuple(part.tables.shape) for part in batch.decodes] == [(31, 1), (1, 1000)]


def test_padding_of_short_contexts_reads_no_rubbish() -> None:
    """A long and a short decode share a batch; the short one's padding is never seen."""
    cache = KeyValueCache([LayerShape(1, 4, 4)], 8, 2, torch.float32, CPU)
    batch = make_batch(cache, [(10, [1, 2, 3, 4, 5]), (1, [6])], [], CPU)
    query, key, value = (torch.randn(1, 1, 2, 4) for _ in range(3))
    out, _ = paged_attention(Layer(), query, key, value, None, scaling=1.0, paged=batch)
    torch.testing.assert_close(out[0, 1, 0], value[0, 0, 1])


def test_an_untouched_cache_takes_no_more_than_its_first_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 GiB of keys and values on a CPU, what is made resident at start, and then what is used."""
    monkeypatch.setattr(attention, "RESIDENT_BYTES", 32 << 20)
    before = resident_bytes(os.getpid())
    cache = KeyValueCache([LayerShape(8, 64, 64)] * 8, 8192, 16, torch.bfloat16, CPU)
    assert sum(t.nbytes for t in (*cache.keys, *cache.values)) == 2 << 30
    assert resident_bytes(os.getpid()) - before < 16 << 20
    cache.warm()
    cache.keys[3][100] = 1.0
    grown = resident_bytes(os.getpid()) - before
    assert grown < 160 << 20  # huge pages round each of sixteen tensors up
    if make_resident([(cache.keys[0].data_ptr(), 1 << 20)], threads=1):  # the system can
        assert grown > 28 << 20


def test_attention_without_its_batch_is_an_error_and_not_a_wrong_answer() -> None:
    q = torch.zeros(1, 1, 1, 4)
    with pytest.raises(RuntimeError, match="without its paged batch"):
        paged_attention(Layer(), q, q, q, None)
