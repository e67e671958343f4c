"""An OTLP/HTTP collector on loopback: takes spans as a real one would, and keeps them for tests to see."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.engine_server import wait_until


@dataclass(slots=True)
class Collector:
    """What came in."""

    port: int
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    raw: bytearray = field(default_factory=bytearray)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def env(self, **more: str) -> dict[str, str]:
        """Variables that send an engine's spans here, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "20", **more}

    def servers(self) -> list[Span]:
        """Spans of requests, without those inside them."""
        return [span for span in list(self.spans) if span.kind == Span.SPAN_KIND_SERVER]

    def of(self, request_id: str) -> Span:
        """The span of one request; waits for it."""

        def found() -> list[Span]:
            return [s for s in self.servers() if attributes(s).get("headway.request_id") == request_id]

        wait_until(found, f"a span of {request_id}")
        return found()[0]

    def inside(self, span: Span) -> dict[str, Span]:
        """The children of a span by name. They leave with it, or before."""
        return {s.name: s for s in list(self.spans) if s.parent_span_id == span.span_id}


def attributes(holder: Any) -> dict[str, Any]:
    """Attributes of a span, an event or a resource, as Python values."""
    return {pair.key: _value(pair.value) for pair in holder.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self._take(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _take(self, body: bytes) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            here.raw.extend(body)
            here.headers.append({name.lower(): value for name, value in self.headers.items()})
            for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
                here.resources.append(attributes(batch.resource))
                for scope in batch.scope_spans:
                    here.spans.extend(scope.spans)

        def log_message(self, format: str, *args: Any) -> None:
            """Tests say what went wrong."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    here = Collector(server.server_address[1])
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield here
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
