"""Log-probabilities of prompts: transformers' own values, whatever happens around them, in bounded memory.

The reference is one plain forward pass of the same weights over prompt and output.
"""

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway_engine.protocol import Capacity, Limits
from headway_engine.results import SCORES_IN_EVENT
from headway_engine.runner import Runner
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import (
    NO_TOKEN,
    Chunk,
    Finished,
    FinishReason,
    PromptOut,
    Rejected,
    SampledToken,
    Sequence,
    Started,
    Step,
    TokenLogprob,
    TokenOut,
)
from headway_engine.stepping import LEAST_LOGIT_ROWS, StepError, logit_rows, most_logit_rows, parts
from support import runners, tiny_models

TOP = 3
SHARED = tuple((5 * j + 8) % 290 + 3 for j in range(21))
PROMPTS = (
    (7,),
    (4, 9),
    tuple((11 * j + 3) % 290 + 3 for j in range(9)),
    (*SHARED, 40, 50),
    (*SHARED, 41, 51, 17),
    tuple((31 * j + 14) % 290 + 3 for j in range(60)),
)
KINDS = [
    ("padded", "llama"),
    ("padded", "gpt2"),
    ("kernel", "gpt2"),
    ("fused", "llama"),
    ("lean graphs", "llama"),
]


STEP_TOKENS = 96
"""Of the largest step: room for the longest prompt, and for others beside it."""


def runner_of(kind: str, architecture: str) -> Runner:
    return runners.kept(kind, architecture, STEP_TOKENS)


