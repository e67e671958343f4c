"""Exposition text to Sample, two sets of Samples to an Observation."""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as PromHistogram

from headway_engine.messages import Fallback, Gauges, Ready, StepReport
from headway_engine.protocol import (
    BatchingMode,
    Capacity,
    Limits,
    Metric,
    Objectives,
    Outcome,
    latency_buckets,
)
from headway_engine.sequence import Finished, FinishReason, Request, SamplingParams, Started, TokenOut
from headway_engine.stepcost import StepStatistics
from headway_engine.telemetry import Telemetry
from headway_operator.metrics import Computing, Histogram, MetricsError, Sample, observe, parse
from support.observations import COST, a_histogram, statistics_of

CAPACITY = Capacity(
    max_batch_tokens=512, max_batch_sequences=16, kv_blocks=100, block_tokens=16, max_model_tokens=1024
)


def an_engine(objectives: Objectives | None = None) -> Telemetry:
    telemetry = Telemetry(objectives or Objectives(ttft_ms=500, itl_ms=50), start_time_s=1_700_000_000.0)
    telemetry.capacity = CAPACITY
    telemetry.limits = Limits(generation=7, mode=BatchingMode.DYNAMIC, max_batch_tokens=256)
    return telemetry


def serve(telemetry: Telemetry, name: str, at_s: float, tokens: Sequence[float]) -> None:
    """One request that got its tokens at these times."""
    telemetry.arrived(
        Request(id=name, prompt=(1,) * 10, sampling=SamplingParams(max_tokens=9), arrival_s=at_s)
    )
    for number, when_s in enumerate(tokens):
        events: tuple[object, ...] = (TokenOut(name, 5),)
        if number == 0:
            events = (Started(name, 0), *events)
        if number == len(tokens) - 1:
            events = (*events, Finished(name, FinishReason.LENGTH))
        telemetry.record(StepReport(at_s=when_s, events=events, step_tokens=1, gauges=Gauges()), when_s)  # type: ignore[arg-type]


def read(telemetry: Telemetry) -> Sample:
    return parse(telemetry.exposition().decode())


def test_everything_that_the_engine_exports_is_read_back() -> None:
    telemetry = an_engine()
    statistics = statistics_of(COST, steps=20)
    serve(telemetry, "a", 1.0, [1.3, 1.34, 1.5])
    telemetry.record(StepReport(at_s=2, gauges=Gauges(running=3, waiting=2, statistics=statistics)), 2.0)
    sample = read(telemetry)
    assert sample.limits == telemetry.limits
    assert sample.capacity == CAPACITY
    assert sample.objectives == Objectives(ttft_ms=500, itl_ms=50)
    assert sample.start_time_s == 1_700_000_000.0
    assert sample.statistics == statistics
    assert sample.histograms[Metric.TTFT].count == 1
    assert sample.histograms[Metric.ITL].count == 2
    assert sample.histograms[Metric.ITL].sum == pytest.approx(0.2)
    assert sample.counters[Metric.ARRIVED] == 1
    assert sample.counters[Metric.OUTPUT_TOKENS] == 3
    assert sample.outcomes[Outcome.FINISHED] == 1
    assert sample.gauges[Metric.RUNNING] == 3


def test_what_computes_the_model_is_read_back_with_what_was_left_for_it() -> None:
    telemetry = an_engine()
    assert read(telemetry).computing is None
    left = (Fallback("fused on amx", "wrong logits", "by 0.3"), Fallback("fused on avx2", "unavailable"))
    telemetry.ready = Ready(
        capacity=CAPACITY, limits=Limits(), model="", device="", dtype="", runner="transformers",
        kernels="torch", fallbacks=left,
    )  # fmt: skip
    expected = (("fused on amx", "wrong logits"), ("fused on avx2", "unavailable"))
    assert read(telemetry).computing == Computing("transformers on torch", expected)
    telemetry.ready = msgspec.structs.replace(telemetry.ready, fallbacks=())
    assert read(telemetry).computing == Computing("transformers on torch")


def test_a_signal_that_is_not_exported_is_absent_and_not_zero() -> None:
    sample = parse("headway_requests_running 4\nheadway_requests_arrived_total 2\n")
    assert sample.gauges == {Metric.RUNNING: 4}
    assert sample.counters == {Metric.ARRIVED: 2}
    assert sample.limits is None
    assert sample.capacity is None
    assert sample.objectives is None
    assert sample.statistics is None
    assert sample.histograms == {}
    seen = observe({"a": sample}, {"a": sample}, 10)
    assert seen.arrivals == 0
    assert seen.output_tokens is None
    assert seen.ttft is None
    assert seen.statistics is None
    assert seen.kv_used_ratio is None


