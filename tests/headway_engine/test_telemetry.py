"""What the engine counts, checked through the exposition that a scraper reads."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headway_engine.messages import Fallback, Gauges, Ready, StepReport
from headway_engine.protocol import Capacity, Limits, Metric, Objectives, Outcome
from headway_engine.sequence import (
    Finished,
    FinishReason,
    Preempted,
    Request,
    SamplingParams,
    Started,
    TokenOut,
)
from headway_engine.stepcost import StepStatistics
from headway_engine.telemetry import MAX_TENANT_SERIES, Histogram, Telemetry


def telemetry(**objectives):
    return Telemetry(Objectives(**objectives), start_time_s=1.0)


def request(id="a", arrival_s=10.0, prompt=(1, 2, 3)):
    return Request(id=id, prompt=prompt, sampling=SamplingParams(max_tokens=9), arrival_s=arrival_s)


def step(*events, tokens=1, seconds=0.01, **gauges):
    return StepReport(
        at_s=0.0,
        events=events,
        step_tokens=tokens,
        step_seconds=seconds,
        step_sequences=1,
        gauges=Gauges(**gauges),
    )


def samples(t):
    out = {}
    for family in text_string_to_metric_families(t.exposition().decode()):
        for s in family.samples:
            out[(s.name, *s.labels.values())] = s.value
    return out


def serve_one(t, id="a", arrival_s=10.0):
    """Arrives, starts and has its first token 0.2 s later, two more at 0.1 s."""
    t.arrived(request(id, arrival_s))
    t.record(step(Started(id, 0), TokenOut(id, 5), seconds=0.05), arrival_s + 0.2)
    t.record(step(TokenOut(id, 5)), arrival_s + 0.3)
    t.record(step(TokenOut(id, 5), Finished(id, FinishReason.LENGTH)), arrival_s + 0.4)


def test_the_clock_of_a_request_starts_at_its_arrival():
    """TTFT, ITL, TPOT, E2E and queue time of one request, exactly."""
    t = telemetry()
    serve_one(t)
    s = samples(t)
    assert s[(f"{Metric.TTFT}_sum",)] == pytest.approx(0.2)
    assert s[(f"{Metric.ITL}_count",)] == 2
    assert s[(f"{Metric.ITL}_sum",)] == pytest.approx(0.2)
    assert s[(f"{Metric.TPOT}_sum",)] == pytest.approx(0.1)
    assert s[(f"{Metric.E2E}_sum",)] == pytest.approx(0.4)
    assert s[(f"{Metric.QUEUE}_sum",)] == pytest.approx(0.15)
    assert s[(Metric.OUTPUT_TOKENS,)] == 3
    assert s[(Metric.PROMPT_TOKENS,)] == 3


def ready(*fallbacks):
    capacity = Capacity(
        max_batch_tokens=1, max_batch_sequences=1, kv_blocks=10, block_tokens=16, max_model_tokens=64
    )
    return Ready(
        capacity=capacity,
        limits=Limits(),
        model="a model",
        device="cpu",
        dtype="float32",
        runner="lean, triton attention, 13 decode graphs",
        kernels="triton",
        fallbacks=fallbacks,
    )


def test_what_computes_the_model_and_what_was_left_for_it_are_series():
    """Nothing before the core is ready; no words that vary in the labels."""
    t = telemetry()
    assert not any(key[0] in (Metric.RUNNER, Metric.FALLBACK) for key in samples(t))
    t.ready = ready()
    assert samples(t)[(Metric.RUNNER, "triton", "lean")] == 1
    t.ready = ready(
        Fallback("lean on flash-attn 3", "wrong logits", "by 0.31"),
        Fallback("lean on flash-attn 2", "failed", "RuntimeError: at 0x7f"),
    )
    left = {key[1:]: value for key, value in samples(t).items() if key[0] == Metric.FALLBACK}
    assert left == {("lean on flash-attn 3", "wrong logits"): 1, ("lean on flash-attn 2", "failed"): 1}


def test_a_path_that_was_left_of_two_kinds_of_weights_is_one_series():
    """Prometheus refuses a scrape that has the same series twice."""
    t = telemetry()
    t.ready = ready(*[Fallback("fused on avx2", "unavailable", why) for why in ("in blocks", "plain")])
    found = [s for family in t.families() for s in family.samples if s.name == Metric.FALLBACK]
    assert [tuple(s.labels.values()) for s in found] == [("fused on avx2", "unavailable")]


def test_every_metric_of_the_protocol_is_exposed():
    """A name in the protocol that no scrape shows would be a signal the controller waits for in vain."""
    t = telemetry(ttft_ms=500, itl_ms=50, e2e_ms=15000)
    t.limits = Limits()
    t.ready = ready(Fallback("fused on amx", "wrong logits"))
    t.capacity = t.ready.capacity
    serve_one(t)
    names = {key[0] for key in samples(t)}
    for metric in Metric:
        assert metric in names or f"{metric}_bucket" in names, metric


def test_declared_tenants_have_series_from_the_start_and_all_others_share_one():
    """A client that makes up names takes no declared tenant's series away, and makes none."""
    t = Telemetry(Objectives(), start_time_s=1.0, tenants=["gold", "batch"])
    assert samples(t)[(Metric.TENANT_TOKENS, "prompt", "gold")] == 0
    for number, name in enumerate([*(f"made-up-{n}" for n in range(70)), "gold", ""]):
        t.arrived(
            Request(
                id=f"r{number}",
                prompt=(1, 2),
                sampling=SamplingParams(max_tokens=3),
                arrival_s=0.0,
                tenant=name,
            )
        )
        t.record(step(Started(f"r{number}", 0), TokenOut(f"r{number}", 1)), 1.0)
    found = {key[1:]: value for key, value in samples(t).items() if key[0] == Metric.TENANT_TOKENS}
    assert found == {
        ("prompt", "gold"): 2,
        ("output", "gold"): 1,
        ("prompt", "batch"): 0,
        ("output", "batch"): 0,
        ("prompt", "(others)"): 142,
        ("output", "(others)"): 71,
    }


