"""Exchanges become spans: what is in them, how far a sequence came, and what is told of a lost collector."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headway_engine.exchange import Asked, Exchange
from headway_engine.generation import Usage
from headway_engine.protocol import Outcome
from headway_engine.spans import MOST_SEQUENCES, Spans, Told, epoch_now
from headway_engine.telemetry import Journey, _TenantTokens


def traced(exchange):
    """The spans that come of an exchange, by name; the request's own under ''. Seconds are the epoch's."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    Spans(provider, epoch_ns=lambda at_s: round(at_s * 1e9)).over(exchange)
    spans = kept.get_finished_spans()
    return spans[-1], list(spans[:-1])


def journey(**more):
    return Journey(10.0, 5, _TenantTokens(), **more)


def exchange(*journeys, **more):
    asked = Asked(operation="chat", model="m", samples=len(journeys) or 1)
    return Exchange(
        id="x", method="POST", arrival_s=10.0, ended_s=20.0, asked=asked, journeys=journeys, **more
    )


def times(spans):
    return [(span.name, span.start_time / 1e9, span.end_time / 1e9) for span in spans]


def test_phases_have_the_times_that_the_core_reported():
    """Made when all is over, with explicit starts and ends."""
    whole = journey(started_s=11.0, first_s=12.0, last_s=14.0, ended_s=14.0, tokens=9, cached_tokens=3)
    request, inside = traced(exchange(whole, status=200, usage=Usage(5, 9, 3), finish_reasons=("stop",)))
    assert times([request]) == [("chat m", 10.0, 20.0)]
    assert times(inside) == [("queue", 10.0, 11.0), ("prefill", 11.0, 12.0), ("decode", 12.0, 14.0)]
    said = request.attributes
    assert (said["headway.queue_s"], said["headway.prefill_s"], said["headway.ttft_s"]) == (1.0, 1.0, 2.0)
    assert (said["gen_ai.usage.cache_read.input_tokens"], inside[1].attributes["headway.cached_tokens"]) == (
        3,
        3,
    )


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        ({}, [("queue", 10.0, 15.0)]),
        ({"started_s": 11.0}, [("queue", 10.0, 11.0), ("prefill", 11.0, 15.0)]),
        (
            {"started_s": 11.0, "first_s": 12.0, "last_s": 12.0, "tokens": 1},
            [("queue", 10.0, 11.0), ("prefill", 11.0, 12.0), ("decode", 12.0, 12.0)],
        ),
    ],
)
def test_the_phase_that_a_request_was_left_in_ends_with_it(reached, expected):
    """A client that hangs up is seen where it lost its patience."""
    request, inside = traced(exchange(journey(ended_s=15.0, outcome=Outcome.ABORTED, **reached)))
    assert times(inside) == expected
    assert request.attributes["headway.outcome"] == "aborted"


def test_times_that_two_processes_disagree_about_never_run_backwards():
    """The core's clock may read before the front end's arrival, by its grain."""
    _, inside = traced(exchange(journey(started_s=9.999, first_s=12.0, last_s=13.0, ended_s=13.0)))
    assert times(inside)[0] == ("queue", 10.0, 10.0)
    assert all(start <= end for _, start, end in times(inside))


def test_preemptions_are_counted_and_seen_where_they_happened():
    """What explains a pause in the middle of an answer."""
    held = journey(started_s=11.0, first_s=12.0, last_s=18.0, ended_s=18.0, preempted_s=(13.0, 15.0))
    request, _ = traced(exchange(held, status=200))
    assert request.attributes["headway.preemptions"] == 2
    assert [(e.name, e.timestamp / 1e9) for e in request.events] == [("preempted", 13.0), ("preempted", 15.0)]


def test_many_samples_have_a_bound_and_the_first_to_speak_gives_the_times():
    """128 samples must not be 400 spans."""
    late = [journey(started_s=13.0, first_s=16.0, last_s=17.0, ended_s=17.0) for _ in range(20)]
    early = journey(started_s=12.0, first_s=14.0, last_s=15.0, ended_s=15.0)
    request, inside = traced(exchange(*late, early, status=200))
    assert len(inside) == 3 * MOST_SEQUENCES
    assert request.attributes["gen_ai.request.choice.count"] == 21
    assert request.attributes["headway.ttft_s"] == 4.0


@pytest.mark.parametrize(
    ("status", "code", "outcome", "error"),
    [(429, "queue_full", "refused", False), (500, "error", "failed", True), (503, None, "failed", True)],
)
def test_only_the_servers_own_errors_make_a_span_one(status, code, outcome, error):
    """As the conventions have it for servers; the reason is in error.type either way."""
    gone = exchange(status=status)
    gone.failed(status, code)
    request, _ = traced(gone)
    assert request.attributes["error.type"] == (code or str(status))
    assert request.attributes["headway.outcome"] == outcome
    assert request.status.is_ok is not error


def test_an_error_inside_a_stream_is_an_error_though_the_status_is_200():
    """Headers were out already."""
    torn = exchange(journey(started_s=11.0, ended_s=12.0, outcome=Outcome.FAILED), status=200)
    torn.failed(500, "error")
    request, _ = traced(torn)
    assert request.attributes["http.response.status_code"] == 200
    assert not request.status.is_ok


def test_a_broken_traceparent_begins_a_new_trace():
    """It comes from outside; anything may be in it."""
    for header in ("", "00-zz-yy-01", "x" * 1000, "ff-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        request, _ = traced(exchange(trace_headers={"traceparent": header}))
        assert request.parent is None
        assert request.context.trace_id


def test_an_exchange_knows_its_trace_afterwards():
    """For the access log."""
    seen = exchange(trace_headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    request, _ = traced(seen)
    assert seen.trace_id == "a" * 32 == format(request.context.trace_id, "032x")


def test_monotonic_seconds_become_the_epochs():
    """Both clocks are read together."""
    import time

    assert abs(epoch_now()(time.monotonic()) - time.time_ns()) < 60e9


class Collector(SpanExporter):
    """Answers as it is told."""

    def __init__(self):
        self.result = SpanExportResult.SUCCESS

    def export(self, spans):
        return self.result

    def shutdown(self):
        self.result = SpanExportResult.FAILURE


def test_a_lost_collector_is_told_of_once_and_its_return_once(caplog):
    """One line per change, with what was lost."""
    caplog.set_level("INFO", "headway.tracing")
    inner = Collector()
    told = Told(inner, "c:4318")
    told.export(["span"])
    assert caplog.records == []
    inner.result = SpanExportResult.FAILURE
    for _ in range(3):
        told.export(["a", "b"])
    inner.result = SpanExportResult.SUCCESS
    told.export(["c"])
    told.export(["d"])
    assert [r.getMessage() for r in caplog.records] == [
        "collector-lost collector=c:4318 spans=2",
        "collector-back collector=c:4318 spans_lost=6",
    ]
    told.shutdown()
    assert inner.result is SpanExportResult.FAILURE