def test_half_a_set_of_limits_is_none() -> None:
    sample = parse('headway_limit{parameter="max_batch_tokens"} 64\nheadway_limits_generation 3\n')
    assert sample.limits is None


def test_a_gauge_that_is_not_a_number_is_absent() -> None:
    assert parse("headway_requests_running NaN\nheadway_queued_tokens 1\n").gauges == {
        Metric.QUEUED_TOKENS: 1
    }


@pytest.mark.parametrize(
    "text",
    ["", "<html>It works!</html>", '{"error": 1}', "headway_x{ 1\n", "process_cpu_seconds_total 1\n"],
)
def test_what_is_no_engines_exposition_is_refused(text: str) -> None:
    with pytest.raises(MetricsError):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        'headway_time_to_first_token_seconds_bucket{le="1.0"} 3\n',
        'headway_time_to_first_token_seconds_bucket{le="1.0"} 3\n'
        'headway_time_to_first_token_seconds_bucket{le="+Inf"} 2\n',
        'headway_time_to_first_token_seconds_bucket{le="soon"} 3\n'
        'headway_time_to_first_token_seconds_bucket{le="+Inf"} 4\n',
    ],
)
def test_a_histogram_that_does_not_hold_together_is_absent(text: str) -> None:
    assert parse(text).histograms == {}


@settings(deadline=None, max_examples=40)
@given(text=st.text(max_size=200))
def test_any_text_is_a_sample_or_a_metrics_error(text: str) -> None:
    try:
        parse(text)
    except MetricsError:
        return


def test_series_are_summed_over_labels_that_do_not_matter_here() -> None:
    text = (
        'headway_prompt_tokens_total{tenant="a"} 10\nheadway_prompt_tokens_total{tenant="b"} 5\n'
        'headway_requests_total{outcome="finished",tenant="a"} 1\n'
        'headway_requests_total{outcome="finished",tenant="b"} 2\n'
        'headway_requests_total{outcome="unheard_of"} 9\n'
    )
    sample = parse(text)
    assert sample.counters[Metric.PROMPT_TOKENS] == 15
    assert sample.outcomes == {Outcome.FINISHED: 3}


def test_two_scrapes_differ_by_what_happened_between_them() -> None:
    telemetry = an_engine()
    serve(telemetry, "a", 0.0, [0.2, 0.3])
    before = read(telemetry)
    serve(telemetry, "b", 1.0, [1.6, 1.62, 1.69])
    telemetry.turned_away(2)
    seen = observe({"pod": before}, {"pod": read(telemetry)}, 10.0)
    assert (seen.pods, seen.scraped, seen.dropped) == (1, 1, ())
    assert (seen.arrivals, seen.finished, seen.rejected) == (3, 1, 2)
    assert (seen.prompt_tokens, seen.output_tokens) == (10, 3)
    assert seen.ttft is not None
    assert seen.ttft.count == 1
    assert dict(seen.ttft.buckets)[0.5] == 0
    assert seen.itl is not None
    assert dict(seen.itl.buckets)[0.05] == 1
    assert seen.itl.sum == pytest.approx(0.09)


def a_sample(**values: object) -> Sample:
    sample = Sample(
        start_time_s=100.0,
        statistics=statistics_of(COST, steps=10),
        histograms={Metric.TTFT: a_histogram([0.1, 0.2])},
        counters={Metric.ARRIVED: 5.0},
        outcomes={Outcome.FINISHED: 4.0},
        gauges={Metric.KV_USED_RATIO: 0.5, Metric.RUNNING: 1.0},
    )
    return replace(sample, **values)  # type: ignore[arg-type]


def test_a_pod_seen_for_the_first_time_has_nothing_to_be_compared_with() -> None:
    seen = observe({}, {"new": a_sample()}, 10)
    assert (seen.scraped, seen.pods) == (1, 0)
    assert seen.arrivals is None


