"""The engine core: commands in, steps, reports out.

One thread turns the loop and is the only one to touch the scheduler; everyone else posts commands. It
knows a scheduler, a function that runs a step, and a function that takes reports; it knows neither
HTTP nor torch nor how reports travel, so it runs in a process of its own or inside a test alike.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from headway_engine.limits import differences, successor
from headway_engine.logs import Change, fields
from headway_engine.messages import (
    Abort,
    Command,
    Counted,
    Died,
    Drain,
    Gauges,
    LimitsApplied,
    Refused,
    Report,
    SetLimits,
    StepReport,
    Stop,
    Submit,
    gauges_of,
)
from headway_engine.preparation import Prepare, Prepared, Preparer
from headway_engine.protocol import Limits
from headway_engine.sequence import (
    Event,
    Finished,
    FinishReason,
    Rejected,
    Request,
    RequestId,
    SampledToken,
    SamplingParams,
    Step,
)
from headway_engine.stepcost import StepStatistics

log = logging.getLogger("headway.core")

WARM_UP_STEPS = 50
"""Steps after start that the statistics leave out: caches, kernels and allocators are still settling."""

SUSPICIOUS_FAILURES = 3
"""Steps that fail whole, one after another, before the core asks itself whether it is the device: a harmless
probe of one token is queued, and if that fails too, the core gives up. Without the probe, a client that
repeats a request which poisons its step would end the process."""

PROBE_ID = "probe"

Run = Callable[[Step], Mapping[RequestId, SampledToken]]

Inbox = queue.SimpleQueue[Command | Prepared]


class Scheduler(Counted, Protocol):
    """What the loop asks of the scheduler. `admit` answers with a Rejected or something else."""

    def admit(self, request: Request, now_s: float) -> object: ...
    def abort(self, request_id: RequestId, now_s: float) -> Iterable[Event]: ...
    def next_step(self, now_s: float) -> Step | None: ...
    def wait_s(self, now_s: float) -> float | None: ...
    def commit(
        self, step: Step, sampled: Mapping[RequestId, SampledToken], now_s: float
    ) -> Iterable[Event]: ...
    def give_up(self, request_id: RequestId, message: str) -> Iterable[Event]: ...
    def lose(self, blocks: Iterable[int]) -> None: ...
    def expire(self, now_s: float) -> Iterable[Event]: ...
    def set_limits(self, limits: Limits) -> None: ...
    def drain(self) -> None: ...


class Loop:
    """Drains the inbox, runs one step, reports it; until told to stop."""

    def __init__(
        self,
        scheduler: Scheduler,
        run: Run,
        report: Callable[[Report], None],
        *,
        limits: Limits,
        inbox: Inbox | None = None,
        prepare: Prepare | None = None,
        clock: Callable[[], float] = time.monotonic,
        warm_up_steps: int = WARM_UP_STEPS,
    ) -> None:
        self._scheduler = scheduler
        self._run = run
        self._report = report
        self._clock = clock
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._preparer = Preparer(prepare, self._inbox.put) if prepare else None
        self._events: list[Event] = []
        self._changed = False
        self._statistics = StepStatistics()
        self._warm_up_left = warm_up_steps
        self._failures = 0
        self._busy = False  # the last turn had a step
        self._lowered = False  # the token budget, after a step ran out of memory
        self._retried = False  # the last step was run in parts, so its time means nothing
        self.limits = limits

    def post(self, command: Command) -> None:
        """Put a command on the inbox; from any thread. It takes effect between two steps."""
        self._inbox.put(command)

    def run(self) -> None:
        """Turn until Stop, or until the device is given up."""
        while self.turn(0.0 if self._busy else self._scheduler.wait_s(self._clock())):
            pass

    def turn(self, wait_s: float | None = 0.0) -> bool:
        """One round; waits up to `wait_s` (None: for ever) for a command. False: leave the loop."""
        # 1. Apply what was asked for since the last step.
        for command in self._drained(wait_s):
            if isinstance(command, Stop):
                return False
            self._apply(command)
        # 2. Give up what has waited too long, and choose the tokens to compute.
        started_s = self._clock()
        self._note(self._scheduler.expire(started_s))
        step = self._scheduler.next_step(started_s)
        self._busy = step is not None
        if step is None:
            self._report_change()
            return True
        # 3. Compute them.
        sampled, failed, lost = self._run_isolated(step)
        # 4. Tell the scheduler what came of it.
        now_s = self._clock()
        for request_id, message in failed.items():
            self._note(self._scheduler.give_up(request_id, message))
        if lost:
            self._scheduler.lose(lost)
        self._note(self._scheduler.commit(step, sampled, now_s))
        # 5. Report it, with everything else that happened on the way.
        seconds = self._clock() - started_s
        if not self._retried:
            self._measure(step, seconds)
        self._report_step(step, now_s, seconds)
        return self._going_on(step, failed)

    def _drained(self, wait_s: float | None) -> list[Command | Prepared]:
        """All commands that are there; the first may be waited for."""
        commands: list[Command | Prepared] = []
        try:
            if wait_s is None or wait_s > 0:
                commands.append(self._inbox.get(timeout=wait_s))
            while True:
                commands.append(self._inbox.get_nowait())
        except queue.Empty:
            return commands

    def _apply(self, command: Command | Prepared) -> None:
        now_s = self._clock()
        match command:
            case Submit(request=request):
                if self._preparer and request.sampling.grammar:
                    self._preparer.start(request)
                else:
                    self._admit(request, now_s)
            case Prepared(id=request_id, failure=failure):
                prepared = self._preparer.take(request_id) if self._preparer else None
                if prepared and failure:
                    self._note([Finished(request_id, FinishReason.ERROR, failure)])
                elif prepared:
                    self._admit(prepared, now_s)
            case Abort(id=request_id):
                if self._preparer and self._preparer.take(request_id):
                    self._note([Finished(request_id, FinishReason.ABORT)])
                self._note(self._scheduler.abort(request_id, now_s))
                self._changed = True
            case SetLimits(ticket=ticket, limits=wanted):
                if wanted.max_batch_tokens > self.limits.max_batch_tokens:
                    self._lowered = False  # a limit raised again may be too high again
                self._put_in_force(wanted, "asked for")
                self._report(LimitsApplied(ticket=ticket, limits=self.limits))
            case Drain():
                self._scheduler.drain()
                # The front end has logged it; this is what it means here.
                log.debug(
                    fields("draining", running=self._scheduler.running, waiting=self._scheduler.waiting)
                )
                # Not admitted yet, so refused like newcomers, and told so now.
                for request in self._preparer.take_all() if self._preparer else ():
                    self._admit(request, now_s)
            case Stop():  # handled by turn
                raise AssertionError("Stop reached _apply")

    def _admit(self, request: Request, now_s: float) -> None:
        outcome = self._scheduler.admit(request, now_s)
        if isinstance(outcome, Rejected):
            self._report(Refused(rejected=outcome, gauges=self._gauges()))
        else:
            self._changed = True

    def _put_in_force(self, wanted: Limits, why: str) -> None:
        limits = successor(self.limits, wanted)
        if limits is self.limits:
            return
        self._scheduler.set_limits(limits)
        changes = {name: Change(was, now) for name, was, now in differences(self.limits, limits)}
        log.info(fields("limits", **changes, why=why))
        self.limits = limits

    def _run_isolated(
        self, step: Step
    ) -> tuple[dict[RequestId, SampledToken], dict[RequestId, str], set[int]]:
        """The sampled tokens, the sequences that failed with the reason, and blocks that hold no numbers.

        When a step raises, it is tried again without the sequences that the error blames, or one by one when
        it blames none, so that a request that poisons the batch fails alone: computing a chunk again writes
        the same keys and values to the same place.
        """
        self._retried = False
        sampled: dict[RequestId, SampledToken] = {}
        failed: dict[RequestId, str] = {}
        lost: set[int] = set()
        parts = deque((step,))
        while parts:
            part = parts.popleft()
            try:
                sampled.update(self._run(part))
                continue
            except Exception as error:  # noqa: BLE001 - whatever the model code raises, the process lives
                text = _words(error)
                if part is step:
                    self._retried = True
                    log.warning(
                        fields("step-failed", sequences=len(step.chunks), tokens=step.tokens, error=text)
                    )
                    if getattr(error, "out_of_memory", False):
                        self._lower_tokens(step.tokens)
                ids = {chunk.sequence.id for chunk in part.chunks}
                lost.update(getattr(error, "lost_blocks", ()))
                blamed = ids if len(ids) == 1 else ids.intersection(getattr(error, "sequence_ids", ()))
            failed.update(dict.fromkeys(blamed, text))
            rest = tuple(chunk for chunk in part.chunks if chunk.sequence.id not in blamed)
            retries = (rest,) if blamed and rest else tuple((chunk,) for chunk in rest)
            # Whether the blocks were wiped is not known; the first retry does it before anybody has written.
            parts.extend(Step(chunks, wiped=() if i else part.wiped) for i, chunks in enumerate(retries))
        for request_id, message in failed.items():
            # The front end logs it at level error, with what is known of the request there.
            log.debug(fields("request-failed", id=request_id, error=message))
        return sampled, failed, lost

    def _lower_tokens(self, tokens: int) -> None:
        """After a step that did not fit into memory: no step as large as that. Once until somebody raises the
        limit; the capacity that was measured at start leaves room, so a second time means something else, and
        each retry is small."""
        wanted = max(tokens // 2, self.limits.max_batch_sequences)
        if self._lowered or wanted >= self.limits.max_batch_tokens:
            return
        self._lowered = True
        fitting = msgspec.structs.replace(self.limits, max_batch_tokens=wanted)
        self._put_in_force(fitting, "a step did not fit into memory")
        self._report(LimitsApplied(ticket=0, limits=self.limits))

    def _going_on(self, step: Step, failed: Mapping[RequestId, str]) -> bool:
        """False when the device, and not some request, makes every step fail."""
        self._failures = self._failures + 1 if len(failed) == len(step.chunks) else 0
        if self._failures < SUSPICIOUS_FAILURES:
            return True
        if PROBE_ID in failed:
            self._report(Died(message=f"{self._failures} steps failed one after another: {failed[PROBE_ID]}"))
            return False
        now_s = self._clock()
        probe = SamplingParams(max_tokens=1)
        self._note(self._scheduler.abort(PROBE_ID, now_s))
        self._scheduler.admit(Request(id=PROBE_ID, prompt=(0,), sampling=probe, arrival_s=now_s), now_s)
        return True

    def _measure(self, step: Step, seconds: float) -> None:
        if self._warm_up_left > 0:
            self._warm_up_left -= 1
            return
        self._statistics = self._statistics.add(
            step.prefill_tokens, step.decode_sequences, step.kv_tokens, seconds
        )

    def _note(self, events: Iterable[Event]) -> None:
        self._events.extend(events)

    def _report_step(self, step: Step, now_s: float, seconds: float) -> None:
        events, self._events, self._changed = tuple(self._events), [], False
        self._report(
            StepReport(
                at_s=now_s,
                events=events,
                step_seconds=seconds,
                step_tokens=step.tokens,
                step_sequences=len(step.chunks),
                gauges=self._gauges(),
            )
        )

    def _report_change(self) -> None:
        """What happened outside a step: without it, gauges would stay up after the last cancel."""
        if self._events or self._changed:
            events, self._events, self._changed = tuple(self._events), [], False
            self._report(StepReport(at_s=self._clock(), events=events, gauges=self._gauges()))

    def _gauges(self) -> Gauges:
        return gauges_of(self._scheduler, self._statistics)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
