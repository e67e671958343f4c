"""A deployment on a virtual clock: simulated engines and the controller's own tuner, tick by tick.

Pure: the same setup and arrivals give the same result, whatever the machine. Knows nothing of files,
tables, or how the result is judged.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from headway_cli.simulated_engine import Journey, SimulatedEngine
from headway_cli.traces import Arrival
from headway_engine.protocol import Capacity, Limits, clamp_limits
from headway_engine.stepcost import StepCost
from headway_operator.metrics import observe
from headway_operator.resource import Resource
from headway_operator.tuner.controller import Decision, decide
from headway_operator.tuner.memory import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated. `capacity` is what each replica reserves, `cost` what its steps take."""

    resource: Resource
    capacity: Capacity
    cost: StepCost
    replicas: int = 1
    prefix_caching: bool = False
    noise: float = 0.0  # standard deviation of a step's time about its cost, as a share
    seed: int = 1  # of who gets which request, and of the noise


@dataclass(frozen=True, slots=True)
class Tick:
    """One look of the controller: when, the limits that were in force before it, and what it decided."""

    at_s: float
    limits: Limits
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened. `ended_s` is when the last request was over."""

    setup: Setup
    journeys: tuple[Journey, ...]  # in order of arrival
    ticks: tuple[Tick, ...]
    gaps_us: Counter[int]
    ended_s: float
    busy_s: float  # all replicas together
    steps: int
    preemptions: int
    prefix_hit_tokens: int
    limits: Limits  # in force at the end


def simulate(
    setup: Setup, arrivals: Sequence[Arrival], on_tick: Callable[[float], None] | None = None
) -> Outcome:
    """All arrivals, served to the last token. They are in time order, the first at or after 0 s.

    `on_tick` is told the virtual time of each look of the controller, and may raise to end it all.
    """
    resource = setup.resource
    slo, tuning = resource.slo, resource.tuning
    engines = [
        SimulatedEngine(
            setup.capacity,
            clamp_limits(resource.batching.limits(), setup.capacity),
            slo.objectives(),
            _step_seconds(setup, number),
            replica=number,
            prefix_caching=setup.prefix_caching,
        )
        for number in range(setup.replicas)
    ]
    for engine, share in zip(engines, _dealt(arrivals, setup), strict=True):
        engine.offer(share)
    memory = Memory()
    ticks: list[Tick] = []
    before = {str(n): engine.sample() for n, engine in enumerate(engines)}
    while not all(engine.idle for engine in engines):
        # A sum of intervals would drift.
        now_s = (len(ticks) + 1) * tuning.interval_s
        for engine in engines:
            engine.run_until(now_s)
        after = {str(n): engine.sample() for n, engine in enumerate(engines)}
        in_force = engines[0].limits
        decision = decide(
            slo,
            tuning,
            resource.batching,
            setup.capacity,
            in_force,
            memory,
            observe(before, after, tuning.interval_s),
            now_s,
        )
        before, memory = after, decision.memory
        for engine in engines:
            engine.set_limits(msgspec.structs.replace(decision.limits, generation=0))
        ticks.append(Tick(now_s, in_force, decision))
        if on_tick is not None:
            on_tick(now_s)
    return _outcome(setup, engines, ticks)


def _step_seconds(setup: Setup, replica: int) -> Callable[[int, int, int], float]:
    """What a step of one replica takes: its cost, times lognormal noise with a mean of 1."""
    if not setup.noise:
        return setup.cost.seconds
    chance = Random(f"{setup.seed}/{replica}")
    sigma = math.sqrt(math.log(1 + setup.noise**2))

    def seconds(prefill_tokens: int, decode_sequences: int, kv_tokens: int) -> float:
        cost_s = setup.cost.seconds(prefill_tokens, decode_sequences, kv_tokens)
        return cost_s * chance.lognormvariate(-(sigma**2) / 2, sigma)

    return seconds


def _dealt(arrivals: Sequence[Arrival], setup: Setup) -> list[list[Arrival]]:
    """Each arrival to one replica, at random, as a Service deals connections out."""
    chance = Random(setup.seed)
    shares: list[list[Arrival]] = [[] for _ in range(setup.replicas)]
    for arrival in arrivals:
        shares[chance.randrange(setup.replicas)].append(arrival)
    return shares


def _outcome(setup: Setup, engines: Sequence[SimulatedEngine], ticks: Sequence[Tick]) -> Outcome:
    journeys = [journey for engine in engines for journey in engine.journeys]
    gaps_us: Counter[int] = Counter()
    for engine in engines:
        gaps_us.update(engine.gaps_us)
    return Outcome(
        setup=setup,
        journeys=tuple(sorted(journeys, key=lambda j: j.arrival.at_s)),
        ticks=tuple(ticks),
        gaps_us=gaps_us,
        ended_s=max((j.last_s for j in journeys), default=0.0),
        busy_s=sum(engine.busy_s for engine in engines),
        steps=sum(engine.steps for engine in engines),
        preemptions=sum(engine.preemptions for engine in engines),
        prefix_hit_tokens=sum(engine.prefix_hit_tokens for engine in engines),
        limits=engines[0].limits,
    )