@pytest.mark.parametrize(
    "later",
    [
        a_sample(start_time_s=200.0),
        a_sample(counters={Metric.ARRIVED: 4.0}),
        a_sample(outcomes={Outcome.FINISHED: 0.0}),
        a_sample(statistics=StepStatistics(n=3)),
    ],
    ids=["another start time", "a counter fell", "an outcome fell", "steps fell"],
)
def test_a_restarted_pod_is_left_out_and_named(later: Sample) -> None:
    steady = a_sample()
    more = a_sample(counters={Metric.ARRIVED: 9.0})
    seen = observe({"a": steady, "b": steady}, {"a": later, "b": more}, 10)
    assert seen.dropped == ("a",)
    assert (seen.scraped, seen.pods) == (2, 1)
    assert seen.arrivals == 4


def test_a_pod_that_vanished_takes_nothing_with_it() -> None:
    seen = observe({"a": a_sample(), "b": a_sample()}, {"b": a_sample(counters={Metric.ARRIVED: 6.0})}, 10)
    assert (seen.pods, seen.arrivals) == (1, 1)


def test_new_objectives_restart_the_latency_histograms_and_nothing_else() -> None:
    telemetry = an_engine()
    serve(telemetry, "a", 0.0, [0.2, 0.3])
    before = read(telemetry)
    telemetry.set_objectives(Objectives(ttft_ms=300, itl_ms=20))
    serve(telemetry, "b", 1.0, [1.4, 1.5])
    seen = observe({"pod": before}, {"pod": read(telemetry)}, 10.0)
    assert seen.arrivals == 1
    assert seen.ttft is not None
    assert seen.ttft.count == 1
    assert dict(seen.ttft.buckets)[0.3] == 0


def test_histograms_of_pods_with_other_boundaries_add_where_they_share_them() -> None:
    one, other = a_histogram([0.1, 0.4], 300), a_histogram([0.2, 0.9], 500)
    both = one.plus(other)
    assert both.count == 4
    assert dict(both.buckets)[0.32] == 2
    assert 0.24 not in dict(both.buckets)


def test_sums_gauges_and_the_fullest_cache_over_pods() -> None:
    full = a_sample(gauges={Metric.KV_USED_RATIO: 0.9, Metric.RUNNING: 7.0})
    seen = observe({"a": a_sample(), "b": a_sample()}, {"a": a_sample(), "b": full}, 10)
    assert seen.running == 8
    assert seen.kv_used_ratio == 0.9


values = st.lists(st.floats(0.0005, 700), max_size=25)


@settings(deadline=None, max_examples=40)
@given(first=values, second=values, objective_ms=st.integers(0, 5000))
def test_a_difference_of_rendered_histograms_is_the_histogram_of_what_came_between(
    first: list[float], second: list[float], objective_ms: int
) -> None:
    """Rendered by prometheus_client itself, not by our telemetry."""
    registry = CollectorRegistry()
    histogram = PromHistogram(Metric.TTFT, "x", buckets=latency_buckets(objective_ms), registry=registry)
    arrived = Counter(Metric.ARRIVED.removesuffix("_total"), "x", registry=registry)
    running = Gauge(Metric.RUNNING, "x", registry=registry)

    def scrape() -> Sample:
        return parse(generate_latest(registry).decode())

    for value in first:
        histogram.observe(value)
        arrived.inc()
    before = scrape()
    for value in second:
        histogram.observe(value)
        arrived.inc()
        running.inc()
    seen = observe({"pod": before}, {"pod": scrape()}, 5.0)
    expected = a_histogram(second, objective_ms)
    assert seen.arrivals == len(second)
    assert seen.running == len(second)
    assert seen.ttft is not None
    assert seen.ttft.buckets == expected.buckets
    assert seen.ttft.sum == pytest.approx(expected.sum, abs=1e-6 * (1 + sum(first)))


@settings(deadline=None, max_examples=40)
@given(parts=st.lists(values, min_size=1, max_size=4))
def test_summing_over_pods_equals_one_pod_that_saw_it_all(parts: list[list[float]]) -> None:
    empty = Sample(start_time_s=1.0, histograms={Metric.ITL: a_histogram([])})
    before = {f"p{i}": empty for i in range(len(parts))}
    after = {
        f"p{i}": Sample(start_time_s=1.0, histograms={Metric.ITL: a_histogram(part)})
        for i, part in enumerate(parts)
    }
    seen = observe(before, after, 1.0)
    assert seen.itl is not None
    assert seen.itl.buckets == a_histogram([v for part in parts for v in part]).buckets


def test_a_histogram_ends_at_infinity() -> None:
    histogram = Histogram(((0.1, 1), (math.inf, 3)), 4.0)
    assert histogram.count == 3
    assert histogram.boundaries == (0.1, math.inf)
