"""Builders for the engine's nouns, and a scheduler with a virtual clock and a made-up model behind it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from headway_engine.protocol import Capacity, Limits, check_limits
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import (
    NO_TOKEN,
    Event,
    Finished,
    FinishReason,
    Pooling,
    Preempted,
    Rejected,
    Request,
    SampledToken,
    SamplingParams,
    Sequence,
    Started,
    Step,
    TokenOut,
    VectorOut,
)
from headway_engine.tenants import TenantPolicy

VOCABULARY = 97
"""A prime, so that made-up continuations do not fall into short circles."""


def a_capacity(**changes: int) -> Capacity:
    """Room for everything a small test does: 64 blocks of 4 tokens."""
    values = {
        "max_batch_tokens": 256,
        "max_batch_sequences": 32,
        "kv_blocks": 64,
        "block_tokens": 4,
        "max_model_tokens": 256,
    }
    return Capacity(**(values | changes))


def some_limits(capacity: Capacity | None = None, **changes: Any) -> Limits:
    """Limits at the given capacity, with the changes asked for; checked as the control API does."""
    capacity = capacity or a_capacity()
    tokens = changes.get("max_batch_tokens", capacity.max_batch_tokens)
    values: dict[str, Any] = {
        "max_batch_tokens": tokens,
        "max_batch_sequences": min(capacity.max_batch_sequences, tokens),
        "prefill_chunk_tokens": capacity.max_batch_tokens,
    }
    limits = Limits(**(values | changes))
    check_limits(limits, capacity)
    return limits


def a_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of so many tokens; different seeds differ from the first token on."""
    return tuple((seed * 31 + 7 * i + i * i) % VOCABULARY for i in range(seed, seed + length))


def a_request(
    id: str = "r",
    prompt: int | Iterable[int] = 8,
    *,
    max_tokens: int = 4,
    arrival_s: float = 0.0,
    tenant: str = "",
    priority: int = 0,
    call: str = "",
    cache_salt: str = "",
    pooling: Pooling | None = None,
    **sampling: Any,
) -> Request:
    """A request; an integer prompt means that many tokens, different for each id. With `pooling`, nothing is
    generated."""
    if isinstance(prompt, int):
        prompt = a_prompt(prompt, seed=sum(map(ord, id)) % 1009)
    return Request(
        id=id,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=0 if pooling else max_tokens, **sampling),
        arrival_s=arrival_s,
        tenant=tenant,
        priority=priority,
        call=call,
        cache_salt=cache_salt,
        pooling=pooling,
    )


def next_token(tokens: Iterable[int]) -> int:
    """The made-up model: the next token depends on every token before it, and on nothing else."""
    state = 1
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCABULARY


def vector_of(tokens: Iterable[int]) -> bytes:
    """The made-up vector of a prompt: every token is in it."""
    return repr(list(tokens)).encode()


def expected_output(request: Request, most_tokens: int) -> list[int]:
    """What the made-up model says to a request that runs alone: the slow, obvious way."""
    tokens, output = list(request.prompt), []
    while len(output) < request.sampling.max_tokens and len(tokens) < most_tokens:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if token in request.sampling.stop_token_ids and len(output) >= request.sampling.min_tokens:
            break
    return output


def flat_cost(step: Step) -> float:
    """Every step takes 10 ms."""
    return 0.010


