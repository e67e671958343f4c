"""Simulations small enough to compute by hand, and large enough for queueing theory."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from headway_cli import traces
from headway_cli.capacity_report import figures
from headway_cli.client import Answer, Ending
from headway_cli.report import Record, summarise
from headway_cli.simulated_engine import Fate
from headway_cli.simulation import Outcome, Setup, simulate
from headway_cli.step_costs import PROFILES
from headway_cli.traces import Arrival
from headway_engine.protocol import Capacity
from headway_engine.stepcost import StepCost
from headway_operator.resource import Batching, Model, Resource, Slo, Tuning, TuningMode
from support.observations import a_slo

COST = StepCost(base_s=0.010, per_prefill_token_s=100e-6, per_decode_s=0.001, per_kv_token_s=0.0)
CAPACITY = Capacity(
    max_batch_tokens=8192, max_batch_sequences=256, kv_blocks=20_000, block_tokens=16, max_model_tokens=16_384
)
OFF = Tuning(mode=TuningMode.OFF)


def a_setup(slo: Slo | None = None, *, tuning: Tuning = OFF, **values: object) -> Setup:
    batching = values.pop("batching", Batching())
    resource = Resource(
        namespace="default",
        name="chat",
        uid="",
        generation=1,
        model=Model(uri="random://llama", name="chat"),
        batching=batching,  # type: ignore[arg-type]
        slo=slo or Slo(),
        tuning=tuning,
    )
    defaults: dict[str, object] = {"resource": resource, "capacity": CAPACITY, "cost": COST}
    return Setup(**{**defaults, **values})  # type: ignore[arg-type]


def test_two_requests_computed_by_hand() -> None:
    """A (100 tokens, 3 of output) at 0 ms, B (50 tokens, 2 of output) at 5 ms.

    Step 1 is A's prompt alone: 10 + 100 x 0.1 = 20 ms. Step 2, from 20 ms: one decode of A and B's prompt,
    10 + 1 + 5 = 16 ms. Step 3, from 36 ms: two decodes, 12 ms; both are done at 48 ms.
    """
    outcome = simulate(a_setup(), [Arrival(0.0, 100, 3), Arrival(0.005, 50, 2)])
    a, b = outcome.journeys
    assert (a.ttft_s, b.ttft_s) == (pytest.approx(0.020), pytest.approx(0.031))
    assert (a.e2e_s, b.e2e_s) == (pytest.approx(0.048), pytest.approx(0.043))
    assert outcome.gaps_us == Counter({16_000: 1, 12_000: 2})
    assert (outcome.steps, outcome.busy_s) == (3, pytest.approx(0.048))
    found = figures(outcome, price_per_hour=3.6)
    assert found.output_tokens_per_s == pytest.approx(5 / 0.048)
    assert found.cost is not None
    # 3.60 an hour is a thousandth a second: 48e-6 for five tokens.
    assert found.cost.total == pytest.approx(48e-6)
    assert found.cost.per_million_output_tokens == pytest.approx(9.6)


def test_a_target_that_one_of_two_misses_is_kept_by_half() -> None:
    """TTFT 25 ms: A is in time, B (31 ms) is not. ITL 12 ms: two gaps of three are."""
    outcome = simulate(a_setup(a_slo(ttft_ms=25, itl_ms=12)), [Arrival(0.0, 100, 3), Arrival(0.005, 50, 2)])
    found = figures(outcome)
    ttft, itl, e2e = found.targets
    assert (ttft.kept, itl.kept, e2e.kept) == (0.5, pytest.approx(2 / 3), None)
    assert (found.met_slo, found.attainment, found.meets) == (1, 0.5, False)


def test_the_mean_wait_is_what_queueing_theory_says() -> None:
    """Poisson arrivals, one at a time, 20 ms each (M/D/1): the mean wait is rho / (2 (1 - rho)) services."""
    batching = Batching(max_batch_sequences=1, queue_timeout_ms=0, max_queued_tokens=1_000_000)
    rate_per_s = 35.0
    outcome = simulate(a_setup(batching=batching), traces.poisson(rate_per_s, 400.0, 100, 1, Random(5)))
    assert all(j.fate is Fate.FINISHED for j in outcome.journeys)
    rho = rate_per_s * 0.020
    expected_s = 0.020 + 0.020 * rho / (2 * (1 - rho))
    mean_s = sum(j.ttft_s or 0.0 for j in outcome.journeys) / len(outcome.journeys)
    assert mean_s == pytest.approx(expected_s, rel=0.03)
    assert figures(outcome).utilisation == pytest.approx(rho, rel=0.02)


def test_what_does_not_fit_in_the_queue_is_refused_with_the_limit() -> None:
    """Ten at once, one slot, room for three in the queue."""
    batching = Batching(max_batch_sequences=1, max_queued_requests=3)
    outcome = simulate(a_setup(a_slo(ttft_ms=1000), batching=batching), [Arrival(0.0, 100, 5)] * 10)
    found = figures(outcome)
    assert found.offered == 10
    assert found.finished + found.refused == 10
    (refused,) = found.refusals
    assert (refused.why, refused.count) == ("queue.maxRequests", found.refused)
    assert "requests are waiting" in refused.example


def test_who_waits_too_long_is_refused_by_the_queue_timeout() -> None:
    """A lone slot is taken for 10 s; the queue lets go after 1 s."""
    batching = Batching(max_batch_sequences=1, queue_timeout_ms=1000)
    outcome = simulate(a_setup(batching=batching), [Arrival(0.0, 100, 900), Arrival(0.1, 100, 5)])
    found = figures(outcome)
    assert [(r.why, r.count) for r in found.refusals] == [("queue.timeout", 1)]


def busy(seconds: float = 60, rate: float = 20, **values: object) -> Outcome:
    """Traffic that the spec's limits serve badly: steps take up to 0.2 s, ITL may take 50 ms."""
    setup = a_setup(a_slo(ttft_ms=1000, itl_ms=50), tuning=Tuning(interval_s=5.0), **values)
    return simulate(setup, traces.poisson(rate, seconds, 250, 20, Random(3)))


