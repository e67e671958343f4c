"""What the tuner says can be served, against engines on a virtual clock, and when it says that more comes."""

from dataclasses import dataclass, field, replace
from random import Random

import pytest

from headway_cli import traces
from headway_cli.capacity_report import figures
from headway_cli.simulation import Outcome, Setup, simulate
from headway_cli.step_costs import PROFILES
from headway_engine.protocol import Capacity
from headway_engine.stepcost import StepCost
from headway_operator.metrics import Observation
from headway_operator.resource import Batching, Model, Resource, Slo, Tuning
from headway_operator.tuner.controller import decide
from headway_operator.tuner.feasibility import UTILISATION, Assessment, settle
from headway_operator.tuner.memory import Feasibility, Memory
from support.observations import CAPACITY, COST, a_histogram, a_slo, an_observation, statistics_of

SLOW = PROFILES["smollm2-135m-2cpu"].cost


@dataclass(frozen=True)
class Engine:
    """An engine and requests of one size."""

    cost: StepCost
    slo: Slo
    prompt_tokens: int
    output_tokens: int
    batching: Batching = field(default_factory=Batching)
    capacity: Capacity = CAPACITY

    def serves(self, rate_per_s: float, duration_s: float) -> Outcome:
        resource = Resource(
            namespace="default",
            name="chat",
            uid="",
            generation=1,
            model=Model(uri="random://llama", name="chat"),
            batching=self.batching,
            slo=self.slo,
            tuning=Tuning(interval_s=5),
        )
        setup = Setup(resource=resource, capacity=self.capacity, cost=self.cost)
        size = (self.prompt_tokens, self.output_tokens)
        return simulate(setup, traces.poisson(rate_per_s, duration_s, *size, Random(3)))


def few_slots(slots: int) -> Engine:
    batching = Batching(max_batch_tokens=512, max_batch_sequences=slots, prefill_chunk_tokens=256)
    return Engine(SLOW, a_slo(ttft_ms=2000, itl_ms=250), 165, 107, batching)


SMALL_STEPS = Engine(
    COST,
    a_slo(ttft_ms=1000, itl_ms=50),
    200,
    50,
    Batching(max_batch_tokens=64, max_batch_sequences=64),
    Capacity(
        max_batch_tokens=64, max_batch_sequences=64, kv_blocks=20_000, block_tokens=16, max_model_tokens=4096
    ),
)
LONG_PROMPTS = Engine(COST, a_slo(ttft_ms=1000, itl_ms=50), 2000, 10)


@pytest.mark.parametrize(
    ("engine", "full_per_s", "duration_s"),
    [
        # 1 / (w + a (S + G) / N): w = 165 x 1.2 ms + 106 x (1.6 ms + 218 x 2 us), a = 21.4 ms, S + G = 108.
        pytest.param(few_slots(16), 1.79, 300.0, id="sixteen slots bind"),
        # 1 / (w + a (L + G) / B): w = 200 x 33 us + 49 x (10 us + 225 x 45 ns), a = 7 ms, L + G = 249.
        pytest.param(SMALL_STEPS, 28.8, 60.0, id="tokens a step bind"),
        # (1 - a / T) / w: a = 7 ms, T = 45 ms, w = 2000 x 33 us + 9 x (10 us + 2005 x 45 ns).
        pytest.param(LONG_PROMPTS, 12.6, 100.0, id="prompts fill the steps that ITL allows"),
    ],
)
def test_what_can_be_served_is_what_an_engine_serves(
    engine: Engine, full_per_s: float, duration_s: float
) -> None:
    """Under three quarters of it the targets hold; a tenth above it they do not."""
    for share, holds in ((UTILISATION, True), (1.1, False)):
        outcome = engine.serves(share * full_per_s, duration_s)
        attained = figures(outcome).attainment
        assert attained is not None
        assert (attained >= 0.95) is holds, attained
        ticks = [t for t in outcome.ticks if duration_s / 2 < t.at_s <= duration_s]
        said = [t.decision.evidence.capacity_per_s for t in ticks]
        assert said == [pytest.approx(UTILISATION * full_per_s, rel=0.1)] * len(ticks)