@dataclass
class Drive:
    """Runs a scheduler on a virtual clock and keeps what came out.

    It keeps a cache of its own, by block and offset, of which token was computed where, and checks before a
    step that every earlier token of a chunk's sequence lies where the block table says: a wrong table or a
    wrong prefix hit is seen at once.
    """

    capacity: Capacity = field(default_factory=a_capacity)
    limits: Limits | None = None
    tenants: TenantPolicy | None = None
    prefix_caching: bool = True
    cost: Callable[[Step], float] = flat_cost
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.capacity,
            self.limits or some_limits(self.capacity),
            prefix_caching=self.prefix_caching,
            tenants=self.tenants,
        )
        self.requests: dict[str, Request] = {}
        self.rejected: dict[str, Rejected] = {}
        self.started_s: dict[str, float] = {}
        self.preempted: Counter[str] = Counter()
        self.cached: dict[str, int] = {}
        self.output: dict[str, list[int]] = {}
        self.token_s: dict[str, list[float]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.messages: dict[str, str] = {}
        self.steps: list[Step] = []
        self.vectors: dict[str, bytes] = {}
        self._summed: dict[str, int] = {}  # tokens of a mean, computed one after the other since the last 0
        self._cells: dict[tuple[int, int], tuple[int, ...]] = {}

    def submit(self, *requests: Request) -> None:
        """Admit requests that arrive now (their arrival time is set to the clock)."""
        for request in requests:
            self.admit(msgspec.structs.replace(request, arrival_s=self.now_s))

    def admit(self, request: Request) -> Sequence | Rejected:
        """Admit a request with the arrival time it carries."""
        answer = self.scheduler.admit(request, self.now_s)
        if isinstance(answer, Rejected):
            self.rejected[request.id] = answer
        else:
            self.requests[request.id] = request
            self.output[request.id] = []
            self.token_s[request.id] = []
        self.scheduler.check()
        return answer

    def abort(self, *ids: str) -> None:
        for id in ids:
            self.note(self.scheduler.abort(id, self.now_s))
            self.scheduler.check()

    def plan(self) -> Step | None:
        """Ask for the next step, and check that it can be computed."""
        step = self.scheduler.next_step(self.now_s)
        self.scheduler.check()
        assert step is not None or not self.scheduler.running, "sequences run and none gets on"
        if step is not None:
            assert step.tokens <= self.scheduler.limits.max_batch_tokens
            kinds = [c.is_decode for c in step.chunks]
            assert kinds == sorted(kinds, reverse=True), "decodes come first"
            self._compute(step)
        return step

    def fail(self, step: Step, message: str) -> None:
        """A step of which nothing could be computed, as the loop tells of it."""
        for chunk in step.chunks:
            self.note(self.scheduler.give_up(chunk.sequence.id, message))
            self.scheduler.check()
        self.note(self.scheduler.commit(step, {}, self.now_s))
        self.scheduler.check()

    def lose(self, blocks: Iterable[int]) -> None:
        """In the middle of a step, these blocks turn out to hold nothing of use; who reads them is seen."""
        lost = set(blocks)
        self._cells = {cell: prefix for cell, prefix in self._cells.items() if cell[0] not in lost}
        self.scheduler.lose(lost)
        self.scheduler.check()

    def commit(self, step: Step) -> None:
        """Let the clock run on by the step's cost and take its tokens in."""
        self.now_s += self.cost(step)
        sampled = {
            c.sequence.id: SampledToken(next_token(c.sequence.tokens)) for c in step.chunks if c.samples
        }
        for c in step.chunks:
            if c.pools:
                sampled[c.sequence.id] = SampledToken(NO_TOKEN, vector=vector_of(c.sequence.tokens))
        self.steps.append(step)
        self.note(self.scheduler.commit(step, sampled, self.now_s))
        self.scheduler.check()

    def step(self) -> Step | None:
        """One whole turn of the loop."""
        self.note(self.scheduler.expire(self.now_s))
        step = self.plan()
        if step is not None:
            self.commit(step)
        return step

    def wait(self) -> bool:
        """Let the clock run to the time the scheduler named; False when it named none."""
        wait_s = self.scheduler.wait_s(self.now_s)
        if wait_s is None:
            return False
        self.now_s += wait_s
        return True

    def run(self, most_steps: int = 10_000) -> "Drive":
        """Turn until nothing is left to do."""
        for _ in range(most_steps):
            if self.step() is None and not self.wait():
                return self
        raise AssertionError(f"not done after {most_steps} turns: {self.scheduler.running} run")

    def note(self, events: Iterable[Event]) -> None:
        """Keep events, and check their order: Started, then tokens, then exactly one Finished."""
        for event in events:
            assert event.id not in self.ended, f"{event} after the end"
            match event:
                case Started():
                    assert event.id not in self.started_s, f"{event.id} started twice"
                    self.started_s[event.id] = self.now_s
                    assert self.requests[event.id].arrival_s <= event.at_s <= self.now_s
                    self.cached[event.id] = event.cached_prompt_tokens
                case Preempted():
                    self.preempted[event.id] += 1
                    assert self.preempted.total() <= self.scheduler.preemptions_total
                case TokenOut():
                    assert event.id in self.started_s, f"a token of {event.id} before its start"
                    self.output[event.id].append(event.token)
                    self.token_s[event.id].append(self.now_s)
                case VectorOut():
                    assert event.id not in self.vectors, f"two vectors of {event.id}"
                    self.vectors[event.id] = event.vector
                case Finished():
                    if event.reason is FinishReason.TIMEOUT:
                        self._assert_nobody_of_its_call_runs(event.id)
                    self.ended[event.id] = event.reason
                    self.messages[event.id] = event.message

    def _assert_nobody_of_its_call_runs(self, id: str) -> None:
        call = self.requests[id].call
        siblings = {other.id for other in self.requests.values() if call and other.call == call}
        assert not siblings & self.scheduler._roster.running.keys(), f"{id} of {call} was refused in part"

    def ttft_s(self, id: str) -> float:
        return self.token_s[id][0] - self.requests[id].arrival_s

    def widest_gap_s(self, id: str) -> float:
        """The longest time between two tokens."""
        times = self.token_s[id]
        return max(b - a for a, b in pairwise(times))

    def assert_all_ended_right(self) -> None:
        """Everyone admitted has ended, outputs are those of running alone, and no block is held."""
        assert self.ended.keys() == self.requests.keys()
        most = min(self.capacity.max_model_tokens, self.capacity.kv_tokens)
        for id, request in self.requests.items():
            expected = expected_output(request, most)
            if request.pooling:
                done = self.ended[id] is FinishReason.STOP
                assert self.vectors.get(id) == (vector_of(request.prompt) if done else None)
            if self.ended[id] in {FinishReason.STOP, FinishReason.LENGTH}:
                assert self.output[id] == expected
            else:
                assert self.output[id] == expected[: len(self.output[id])]
        s = self.scheduler
        assert (s.running, s.waiting, s.queued_tokens, s.pool.used_blocks) == (0, 0, 0, 0)
        roster = s._roster
        kept = (
            roster.sequences,
            roster.running,
            roster.unannounced,
            roster.queue._classes,
            roster.queue._home,
            roster.queue._place,
            roster.backlog._members,
            roster.backlog._impatient,
            roster.backlog._calls,
            roster.backlog._shares,
            roster.patience._passed,
        )
        assert [len(container) for container in kept] == [0] * len(kept), "kept of those who left"

    def _compute(self, step: Step) -> None:
        """Write a step's tokens into our own cache, after checking that all they attend to is there."""
        size = self.capacity.block_tokens
        self._cells = {cell: prefix for cell, prefix in self._cells.items() if cell[0] not in step.wiped}
        for chunk in step.chunks:
            sequence, table = chunk.sequence, chunk.sequence.block_table
            assert chunk.length > 0
            assert chunk.start == sequence.computed
            assert chunk.start + chunk.length <= min(len(sequence.tokens), len(table) * size)
            ends = chunk.start + chunk.length == len(sequence.tokens)
            assert chunk.samples == (ends and sequence.request.sampling.max_tokens > 0)
            assert chunk.pools == (ends and sequence.request.pooling is not None)
            if sequence.request.pooling is Pooling.MEAN:
                assert chunk.start in {0, self._summed.get(sequence.id)}, "part of the mean is missing"
                self._summed[sequence.id] = chunk.start + chunk.length
            for i in range(chunk.start + chunk.length):
                cell = (table[i // size], i % size)
                prefix = tuple(sequence.tokens[: i + 1])
                if i < chunk.start:
                    assert self._cells.get(cell) == prefix, (
                        f"token {i} of {sequence.id} is not where it should be"
                    )
                else:
                    self._cells[cell] = prefix
