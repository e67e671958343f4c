"""An engine on a virtual clock: the engine's own scheduler and telemetry, and steps of simulated time.

The only module here that knows the engine's scheduler; what it hands out is what a scrape of a real engine
would show, and the fate of each request. Knows nothing of tuning, replicas, or where arrivals come from.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from headway_cli.traces import Arrival
from headway_engine.messages import Gauges, StepReport, gauges_of
from headway_engine.protocol import Capacity, Limits, Objectives, check_limits
from headway_engine.scheduler import Scheduler
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
    TokenOut,
)
from headway_engine.stepcost import StepStatistics
from headway_engine.telemetry import Telemetry
from headway_operator.metrics import Sample, read

PREFIX_BLOCK_TOKENS = 512
"""Tokens that one prefix id of a trace stands for (Mooncake's own size)."""

_TOKEN = SampledToken(2)
_SHORTEST_WAIT_S = 1e-6
"""Floats may say that a deadline is now and not yet over; the clock goes on all the same."""


class Fate(StrEnum):
    """What became of a request. OPEN: it is still under way."""

    OPEN = "open"
    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(slots=True)
class Journey:
    """One request on its way through an engine; times are seconds of the virtual clock."""

    arrival: Arrival
    replica: int
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    gaps_over: int = 0  # gaps longer than the ITL target
    fate: Fate = Fate.OPEN
    why: str = ""  # where it was refused: the limit in the resource, or the engine's word for it
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrival.at_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.arrival.at_s


class SimulatedEngine:
    """One engine pod, number `replica`. `run_until` turns its loop; `sample` reads it as a scrape would.

    `cost` gives the seconds of a step from its prefill tokens, decoding sequences, and cached tokens read.
    """

    def __init__(
        self,
        capacity: Capacity,
        limits: Limits,
        objectives: Objectives,
        cost: Callable[[int, int, int], float],
        *,
        replica: int = 0,
        prefix_caching: bool = False,
    ) -> None:
        check_limits(limits, capacity)
        self.now_s = 0.0
        self.busy_s = 0.0
        self.steps = 0
        self.journeys: list[Journey] = []
        self.gaps_us: Counter[int] = Counter()  # gaps between tokens, in microseconds: how many
        self._replica = replica
        self._capacity = capacity
        self._cost = cost
        self._itl_target_s = objectives.itl_ms / 1000 or float("inf")
        self._scheduler = Scheduler(capacity, limits, prefix_caching=prefix_caching)
        self._telemetry = Telemetry(objectives, start_time_s=0.0)
        self._telemetry.limits, self._telemetry.capacity = limits, capacity
        self._statistics = StepStatistics()
        self._coming: deque[Arrival] = deque()
        self._open: dict[RequestId, Journey] = {}

    @property
    def limits(self) -> Limits:
        return self._scheduler.limits

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or is still to come."""
        return not self._coming and not self._open

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions_total

    @property
    def prefix_hit_tokens(self) -> int:
        return self._scheduler.prefix_hit_tokens_total

    def offer(self, arrivals: Iterable[Arrival]) -> None:
        """Arrivals that are still to come, in time order."""
        self._coming.extend(arrivals)

    def set_limits(self, wanted: Limits) -> None:
        """As PUT /control/limits does: checked whole, in force from the next step. Raises InvalidLimits."""
        check_limits(wanted, self._capacity)
        if not wanted.same_values(self.limits):
            limits = msgspec.structs.replace(wanted, generation=self.limits.generation + 1)
            self._scheduler.set_limits(limits)
            self._telemetry.limits = limits

    def sample(self) -> Sample:
        """What a scrape of /metrics shows now."""
        return read(self._telemetry.families())

    def run_until(self, end_s: float) -> None:
        """Turn the loop up to this time; a step that is under way then is finished."""
        while self.now_s < end_s:
            self._take_arrivals()
            self._note(self._scheduler.expire(self.now_s))
            step = self._scheduler.next_step(self.now_s)
            if step is None:
                self._wait(end_s)
            else:
                self._run(step)

    def _take_arrivals(self) -> None:
        while self._coming and self._coming[0].at_s <= self.now_s:
            arrival = self._coming.popleft()
            journey = Journey(arrival, self._replica)
            request = Request(
                id=str(len(self.journeys)),
                prompt=_prompt(arrival),
                sampling=SamplingParams(max_tokens=max(1, arrival.output_tokens)),
                arrival_s=arrival.at_s,
            )
            self.journeys.append(journey)
            self._telemetry.arrived(request)
            outcome = self._scheduler.admit(request, self.now_s)
            if isinstance(outcome, Rejected):
                journey.fate, journey.last_s = Fate.REFUSED, self.now_s
                journey.why, journey.message = _why(outcome), outcome.message
                self._telemetry.refused(request.id, self._gauges(), self.now_s)
            else:
                self._open[request.id] = journey

    def _wait(self, end_s: float) -> None:
        times = [end_s]
        if self._coming:
            times.append(self._coming[0].at_s)
        wait_s = self._scheduler.wait_s(self.now_s)
        if wait_s is not None:
            times.append(self.now_s + max(wait_s, _SHORTEST_WAIT_S))
        self.now_s = max(self.now_s, min(times))

    def _run(self, step: Step) -> None:
        prefill = decodes = kv = 0
        sampled: dict[RequestId, SampledToken] = {}
        for chunk in step.chunks:
            if chunk.is_decode:
                decodes += 1
                kv += chunk.start + 1
            else:
                prefill += chunk.length
            if chunk.samples:
                sampled[chunk.sequence.id] = _TOKEN
        seconds = self._cost(prefill, decodes, kv)
        self._statistics = self._statistics.add(prefill, decodes, kv, seconds)
        self.now_s += seconds
        self.busy_s += seconds
        self.steps += 1
        events = self._scheduler.commit(step, sampled, self.now_s)
        self._follow(events)
        self._telemetry.record(
            StepReport(
                at_s=self.now_s,
                events=events,
                step_seconds=seconds,
                step_tokens=prefill + decodes,
                step_sequences=len(step.chunks),
                gauges=self._gauges(),
            ),
            self.now_s,
        )

    def _note(self, events: tuple[Event, ...]) -> None:
        """What happened outside a step."""
        if events:
            self._follow(events)
            self._telemetry.record(
                StepReport(at_s=self.now_s, events=events, gauges=self._gauges()), self.now_s
            )

    def _follow(self, events: tuple[Event, ...]) -> None:
        """The journeys of those that the events are about."""
        now_s = self.now_s
        for event in events:
            journey = self._open.get(event.id)
            if journey is None:
                continue
            if isinstance(event, TokenOut):
                if journey.first_s is None:
                    journey.first_s = now_s
                else:
                    gap_s = now_s - journey.last_s
                    self.gaps_us[round(gap_s * 1e6)] += 1
                    # The clock is a sum of floats; a gap that is on target to a microsecond is not over it.
                    journey.gaps_over += gap_s > self._itl_target_s + 1e-6
                journey.last_s = now_s
                journey.tokens += 1
            elif isinstance(event, Finished):
                del self._open[event.id]
                journey.fate = _FATES.get(event.reason, Fate.FAILED)
                if journey.fate is not Fate.FINISHED:
                    timed_out = event.reason is FinishReason.TIMEOUT
                    journey.why = "queue.timeout" if timed_out else event.reason.value
                    journey.last_s, journey.message = now_s, event.message

    def _gauges(self) -> Gauges:
        return gauges_of(self._scheduler, self._statistics)


_FATES = {
    FinishReason.STOP: Fate.FINISHED,
    FinishReason.LENGTH: Fate.FINISHED,
    FinishReason.TIMEOUT: Fate.REFUSED,
}


_QUEUE_LIMITS = {"max_queued_requests": "queue.maxRequests", "max_queued_tokens": "queue.maxTokens"}
"""Names in the engine's refusals, and in the resource."""


def _why(refusal: Rejected) -> str:
    """The limit that the refusal names, or its reason."""
    limits = (name for word, name in _QUEUE_LIMITS.items() if word in refusal.message)
    return next(limits, refusal.reason.value)


def _prompt(arrival: Arrival) -> tuple[int, ...]:
    """Token ids as long as the prompt: the same where the trace says so, else meaningless."""
    tokens = max(1, arrival.prompt_tokens)
    if not arrival.prefix_ids:
        return (1,) * tokens
    known = tuple(3 + id for id in arrival.prefix_ids for _ in range(PREFIX_BLOCK_TOKENS))
    return known[:tokens] + (1,) * (tokens - len(known))
