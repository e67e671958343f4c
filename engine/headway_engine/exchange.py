"""One request on the public port, as watchers want to know it: who asked for what, what came of it, when.

Filled in on the way, read when it is over. Holds no prompt, no answer and no key, so that no watcher can
tell of one. Knows nothing of logs and traces.
"""

import logging
import re
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway_engine.generation import Usage
from headway_engine.logs import context, fields
from headway_engine.protocol import Outcome
from headway_engine.telemetry import Journey

log = logging.getLogger("headway.front")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_KEY = "headway.exchange"
_HEADERS = frozenset((b"x-request-id", b"traceparent", b"tracestate"))


@dataclass(slots=True, kw_only=True)
class Asked:
    """What a computing route was asked for, once the body is understood."""

    operation: str  # chat | text_completion | embeddings, as OpenTelemetry names them
    model: str
    stream: bool = False
    samples: int = 1
    max_tokens: int = 0  # 0: not said
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0  # 0: no cut


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Times are time.monotonic() seconds."""

    id: str  # X-Request-Id
    method: str
    arrival_s: float
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str = ""
    route: str = ""  # the template, never the path that a client wrote; empty: no such route
    asked: Asked | None = None
    response_id: str = ""
    status: int = 0  # 0: no answer was begun
    error: str = ""  # a code, never a message: messages may quote the client
    error_status: int = 0  # an error inside a stream has one too
    journeys: Sequence[Journey] = ()
    usage: Usage | None = None
    finish_reasons: tuple[str, ...] = ()
    ended_s: float = 0.0
    trace_id: str = ""

    def asks(self, tenant: str) -> None:
        """It is known who asks; the log lines of this request say so from now on."""
        self.tenant = tenant
        if tenant:
            context.set({**context.get(), "tenant": tenant})

    def failed(self, status: int, code: str | None) -> None:
        """The answer is an error, or a stream ends with one."""
        self.error_status, self.error = status, code or str(status)

    @property
    def outcome(self) -> str:
        """answered, refused, failed, or aborted: the client left before the end."""
        if self.error_status:
            return "failed" if self.error_status >= 500 else "refused"
        if any(journey.outcome is Outcome.ABORTED for journey in self.journeys) or not self.status:
            return "aborted"
        return "answered"

    @property
    def first(self) -> Journey | None:
        """The sequence that the client had the first token of, or that ran first, or that came first."""
        return min(
            self.journeys,
            key=lambda j: (j.first_s or float("inf"), j.started_s or float("inf")),
            default=None,
        )

    @property
    def preemptions(self) -> int:
        """How often its sequences had to give way."""
        return sum(len(journey.preempted_s) for journey in self.journeys)

    @property
    def queue_s(self) -> float | None:
        """From arrival to the first step; of one that never ran, to its end."""
        journey = self.first
        if journey is None:
            return None
        return max(0.0, (journey.started_s or journey.ended_s or self.ended_s) - journey.arrival_s)

    @property
    def prefill_s(self) -> float | None:
        """From the first step to the first token."""
        journey = self.first
        return journey.first_s - journey.started_s if journey and journey.first_s else None

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        journey = self.first
        return journey.first_s - journey.arrival_s if journey and journey.first_s else None


class Watcher(Protocol):
    """Wants to know of every exchange, when it is over. Must be quick: it runs between two answers."""

    def over(self, exchange: Exchange) -> None: ...


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange:
    """The exchange that a request belongs to; one that nobody watches where there is none."""
    found = scope.get(_KEY)
    return found if isinstance(found, Exchange) else Exchange(id="", method="", arrival_s=0.0)


class Exchanges:
    """Opens an exchange for each request, and tells the watchers of it when it is over. Each answer gets an
    X-Request-Id: the client's own if it is printable, else a new one."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float], watchers: Sequence[Watcher] = ()) -> None:
        self._app = app
        self._clock = clock
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in _HEADERS}
        given = headers.pop("x-request-id", "")
        exchange = scope[_KEY] = Exchange(
            id=given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16),
            method=scope["method"],
            arrival_s=self._clock(),
            trace_headers=headers,
        )
        context.set({"request_id": exchange.id})

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                own = (b"x-request-id", exchange.id.encode("latin-1"))
                message["headers"] = [*message.get("headers", []), own]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._watchers:
                exchange.ended_s = self._clock()
                exchange.route = getattr(scope.get("route"), "path", "")
                self._tell(exchange)

    def _tell(self, exchange: Exchange) -> None:
        for watcher in self._watchers:
            try:
                watcher.over(exchange)
            except Exception:
                # Whoever watches may be wrong; the request was answered.
                log.exception(fields("watcher-failed"))