@pytest.mark.parametrize(("slots", "rate_per_s"), [(16, 1.0), (8, 0.8)])
def test_an_engine_that_serves_all_in_time_is_asked_for_no_second_one(slots: int, rate_per_s: float) -> None:
    """Every request met its targets, and yet three replicas were asked for, or seven."""
    found = figures(few_slots(slots).serves(rate_per_s, 300.0))
    assert found.attainment is not None
    assert found.attainment > 0.99
    assert found.verdict.replicas_needed == 1


def test_whoever_is_accepted_is_in_time_when_slots_free_up_slower_than_prompts_are_computed() -> None:
    """p95 was 3.3 s of 2 s allowed: the queue was as long as prompts could be computed in."""
    outcome = few_slots(16).serves(1.9, 300.0)
    late = sorted(t for j in outcome.journeys if (t := j.ttft_s) is not None)
    assert late[round(0.95 * len(late))] <= 2.0
    reasons = [t.decision.reason for t in outcome.ticks if t.decision.changes]
    assert "of them find a slot" in reasons[-1]


def quiet(refused: float) -> Observation:
    """Ten busy seconds in which six long requests came."""
    return an_observation(
        statistics=statistics_of(COST, steps=300, prefill=(0, 560), decode=(3, 4)),
        itl=a_histogram([0.01] * 3000, 30),
        ttft=a_histogram([0.2] * 6, 1000),
        arrivals=6.0,
        finished=6.0,
        rejected=refused,
    )


@pytest.mark.parametrize(
    ("refused", "verdict"),
    [
        pytest.param([1.0] + [0.0] * 7, Feasibility.FEASIBLE, id="one of six, and then none"),
        pytest.param([1.0] * 8, Feasibility.CAPACITY_LIMITED, id="one of six, again and again"),
    ],
)
def test_refusals_are_judged_by_counts(refused: list[float], verdict: Feasibility) -> None:
    """One in a handful is 17 %, and says nothing."""
    memory, slo = Memory(), a_slo(ttft_ms=1000, itl_ms=30)
    batching = Batching(max_batch_sequences=4)
    limits = batching.limits()
    for number, count in enumerate(refused):
        at_s = 1000.0 + 10 * number
        decision = decide(slo, Tuning(), batching, CAPACITY, limits, memory, quiet(count), at_s)
        memory, limits = decision.memory, decision.limits
    assert decision.feasibility is verdict


def test_the_first_interval_weighs_no_more_than_those_after_it() -> None:
    """Sixty requests and then six at a time: the rate is the mean of what was seen."""
    memory, slo = Memory(), a_slo(ttft_ms=1000, itl_ms=30)
    batching = Batching()
    for number, count in enumerate((60.0, 6.0, 6.0)):
        seen = replace(quiet(0.0), arrivals=count)
        memory = decide(
            slo, Tuning(), batching, CAPACITY, batching.limits(), memory, seen, 1000.0 + 10 * number
        ).memory
    assert memory.load.accepted_per_s == pytest.approx(2.4)


def test_capacity_is_back_only_after_minutes_without_a_doubt() -> None:
    """One look that finds too little begins the wait anew; a condition that flaps tells nobody anything."""
    enough, too_little = (
        Assessment(verdict, "") for verdict in (Feasibility.FEASIBLE, Feasibility.CAPACITY_LIMITED)
    )
    memory = Memory(feasibility=Feasibility.CAPACITY_LIMITED)
    looks = [(float(at_s), enough) for at_s in range(0, 170, 10)]
    looks += [(170.0, too_little), *((float(at_s), enough) for at_s in range(180, 360, 10))]
    for at_s, found in looks:
        memory = settle(memory, found, at_s)
        assert memory.feasibility is Feasibility.CAPACITY_LIMITED
    assert settle(memory, enough, 360.0).feasibility is Feasibility.FEASIBLE