@cache
def reference(architecture: str, tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [positions, vocabulary] of what follows each token, by transformers alone."""
    with torch.inference_mode():
        logits = tiny_models.plain(architecture)(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def assert_scores_are_transformers(
    architecture: str, prompt: tuple[int, ...], scores: list[TokenLogprob]
) -> None:
    """One score for each token but the first, at its place, with the likeliest alternatives."""
    assert len(scores) == len(prompt) - 1
    table = reference(architecture, prompt)
    for position, score in enumerate(scores):
        expected = table[position]
        assert score.logprob == pytest.approx(float(expected[prompt[position + 1]]), abs=2e-4)
        best = torch.topk(expected, TOP)
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert all(value == pytest.approx(float(expected[id]), abs=2e-4) for id, value in score.top)


asked = st.tuples(
    st.integers(0, 10),  # the step of arrival
    st.integers(0, len(PROMPTS) - 1),
    st.sampled_from([0, 1, 12]),  # tokens of output
    st.sampled_from([True, True, False]),  # scored, or a neighbour that is not
)


def play(
    runner: Runner, architecture: str, blocks: int, requests: list[Any], chunk: int, caching: bool
) -> tuple[Scheduler, set[int]]:
    """One history to its end; every score and every token is compared. The scheduler, and the numbers of
    requests that were preempted before their prompt was scored to its end."""
    limits = Limits(max_batch_sequences=8, max_batch_tokens=40, prefill_chunk_tokens=chunk)
    scheduler = Scheduler(runners.capacity(blocks, STEP_TOKENS), limits, prefix_caching=caching)
    due = sorted(requests)
    came: dict[str, Any] = {}
    sequences: dict[str, Sequence] = {}
    scores: dict[str, list[TokenLogprob]] = {}
    said: dict[str, list[TokenOut]] = {}
    ended: dict[str, FinishReason] = {}
    for number in range(2_000):
        while due and due[0][0] <= number:
            one = due.pop(0)
            name = str(len(came))
            request = tiny_models.request(
                name,
                PROMPTS[one[1]],
                max_tokens=max(one[2], 0 if one[3] else 1),
                logprobs=1,
                prompt_logprobs=TOP if one[3] else -1,
            )
            outcome = scheduler.admit(request, 0.0)
            assert isinstance(outcome, Sequence)
            came[name], sequences[name], scores[name], said[name] = one, outcome, [], []
        step = scheduler.next_step(0.0)
        if step is not None:
            for event in scheduler.commit(step, runner.run(step), 0.0):
                match event:
                    case PromptOut():
                        assert not said[event.id], "the prompt comes before the output"
                        scores[event.id].extend(event.scores)
                    case TokenOut():
                        said[event.id].append(event)
                    case Finished():
                        ended[event.id] = event.reason
        scheduler.check()
        if not due and len(ended) == len(came):
            break
    for name, (_, prompt, tokens, scored) in came.items():
        assert ended[name] is FinishReason.LENGTH
        if scored:
            assert sequences[name].cached_prompt_tokens == 0
            assert_scores_are_transformers(architecture, PROMPTS[prompt], scores[name])
        else:
            assert scores[name] == []
        output = tuple(event.token for event in said[name])
        assert output == tiny_models.greedy(architecture, PROMPTS[prompt], 12)[: len(output)]
        assert len(output) == max(tokens, 0 if scored else 1)
        if output:
            table = reference(architecture, PROMPTS[prompt] + output)
            for place, event in enumerate(said[name], len(PROMPTS[prompt]) - 1):
                assert event.logprob is not None
                assert event.logprob.logprob == pytest.approx(float(table[place, event.token]), abs=2e-4)
    return scheduler, {int(name) for name, s in sequences.items() if s.preemptions}


@pytest.mark.parametrize(("kind", "architecture"), KINDS)
def test_scores_are_transformers_own_whatever_happens_around_them(kind: str, architecture: str) -> None:
    """Rows C.5 46 and 47: prompts scored in chunks, beside neighbours that ask for other things or nothing,
    through preemption and with the prefix cache on: every value is that of a plain forward pass, aligned."""

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        requests=st.lists(asked, min_size=1, max_size=7),
        blocks=st.sampled_from([19, 24, 60]),
        chunk=st.sampled_from([1, 3, 7, 40]),
        caching=st.booleans(),
    )
    def history(requests: list[Any], blocks: int, chunk: int, caching: bool) -> None:
        play(runner_of(kind, architecture), architecture, blocks, requests, chunk, caching)

    history()


@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_prompt_is_scored_once_and_goes_on_where_it_was(caching: bool) -> None:
    """Row C.7 65: the property above would be hollow if nobody were preempted; values that are out already
    are not given twice, and only they may come back from the prefix cache."""
    crowd = [(0, 3 + i % 2, 12, True) for i in range(6)]
    scheduler, preempted = play(runner_of("padded", "llama"), "llama", 26, crowd, 40, caching)
    assert scheduler.preemptions_total > 0
    assert preempted


def test_a_prompt_half_scored_takes_hits_only_below_what_is_out() -> None:
    """After a preemption in mid-prompt: 10 tokens scored, so two blocks of four may be found again."""
    scheduler = Scheduler(
        runners.capacity(64, STEP_TOKENS), Limits(prefill_chunk_tokens=10, max_batch_tokens=10)
    )
    request = tiny_models.request("a", PROMPTS[5], max_tokens=1, prompt_logprobs=0)
    sequence = scheduler.admit(request, 0.0)
    assert isinstance(sequence, Sequence)
    step = scheduler.next_step(0.0)
    assert step is not None
    out = SampledToken(NO_TOKEN, scores=(TokenLogprob(-1.0),) * 10)
    scheduler.commit(step, {"a": out}, 0.0)
    scheduler._roster.preempt(sequence)
    step = scheduler.next_step(0.0)
    assert step is not None
    (chunk,) = step.chunks
    assert (chunk.start, chunk.scored) == (8, range(10, 18))
    twin = tiny_models.request("b", PROMPTS[5], max_tokens=1, prompt_logprobs=0)
    other = scheduler.admit(twin, 0.0)
    assert isinstance(other, Sequence)
    assert scheduler.pool.match(other) == []


def test_one_request_without_hits_leaves_the_cache_to_the_others() -> None:
    """A scored prompt fills the prefix cache like any other, and a plain twin hits it."""
    requests = [(0, 3, 1, True), (6, 3, 1, False)]
    scheduler, _ = play(runner_of("padded", "llama"), "llama", 60, requests, 40, True)
    assert scheduler.prefix_hit_tokens_total == len(PROMPTS[3]) // 4 * 4


@pytest.mark.parametrize(("kind", "architecture"), KINDS)
@pytest.mark.parametrize("length", [12, 60, 96])
def test_no_logits_tensor_is_larger_than_what_is_reserved(
    kind: str, architecture: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row C.5 49: whatever a prompt's length, at most `most_logit_rows` rows of logits exist at a time."""
    runner: Any = runner_of(kind, architecture)
    rows: list[int] = []
    forward = runner._forward

    def counted(chunks: list[Chunk]) -> torch.Tensor:
        logits: torch.Tensor = forward(chunks)
        rows.append(logits.shape[0])
        assert logits.untyped_storage().nbytes() <= bound * logits.shape[1] * logits.itemsize
        return logits

    bound = most_logit_rows(96, 8)
    assert bound == LEAST_LOGIT_ROWS == 16
    monkeypatch.setattr(runner, "_forward", counted)
    prompt = tuple((13 * j + 5) % 290 + 3 for j in range(length))
    scored = tiny_models.sequence("a", prompt, range(24), max_tokens=0, prompt_logprobs=TOP)
    plain = tiny_models.sequence("b", prompt[:5], range(24, 26))
    step = Step((Chunk(scored, 0, length, samples=False), Chunk(plain, 0, 5, samples=True)))
    out = runner.run(step)
    assert max(rows) <= bound
    assert sum(rows) == length - 1 + 1
    assert out["a"].token == NO_TOKEN
    assert_scores_are_transformers(architecture, prompt, list(out["a"].scores))
    assert out["b"].token == tiny_models.greedy(architecture, prompt[:5], 1)[0]
    assert out["b"].scores == ()


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 29), st.integers(1, 30), st.booleans(), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    most_rows=st.integers(1, 20),
)
def test_parts_hold_every_token_once_and_few_enough_rows(chunks: Any, most_rows: int) -> None:
    """Whatever is scored, sampled or neither: parts put together are the step, and each sequence's tokens
    come in order."""
    made: list[Chunk] = []
    for number, (length, start, computed, is_scored, output) in enumerate(chunks):
        start = min(start, length - 1)
        s = tiny_models.sequence(
            str(number),
            range(3, 3 + length),
            range(8),
            max_tokens=int(output),
            prompt_logprobs=0 if is_scored else -1,
        )
        s.scored = min(start, length - 1)
        took = min(computed, length - start)
        made.append(Chunk(s, start, took, samples=output and start + took == length))
    samplers = sum(c.samples for c in made if not c.scored)
    seen: dict[str, list[int]] = {c.sequence.id: [] for c in made}
    rows = 0
    for part in parts(made, most_rows):
        assert part
        assert len({c.sequence.id for c in part}) == len(part)
        assert len(logit_rows(part)) <= max(most_rows, samplers)
        rows += len(logit_rows(part))
        for c in part:
            seen[c.sequence.id].extend(range(c.start, c.start + c.length))
    assert seen == {c.sequence.id: list(range(c.start, c.start + c.length)) for c in made}
    assert rows == sum(len(c.scored) + c.samples for c in made)


