"""The front end's hold on the engine core: requests go in, each one's events come back to its mailbox.

Owns the list of requests in flight, and the promise that every one of them gets an end: from the core,
from a cancel, or from here when the core is gone. A call that was taken in is carried through a drain. Knows
nothing of HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from headway_engine.channel import ChannelClosed, FrontEnd
from headway_engine.logs import Change, fields
from headway_engine.mailbox import CutOff, Mailbox, News
from headway_engine.messages import (
    Abort,
    Died,
    Drain,
    Gauges,
    LimitsApplied,
    Loading,
    Ready,
    Refused,
    Report,
    SetLimits,
    StepReport,
    Stop,
    Submit,
)
from headway_engine.protocol import Limits, Outcome
from headway_engine.sequence import (
    Event,
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    Request,
    RequestId,
    Started,
)
from headway_engine.storms import Began, Over, Storms
from headway_engine.telemetry import Telemetry
from headway_engine.text import Tokeniser

log = logging.getLogger("headway.front")

DRAINING_RETRY_S = 2.0
STARTING_RETRY_S = 5.0
GONE = "the engine has stopped and is started anew"
"""What a client hears of a lost core; why it was lost is for the log and for /readyz."""


class Phase(Enum):
    """Where the core is. GONE is final: the process exits and is started anew from outside."""

    STARTING = "starting"
    READY = "ready"
    GONE = "gone"


class CoreGone(Exception):
    """The core cannot answer any more."""


class CoreClient:
    """Used from the front end's event loop only."""

    def __init__(self, telemetry: Telemetry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.phase = Phase.STARTING
        self.doing = "starting the engine core"  # shown by /readyz
        self.ready: Ready | None = None
        self.tokeniser: Tokeniser | None = None
        self.limits: Limits | None = None
        self.draining = False
        self.gone = asyncio.Event()
        self.ending = asyncio.Event()  # draining or gone: nobody is let in any more
        self._telemetry = telemetry
        self._clock = clock
        self._end: FrontEnd | None = None
        self._boxes: dict[RequestId, Mailbox] = {}
        self._unstarted: set[RequestId] = set()
        self._kept: set[RequestId] = set()  # of calls that go in portions
        self._held: set[RequestId] = set()  # of these, those that the core does not have now
        self._promised: set[RequestId] = set()  # the core hears of a drain when none of them is open
        self._told_of_drain = False
        self._tickets: dict[int, asyncio.Future[Limits]] = {}
        self._next_ticket = 0
        self._answering = 0
        self._stopping = False
        self._last_words = ""  # why the core ended, when it could say so itself
        self._idle = asyncio.Event()
        self._idle.set()
        self._storms = Storms()
        self._owed_since_s: float | None = None  # since when the core owes a report; None: it owes none

    @property
    def in_flight(self) -> int:
        return len(self._boxes)

    @property
    def unstarted(self) -> int:
        """Requests that have not been in a step yet."""
        return len(self._unstarted)

    def stalled_s(self) -> float:
        """How long the core has owed a report: requests are pending, or their aborts; 0 when it owes none.

        Clients that give up do not stop this clock: a core that hangs would otherwise look idle.
        """
        return 0.0 if self._owed_since_s is None else self._clock() - self._owed_since_s

    async def run(self, end: FrontEnd) -> None:
        """Read reports until the core is gone."""
        self._end = end
        try:
            while True:
                await self._take(await end.receive())
        except ChannelClosed:
            self.lose("the engine core ended unexpectedly")
        except Exception as error:
            # Without a reader of reports nothing can be served, whatever the reason is.
            log.exception(fields("reading-failed"))
            self.lose(f"{type(error).__name__}: {error}")

    def submit(self, requests: Sequence[Request], box: Mailbox) -> None:
        """Hand requests to the core; the mailbox gets all that comes of them."""
        if self._take_in(requests, box):
            # Those whose grammar is prepared are admitted one by one: a drain must not cut their call in two.
            self._promised.update(r.id for r in requests if r.call and r.sampling.grammar)
            self.hand_over(requests)

    def turn_away(self, count: int) -> None:
        """Count requests that are refused before the core could be asked."""
        self._telemetry.turned_away(count)

    def accept(self, requests: Sequence[Request], box: Mailbox) -> None:
        """Take in a call that goes to the core in portions: each of its requests waits here for `hand_over`.

        One that the core refuses for the moment, or that waited too long there, is here again: it has not
        ended, its caller hands it over once more or ends it.
        """
        if self._take_in(requests, box, kept=True):
            for ids in (self._kept, self._held, self._promised):
                ids.update(r.id for r in requests)

    def hand_over(self, requests: Sequence[Request]) -> None:
        """Send a portion to the core. What was cut off meanwhile stays away."""
        for request in requests:
            if request.id not in self._boxes:
                continue
            if self._owed_since_s is None:
                self._owed_since_s = self._clock()
            self._held.discard(request.id)
            self._unstarted.add(request.id)
            self._telemetry.handed_over(request)
            self._send(Submit(request))

    def _take_in(self, requests: Sequence[Request], box: Mailbox, *, kept: bool = False) -> bool:
        """Whether there is somebody who will have them; if not, the mailbox says so."""
        for request in requests:
            box.journeys.append(self._telemetry.arrived(request, kept=kept))
            self._boxes[request.id] = box
        self._idle.clear()
        if self.phase is Phase.GONE:
            self._cut_off_gone()
            return False
        if self.draining:
            for request in requests:
                self._telemetry.ended(request.id, Outcome.REJECTED, self._clock())
                reason, words = RejectReason.DRAINING, "the engine is shutting down"
                self._put(Rejected(request.id, reason, words, DRAINING_RETRY_S))
                self._forget(request.id)
            return False
        return True

    def end(self, id: RequestId, outcome: Outcome) -> None:
        """Forget a request, and have the core forget it. Nothing happens to one that has ended."""
        if id not in self._boxes:
            return
        held = id in self._held
        self._telemetry.ended(id, outcome, self._clock())
        self._forget(id)
        if self.phase is not Phase.GONE and not held:
            self._send(Abort(id))

    async def set_limits(self, limits: Limits) -> Limits:
        """Put limits in force between two steps; what is in force then. Raises CoreGone."""
        if self.phase is Phase.GONE:
            raise CoreGone(self.doing)
        self._next_ticket += 1
        ticket = self._next_ticket
        answer: asyncio.Future[Limits] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = answer
        self._send(SetLimits(ticket, limits))
        try:
            return await answer
        finally:
            self._tickets.pop(ticket, None)

    def drain(self) -> None:
        """No newcomers from now on. The core is told once it has all of the calls that were taken in."""
        self.draining = True
        self.ending.set()
        self._telemetry.draining = True
        self._tell_of_drain()

    def _tell_of_drain(self) -> None:
        if self.draining and not self._told_of_drain and not self._promised and self.phase is not Phase.GONE:
            self._told_of_drain = True
            self._send(Drain())

    def stop(self) -> None:
        """Have the core leave its loop."""
        self._stopping = True
        if self.phase is not Phase.GONE:
            self._send(Stop())

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While an answer is on its way to its client. It may take longer than the computing."""
        self._answering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answering -= 1
            self._rest()

    async def idle(self) -> None:
        """Wait until nothing is in flight, and every answer has been handed over."""
        await self._idle.wait()

    def cut_off(self, message: str, code: str, retry_after_s: float) -> None:
        """Give every open request its end, as failed, with words for the client."""
        for id, box in list(self._boxes.items()):
            self.end(id, Outcome.FAILED)
            box.put(CutOff(id, message, code, retry_after_s))

    def _cut_off_gone(self) -> None:
        self.cut_off(GONE, "engine_gone", STARTING_RETRY_S)

    def lose(self, message: str) -> None:
        """The core is gone: everyone who waits for it hears so."""
        if self.phase is Phase.GONE:
            return
        phase = Change(self.phase.value, Phase.GONE.value)
        self.phase = Phase.GONE
        self.doing = why = self._last_words or message
        if not self._stopping:
            log.error(fields("core-gone", phase=phase, why=why, in_flight=self.in_flight))
        self._cut_off_gone()
        self._telemetry.core_gone()
        for answer in self._tickets.values():
            if not answer.done():
                answer.set_exception(CoreGone(why))
        self.gone.set()
        self.ending.set()

    async def _take(self, report: Report) -> None:
        now_s = self._clock()
        match report:
            case StepReport():
                self._telemetry.record(report, now_s)
                self._deliver(report.events)
                storm = self._storms.note(report.gauges.preemptions_total, now_s)
                if storm is not None:
                    log_storm(storm, report.gauges)
            case Refused(rejected=Rejected(reason=RejectReason.QUEUE_FULL) as rejected, gauges=gauges) if (
                rejected.id in self._kept
            ):
                self._telemetry.note(gauges)
                self._hold(rejected.id)
                self._put(rejected)
            case Refused(rejected=rejected, gauges=gauges):
                self._telemetry.refused(rejected.id, gauges, now_s)
                self._put(rejected)
                self._forget(rejected.id)
            case LimitsApplied(ticket=ticket, limits=limits):
                self._in_force(limits)
                answer = self._tickets.get(ticket)
                if answer is not None and not answer.done():
                    answer.set_result(limits)
            case Loading(what=what):
                self.doing = what
                log.info(fields("loading", what=what))
            case Ready():
                await self._become_ready(report)
            case Died(message=message):
                self._last_words = message
        self._owed_since_s = now_s if len(self._boxes) > len(self._held) else None

    async def _become_ready(self, ready: Ready) -> None:
        self.doing = "loading the tokenizer"
        self.tokeniser = await asyncio.to_thread(Tokeniser, Path(ready.tokenizer_dir))
        self.ready = ready
        self._telemetry.capacity, self._telemetry.ready = ready.capacity, ready
        self._in_force(ready.limits)
        self.phase = Phase.READY
        self.doing = ""
        log.info(
            fields(
                "ready",
                phase=Change(Phase.STARTING.value, Phase.READY.value),
                model=ready.model,
                device=ready.device,
                dtype=ready.dtype,
                runner=ready.runner,
                kernels=ready.kernels,
                left=", ".join(dict.fromkeys(one.path for one in ready.fallbacks)) or None,
                kv_blocks=ready.capacity.kv_blocks,
                max_model_tokens=ready.capacity.max_model_tokens,
            )
        )

    def _in_force(self, limits: Limits) -> None:
        self.limits = limits
        self._telemetry.limits = limits

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            self._put(event)
            if isinstance(event, Finished):
                if event.reason is FinishReason.TIMEOUT and event.id in self._kept:
                    self._hold(event.id)
                else:
                    self._forget(event.id)
            elif isinstance(event, Started):
                self._unstarted.discard(event.id)
                if event.id not in self._kept:
                    self._promised.discard(event.id)
        self._tell_of_drain()

    def _put(self, news: News) -> None:
        box = self._boxes.get(news.id)
        if box is not None:
            box.put(news)

    def _hold(self, id: RequestId) -> None:
        self._held.add(id)
        self._unstarted.discard(id)

    def _forget(self, id: RequestId) -> None:
        self._boxes.pop(id, None)
        for ids in (self._unstarted, self._kept, self._held, self._promised):
            ids.discard(id)
        self._tell_of_drain()
        self._rest()

    def _rest(self) -> None:
        if not self._boxes and not self._answering:
            self._idle.set()

    def _send(self, command: Submit | Abort | SetLimits | Drain | Stop) -> None:
        if self._end is None:
            return  # the core has not been started: there is nothing it could know of
        self._end.send(command)


def log_storm(storm: Began | Over, gauges: Gauges) -> None:
    """One line when sequences begin to push each other out over and over, and one when that is over."""
    seconds = round(storm.seconds, 1)
    if isinstance(storm, Began):
        log.warning(
            fields(
                "preemption-storm",
                storm=Change(False, True),
                preemptions=storm.preemptions,
                seconds=seconds,
                running=gauges.running,
                waiting=gauges.waiting,
                kv_used_blocks=gauges.kv_used_blocks,
                why="more sequences run than the KV cache holds",
            )
        )
    else:
        log.info(
            fields(
                "preemption-storm",
                storm=Change(True, False),
                preemptions=storm.preemptions,
                seconds=seconds,
                why="none for a while",
            )
        )
