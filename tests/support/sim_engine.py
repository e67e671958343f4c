"""An engine on a virtual clock: the real scheduler and telemetry, a step that costs simulated time.

What it exports is the exposition text that a real engine would, so everything behind the scrape is real.
The true cost of a step is deliberately not of the form that the tuner fits: it has a knee, noise and stalls.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from headway_engine.messages import Gauges, StepReport
from headway_engine.protocol import Capacity, Limits, Objectives, check_limits
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import (
    Finished,
    Rejected,
    Request,
    SampledToken,
    SamplingParams,
    Step,
)
from headway_engine.stepcost import StepStatistics
from headway_engine.telemetry import Telemetry
from headway_operator.metrics import Observation, Sample, observe, parse
from headway_operator.resource import Batching, Slo, Tuning
from headway_operator.tuner.controller import Decision, decide
from headway_operator.tuner.memory import Memory, from_status, to_status

Cost = Callable[[Step], float]


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def poisson(
    rate_per_s: float,
    *,
    seconds: float,
    start_s: float = 0.0,
    prompt_tokens: float = 500,
    output_tokens: float = 30,
    seed: int = 1,
) -> Iterator[Arrival]:
    """Poisson arrivals with lognormal lengths of these means."""
    chance = random.Random(seed)
    at_s = start_s
    while True:
        at_s += chance.expovariate(rate_per_s)
        if at_s >= start_s + seconds:
            return
        yield Arrival(
            at_s,
            min(4000, max(1, round(prompt_tokens * chance.lognormvariate(-0.32, 0.8)))),
            min(500, max(2, round(output_tokens * chance.lognormvariate(-0.125, 0.5)))),
        )


@dataclass
class TrueCost:
    """Seconds of a step: 2 ms + max(5 ms, 35 us a token) + attention, with noise and rare stalls."""

    slower: float = 1.0
    noise: float = 0.05
    per_token_s: float = 35e-6
    floor_s: float = 0.005
    base_s: float = 0.002
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def __call__(self, step: Step) -> float:
        seconds = self.base_s + max(self.floor_s, self.per_token_s * step.tokens)
        seconds += 45e-9 * step.kv_tokens + 10e-6 * step.decode_sequences
        seconds *= self.slower * self.chance.lognormvariate(0, self.noise)
        return seconds * 4 if self.chance.random() < 0.001 else seconds


class SimEngine:
    """One engine pod. `run_until` turns its loop; `scrape` reads it as the controller would."""

    def __init__(
        self,
        capacity: Capacity,
        limits: Limits,
        objectives: Objectives,
        cost: Cost,
        *,
        start_s: float = 0.0,
    ) -> None:
        self.now_s = start_s
        self.scheduler = Scheduler(capacity, limits, prefix_caching=False)
        self.telemetry = Telemetry(objectives, start_time_s=1_700_000_000 + start_s)
        self.telemetry.limits = limits
        self.telemetry.capacity = capacity
        self.cost = cost
        self.rejected = 0
        self._statistics = StepStatistics()
        self._served = 0
        self._trace: list[Arrival] = []

    def offer(self, trace: Iterable[Arrival]) -> None:
        """Add arrivals that are still to come."""
        self._trace = sorted([*self._trace, *trace], key=lambda a: -a.at_s)

    def set_limits(self, limits: Limits) -> Limits:
        """As PUT /control/limits does: checked whole, in force from the next step."""
        assert self.telemetry.limits is not None
        assert self.telemetry.capacity is not None
        check_limits(limits, self.telemetry.capacity)
        in_force = self.telemetry.limits
        if not limits.same_values(in_force):
            in_force = Limits(**{**_fields(limits), "generation": in_force.generation + 1})
            self.scheduler.set_limits(in_force)
            self.telemetry.limits = in_force
        return in_force

    def scrape(self) -> Sample:
        return parse(self.telemetry.exposition().decode())

    def run_until(self, end_s: float) -> None:
        while self.now_s < end_s:
            self._take_arrivals()
            self._record(self.scheduler.expire(self.now_s))
            step = self.scheduler.next_step(self.now_s)
            if step is None:
                self._idle(end_s)
            else:
                self._run(step)

    def _take_arrivals(self) -> None:
        while self._trace and self._trace[-1].at_s <= self.now_s:
            arrival = self._trace.pop()
            self._served += 1
            request = Request(
                id=f"r{self._served}",
                prompt=(1,) * arrival.prompt_tokens,
                sampling=SamplingParams(max_tokens=arrival.output_tokens),
                arrival_s=arrival.at_s,
            )
            self.telemetry.arrived(request)
            outcome = self.scheduler.admit(request, self.now_s)
            if isinstance(outcome, Rejected):
                self.rejected += 1
                self.telemetry.refused(request.id, self._gauges(), self.now_s)

    def _idle(self, end_s: float) -> None:
        times = [end_s]
        if self._trace:
            times.append(self._trace[-1].at_s)
        wait_s = self.scheduler.wait_s(self.now_s)
        if wait_s is not None:
            times.append(self.now_s + max(wait_s, 1e-6))
        self.now_s = max(self.now_s, min(times))

    def _run(self, step: Step) -> None:
        seconds = self.cost(step)
        self._statistics = self._statistics.add(
            step.prefill_tokens, step.decode_sequences, step.kv_tokens, seconds
        )
        self.now_s += seconds
        sampled = {chunk.sequence.id: SampledToken(2) for chunk in step.chunks if chunk.samples}
        events = self.scheduler.commit(step, sampled, self.now_s)
        self.telemetry.record(
            StepReport(
                at_s=self.now_s,
                events=events,
                step_seconds=seconds,
                step_tokens=step.tokens,
                step_sequences=len(step.chunks),
                gauges=self._gauges(),
            ),
            self.now_s,
        )

    def _record(self, events: tuple[object, ...]) -> None:
        if events:
            ended = tuple(e for e in events if isinstance(e, Finished))
            self.telemetry.record(
                StepReport(at_s=self.now_s, events=ended, gauges=self._gauges()), self.now_s
            )

    def _gauges(self) -> Gauges:
        return Gauges(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            queued_tokens=self.scheduler.queued_tokens,
            kv_used_blocks=self.scheduler.pool.used_blocks,
            preemptions_total=self.scheduler.preemptions_total,
            statistics=self._statistics,
        )


def _fields(limits: Limits) -> dict[str, object]:
    return {name: getattr(limits, name) for name in limits.__struct_fields__}


@dataclass
class Tick:
    """One tick: what was seen, what was decided."""

    observation: Observation
    decision: Decision
    limits: Limits  # in force during the interval


class Plant:
    """Engines and tuner together, tick by tick."""

    def __init__(
        self,
        slo: Slo,
        batching: Batching,
        capacity: Capacity,
        cost: Cost,
        *,
        tuning: Tuning | None = None,
        pods: int = 1,
    ) -> None:
        self.slo, self.batching, self.capacity = slo, batching, capacity
        self.tuning = tuning or Tuning(interval_s=5.0)
        self.memory = Memory()
        self.engines = [SimEngine(capacity, batching.limits(), slo.objectives(), cost) for _ in range(pods)]
        self.ticks: list[Tick] = []
        self._before = self._scrape()

    @property
    def now_s(self) -> float:
        return len(self.ticks) * self.tuning.interval_s

    @property
    def limits(self) -> Limits:
        found = self.engines[0].scrape().limits
        assert found is not None
        return found

    def offer(self, trace: Iterable[Arrival]) -> None:
        """Share arrivals out to the engines in turn."""
        for number, arrival in enumerate(trace):
            self.engines[number % len(self.engines)].offer([arrival])

    def run(self, ticks: int) -> list[Tick]:
        """So many ticks; returns them."""
        return [self.tick() for _ in range(ticks)]

    def tick(self) -> Tick:
        in_force = self.limits
        end_s = self.now_s + self.tuning.interval_s
        for engine in self.engines:
            engine.run_until(end_s)
        after = self._scrape()
        observation = observe(self._before, after, self.tuning.interval_s)
        self._before = after
        decision = decide(
            self.slo,
            self.tuning,
            self.batching,
            self.capacity,
            in_force,
            self.memory,
            observation,
            end_s,
        )
        self.memory = decision.memory
        for engine in self.engines:
            engine.set_limits(decision.limits)
        tick = Tick(observation, decision, in_force)
        self.ticks.append(tick)
        return tick

    def restart_controller(self) -> None:
        """Only what stands in the status survives."""
        self.memory = from_status(to_status(self.memory))

    def change_slo(self, slo: Slo) -> None:
        self.slo = slo
        for engine in self.engines:
            engine.telemetry.set_objectives(slo.objectives())

    def change_tuning(self, **values: object) -> None:
        self.tuning = replace(self.tuning, **values)  # type: ignore[arg-type]

    def _scrape(self) -> dict[str, Sample]:
        return {f"pod-{number}": engine.scrape() for number, engine in enumerate(self.engines)}