def test_a_step_that_gives_no_scores_fails_the_request() -> None:
    """A runner that forgets is seen at once: the client gets an error and not a short list."""
    scheduler = Scheduler(runners.capacity(64, STEP_TOKENS), Limits())
    scheduler.admit(tiny_models.request("a", PROMPTS[2], max_tokens=0, prompt_logprobs=0), 0.0)
    step = scheduler.next_step(0.0)
    assert step is not None
    events = scheduler.commit(step, {}, 0.0)
    assert [type(e) for e in events] == [Started, Finished]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.ERROR


def test_scores_travel_in_slices() -> None:
    """Whoever turns them into text can let others in between."""
    roomy = Capacity(
        max_batch_tokens=2048, max_batch_sequences=8, kv_blocks=64, block_tokens=16, max_model_tokens=1024
    )
    scheduler = Scheduler(roomy, Limits(max_batch_tokens=2048))
    length = 2 * SCORES_IN_EVENT + 10
    scheduler.admit(tiny_models.request("a", [5] * length, max_tokens=0, prompt_logprobs=0), 0.0)
    step = scheduler.next_step(0.0)
    assert step is not None
    out = SampledToken(NO_TOKEN, scores=(TokenLogprob(-1.0),) * (length - 1))
    events = scheduler.commit(step, {"a": out}, 0.0)
    sizes = [len(e.scores) for e in events if isinstance(e, PromptOut)]
    assert sizes == [SCORES_IN_EVENT, SCORES_IN_EVENT, 9]
    assert isinstance(events[-1], Finished)


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    """With nothing to follow, no room is needed for it."""
    scheduler = Scheduler(runners.capacity(64, STEP_TOKENS), Limits(max_batch_tokens=96))
    full = [5] * 97
    assert isinstance(scheduler.admit(tiny_models.request("a", full, max_tokens=1), 0.0), Rejected)
    assert isinstance(scheduler.admit(tiny_models.request("b", full, max_tokens=0), 0.0), Sequence)
    longer = scheduler.admit(tiny_models.request("c", [5] * 98, max_tokens=0), 0.0)
    assert isinstance(longer, Rejected)
    assert "the prompt has 98 tokens; the model's limit is 97" in longer.message


def test_scores_that_are_no_numbers_fail_their_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row C.6 61: a model that gives no usable logits for one prompt; its neighbour is told apart."""
    runner: Any = runner_of("padded", "llama")
    bad = tiny_models.sequence("bad", [5, 6, 7], range(2), max_tokens=0, prompt_logprobs=0)
    good = tiny_models.sequence("good", [5, 6, 7], range(2, 4), max_tokens=0, prompt_logprobs=TOP)
    chunks = [Chunk(s, 0, 3, samples=False) for s in (bad, good)]
    forward = runner._forward

    def spoiled(chunks: list[Chunk]) -> torch.Tensor:
        logits: torch.Tensor = forward(chunks)
        logits[1] = math.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_forward", spoiled)
        with pytest.raises(StepError, match="not a number") as caught:
            runner.run(Step(tuple(chunks)))
    assert caught.value.sequence_ids == ("bad",)
    out = runner.run(Step((chunks[1],)))
    assert_scores_are_transformers("llama", (5, 6, 7), list(out["good"].scores))
