"""Which tokens to compute now: a step, planned on the roster and within the limits.

Decodes first, then prompts that have begun, then waiting requests in fair order, up to `max_batch_tokens`; a
prompt is cut into chunks of `prefill_chunk_tokens`. A request is admitted when room for all its known tokens
is free, so running prompts never wait for blocks; only decodes grow, and when there is no block the cheapest
sequence is preempted and computed again later. A request of a higher class that finds no slot or no blocks
takes those of a lower one in the same way.

Nothing is remembered here from one step to the next: what lasts is the roster's. Knows nothing of what came
of a step, or of who may join the queue.
"""

from dataclasses import dataclass, field

from headway_engine.preemption import SKIP_WINDOW, choose_displaced, choose_victim
from headway_engine.protocol import BatchingMode, Limits
from headway_engine.roster import Roster
from headway_engine.sequence import Chunk, RequestId, Sequence, Status, Step
from headway_engine.window import Waiting, leaves_at_s


def plan_step(roster: Roster, limits: Limits, now_s: float, *, last: bool = False) -> Step | None:
    """What to compute now, blocks in place; None when there is nothing to run now. `last`: nobody else can
    join those who wait."""
    plan = _Plan(roster, limits, now_s, limits.max_batch_tokens)
    plan.go_on()
    if not plan.preempted:
        plan.displace()
    if not plan.preempted and (plan.under_way or _window_is_over(roster, limits, now_s, last)):
        plan.let_in()
    if not plan.chunks:
        return None
    chunks = sorted(plan.chunks.values(), key=lambda chunk: not chunk.is_decode)
    return Step(tuple(chunks), wiped=roster.take_lost())


def starts_at_s(roster: Roster, limits: Limits, *, last: bool = False) -> float | None:
    """The time from which an idle engine starts the requests that wait; None when none waits."""
    oldest = roster.backlog.oldest()
    if oldest is None:
        return None
    highest = roster.queue.highest_class
    return leaves_at_s(
        limits,
        Waiting(
            requests=roster.backlog.requests,
            prompt_tokens=roster.backlog.tokens,
            oldest_arrival_s=oldest.request.arrival_s,
            urgent=highest is not None and highest > 0,
            last=last,
        ),
    )


def _window_is_over(roster: Roster, limits: Limits, now_s: float, last: bool) -> bool:
    start_s = starts_at_s(roster, limits, last=last)
    return start_s is not None and start_s <= now_s


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    roster: Roster
    limits: Limits
    now_s: float
    budget: int  # tokens that may still be added
    chunks: dict[RequestId, Chunk] = field(default_factory=dict)
    preempted: bool = False

    # Who is in.

    def go_on(self) -> None:
        """Decodes, then prompts under way. With more sequences than tokens in a step they take turns."""
        running = list(self.roster.running.values())
        crowded = len(running) > self.budget
        if not crowded:
            running.sort(key=lambda s: s.remaining > 1)
        chunk_cap = self._chunk_cap()
        block_tokens = self.roster.pool.block_tokens
        for sequence in running:
            if not self.budget:
                break
            if sequence.status is not Status.RUNNING:
                continue
            length = min(sequence.remaining, chunk_cap, self.budget)
            end = sequence.computed + length
            if end <= len(sequence.block_table) * block_tokens or self._make_room(sequence, end):
                self._add(sequence, length)
        for chunk in self.chunks.values():
            if chunk.samples:
                self.roster.charge_output(chunk.sequence)
            if crowded:
                self.roster.rotate(chunk.sequence)

    def displace(self) -> None:
        """Let the next one in where lower classes hold its slot or its blocks; one a step, to go slow."""
        roster, pool = self.roster, self.roster.pool
        most = self.limits.max_batch_sequences
        if self._by_batch or not roster.queue.several_classes or not 0 < len(roster.running) <= most:
            return
        sequence = roster.queue.take(self.now_s)
        if sequence is None:
            return
        hits = pool.match(sequence)
        slots = most - len(roster.running)
        missing = pool.needed(sequence, hits) + self._spare_blocks - pool.free_blocks
        kept = frozenset(hits)  # whoever holds them now

        def enough_with(gone: Sequence) -> bool:
            nonlocal slots, missing
            slots += 1
            missing -= pool.freed_by(gone, kept)
            return slots > 0 and missing <= 0

        victims: list[Sequence] = []
        if slots <= 0 or missing > 0:
            victims = choose_displaced(roster.running.values(), sequence, roster.policy.class_of, enough_with)
        if not victims:
            roster.queue.put_back([sequence])
            return
        for victim in victims:
            self._preempt(victim)
        self._start(sequence, hits)

    def let_in(self) -> None:
        """Admit waiting requests, in fair order, while tokens, slots and blocks last."""
        roster, pool = self.roster, self.roster.pool
        # A batch that runs to its end lets nobody in but its own preempted members.
        closed = self._by_batch and self.under_way
        passed: list[Sequence] = []
        while len(roster.running) < self.limits.max_batch_sequences and (self.budget or self._by_batch):
            sequence = roster.queue.take_preempted() if closed else roster.queue.take(self.now_s)
            if sequence is None:
                break
            hits = pool.match(sequence)
            if pool.fits(sequence, hits, self._spare_blocks if roster.running else 0):
                self._start(sequence, hits)
                roster.patience.count_admission(passed)
                continue
            passed.append(sequence)
            if not roster.patience.may_pass(sequence, self.now_s) or len(passed) > SKIP_WINDOW:
                break
        roster.queue.put_back(passed)

    # Rules.

    @property
    def under_way(self) -> bool:
        """Whether something runs already, or ran and is to go on."""
        return bool(self.roster.running) or self.roster.resuming

    @property
    def _by_batch(self) -> bool:
        return self.limits.mode is not BatchingMode.CONTINUOUS

    @property
    def _spare_blocks(self) -> int:
        """Blocks that a newcomer leaves free, for those who run to grow."""
        return max(1, self.roster.pool.blocks // 100)

    def _chunk_cap(self) -> int:
        """Prompt tokens that one sequence may have in a step; a lone request disturbs nobody."""
        if len(self.roster.sequences) == 1:
            return self.limits.max_batch_tokens
        return self.limits.prefill_chunk_tokens

    # Moves.

    def _add(self, sequence: Sequence, length: int) -> None:
        end = sequence.computed + length
        samples = end == len(sequence.tokens) and sequence.request.sampling.max_tokens > 0
        self.chunks[sequence.id] = Chunk(sequence, sequence.computed, length, samples)
        self.budget -= length

    def _start(self, sequence: Sequence, hits: list[int]) -> None:
        """A waiting sequence runs, with a chunk in this step if there is room."""
        self.roster.start(sequence, hits, self.now_s)
        if self.budget:
            self._add(sequence, min(sequence.remaining, self._chunk_cap(), self.budget))
            if self.chunks[sequence.id].samples:
                self.roster.charge_output(sequence)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens, at the cost of others; False when the sequence itself had to go."""
        roster = self.roster
        while not roster.pool.extend(sequence, tokens):
            victim = choose_victim(roster.running.values(), sequence, roster.policy.class_of)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        chunk = self.chunks.pop(victim.id, None)
        if chunk is not None:
            self.budget += chunk.length
        self.preempted = True
        self.roster.preempt(victim)