def test_tenants_have_a_bounded_number_of_series():
    """Names come from clients: a thousand of them make no thousand series."""
    t = telemetry()
    for number in range(1000):
        t.arrived(request(str(number)))
        tenant = Request(
            id=f"t{number}",
            prompt=(1, 2),
            sampling=SamplingParams(max_tokens=1),
            arrival_s=0.0,
            tenant=f"tenant-{number}",
        )
        t.arrived(tenant)
        t.record(step(Started(tenant.id, 0), TokenOut(tenant.id, 1)), 1.0)
    s = samples(t)
    series = {key: value for key, value in s.items() if key[0] == Metric.TENANT_TOKENS}
    assert len(series) <= 2 * (MAX_TENANT_SERIES + 1)
    assert sum(series.values()) == 3000
    assert s[(Metric.TENANT_TOKENS, "prompt", "tenant-0")] == 2


def test_a_boundary_stands_exactly_on_the_objective():
    """Counting misses of an objective must need no interpolation."""
    s = samples(telemetry(ttft_ms=370, itl_ms=33))
    assert (f"{Metric.TTFT}_bucket", "0.37") in s
    assert (f"{Metric.ITL}_bucket", "0.033") in s
    assert (f"{Metric.TTFT}_bucket", "0.033") not in s


def test_new_objectives_restart_the_latency_histograms_and_nothing_else():
    """To a scraper it is a counter reset."""
    t = telemetry(ttft_ms=500)
    serve_one(t)
    t.set_objectives(Objectives(ttft_ms=250))
    s = samples(t)
    assert s[(f"{Metric.TTFT}_count",)] == 0
    assert s[(Metric.OUTPUT_TOKENS,)] == 3
    assert s[(Metric.OBJECTIVE, "ttft")] == 0.25


def test_gauges_are_those_of_the_last_report_and_the_statistics_are_passed_on():
    """Row C.8 70."""
    t = telemetry()
    t.record(step(running=3, waiting=2, kv_used_blocks=7, statistics=StepStatistics(n=4, pp=9)), 1.0)
    s = samples(t)
    assert (s[(Metric.RUNNING,)], s[(Metric.WAITING,)], s[(Metric.KV_USED_BLOCKS,)]) == (3, 2, 7)
    assert (s[(Metric.STEP_STATISTIC, "n")], s[(Metric.STEP_STATISTIC, "pp")]) == (4, 9)
    t.core_gone()
    s = samples(t)
    assert (s[(Metric.RUNNING,)], s[(Metric.STEP_STATISTIC, "n")]) == (0, 4)


def test_a_request_cancelled_here_is_counted_once_and_its_late_tokens_not_at_all():
    """Row C.8 71: token counters agree with the per-request series."""
    t = telemetry()
    t.arrived(request())
    t.ended("a", Outcome.ABORTED, 11.0)
    t.record(step(TokenOut("a", 5), Finished("a", FinishReason.ABORT)), 12.0)
    s = samples(t)
    assert s[(Metric.OUTCOME, "aborted")] == 1
    assert s[(Metric.OUTPUT_TOKENS,)] == 0
    assert s[(f"{Metric.TTFT}_count",)] == 0


actions = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["arrive", "start", "token", "refuse", "turn away", "cancel", *FinishReason]),
    )
)


