"""Vectors of prompts: every runner gives transformers' own hidden states, pooled, whatever goes on around.

The reference is the base model alone, over the whole prompt at once, with its own attention and no cache.
"""

import math
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway_engine.pooling import Pooler, base_of, hidden_rows
from headway_engine.protocol import Limits
from headway_engine.runner import Runner, TransformersRunner
from headway_engine.sampling import NotFinite
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import (
    Chunk,
    Finished,
    FinishReason,
    Pooling,
    Sequence,
    Step,
    TokenOut,
    VectorOut,
)
from headway_engine.stepping import StepError
from support import runners, tiny_models

RUNNERS = {
    "padded": ("llama", "qwen2", "gpt2"),
    "kernel": ("llama", "gpt2"),
    "fused": ("llama", "qwen2", "llama-wide"),
    "lean graphs": ("llama",),
}
KINDS = [(kind, architecture) for kind, names in RUNNERS.items() for architecture in names]

PROMPTS = tuple(
    tuple((7 * i * i + 31 * i + 11 * j + 3) % 290 + 3 for j in range(length))
    for i, length in enumerate((1, 2, 5, 9, 17, 30, 41))
) + tuple((*((5 * j + 8) % 290 + 3 for j in range(19)), 40 + i) for i in range(3))


@cache
def reference(architecture: str, prompt: tuple[int, ...], pooling: Pooling) -> np.ndarray[Any, Any]:
    """By transformers alone."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        hidden = tiny_models.plain(architecture).base_model(ids, use_cache=False).last_hidden_state[0]
    vector = hidden.mean(dim=0) if pooling is Pooling.MEAN else hidden[-1]
    return (vector / vector.norm()).numpy()


def pooled(name: str, prompt: Seq[int], pooling: Pooling, blocks: Seq[int] = ()) -> Sequence:
    request = msgspec.structs.replace(tiny_models.request(name, prompt, max_tokens=0), pooling=pooling)
    return Sequence(request=request, tokens=list(prompt), block_table=list(blocks))


def vector_of(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype="<f4")


def run(runner: Runner, *parts: tuple[Sequence, int]) -> dict[str, Any]:
    """One step of (sequence, tokens), written back as the scheduler would."""
    chunks = tuple(
        Chunk(
            s,
            s.computed,
            length,
            samples=s.computed + length == len(s.tokens) and s.request.pooling is None,
        )
        for s, length in parts
    )
    out = runner.run(Step(chunks))
    for chunk in chunks:
        chunk.sequence.computed += chunk.length
        if chunk.samples:
            chunk.sequence.tokens.append(out[chunk.sequence.id].token)
    return out


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize(("kind", "architecture"), KINDS)
def test_a_vector_is_that_of_the_models_own_hidden_states(
    kind: str, architecture: str, pooling: Pooling
) -> None:
    """In one chunk, in uneven ones, and token by token; of length one."""
    runner = runners.kept(kind, architecture)
    prompt = PROMPTS[5]
    assert runner.embedding_size == len(reference(architecture, prompt, pooling))
    for sizes in ([30], [7, 1, 13, 9], [1] * 30):
        s = pooled("a", prompt, pooling, range(8))
        for size in sizes[:-1]:
            assert run(runner, (s, size)) == {}
        found = vector_of(run(runner, (s, sizes[-1]))["a"].vector)
        np.testing.assert_allclose(found, reference(architecture, prompt, pooling), atol=2e-5)
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("kind", "architecture"), KINDS)
def test_prompts_for_vectors_and_sequences_that_decode_do_not_see_each_other(
    kind: str, architecture: str
) -> None:
    """All in the same steps: tokens as by generate(), both kinds of vectors as by the base model."""
    runner = runners.kept(kind, architecture)
    writer = tiny_models.sequence("w", PROMPTS[3], range(6))
    last = pooled("l", PROMPTS[4], Pooling.LAST, range(6, 12))
    mean = pooled("m", PROMPTS[5], Pooling.MEAN, range(12, 20))
    run(runner, (writer, 9), (mean, 10))
    run(runner, (writer, 1), (last, 6), (mean, 1))
    found = run(runner, (last, 11), (writer, 1), (mean, 19))
    run(runner, (writer, 1))
    assert tuple(writer.tokens[9:]) == tiny_models.greedy(architecture, PROMPTS[3], 4)
    for name, prompt, pooling in (("l", PROMPTS[4], Pooling.LAST), ("m", PROMPTS[5], Pooling.MEAN)):
        np.testing.assert_allclose(
            vector_of(found[name].vector), reference(architecture, prompt, pooling), atol=2e-5
        )


requests = st.tuples(
    st.integers(0, 8),  # the step at which it comes
    st.integers(0, len(PROMPTS) - 1),
    st.sampled_from([None, None, Pooling.LAST, Pooling.MEAN, Pooling.MEAN]),
)
changes = st.builds(
    lambda sequences, extra, chunk: Limits(
        max_batch_sequences=sequences,
        max_batch_tokens=sequences + extra,
        prefill_chunk_tokens=chunk,
        max_queued_tokens=10_000,
    ),
    sequences=st.integers(2, 8),
    extra=st.integers(0, 40),
    chunk=st.integers(1, 20),
)


def play(
    runner: Runner,
    architecture: str,
    arrivals: Seq[tuple[int, int, Pooling | None]],
    limits: Limits,
    blocks: int = 64,
    shove: Seq[int] = (),
) -> Scheduler:
    """A history through the real scheduler; at the steps of `shove`, everything that runs is preempted."""
    scheduler = Scheduler(runners.capacity(blocks), limits)
    said: dict[str, list[int]] = {}
    vectors: dict[str, bytes] = {}
    ended: dict[str, FinishReason] = {}
    number = 0
    while len(ended) < len(arrivals):
        now_s = number * 0.01
        for name, (at, prompt, pooling) in enumerate(arrivals):
            if at == number:
                request = tiny_models.request(str(name), PROMPTS[prompt], max_tokens=0 if pooling else 8)
                request = msgspec.structs.replace(request, pooling=pooling, arrival_s=now_s)
                assert isinstance(scheduler.admit(request, now_s), Sequence)
                said[str(name)] = []
        if number in shove:
            for victim in list(scheduler._roster.running.values()):
                scheduler._roster.preempt(victim)
        step = scheduler.next_step(now_s)
        if step is not None:
            for event in scheduler.commit(step, runner.run(step), now_s):
                match event:
                    case TokenOut():
                        said[event.id].append(event.token)
                    case VectorOut():
                        vectors[event.id] = event.vector
                    case Finished():
                        ended[event.id] = event.reason
        scheduler.check()
        number += 1
        assert number < 3_000, "no progress"
    for name, (_, prompt, pooling) in enumerate(arrivals):
        tokens = PROMPTS[prompt]
        if pooling is None:
            assert tuple(said[str(name)]) == tiny_models.greedy(architecture, tokens, 24)[:8]
        else:
            assert ended[str(name)] is FinishReason.STOP
            assert said[str(name)] == []
            np.testing.assert_allclose(
                vector_of(vectors[str(name)]), reference(architecture, tokens, pooling), atol=3e-5
            )
    assert (scheduler.running, scheduler.waiting, scheduler.pool.used_blocks) == (0, 0, 0)
    return scheduler


@pytest.mark.parametrize(
    ("kind", "architecture"), [("padded", "gpt2"), ("padded", "llama"), ("fused", "qwen2")]
)
def test_vectors_are_right_whatever_happens_around_them(kind: str, architecture: str) -> None:
    """Random histories: small caches, chunks of any size, preemption in mid-prompt, shared beginnings."""

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        arrivals=st.lists(requests, min_size=1, max_size=8),
        limits=changes,
        blocks=st.sampled_from([17, 24, 64]),
        shove=st.lists(st.integers(1, 12), max_size=3),
    )
    def history(
        arrivals: list[tuple[int, int, Pooling | None]], limits: Limits, blocks: int, shove: list[int]
    ) -> None:
        play(runners.kept(kind, architecture), architecture, arrivals, limits, blocks, shove)

    history()


def test_a_mean_that_was_preempted_in_mid_prompt_begins_anew() -> None:
    """And though its own first half is in the prefix cache by then, it is computed again and not taken."""
    limits = Limits(max_batch_sequences=8, max_batch_tokens=8, prefill_chunk_tokens=8)
    crowd = [(0, 6, Pooling.MEAN), (0, 5, Pooling.LAST)]
    scheduler = play(runners.kept("padded", "llama"), "llama", crowd, limits, shove=[3, 5])
    assert scheduler.preemptions_total >= 2


def test_a_prefix_hit_is_for_the_last_token_and_not_for_the_mean() -> None:
    """Both fill the cache for those who come later."""
    limits = Limits(max_batch_sequences=8, max_batch_tokens=64, prefill_chunk_tokens=64)
    runner = runners.kept("padded", "llama")
    first, second = 7, 8  # 19 tokens in common: four blocks
    mean_first = play(runner, "llama", [(0, first, Pooling.MEAN), (3, second, Pooling.LAST)], limits)
    assert mean_first.prefix_hit_tokens_total == 16
    last_first = play(runner, "llama", [(0, first, Pooling.LAST), (3, second, Pooling.MEAN)], limits)
    assert last_first.prefix_hit_tokens_total == 0
    writer = play(runner, "llama", [(0, first, Pooling.MEAN), (3, second, None)], limits)
    assert writer.prefix_hit_tokens_total == 16


# The pooler alone.


def test_a_chunk_that_is_computed_again_counts_once() -> None:
    """The loop runs a step again when something else in it failed."""
    pooler = Pooler()
    s = pooled("a", [1, 2, 3, 4], Pooling.MEAN)
    states = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, 1.0]])
    first, second = Chunk(s, 0, 3, samples=False), Chunk(s, 3, 1, samples=False)
    for _ in range(2):
        assert pooler.pool([first], states[:3]) == {}
    for _ in range(2):
        found = vector_of(pooler.pool([second], states[3:])["a"].vector)
        np.testing.assert_allclose(found, [0.8, 0.6])


def test_a_mean_without_its_beginning_is_an_error_and_no_wrong_vector() -> None:
    """Should a prefix hit ever get there."""
    s = pooled("a", [1, 2, 3], Pooling.MEAN)
    with pytest.raises(ValueError, match="before token 2 are not there"):
        Pooler().pool([Chunk(s, 2, 1, samples=False)], torch.ones((1, 2)))


def test_sums_are_forgotten_with_their_sequence() -> None:
    """An aborted prompt leaves nothing behind."""
    pooler = Pooler()
    s = pooled("a", [1, 2, 3], Pooling.MEAN)
    pooler.pool([Chunk(s, 0, 2, samples=False)], torch.ones((2, 2)))
    assert len(pooler._sums) == 1
    del s
    assert len(pooler._sums) == 0


def test_rows_are_all_of_a_mean_and_the_last_of_a_last() -> None:
    """A chunk that does not end its prompt has none for `last`; a neighbour that decodes has none at all."""
    writer = tiny_models.sequence("w", [1, 2])
    last = pooled("l", [1, 2, 3, 4], Pooling.LAST)
    mean = pooled("m", [1, 2, 3, 4], Pooling.MEAN)
    chunks = [
        Chunk(writer, 1, 1, samples=True),
        Chunk(last, 0, 2, samples=False),
        Chunk(mean, 0, 2, samples=False),
        Chunk(last, 2, 2, samples=False),
    ]
    assert hidden_rows(chunks) == [3, 4, 6]


def test_hidden_states_that_are_no_numbers_name_their_sequence() -> None:
    states = torch.tensor([[1.0, 1.0], [math.nan, 1.0]])
    chunks = [Chunk(pooled(n, [1], Pooling.LAST), 0, 1, samples=False) for n in ("good", "bad")]
    with pytest.raises(NotFinite) as caught:
        Pooler().pool(chunks, states)
    assert tuple(caught.value.ids) == ("bad",)


def test_a_poisoned_cache_fails_the_vector_alone_and_is_clean_afterwards() -> None:
    runner: Any = TransformersRunner(tiny_models.fresh("llama"), runners.capacity())
    bad = pooled("bad", [5, 6, 7, 8], Pooling.LAST, range(4))
    run(runner, (bad, 3))
    for values in runner._cache.values:
        values[0] = math.nan
    with pytest.raises(StepError) as caught:
        run(runner, (bad, 1))
    assert caught.value.sequence_ids == ("bad",)
    heir = pooled("heir", [3, 4, 5], Pooling.LAST, range(4))
    found = vector_of(run(runner, (heir, 3))["heir"].vector)
    np.testing.assert_allclose(found, reference("llama", (3, 4, 5), Pooling.LAST), atol=2e-5)


def test_logits_are_computed_for_nobody_who_asks_for_a_vector() -> None:
    """The head of a large vocabulary costs as much as several layers."""
    runner: Any = TransformersRunner(tiny_models.fresh("llama"), runners.capacity())
    rows: list[int] = []
    hook = runner._module.lm_head.register_forward_hook(lambda _m, _i, out: rows.append(out.shape[1]))
    run(runner, (pooled("a", PROMPTS[4], Pooling.MEAN, range(5)), 17))
    hook.remove()
    assert rows == [0]


def test_a_model_whose_head_reads_something_else_gives_no_vectors() -> None:
    """Some models scale between the last norm and the head; which of the two is meant, nobody says."""
    module = tiny_models.fresh("llama").module
    assert base_of(module, torch.device("cpu")) is not None
    original = module.lm_head.forward
    module.lm_head.register_forward_pre_hook(lambda _m, inputs: (inputs[0] * 0.5,), prepend=True)
    assert module.lm_head.forward == original
    assert base_of(module, torch.device("cpu")) is None