def test_the_tuner_moves_the_limits_as_it_would_in_a_cluster() -> None:
    """With a reason for each move; without it the target is missed."""
    tuned = figures(busy())
    assert tuned.moves
    first = tuned.moves[0]
    assert (first.parameter, first.old) == ("maxBatchTokens", 2048)
    assert first.new < 2048
    assert "ITL binds" in first.why
    assert tuned.limits.max_batch_tokens < 2048


def test_more_replicas_share_the_traffic_and_cost_more() -> None:
    """All requests are there, and each replica had a part."""
    one, three = busy(seconds=20, rate=30), busy(seconds=20, rate=30, replicas=3)
    assert len(one.journeys) == len(three.journeys)
    assert {j.replica for j in three.journeys} == {0, 1, 2}
    alone, shared = figures(one, price_per_hour=1.0), figures(three, price_per_hour=1.0)
    assert shared.attainment > alone.attainment
    assert alone.cost is not None
    assert shared.cost is not None
    assert (alone.cost.accelerators, shared.cost.accelerators) == (1, 3)


def test_the_same_inputs_give_the_same_answer() -> None:
    """To the last digit."""
    assert figures(busy(seconds=20)) == figures(busy(seconds=20))


def test_noise_leaves_the_mean_as_it_is() -> None:
    """Steps vary, the same way each time; all of them together take about as long."""
    arrivals = [Arrival(0.0, 100, 2000)]
    calm, noisy = simulate(a_setup(), arrivals), simulate(a_setup(noise=0.2), arrivals)
    assert len(calm.gaps_us) == 1
    assert len(noisy.gaps_us) > 1000
    assert noisy.busy_s == pytest.approx(calm.busy_s, rel=0.02)
    assert simulate(a_setup(noise=0.2), arrivals).gaps_us == noisy.gaps_us
    assert simulate(a_setup(noise=0.2, seed=2), arrivals).gaps_us != noisy.gaps_us


def test_prompts_that_share_blocks_are_found_in_the_cache() -> None:
    """Two turns of one talk; where the trace tells no blocks, nothing is ever shared."""
    talk = [Arrival(0.0, 1024, 2, (7, 8)), Arrival(5.0, 1536, 2, (7, 8, 9)), Arrival(10.0, 1024, 2, (1, 2))]
    outcome = simulate(a_setup(prefix_caching=True), talk)
    assert outcome.prefix_hit_tokens == 1024
    assert simulate(a_setup(), talk).prefix_hit_tokens == 0


