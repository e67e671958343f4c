"""The promise that carries everything: in float32, greedy output is transformers' own, token for token.

Random histories go through the real scheduler and the real runner: arrivals, chunk sizes, tiny caches that
force preemption, cancels of others, live changes of limits and modes, shared prefixes, tenants, priorities,
siblings (`n`), neighbours that are sampled. The reference is generate() of the same weights, one request at a
time; for a sampled request, which generate() draws otherwise, it is the same request alone.
"""

from dataclasses import dataclass
from functools import cache

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway_engine.lean.graphs import buckets
from headway_engine.protocol import BatchingMode, Limits
from headway_engine.runner import Runner
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import Finished, Request, Sequence, TokenOut
from headway_engine.tenants import Tenant, TenantPolicy
from support import runners, tiny_models

MOST_TOKENS = 24
"""Output tokens of the reference; requests ask for up to this many."""

NEVER = 10_000

PROMPTS = tuple(
    tuple((7 * i * i + 31 * i + 11 * j + 3) % 290 + 3 for j in range(length))
    for i, length in enumerate((1, 2, 5, 9, 17, 30, 41))
) + tuple(  # one beginning, four endings: the prefix cache has something to find
    (*((5 * j + 8) % 290 + 3 for j in range(19)), 40 + i, 50 + i) for i in range(4)
)


RUNNERS = {
    "padded": ("llama", "qwen2", "gpt2"),
    "kernel": ("llama", "qwen2", "gpt2", "llama-wide"),
    "fused": ("llama", "qwen2", "llama-wide"),
    "lean": ("qwen3",),
    "lean graphs": ("llama", "qwen2"),
}


@cache
def runner_of(kind: str, architecture: str) -> Runner:
    """One runner for all histories of an architecture; blocks keep what earlier histories wrote."""
    sizes = buckets(8, 25, by_width=True, most_cells=150)  # many widths; none for eight rows of the widest
    return runners.fresh(kind, architecture, runners.capacity(), sizes)


FLAVOURS: dict[str, dict[str, object]] = {
    "greedy": {},
    "greedy, told of": {"logprobs": 2},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "sampled": {"temperature": 1.0},
    "cut": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
}
PLAIN = ("greedy", "greedy, told of")
"""Flavours whose tokens are generate()'s own."""

POLICY = TenantPolicy(tenants={"gold": Tenant(weight=4.0, priority=1), "free": Tenant(weight=0.5)})


@dataclass(frozen=True)
class Arrival:
    """At `step`, `siblings` requests with prompt `prompt`; cancelled `cancel` steps later, or never."""

    step: int
    prompt: int
    tokens: int
    cancel: int
    flavour: str = "greedy"
    siblings: int = 1
    tenant: str = ""
    priority: int = 0

    def request(self, name: str, sibling: int, arrival_s: float) -> Request:
        sampling = {"max_tokens": self.tokens, "seed": 100 * self.prompt + sibling, **FLAVOURS[self.flavour]}
        request = tiny_models.request(name, PROMPTS[self.prompt], **sampling)
        return msgspec.structs.replace(
            request, arrival_s=arrival_s, tenant=self.tenant, priority=self.priority
        )


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prompt=st.integers(0, len(PROMPTS) - 1),
    tokens=st.integers(1, MOST_TOKENS),
    cancel=st.sampled_from([NEVER, NEVER, NEVER, 2, 9]),
    flavour=st.sampled_from(["greedy", *FLAVOURS]),
    siblings=st.sampled_from([1, 1, 1, 2, 3]),
    tenant=st.sampled_from(["", "gold", "free"]),
    priority=st.integers(-2, 2),
)

limits = st.builds(
    lambda sequences, extra, chunk, mode, window_ms: Limits(
        mode=mode,
        window_ms=window_ms,
        max_batch_sequences=sequences,
        max_batch_tokens=sequences + extra,
        prefill_chunk_tokens=chunk,
        max_queued_tokens=10_000,
    ),
    sequences=st.integers(1, 8),
    extra=st.integers(0, 40),
    chunk=st.integers(1, 40),
    mode=st.sampled_from([BatchingMode.CONTINUOUS, *BatchingMode]),
    window_ms=st.sampled_from([0, 0, 30]),
)


def reference(runner: Runner, architecture: str, arrival: Arrival, sibling: int) -> tuple[int, ...]:
    """What this request says when nobody else is there."""
    if arrival.flavour in PLAIN:
        return tiny_models.greedy(architecture, PROMPTS[arrival.prompt], MOST_TOKENS)
    return alone(runner, arrival.flavour, arrival.prompt, sibling)


