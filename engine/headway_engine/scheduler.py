"""Requests in, steps out: who is admitted, when one ends from outside, and which step is under way.

`planning` chooses the tokens of a step, `results` knows what a finished one changes, and `roster` who is here
and in which state.

Always true, after every call: running sequences hold blocks and waiting ones hold none; every admitted
request gets exactly one Finished; some sequence makes progress in every step.

The clock is an argument. Knows nothing of torch, HTTP, or how a step is computed.
"""

from collections.abc import Iterable, Mapping

from headway_engine.blocks import BlockPool
from headway_engine.planning import plan_step, starts_at_s
from headway_engine.protocol import BatchingMode, Capacity, Limits
from headway_engine.rates import PrefillPace, TokenRates
from headway_engine.results import Results
from headway_engine.roster import Roster
from headway_engine.sequence import (
    Event,
    FinishReason,
    Rejected,
    RejectReason,
    Request,
    RequestId,
    SampledToken,
    Sequence,
    Step,
)
from headway_engine.tenants import TenantPolicy
from headway_engine.window import CLOCK_GRAIN_S


class Scheduler:
    """Requests in, steps out. Not thread-safe; `commit` follows each step before the next."""

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
        self._limits = limits
        self._policy = tenants or TenantPolicy()
        self._roster = Roster(self.pool, self._policy)
        self._backlog = self._roster.backlog
        self._rates = TokenRates(self._policy)
        self._pace = PrefillPace()
        self._most_tokens = min(capacity.max_model_tokens, capacity.kv_tokens)
        self._results = Results(self._roster, self._rates, self._most_tokens)
        self._step: Step | None = None
        self._step_began_s = 0.0
        self._draining = False

    # What others may read.

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._roster.running)

    @property
    def waiting(self) -> int:
        """Requests that never ran, and preempted ones."""
        return len(self._roster.queue)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are admitted and not computed: of waiting requests and of prompts under way."""
        return self._backlog.tokens + self._roster.prefill_tokens

    @property
    def preemptions_total(self) -> int:
        """How often a running sequence gave its blocks up."""
        return self._roster.preemptions_total

    @property
    def prefix_hit_tokens_total(self) -> int:
        """Prompt tokens that were found in the cache when their sequence first ran."""
        return self._roster.prefix_hit_tokens_total

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
        return (self._roster.finish(sequence, FinishReason.ABORT),) if sequence else ()

    def give_up(self, request_id: RequestId, message: str) -> tuple[Event, ...]:
        """End one sequence as failed, and only it: one that poisons a step, say, before the step's commit.
        What it computed may be wrong, so the prefix cache forgets it."""
        sequence = self._roster.sequences.get(request_id)
        if sequence is None:
            return ()
        self.pool.withdraw(sequence)
        return (self._roster.finish(sequence, FinishReason.ERROR, message),)

    def lose(self, blocks: Iterable[int]) -> None:
        """These blocks hold what is no number. Sequences that share them are computed again from their
        tokens, and the next step zeroes them. Call it like `give_up`, and after it."""
        self._roster.lose(blocks)

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
            events.append(self._roster.finish(oldest, FinishReason.TIMEOUT, message))
        return tuple(events)

    # Steps.

    def next_step(self, now_s: float) -> Step | None:
        """What to compute now, blocks in place; None when there is nothing to run now."""
        if self._step is not None:
            raise RuntimeError("commit the last step before asking for the next")
        self._step = plan_step(self._roster, self._limits, now_s, last=self._draining)
        self._step_began_s = now_s
        return self._step

    def wait_s(self, now_s: float) -> float | None:
        """After next_step() gave None: seconds until the window or a queue timeout changes that by itself.

        None when only a command can. Call expire() when the time is over, then next_step().
        """
        start_s = starts_at_s(self._roster, self._limits, last=self._draining)
        if start_s is None:
            return None
        times = [start_s]
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
        return self._results.take_in(step, sampled, now_s)

    # Rules.

    def _close(self, step: Step) -> None:
        if step is not self._step:
            raise ValueError("this is not the step that is under way")
        self._step = None

    def _free_slots(self) -> int:
        """Sequences that the next step could take in; none while a batch that runs to its end is on."""
        if self._roster.running and self._limits.mode is not BatchingMode.CONTINUOUS:
            return 0
        return self._limits.max_batch_sequences - len(self._roster.running)

    def _too_long(self, request: Request) -> str:
        capacity, output = self.capacity, min(1, request.sampling.max_tokens)
        said = f"the prompt has {len(request.prompt)} tokens; "
        said += "with one token of output " if output else ""
        if len(request.prompt) + output > capacity.max_model_tokens:
            return f"{said}the model's limit is {capacity.max_model_tokens}"
        return f"{said}the KV cache holds {capacity.kv_tokens}"