@settings(deadline=None)
@given(actions)
def test_arrived_is_outcomes_plus_in_flight_after_any_history(history):
    """Row C.8 71."""
    t = telemetry()
    known = set()
    for now_s, (number, what) in enumerate(history):
        id = str(number)
        match what:
            case "arrive" if id not in known:
                t.arrived(request(id, float(now_s)))
                known.add(id)
            case "start":
                t.record(step(Started(id, 0)), float(now_s))
            case "token":
                t.record(step(TokenOut(id, 1)), float(now_s))
            case "refuse":
                t.refused(id, Gauges(), float(now_s))
            case "turn away":
                t.turned_away()
            case "cancel":
                t.ended(id, Outcome.ABORTED, float(now_s))
            case FinishReason():
                t.record(step(Finished(id, what)), float(now_s))
        assert t.arrived_total == sum(t.outcomes_total.values()) + t.in_flight
    s = samples(t)
    outcomes = [s[(Metric.OUTCOME, outcome)] for outcome in Outcome]
    assert s[(Metric.ARRIVED,)] == sum(outcomes) + s[(Metric.IN_FLIGHT,)]


@settings(deadline=None)
@given(st.lists(st.floats(0.002, 300), min_size=1, max_size=200), st.floats(0.01, 0.999))
def test_the_bucket_of_a_percentile_holds_it_and_is_narrow(values, share):
    """Row C.8 68: whatever was measured from 2 ms to 300 s, the bucket says it to a quarter."""
    t = telemetry()
    histogram = Histogram(t._latency[Metric.E2E].bounds)
    for value in values:
        histogram.observe(value)
    rank = math.ceil(share * len(values))
    truth = sorted(values)[rank - 1]
    upper = next(float(bound) for bound, count in histogram.buckets() if count >= rank)
    lower = max((b for b in histogram.bounds if b < upper), default=0.0)
    assert lower <= truth <= upper
    assert upper <= 1.29 * lower


@pytest.mark.parametrize("median_s", [0.002, 0.0055, 0.013, 0.045, 0.12, 0.7, 1.4, 5.5, 13, 45, 95, 200])
@pytest.mark.parametrize("width", [0.1, 0.3, 1.0])
def test_percentiles_of_a_load_read_from_buckets_are_near_the_truth(median_s, width):
    """Row C.8 68: within 20 % at every scale, read as Prometheus' histogram_quantile reads them."""
    t = telemetry()
    histogram = Histogram(t._latency[Metric.TTFT].bounds)
    chance = random.Random(f"{median_s} {width}")
    values = sorted(chance.lognormvariate(math.log(median_s), width) for _ in range(2000))
    for value in values:
        histogram.observe(value)
    for share in (0.5, 0.9, 0.95, 0.99):
        rank = share * len(values)
        truth = values[math.ceil(rank) - 1]
        if not 0.002 <= truth <= 300:
            continue
        lower, before = 0.0, 0.0
        for bound, count in histogram.buckets():
            if count >= rank and count > before:
                read = lower + (float(bound) - lower) * (rank - before) / (count - before)
                break
            lower, before = float(bound), count
        assert read == pytest.approx(truth, rel=0.2), (share, truth, read)


def test_a_journey_is_known_to_whoever_took_the_request_in():
    """Kept up to date until the end: when it started by the core's own clock, what it had, how it ended."""
    t = telemetry()
    journey = t.arrived(request(arrival_s=10.0))
    t.record(step(Started("a", 2, at_s=10.05), TokenOut("a", 5)), 10.2)
    t.record(step(Preempted("a"), tokens=0), 10.3)
    t.record(step(TokenOut("a", 5), Finished("a", FinishReason.LENGTH)), 10.4)
    t.record(step(TokenOut("a", 5), Preempted("a")), 10.5)
    assert (journey.arrival_s, journey.started_s, journey.first_s, journey.last_s) == (
        10.0,
        10.05,
        10.2,
        10.4,
    )
    assert (journey.ended_s, journey.outcome, journey.preempted_s) == (10.4, Outcome.FINISHED, (10.3,))
    assert (journey.prompt_tokens, journey.cached_tokens, journey.tokens) == (3, 2, 2)
    assert samples(t)[(f"{Metric.QUEUE}_sum",)] == pytest.approx(0.05)


def test_a_cancelled_journey_says_how_far_it_came():
    """Whoever cancels it is the one who ends it."""
    t = telemetry()
    journey = t.arrived(request(arrival_s=10.0))
    t.ended("a", Outcome.ABORTED, 11.0)
    assert (journey.started_s, journey.first_s, journey.ended_s) == (0.0, 0.0, 11.0)
    assert journey.outcome is Outcome.ABORTED
