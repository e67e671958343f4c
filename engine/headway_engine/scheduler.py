"""Which tokens to compute now, and what a finished step changed.

One step: decodes first, then prompts that have begun, then waiting requests in fair order, up to
`max_batch_tokens`; a prompt is cut into chunks of `prefill_chunk_tokens`. A request is admitted when room
for all its known tokens is free, so running prompts never wait for blocks; only decodes grow, and when
there is no block the cheapest sequence is preempted and computed again later. A request of a higher class
that finds no slot or no blocks takes those of a lower one in the same way.

Always true, after every call: running sequences hold blocks and waiting ones hold none; every admitted
request gets exactly one Finished; some sequence makes progress in every step.

The clock is an argument. Knows nothing of torch, HTTP, or how a step is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway_engine.blocks import BlockPool
from headway_engine.preemption import SKIP_WINDOW, choose_displaced, choose_victim
from headway_engine.protocol import BatchingMode, Capacity, Limits
from headway_engine.rates import PrefillPace, TokenRates
from headway_engine.roster import Roster
from headway_engine.sequence import (
    Chunk,
    Event,
    Finished,
    FinishReason,
    Preempted,
    PromptOut,
    Rejected,
    RejectReason,
    Request,
    RequestId,
    SampledToken,
    Sequence,
    Started,
    Status,
    Step,
    TokenLogprob,
    TokenOut,
    VectorOut,
)
from headway_engine.tenants import TenantPolicy
from headway_engine.window import CLOCK_GRAIN_S, Waiting, leaves_at_s

SCORES_IN_EVENT = 256
"""Log-probabilities of a prompt that travel in one event: whoever makes text of them can breathe between."""


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    budget: int
    now_s: float
    chunks: dict[RequestId, Chunk] = field(default_factory=dict)
    preempted: bool = False

    def add(self, sequence: Sequence, length: int) -> None:
        end = sequence.computed + length
        samples = end == len(sequence.tokens) and sequence.request.sampling.max_tokens > 0
        self.chunks[sequence.id] = Chunk(sequence, sequence.computed, length, samples)
        self.budget -= length

    def drop(self, sequence: Sequence) -> None:
        chunk = self.chunks.pop(sequence.id, None)
        if chunk is not None:
            self.budget += chunk.length


class Scheduler:
    """Requests in, steps out. Not thread-safe; `commit` or `fail` follows each step before the next."""

    def __init__(
        self,
        capacity: Capacity,
        limits: Limits,
        *,
        prefix_caching: bool = True,
        tenants: TenantPolicy | None = None,
    ) -> None:
        self.capacity = capacity
        self.pool = BlockPool(capacity.kv_blocks, capacity.block_tokens, prefix_caching)
        self.prefix_hit_tokens_total = 0
        self._limits = limits
        self._policy = tenants or TenantPolicy()
        self._roster = Roster(self.pool, self._policy)
        self._queue = self._roster.queue
        self._backlog = self._roster.backlog
        self._running = self._roster.running
        self._rates = TokenRates(self._policy)
        self._pace = PrefillPace()
        self._step: Step | None = None
        self._step_began_s = 0.0
        self._draining = False
        self._spare_blocks = max(1, capacity.kv_blocks // 100)
        self._most_tokens = min(capacity.max_model_tokens, capacity.kv_tokens)

    # What others may read.

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that never ran, and preempted ones."""
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are admitted and not computed: of waiting requests and of prompts under way."""
        return self._backlog.tokens + self._roster.prefill_tokens

    @property
    def preemptions_total(self) -> int:
        """How often a running sequence gave its blocks up."""
        return self._roster.preemptions_total

    @property
    def draining(self) -> bool:
        return self._draining

    def check(self) -> None:
        """Raise AssertionError, with words, unless the bookkeeping is consistent (for tests)."""
        self._roster.check()

    # Commands.

    def set_limits(self, limits: Limits) -> None:
        """Put limits in force from the next step on. They are trusted: see protocol.check_limits.

        Lowering them below what runs ends nothing: what runs goes on, and newcomers wait until it is few
        enough.
        """
        self._limits = limits

    def drain(self) -> None:
        """Refuse newcomers from now on; what was admitted goes on to its end."""
        self._draining = True

    def admit(self, request: Request, now_s: float) -> Sequence | Rejected:
        """Queue a request, or say why not. Its id must be new."""
        if request.id in self._roster.sequences:
            raise ValueError(f"request {request.id} is known already")
        if self._draining:
            return Rejected(request.id, RejectReason.DRAINING, "the engine is shutting down")
        if not request.prompt:
            return Rejected(request.id, RejectReason.TOO_LONG, "the prompt has no tokens")
        if len(request.prompt) + min(1, request.sampling.max_tokens) > self._most_tokens:
            return Rejected(request.id, RejectReason.TOO_LONG, self._too_long(request))
        refusal = self._backlog.refusal(
            request,
            self._limits,
            self._policy.of(request.tenant),
            self._roster.prefill_tokens,
            self._free_slots(),
        )
        if refusal:
            retry_s = self._pace.retry_after_s(self.queued_tokens)
            return Rejected(request.id, RejectReason.QUEUE_FULL, refusal, retry_s)
        if self._rates.active:
            retry_s = self._rates.wait_s(request.tenant, now_s)
            if retry_s:
                spent = f"tenant {request.tenant!r} has spent its tokens_per_s"
                return Rejected(request.id, RejectReason.QUEUE_FULL, spent, retry_s)
            self._rates.spend(request.tenant, len(request.prompt), now_s)
        sequence = Sequence(request, list(request.prompt))
        self._roster.join(sequence)
        return sequence

    def abort(self, request_id: RequestId, now_s: float) -> tuple[Event, ...]:
        """Forget a request wherever it is; its blocks are free when this returns. Unknown ids are fine."""
        sequence = self._roster.sequences.get(request_id)
        return (self._finish(sequence, FinishReason.ABORT),) if sequence else ()

    def give_up(self, request_id: RequestId, message: str) -> tuple[Event, ...]:
        """End one sequence as failed, and only it: one that poisons a step, say, before the step's commit.
        What it computed may be wrong, so the prefix cache forgets it."""
        sequence = self._roster.sequences.get(request_id)
        if sequence is None:
            return ()
        self.pool.withdraw(sequence)
        return (self._finish(sequence, FinishReason.ERROR, message),)

    def expire(self, now_s: float) -> tuple[Event, ...]:
        """End requests that never ran and have waited the queue timeout (0: no timeout). A call of several
        sequences is refused whole or not at all: once one of them has run, the others wait."""
        timeout_s = self._limits.queue_timeout_ms / 1000
        events: list[Event] = []
        while timeout_s:
            oldest = self._backlog.next_to_expire()
            if oldest is None or now_s < oldest.request.arrival_s + timeout_s - CLOCK_GRAIN_S:
                break
            message = f"waited longer than the queue timeout of {timeout_s:g} s"
            events.append(self._finish(oldest, FinishReason.TIMEOUT, message))
        return tuple(events)

    # Steps.

    def next_step(self, now_s: float) -> Step | None:
        """What to compute now, blocks in place; None when there is nothing to run now."""
        if self._step is not None:
            raise RuntimeError("commit or fail the last step before asking for the next")
        plan = _Plan(self._limits.max_batch_tokens, now_s)
        self._plan_running(plan)
        if not plan.preempted:
            self._plan_displacing(plan)
        if not plan.preempted:
            self._plan_waiting(plan)
        if not plan.chunks:
            return None
        self._step_began_s = now_s
        self._step = Step(tuple(sorted(plan.chunks.values(), key=lambda chunk: not chunk.is_decode)))
        return self._step

    def wait_s(self, now_s: float) -> float | None:
        """After next_step() gave None: seconds until the window or a queue timeout changes that by itself.

        None when only a command can. Call expire() when the time is over, then next_step().
        """
        oldest = self._backlog.oldest()
        if oldest is None:
            return None
        times = [self._leaves_at_s(oldest.request.arrival_s)]
        expiring = self._backlog.next_to_expire()
        if expiring is not None and self._limits.queue_timeout_ms:
            times.append(expiring.request.arrival_s + self._limits.queue_timeout_ms / 1000)
        return max(0.0, min(times) - now_s)

    def commit(
        self, step: Step, sampled: Mapping[RequestId, SampledToken], now_s: float
    ) -> tuple[Event, ...]:
        """Take a step's results in; a sequence that ended meanwhile has none."""
        self._close(step)
        self._pace.note(step.prefill_tokens, now_s - self._step_began_s)
        events: list[Event] = [Preempted(sequence_id) for sequence_id in self._roster.take_preempted()]
        for chunk in step.chunks:
            sequence = chunk.sequence
            if self._running.get(sequence.id) is not sequence:
                continue
            before, scored = sequence.computed, len(chunk.scored)
            sequence.computed = before + chunk.length
            if before // self.pool.block_tokens != sequence.computed // self.pool.block_tokens:
                self.pool.publish(sequence, before)
            if sequence.id in self._roster.unannounced:
                self._roster.unannounced.discard(sequence.id)
                self.prefix_hit_tokens_total += sequence.cached_prompt_tokens
                began_s = sequence.first_scheduled_s or 0.0
                events.append(Started(sequence.id, sequence.cached_prompt_tokens, began_s))
            result = sampled.get(sequence.id)
            if scored and result is not None:
                self._tell_scores(sequence, result.scores, events)
            if chunk.samples or (scored and result is None):
                self._append(sequence, result, events)
                if self._rates.active:
                    self._rates.spend(sequence.request.tenant, 1, now_s)
            elif chunk.pools:
                self._give_vector(sequence, result, events)
            elif sequence.remaining == 0:
                events.append(self._finish(sequence, FinishReason.LENGTH))
        return tuple(events)

    def fail(self, step: Step, message: str) -> tuple[Event, ...]:
        """A step that could not be computed: its sequences end, their blocks are free again."""
        self._close(step)
        return tuple(
            self._finish(chunk.sequence, FinishReason.ERROR, message)
            for chunk in step.chunks
            if self._running.get(chunk.sequence.id) is chunk.sequence
        )

    # Planning.

    def _plan_running(self, plan: _Plan) -> None:
        """Decodes, then prompts under way. With more sequences than tokens in a step they take turns."""
        running = list(self._running.values())
        crowded = len(running) > plan.budget
        if not crowded:
            running.sort(key=lambda s: s.remaining > 1)
        chunk_cap = self._chunk_cap()
        block_tokens = self.pool.block_tokens
        for sequence in running:
            if not plan.budget:
                break
            if sequence.status is not Status.RUNNING:
                continue
            length = min(sequence.remaining, chunk_cap, plan.budget)
            end = sequence.computed + length
            if end <= len(sequence.block_table) * block_tokens or self._make_room(sequence, end, plan):
                plan.add(sequence, length)
        for chunk in plan.chunks.values():
            if chunk.samples:
                self._roster.charge_output(chunk.sequence)
            if crowded:
                self._roster.rotate(chunk.sequence)

    def _plan_displacing(self, plan: _Plan) -> None:
        """Let the next one in where lower classes hold its slot or its blocks; one a step, to go slow."""
        most = self._limits.max_batch_sequences
        by_batch = self._limits.mode is not BatchingMode.CONTINUOUS
        if by_batch or not self._queue.several_classes or not 0 < len(self._running) <= most:
            return
        sequence = self._queue.take(plan.now_s)
        if sequence is None:
            return
        hits = self.pool.match(sequence)
        slots = most - len(self._running)
        missing = self.pool.needed(sequence, hits) + self._spare_blocks - self.pool.free_blocks
        kept = frozenset(hits)  # whoever holds them now

        def enough_with(gone: Sequence) -> bool:
            nonlocal slots, missing
            slots += 1
            missing -= self.pool.freed_by(gone, kept)
            return slots > 0 and missing <= 0

        victims: list[Sequence] = []
        if slots <= 0 or missing > 0:
            victims = choose_displaced(self._running.values(), sequence, self._policy.class_of, enough_with)
        if not victims:
            self._queue.put_back([sequence])
            return
        for victim in victims:
            self._preempt(victim, plan)
        self._start(sequence, hits, plan)

    def _plan_waiting(self, plan: _Plan) -> None:
        """Admit waiting requests, in fair order, while tokens, slots and blocks last."""
        limits = self._limits
        under_way = bool(self._running) or self._roster.resuming
        by_batch = limits.mode is not BatchingMode.CONTINUOUS
        if not under_way:
            oldest = self._backlog.oldest()
            if oldest is None or self._leaves_at_s(oldest.request.arrival_s) > plan.now_s:
                return
        passed: list[Sequence] = []
        while len(self._running) < limits.max_batch_sequences and (plan.budget or by_batch):
            # A batch that runs to its end lets nobody in but its own preempted members.
            closed = by_batch and under_way
            sequence = self._queue.take_preempted() if closed else self._queue.take(plan.now_s)
            if sequence is None:
                break
            hits = self.pool.match(sequence)
            if self.pool.fits(sequence, hits, self._spare_blocks if self._running else 0):
                self._start(sequence, hits, plan)
                self._roster.patience.count_admission(passed)
                continue
            passed.append(sequence)
            if not self._roster.patience.may_pass(sequence, plan.now_s) or len(passed) > SKIP_WINDOW:
                break
        self._queue.put_back(passed)

    def _start(self, sequence: Sequence, hits: list[int], plan: _Plan) -> None:
        """A waiting sequence runs, with a chunk in this step if there is room."""
        self._roster.start(sequence, hits, plan.now_s)
        if plan.budget:
            plan.add(sequence, min(sequence.remaining, self._chunk_cap(), plan.budget))
            if plan.chunks[sequence.id].samples:
                self._roster.charge_output(sequence)

    def _chunk_cap(self) -> int:
        """Prompt tokens that one sequence may have in a step; a lone request disturbs nobody."""
        if len(self._roster.sequences) == 1:
            return self._limits.max_batch_tokens
        return self._limits.prefill_chunk_tokens

    def _leaves_at_s(self, oldest_arrival_s: float) -> float:
        highest = self._queue.highest_class
        return leaves_at_s(
            self._limits,
            Waiting(
                requests=self._backlog.requests,
                prompt_tokens=self._backlog.tokens,
                oldest_arrival_s=oldest_arrival_s,
                urgent=highest is not None and highest > 0,
                last=self._draining,
            ),
        )

    # Preemption.

    def _make_room(self, sequence: Sequence, tokens: int, plan: _Plan) -> bool:
        """Blocks for so many tokens, at the cost of others; False when the sequence itself had to go."""
        while not self.pool.extend(sequence, tokens):
            victim = choose_victim(self._running.values(), sequence, self._policy.class_of)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, plan: _Plan) -> None:
        plan.drop(victim)
        plan.preempted = True
        self._roster.preempt(victim)

    # Endings.

    def _append(self, sequence: Sequence, sampled: SampledToken | None, events: list[Event]) -> None:
        if sampled is None:
            events.append(
                self._finish(sequence, FinishReason.ERROR, "the step gave no token for this sequence")
            )
            return
        sequence.tokens.append(sampled.token)
        events.append(TokenOut(sequence.id, sampled.token, sampled.logprob))
        sampling = sequence.request.sampling
        output_len = sequence.output_len
        if sampled.token in sampling.stop_token_ids and output_len >= sampling.min_tokens:
            events.append(self._finish(sequence, FinishReason.STOP))
        elif output_len >= sampling.max_tokens or len(sequence.tokens) >= self._most_tokens:
            events.append(self._finish(sequence, FinishReason.LENGTH))

    def _tell_scores(self, sequence: Sequence, scores: tuple[TokenLogprob, ...], events: list[Event]) -> None:
        sequence.scored += len(scores)
        for first in range(0, len(scores), SCORES_IN_EVENT):
            events.append(PromptOut(sequence.id, scores[first : first + SCORES_IN_EVENT]))

    def _give_vector(self, sequence: Sequence, result: SampledToken | None, events: list[Event]) -> None:
        if result is None or not result.vector:
            message = "the step gave no vector for this sequence"
            events.append(self._finish(sequence, FinishReason.ERROR, message))
            return
        events.append(VectorOut(sequence.id, result.vector))
        events.append(self._finish(sequence, FinishReason.STOP))

    def _finish(self, sequence: Sequence, reason: FinishReason, message: str = "") -> Finished:
        self._roster.finish(sequence, reason)
        return Finished(sequence.id, reason, message)

    def _close(self, step: Step) -> None:
        if step is not self._step:
            raise ValueError("this is not the step that is under way")
        self._step = None

    def _free_slots(self) -> int:
        """Sequences that the next step could take in; none while a batch that runs to its end is on."""
        if self._running and self._limits.mode is not BatchingMode.CONTINUOUS:
            return 0
        return self._limits.max_batch_sequences - len(self._running)

    def _too_long(self, request: Request) -> str:
        capacity, output = self.capacity, min(1, request.sampling.max_tokens)
        said = f"the prompt has {len(request.prompt)} tokens; "
        said += "with one token of output " if output else ""
        if len(request.prompt) + output > capacity.max_model_tokens:
            return f"{said}the model's limit is {capacity.max_model_tokens}"
        return f"{said}the KV cache holds {capacity.kv_tokens}"
