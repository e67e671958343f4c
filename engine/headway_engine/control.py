"""The management port: metrics, health, readiness, and the control API of limits and objectives.

A second application on a port of its own, so that a network policy can tell its callers from clients, and an
API key of one is worth nothing at the other. Knows nothing of prompts and torch.
"""

import asyncio
import hmac
import logging
import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from headway_engine import protocol
from headway_engine.control_operations import control_document
from headway_engine.core_client import CoreClient, CoreGone, Phase
from headway_engine.logs import Change, fields
from headway_engine.methods import allowed, heads
from headway_engine.protocol import InvalidLimits, Limits, Objectives, check_limits
from headway_engine.telemetry import Telemetry

log = logging.getLogger("headway.control")

MAX_BODY_BYTES = 64 << 10
BODY_TIMEOUT_S = 30.0
MAX_OBJECTIVE_MS = 86_400_000
JSON = "application/json"


class ControlError(Exception):
    """An answer of the control API other than 200; `field` is the wire name of the offending one."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer to a probe: fit or not, and why."""

    fit: bool
    reason: str


def health(core: CoreClient, stall_limit_s: float) -> Verdict:
    """Red when a restart would help: the core is dead, or requests are pending and no step ends."""
    if core.phase is Phase.GONE:
        return Verdict(False, f"the engine core is gone: {core.doing}")
    stalled_s = core.stalled_s()
    if core.phase is Phase.READY and stalled_s > stall_limit_s:
        return Verdict(
            False, f"{core.in_flight} requests are pending and no step has ended for {stalled_s:.0f} s"
        )
    return Verdict(True, "ok")


def readiness(core: CoreClient) -> Verdict:
    """Ready when a request that came now would be served."""
    if core.draining:
        return Verdict(False, "draining")
    if core.phase is not Phase.READY:
        return Verdict(False, core.doing)
    return Verdict(True, "ready")


def decode_limits(body: bytes) -> Limits:
    """A whole set of limits: every field must be there, so that nothing is changed by leaving it out."""
    limits = _decode(body, Limits)
    given = msgspec.json.decode(body, type=dict[str, object])
    for name in Limits.__struct_fields__:
        if name not in given and name != "generation":
            raise ControlError(422, f"{name} is missing: limits are sent whole", name)
    return limits


def decode_objectives(body: bytes) -> Objectives:
    """Targets in milliseconds; an absent one is no target."""
    objectives = _decode(body, Objectives)
    for name in Objectives.__struct_fields__:
        if not 0 <= getattr(objectives, name) <= MAX_OBJECTIVE_MS:
            raise ControlError(422, f"{getattr(objectives, name)} is outside 0..{MAX_OBJECTIVE_MS}", name)
    return objectives


def control_app(core: CoreClient, telemetry: Telemetry, *, key: str, stall_limit_s: float) -> ASGIApp:
    """The application of the management port. With an empty key, `/control` is closed."""
    app = FastAPI(openapi_url=None, telemetry={"tracing": False, "metrics": False, "logs": False})
    changing = asyncio.Lock()
    fit = True  # as the last probe was told
    schema = msgspec.json.encode(control_document())

    @app.exception_handler(ControlError)
    async def control_error(_: HttpRequest, error: ControlError) -> Response:
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
        body = {"field": error.field, "message": error.message}
        return Response(msgspec.json.encode(body), error.status, headers, JSON)

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, error: HTTPException) -> Response:
        headers = {"allow": allowed(http.app, http.scope)} if error.status_code == 405 else None
        body = {"field": None, "message": str(error.detail)}
        return Response(msgspec.json.encode(body), error.status_code, headers, JSON)

    def authorise(http: HttpRequest) -> None:
        if not key:
            raise ControlError(403, f"the control API is closed: {protocol.CONTROL_KEY_ENV} is not set")
        given = http.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ControlError(401, "a valid bearer key is needed")

    def ready() -> CoreClient:
        if core.phase is not Phase.READY:
            raise ControlError(503, f"the engine is not ready: {core.doing}")
        return core

    @app.get("/openapi.json")
    async def openapi_document() -> Response:
        return Response(schema, media_type=JSON)

    @app.get(protocol.METRICS_PATH)
    async def metrics() -> Response:
        return Response(telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get(protocol.HEALTH_PATH)
    async def healthz() -> Response:
        nonlocal fit
        verdict = health(core, stall_limit_s)
        if verdict.fit is not fit:
            level = logging.INFO if verdict.fit else logging.ERROR
            log.log(level, fields("health", fit=Change(fit, verdict.fit), why=verdict.reason))
            fit = verdict.fit
        return _probe(verdict)

    @app.get(protocol.READY_PATH)
    async def readyz() -> Response:
        return _probe(readiness(core))

    @app.get(protocol.LIMITS_PATH)
    async def get_limits(http: HttpRequest) -> Response:
        authorise(http)
        return _json(ready().limits)

    @app.put(protocol.LIMITS_PATH)
    async def put_limits(http: HttpRequest) -> Response:
        authorise(http)
        current = ready()
        limits = decode_limits(await _body(http))
        assert current.ready is not None
        try:
            check_limits(limits, current.ready.capacity)
        except InvalidLimits as error:
            raise ControlError(422, error.message, error.field) from error
        async with changing:
            try:
                async with asyncio.timeout(stall_limit_s):
                    return _json(await current.set_limits(limits))
            except (CoreGone, TimeoutError) as error:
                raise ControlError(
                    503, f"the engine core did not answer: {error or 'no step has ended'}"
                ) from error

    @app.get(protocol.OBJECTIVES_PATH)
    async def get_objectives(http: HttpRequest) -> Response:
        authorise(http)
        return _json(telemetry.objectives)

    @app.put(protocol.OBJECTIVES_PATH)
    async def put_objectives(http: HttpRequest) -> Response:
        authorise(http)
        objectives = decode_objectives(await _body(http))
        if objectives != telemetry.objectives:
            old, new = (msgspec.structs.asdict(o) for o in (telemetry.objectives, objectives))
            telemetry.set_objectives(objectives)
            log.info(fields("objectives", **{k: Change(old[k], new[k]) for k in old if old[k] != new[k]}))
        return _json(telemetry.objectives)

    @app.get(protocol.CAPACITY_PATH)
    async def get_capacity(http: HttpRequest) -> Response:
        authorise(http)
        current = ready()
        assert current.ready is not None
        return _json(current.ready.capacity)

    return heads(app)


def _probe(verdict: Verdict) -> Response:
    return PlainTextResponse(verdict.reason + "\n", 200 if verdict.fit else 503)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


async def _body(http: HttpRequest) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in http.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise ControlError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise ControlError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} seconds") from error
    return bytes(body)


T = TypeVar("T")
_AT = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<where>[^`]*)`$", re.DOTALL)
_FIELD = re.compile(r"field `(?P<name>[^`]*)`")


def _decode(body: bytes, type: type[T]) -> T:
    """A body as a struct; 422 naming the field for JSON that is no such struct, 400 for no JSON."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        text = str(error)
        at = _AT.match(text)
        named = _FIELD.search(text)
        field = at["where"] if at else named["name"] if named else None
        raise ControlError(422, at["what"] if at else text, field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(400, f"the body is not valid JSON: {error}") from error
