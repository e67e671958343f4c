"""Exchanges to OpenTelemetry spans: one for each request, with queue, prefill and decode inside it.

Spans are made when a request is over, from the times that are known then, so that tokens cost nothing. They
leave in batches, from a thread of the SDK's own. Attributes follow the semantic conventions for generative AI
and for HTTP servers; ours are under `headway.`. The only module that knows OpenTelemetry.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import DEFAULT_ENDPOINT, OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headway_engine.exchange import Exchange
from headway_engine.logs import fields
from headway_engine.telemetry import Journey

log = logging.getLogger("headway.tracing")

SERVICE = "headway-engine"
MOST_SEQUENCES = 8
"""Sequences of one request whose phases are spans; those beyond count in the totals only."""
MOST_EVENTS = 16
_NOISY = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers that tell of each batch that did not leave; `Told` says it once."""
_INDISCREET = "opentelemetry.util.re"
"""The logger that writes out headers that it cannot read: the collector's key may be among them."""

Attribute = str | bool | int | float | Sequence[str]
Attributes = dict[str, Attribute]


class Told(SpanExporter):
    """An exporter that tells when its collector is lost, and when it is back."""

    def __init__(self, inner: SpanExporter, collector: str) -> None:
        self._inner = inner
        self._collector = collector
        self._lost = 0  # spans, since the last one that got through

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info(fields("collector-back", collector=self._collector, spans_lost=self._lost))
            self._lost = 0
        else:
            if not self._lost:
                log.warning(fields("collector-lost", collector=self._collector, spans=len(spans)))
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class Spans:
    """A Tracer."""

    def __init__(self, provider: TracerProvider, *, epoch_ns: Callable[[float], int] | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("headway_engine", version("headway"))
        self._epoch_ns = epoch_ns
        self._propagator = TraceContextTextMapPropagator()

    def over(self, exchange: Exchange) -> None:
        ns = self._epoch_ns or epoch_now()
        context = self._propagator.extract(exchange.trace_headers, Context())
        asked = exchange.asked
        # A client's own path would make as many names as there are clients.
        name = f"{asked.operation} {asked.model}" if asked else f"{exchange.method} {exchange.route}".strip()
        span = self._tracer.start_span(name, context, SpanKind.SERVER, start_time=ns(exchange.arrival_s))
        exchange.trace_id = format(span.get_span_context().trace_id, "032x")
        if span.is_recording():
            span.set_attributes(attributes(exchange))
            inside = set_span_in_context(span, Context())
            for index, journey in enumerate(exchange.journeys[:MOST_SEQUENCES]):
                for at_s in journey.preempted_s[:MOST_EVENTS]:
                    span.add_event("preempted", {"headway.choice": index}, ns(at_s))
                for phase, start_s, end_s, more in phases(journey, exchange.ended_s):
                    child = self._tracer.start_span(
                        phase, inside, attributes={"headway.choice": index, **more}, start_time=ns(start_s)
                    )
                    child.end(ns(end_s))
            if exchange.error_status >= 500:
                span.set_status(Status(StatusCode.ERROR))
        span.end(ns(exchange.ended_s))

    def close(self) -> None:
        self._provider.shutdown()


def epoch_now() -> Callable[[float], int]:
    """From time.monotonic() seconds to nanoseconds since the epoch, as the two clocks stand now."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda at_s: round(at_s * 1e9) + offset_ns


def phases(journey: Journey, ended_s: float) -> Iterator[tuple[str, float, float, Attributes]]:
    """Name, start, end and attributes of what a sequence went through, as far as it came."""
    end_s = journey.ended_s or ended_s
    yield "queue", journey.arrival_s, max(journey.arrival_s, journey.started_s or end_s), {}
    if journey.started_s:
        told: Attributes = {
            "headway.prompt_tokens": journey.prompt_tokens,
            "headway.cached_tokens": journey.cached_tokens,
        }
        yield "prefill", journey.started_s, max(journey.started_s, journey.first_s or end_s), told
    if journey.first_s:
        yield "decode", journey.first_s, journey.last_s, {"headway.output_tokens": journey.tokens}


def attributes(exchange: Exchange) -> Attributes:
    """What a request's span says of it."""
    given: dict[str, Attribute | None] = {
        "http.request.method": exchange.method,
        "http.route": exchange.route or None,
        "http.response.status_code": exchange.status or None,
        "error.type": exchange.error or None,
        "headway.request_id": exchange.id,
        "headway.tenant": exchange.tenant or None,
        "headway.outcome": exchange.outcome,
        **_asked(exchange),
        **_computed(exchange),
    }
    return {name: value for name, value in given.items() if value is not None}


def _asked(exchange: Exchange) -> dict[str, Attribute | None]:
    asked = exchange.asked
    if asked is None:
        return {}
    return {
        "gen_ai.operation.name": asked.operation,
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": asked.model,
        "gen_ai.request.stream": asked.stream or None,
        "gen_ai.request.choice.count": asked.samples if asked.samples != 1 else None,
        "gen_ai.request.max_tokens": asked.max_tokens or None,
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "gen_ai.request.top_k": asked.top_k or None,
    }


def _computed(exchange: Exchange) -> dict[str, Attribute | None]:
    usage = exchange.usage
    told: dict[str, Attribute | None] = {}
    if exchange.journeys:
        told |= {
            "headway.queue_s": exchange.queue_s,
            "headway.prefill_s": exchange.prefill_s,
            "headway.ttft_s": exchange.ttft_s,
            "headway.preemptions": exchange.preemptions,
        }
    if exchange.asked and exchange.status == 200:
        told |= {
            "gen_ai.response.id": exchange.response_id or None,
            "gen_ai.response.model": exchange.asked.model,
            "gen_ai.response.finish_reasons": exchange.finish_reasons or None,
        }
    if usage:
        told |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    return told


def open_tracer(endpoint: str, *, named: bool) -> Spans:
    """A tracer that sends to the collector. The SDK itself reads the variables: endpoint, headers, sampler...
    `named`: they give the service a name, so that ours is not used."""
    quieten()
    own = {"service.version": version("headway"), "service.instance.id": os.uname().nodename}
    resource = Resource.create({**own, **({} if named else {"service.name": SERVICE})})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    address = urlsplit(endpoint or DEFAULT_ENDPOINT)
    collector = f"{address.hostname}:{address.port or address.scheme}"  # without a password that may be in it
    provider.add_span_processor(BatchSpanProcessor(Told(OTLPSpanExporter(), collector)))
    service = resource.attributes["service.name"]
    log.info(fields("tracing", collector=collector, service=service))
    return Spans(provider)


def quieten() -> None:
    """Keep the SDK from saying the same thing over and over, and from telling secrets."""
    logging.getLogger(_INDISCREET).setLevel(logging.CRITICAL)
    if not log.isEnabledFor(logging.DEBUG):
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