@cache
def alone(runner: Runner, flavour: str, prompt: int, sibling: int) -> tuple[int, ...]:
    """A request with the engine to itself: its whole prompt at once, then token by token."""
    wide = Limits(max_batch_sequences=1, max_batch_tokens=64, prefill_chunk_tokens=64)
    scheduler = Scheduler(runners.capacity(), wide, prefix_caching=False)
    arrival = Arrival(step=0, prompt=prompt, tokens=MOST_TOKENS, cancel=NEVER, flavour=flavour)
    scheduler.admit(arrival.request("alone", sibling, 0.0), 0.0)
    said: list[int] = []
    while step := scheduler.next_step(0.0):
        said += [e.token for e in scheduler.commit(step, runner.run(step), 0.0) if isinstance(e, TokenOut)]
    return tuple(said)


def play(
    runner: Runner,
    architecture: str,
    blocks: int,
    requests: list[Arrival],
    changes: list[tuple[int, Limits]],
    prefix_caching: bool,
) -> Scheduler:
    """Run one history to its end and compare every request that finished."""
    first = changes[0][1]
    scheduler = Scheduler(runners.capacity(blocks), first, prefix_caching=prefix_caching, tenants=POLICY)
    due = sorted(requests, key=lambda arrival: arrival.step)
    came: dict[str, tuple[Arrival, int]] = {}
    said: dict[str, list[int]] = {}
    ended: set[str] = set()
    step_number = 0
    while due or len(ended) < len(said):
        now_s = step_number * 0.01
        for at, change in changes[1:]:
            if at == step_number:
                scheduler.set_limits(change)
        while due and due[0].step <= step_number:
            arrival = due.pop(0)
            for sibling in range(arrival.siblings):
                name = str(len(came))
                outcome = scheduler.admit(arrival.request(name, sibling, now_s), now_s)
                assert isinstance(outcome, Sequence), outcome
                came[name], said[name] = (arrival, sibling), []
        for name, (arrival, _) in came.items():
            if name not in ended and step_number >= arrival.step + arrival.cancel:
                scheduler.abort(name, now_s)
                ended.add(name)
        step = scheduler.next_step(now_s)
        if step is not None:
            for event in scheduler.commit(step, runner.run(step), now_s):
                if isinstance(event, TokenOut):
                    said[event.id].append(event.token)
                if isinstance(event, Finished):
                    ended.add(event.id)
        scheduler.check()
        step_number += 1
        assert step_number < 5_000, "the scheduler makes no progress"
    for name, tokens in said.items():
        arrival, sibling = came[name]
        expected = reference(runner, architecture, arrival, sibling)
        assert tuple(tokens) == expected[: len(tokens)], f"request {name}, sibling {sibling} of {arrival}"
        if arrival.cancel == NEVER:
            assert len(tokens) == arrival.tokens
    return scheduler


@pytest.mark.parametrize(
    ("kind", "architecture"), [(kind, name) for kind, names in RUNNERS.items() for name in names]
)
def test_greedy_output_is_generates_whatever_happens_around_it(kind: str, architecture: str) -> None:
    """Random histories, every runner, every architecture that it takes."""

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        requests=st.lists(arrivals, min_size=1, max_size=7),
        blocks=st.sampled_from([17, 20, 40]),
        changes=st.lists(st.tuples(st.integers(1, 30), limits), min_size=1, max_size=4),
        prefix_caching=st.booleans(),
    )
    def history(
        requests: list[Arrival], blocks: int, changes: list[tuple[int, Limits]], prefix_caching: bool
    ) -> None:
        runner = runner_of(kind, architecture)
        play(runner, architecture, blocks, requests, changes, prefix_caching)

    history()


def test_histories_do_preempt_and_do_hit_the_prefix_cache() -> None:
    """The property above would be hollow if its caches were never short and never hit."""
    runner = runner_of("padded", "llama")
    wide = Limits(max_batch_sequences=8, max_batch_tokens=64, prefill_chunk_tokens=16)
    crowd = [Arrival(step=0, prompt=7 + i % 4, tokens=MOST_TOKENS, cancel=NEVER) for i in range(8)]
    short = play(runner, "llama", 17, crowd, [(0, wide)], prefix_caching=False)
    assert short.preemptions_total > 0
    waves = [Arrival(step=i, prompt=7 + i % 4, tokens=4, cancel=NEVER) for i in range(8)]
    roomy = play(runner, "llama", 60, waves, [(0, wide)], prefix_caching=True)
    assert roomy.prefix_hit_tokens_total > 0


def test_the_reference_says_varied_things() -> None:
    """A model that repeats one token would let a wrong cache pass."""
    for architecture in tiny_models.ARCHITECTURES:
        outputs = [tiny_models.greedy(architecture, prompt, MOST_TOKENS) for prompt in PROMPTS]
        assert len(set(outputs)) > len(PROMPTS) // 2
        assert sum(len(set(tokens)) for tokens in outputs) / len(outputs) > 5, architecture
