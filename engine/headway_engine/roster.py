"""Who is here, and in which state: the one owner of sequences, with the changes of state as its methods.

Waiting sequences hold no blocks and stand in the queue; running ones hold blocks and do not. Each change
keeps queue, backlog and blocks in step with the status. Knows nothing of why a change is made: that is the
scheduler's.
"""

from collections.abc import Iterable

from headway_engine.backlog import Backlog
from headway_engine.blocks import BlockPool
from headway_engine.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue
from headway_engine.preemption import Patience
from headway_engine.sequence import Finished, FinishReason, RequestId, Sequence, Started, Status
from headway_engine.tenants import TenantPolicy


class Roster:
    """Sequences from admission to their end.

    A planner takes from `queue` and puts back, and extends and publishes blocks; all else goes through the
    methods.
    """

    def __init__(self, pool: BlockPool, policy: TenantPolicy) -> None:
        self.pool = pool
        self.policy = policy
        self.queue = FairQueue(policy)
        self.backlog = Backlog(policy)
        self.patience = Patience()
        self.sequences: dict[RequestId, Sequence] = {}  # waiting and running
        self.running: dict[RequestId, Sequence] = {}  # in order of admission, but for `rotate`
        self.unannounced: set[RequestId] = set()  # run, but no step of theirs is committed yet
        self.preemptions_total = 0
        self.prefix_hit_tokens_total = 0
        self._preempted: list[RequestId] = []  # since the last time somebody asked
        self._lost: set[int] = set()
        self._joined = 0

    @property
    def resuming(self) -> bool:
        """Whether a preempted sequence waits."""
        return len(self.queue) > self.backlog.requests

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of running sequences that are still to be computed."""
        return sum(max(0, s.prompt_len - s.computed) for s in self.running.values())

    def join(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        self._joined += 1
        sequence.order = self._joined
        self.sequences[sequence.id] = sequence
        call = sequence.request.call
        begun = bool(call) and any(other.request.call == call for other in self.running.values())
        self.backlog.add(sequence, begun=begun)
        self.queue.push(sequence)

    def start(self, sequence: Sequence, hits: list[int], now_s: float) -> None:
        """A sequence taken from the queue runs, with blocks for all its known tokens."""
        self.pool.open(sequence, hits)
        sequence.status = Status.RUNNING
        self.running[sequence.id] = sequence
        self.queue.admitted(sequence)
        self.patience.forget(sequence)
        self.backlog.begin(sequence.request.call)
        if self.backlog.remove(sequence):
            sequence.first_scheduled_s = now_s
            sequence.cached_prompt_tokens = sequence.computed
            self.unannounced.add(sequence.id)
            self.queue.charge(sequence, PROMPT_WEIGHT * (sequence.prompt_len - sequence.computed))

    def announce(self, sequence: Sequence) -> Started:
        """The first step of one of `unannounced` is committed."""
        self.unannounced.discard(sequence.id)
        self.prefix_hit_tokens_total += sequence.cached_prompt_tokens
        return Started(sequence.id, sequence.cached_prompt_tokens, sequence.first_scheduled_s or 0.0)

    def charge_output(self, sequence: Sequence) -> None:
        """A token of output is planned for a running sequence."""
        self.queue.charge(sequence, OUTPUT_WEIGHT)

    def rotate(self, sequence: Sequence) -> None:
        """A running sequence goes to the end of the line, where turns must be taken."""
        self.running[sequence.id] = self.running.pop(sequence.id)

    def preempt(self, victim: Sequence) -> None:
        """A running sequence gives its blocks up and waits to be computed again."""
        self.pool.release(victim)
        del self.running[victim.id]
        victim.computed = 0
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.preemptions_total += 1
        self._preempted.append(victim.id)
        self.queue.push_preempted(victim)

    def lose(self, blocks: Iterable[int]) -> None:
        """Give up what these blocks hold, and what was computed after it: nobody finds it any more, and the
        running sequences that hold it are computed again."""
        lost = set(blocks)
        holders: dict[RequestId, Sequence] = {}
        while more := [s for s in self.running.values() if s.id not in holders and lost & {*s.block_table}]:
            for s in more:
                holders[s.id] = s
                first = next(i for i, block in enumerate(s.block_table) if block in lost)
                lost.update(s.block_table[first:])
        self.pool.unpublish(lost)
        for s in holders.values():
            self.preempt(s)
        self._lost |= lost

    def take_lost(self) -> tuple[int, ...]:
        """Blocks that were given up since the last time: none holds anything of use to anybody."""
        lost, self._lost = tuple(sorted(self._lost)), set()
        return lost

    def take_preempted(self) -> list[RequestId]:
        """Who gave way since the last time, and is still here."""
        preempted, self._preempted = self._preempted, []
        return [id for id in preempted if id in self.sequences]

    def finish(self, sequence: Sequence, reason: FinishReason, message: str = "") -> Finished:
        """The one way out, from every state."""
        del self.sequences[sequence.id]
        if self.running.pop(sequence.id, None) is None:
            self.queue.remove(sequence)
            self.backlog.remove(sequence)
        self.queue.leave(sequence)
        self.pool.release(sequence)
        self.patience.forget(sequence)
        self.unannounced.discard(sequence.id)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        return Finished(sequence.id, reason, message)

    def check(self) -> None:
        """Raise AssertionError, with words, unless the bookkeeping is consistent (for tests)."""
        self.pool.check(self.sequences.values())
        for s in self.sequences.values():
            expected = Status.RUNNING if s.id in self.running else Status.WAITING
            assert s.status is expected, f"{s.id} is {s.status}, expected {expected}"
            assert s.status is Status.RUNNING or not s.block_table, f"{s.id} waits and holds {s.block_table}"
        assert len(self.queue) + len(self.running) == len(self.sequences), "waiting + running is not all"
        fresh = [s for s in self.sequences.values() if s.first_scheduled_s is None]
        assert self.backlog.requests == len(fresh), f"{len(fresh)} never ran, {self.backlog.requests} counted"
        assert self.backlog.tokens == sum(s.prompt_len for s in fresh), "queued tokens do not add up"