def test_the_definitions_are_those_of_a_replay() -> None:
    """The same requests through `report`: attainment, goodput and percentiles agree."""
    outcome = busy(seconds=30)
    slo = outcome.setup.resource.slo
    found = figures(outcome)
    answers = [_answer(outcome, number) for number in range(len(outcome.journeys))]
    told = summarise([Record(0.0, 0.0, answer) for answer in answers], slo, outcome.ended_s)
    assert (found.offered, found.finished) == (told.offered, told.finished)
    assert found.targets[0].spread == told.ttft
    assert found.targets[2].spread == told.e2e
    ttft_only = figures(simulate(a_setup(a_slo(ttft_ms=100)), [Arrival(0.0, 100, 3)] * 8))
    assert ttft_only.attainment == ttft_only.targets[0].kept


def test_a_real_trace_is_served_whole() -> None:
    """Ten minutes of the trace that ships with Headway: each request has one end, and a time for it."""
    arrivals = traces.window(traces.shipped(), 0.0, 600.0)
    quick = StepCost(base_s=0.007, per_prefill_token_s=33e-6, per_decode_s=10e-6, per_kv_token_s=45e-9)
    outcome = simulate(a_setup(a_slo(ttft_ms=1000, itl_ms=50), tuning=Tuning(), cost=quick), arrivals[:300])
    assert [j.arrival for j in outcome.journeys] == arrivals[:300]
    assert all(j.fate is Fate.FINISHED for j in outcome.journeys)
    assert all(j.tokens == max(1, j.arrival.output_tokens) for j in outcome.journeys)
    assert all(0 < (j.ttft_s or 0) <= j.e2e_s for j in outcome.journeys)
    assert outcome.gaps_us.total() == sum(j.tokens - 1 for j in outcome.journeys)


def test_the_measured_profile_tells_what_was_measured_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/README.md, "Poisson 2/s, HTTP and SSE": three rounds of the real engine on the profile's machine.

    The profile was fitted to single steps, so requests are foretold here: each figure falls among the rounds.
    """
    path = Path(__file__).parents[2] / "bench" / "workload.py"
    spec = importlib.util.spec_from_file_location("workload", path)
    assert spec is not None
    assert spec.loader is not None
    workload = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "workload", workload)  # its dataclasses look for it there
    spec.loader.exec_module(workload)
    items = workload.named("p64")
    batching = Batching(max_batch_tokens=512, max_batch_sequences=64, prefill_chunk_tokens=512)
    arrivals = [Arrival(item.at_s, len(item.prompt), item.output_tokens) for item in items]
    cost = PROFILES["smollm2-135m-2cpu"].cost
    outcome = simulate(a_setup(batching=batching, cost=cost), arrivals)
    ttfts = [j.ttft_s or 0.0 for j in outcome.journeys]
    tpots = [(j.e2e_s - (j.ttft_s or 0.0)) / (j.tokens - 1) for j in outcome.journeys]
    seen = {
        "tokens/s": sum(j.tokens for j in outcome.journeys) / outcome.ended_s,
        "ttft p50 ms": 1000 * workload.percentile(ttfts, 0.5),
        "ttft p95 ms": 1000 * workload.percentile(ttfts, 0.95),
        "tpot p50 ms": 1000 * workload.percentile(tpots, 0.5),
    }
    rounds = {
        "tokens/s": (130, 137),
        "ttft p50 ms": (421, 571),
        "ttft p95 ms": (2117, 2522),
        "tpot p50 ms": (72, 94),
    }
    outside = {name: seen[name] for name, (low, high) in rounds.items() if not low <= seen[name] <= high}
    assert outside == {}


def _answer(outcome: Outcome, number: int) -> Answer:
    journey = outcome.journeys[number]
    done = journey.fate is Fate.FINISHED
    return Answer(
        Ending.FINISHED if done else Ending.REJECTED,
        200 if done else 429,
        journey.ttft_s,
        (),
        journey.e2e_s,
        journey.arrival.prompt_tokens,
        journey.tokens,
    )
