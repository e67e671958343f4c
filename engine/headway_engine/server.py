"""The public port: OpenAI's routes on a core client. Says who may ask and when, and hands calls on.

Knows nothing of how a call becomes tokens (`prompts`) and tokens an answer (`reply`), nor of torch.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from headway_engine import answers, openai
from headway_engine.answers import ApiError, Kind, bad_request
from headway_engine.bodies import DetokenizeBody, TokenizeBody
from headway_engine.core_client import DRAINING_RETRY_S, GONE, STARTING_RETRY_S, CoreClient, Phase
from headway_engine.embedding_reply import EmbeddingsReply
from headway_engine.embeddings import most_at_once, parse_embeddings
from headway_engine.exchange import Asked, Exchanges, Watcher, exchange_of
from headway_engine.keys import KeyRing
from headway_engine.methods import allowed, heads
from headway_engine.openai import Call
from headway_engine.prompts import (
    Serving,
    build,
    build_pooled,
    embeddings_of,
    encode_inputs,
    encode_prompts,
    encode_text,
    render,
)
from headway_engine.protocol import TENANT_HEADER, Limits
from headway_engine.public_operations import public_document
from headway_engine.reply import JSON, STALLED_READER_S, Reply
from headway_engine.score_room import ScoreRoom
from headway_engine.telemetry import Telemetry
from headway_engine.tenants import TenantPolicy

MAX_BODY_BYTES = 8 << 20
"""More than any context of text; decoding it holds the interpreter, and so every stream, for a moment."""
INLINE_BODY_BYTES = 256 << 10
"""Longer bodies are decoded in a thread: every stream would wait for them."""
BODY_TIMEOUT_S = 60.0
"""How long a body may take to come: who sends a byte at a time holds memory and a connection."""

T = TypeVar("T")
_TENANT = re.compile(r"[A-Za-z0-9._:@-]{1,64}")


class Front:
    """What the routes share: the core, the counters, the served name."""

    def __init__(
        self,
        core: CoreClient,
        telemetry: Telemetry,
        served_name: str,
        *,
        created: int,
        clock: Callable[[], float] = time.monotonic,
        keys: KeyRing | None = None,
        stalled_reader_s: float = STALLED_READER_S,
        tenants: TenantPolicy | None = None,
    ) -> None:
        self.core = core
        self.telemetry = telemetry
        self.served_name = served_name
        self.created = created
        self.clock = clock
        self.keys = keys
        self.stalled_reader_s = stalled_reader_s
        self.tenants = tenants or TenantPolicy()
        self.score_room = ScoreRoom()

    def serving(self) -> Serving:
        """Raises 503 while there is nothing to serve with."""
        core = self.core
        if core.draining:
            raise ApiError(
                503, "the engine is shutting down", code="draining", retry_after_s=DRAINING_RETRY_S
            )
        if core.phase is Phase.GONE:
            raise ApiError(503, GONE, code="engine_gone", retry_after_s=STARTING_RETRY_S)
        if core.phase is not Phase.READY or not (core.ready and core.tokeniser and core.limits):
            raise ApiError(
                503, f"the engine is not ready: {core.doing}", code="starting", retry_after_s=STARTING_RETRY_S
            )
        return Serving(core.ready, core.tokeniser, core.limits)

    async def generate(self, http: HttpRequest, parse: Callable[[bytes], Call]) -> Response:
        """A generating route, up to the point where the core is asked."""
        arrival_s = exchange_of(http.scope).arrival_s
        serving = self.open()
        tenant = tenant_of(http, self.keys)
        call = await parsed(parse, await read_body(http))
        self.check_model(call.model)
        exchange_of(http.scope).asked = asked_for(call, self.served_name)
        prompts = await encode_prompts(call, serving)
        requests, choices = build(call, prompts, serving, tenant=tenant, arrival_s=arrival_s)
        self.check_flood(len(requests), serving.limits)
        return Reply(
            self.core,
            call,
            requests,
            choices,
            model_name=self.served_name,
            clock=self.clock,
            stalled_reader_s=self.stalled_reader_s,
            room=self.score_room,
        )

    async def embed(self, http: HttpRequest) -> Response:
        """The embedding route, up to the point where the core is asked."""
        arrival_s = exchange_of(http.scope).arrival_s
        serving = self.open()
        tenant = tenant_of(http, self.keys)
        call = await parsed(parse_embeddings, await read_body(http))
        self.check_model(call.model)
        exchange_of(http.scope).asked = Asked(operation="embeddings", model=self.served_name)
        embeddings = embeddings_of(call, serving)
        inputs = await encode_inputs(call, serving)
        requests = build_pooled(call, inputs, embeddings, tenant=tenant, arrival_s=arrival_s)
        rule = self.tenants.of(tenant)
        at_once = min(len(requests), most_at_once(serving.limits, rule))
        self.check_flood(len(requests), serving.limits, at_once=at_once)
        return EmbeddingsReply(
            self.core,
            call,
            requests,
            limits=serving.limits,
            tenant=rule,
            model_name=self.served_name,
            clock=self.clock,
            stalled_reader_s=self.stalled_reader_s,
        )

    def open(self) -> Serving:
        """As `serving`, for requests that count as arrived though there is nothing to serve them with."""
        try:
            return self.serving()
        except ApiError:
            self.telemetry.turned_away()
            raise

    def check_model(self, name: str) -> None:
        """404 for another model than the one served; no name means that one."""
        if name and name != self.served_name:
            raise ApiError(
                404, f"the model {name[:200]!r} does not exist; this engine serves {self.served_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip

    def check_flood(self, count: int, limits: Limits, *, at_once: int | None = None) -> None:
        """429 before the core is asked, when more wait than it could ever let in: during a long step its
        inbox must not grow without bound. Twice the limit, as a queue that one tenant has filled still lets
        others in. Finer refusals are the scheduler's. `at_once`: so many of them, at most, go to the core
        together."""
        coming = count if at_once is None else at_once
        if self.core.unstarted + coming > 2 * limits.max_queued_requests + limits.max_batch_sequences:
            self.telemetry.turned_away(count)
            raise ApiError(
                429, f"the queue is full ({limits.max_queued_requests} requests)",
                code="queue_full", retry_after_s=1.0,
            )  # fmt: skip


async def read_body(http: HttpRequest) -> bytes:
    """The body, refused as soon as it is known to be none that we take: too large, too slow, no JSON."""
    check_content(http)
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    declared = http.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in http.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except ClientDisconnect as error:
        raise bad_request("the client left before its body was complete") from error
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} seconds") from error
    return bytes(body)


def check_content(http: HttpRequest) -> None:
    """415 for what is no JSON by its own word, and for compressed bodies. A page of another site can make a
    browser send a form or plain text here without asking first, but not JSON."""
    encoding = http.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"Content-Encoding {encoding[:40]!r} is not supported: send the body as it is")
    media = http.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media != JSON and not (media.startswith("application/") and media.endswith("+json")):
        raise ApiError(415, f"Content-Type {media[:80]!r} is not supported: send {JSON}")


async def parsed(parse: Callable[[bytes], T], body: bytes) -> T:
    """The body as `parse` understands it, without holding up everyone else for a large one."""
    if len(body) <= INLINE_BODY_BYTES:
        return parse(body)
    return await asyncio.to_thread(parse, body)


def tenant_of(http: HttpRequest, keys: KeyRing | None) -> str:
    """Who asks. With keys, the key says it, and no key is a 401; without, the header does, and no header is
    the tenant without a name."""
    if keys is not None:
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        tenant = keys.tenant(given)
        if tenant is None:
            raise ApiError(401, "this API needs a valid key", code="invalid_api_key")
    else:
        tenant = http.headers.get(TENANT_HEADER, "")
        if tenant and not _TENANT.fullmatch(tenant):
            raise bad_request(f"{TENANT_HEADER} must be 1 to 64 letters, digits or ._:@-")
    exchange_of(http.scope).asks(tenant)
    return tenant


def asked_for(call: Call, model: str) -> Asked:
    """What may be told of a call: nothing of what was written."""
    sampling, unsaid = call.sampling, call.unsaid
    return Asked(
        operation="chat" if call.kind is Kind.CHAT else "text_completion",
        model=model,
        stream=call.stream,
        samples=call.n,
        max_tokens=sampling.max_tokens,
        temperature=None if "temperature" in unsaid else sampling.temperature,
        top_p=None if "top_p" in unsaid else sampling.top_p,
        top_k=sampling.top_k,
    )


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers=headers, media_type=JSON)


async def api_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    exchange_of(http.scope).failed(error.status, error.code)
    # A client that is too slow goes; one that sends too much is let finish, or it would not hear why.
    leave = {"connection": "close"} if error.status == 408 else {}
    return json_response(error.body(), error.status, {**error.headers(), **leave})


async def http_error(http: HttpRequest, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's form too."""
    assert isinstance(error, HTTPException)
    exchange_of(http.scope).failed(error.status_code, None)
    headers = {"allow": allowed(http.app, http.scope)} if error.status_code == 405 else None
    message = f"{error.detail}: {http.method} {http.url.path[:200]}"
    return json_response(ApiError(error.status_code, message).body(), error.status_code, headers)


async def unexpected_error(http: HttpRequest, error: Exception) -> Response:
    exchange_of(http.scope).failed(500, type(error).__name__)
    return json_response(ApiError(500, f"internal error: {type(error).__name__}").body(), 500)


def public_app(front: Front, watchers: Sequence[Watcher] = ()) -> ASGIApp:
    """The application of the public port. Watchers hear of every request when it is over."""
    # Our own spans say more, and nothing that a client wrote; FastAPI's would stand beside them.
    app = FastAPI(openapi_url=None, telemetry={"tracing": False, "metrics": False, "logs": False})
    schema = msgspec.json.encode(public_document(keyed=front.keys is not None))
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected_error)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: HttpRequest) -> Response:
        return await front.generate(http, openai.parse_chat)

    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Response:
        return await front.generate(http, openai.parse_completion)

    @app.post("/v1/embeddings")
    async def embeddings(http: HttpRequest) -> Response:
        return await front.embed(http)

    @app.get("/openapi.json")
    async def openapi_document() -> Response:
        return json_response(schema)

    @app.get("/health")
    async def health() -> Response:
        front.serving()
        return json_response(b'{"status":"ok"}')

    def model() -> dict[str, Any]:
        context = front.serving().ready.capacity.max_model_tokens
        return answers.model(front.served_name, front.created, context)

    @app.get("/v1/models")
    async def models(http: HttpRequest) -> Response:
        tenant_of(http, front.keys)
        return json_response(msgspec.json.encode({"object": "list", "data": [model()]}))

    @app.get("/v1/models/{name:path}")
    async def one_model(http: HttpRequest, name: str) -> Response:
        tenant_of(http, front.keys)
        front.check_model(name)
        return json_response(msgspec.json.encode(model()))

    @app.post("/tokenize")
    async def tokenize(http: HttpRequest) -> Response:
        serving = front.serving()
        tenant_of(http, front.keys)
        body = await parsed(partial(openai.decode, type=TokenizeBody), await read_body(http))
        front.check_model(body.model)
        limit = serving.ready.capacity.max_model_tokens
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is not None:
            text = render(
                serving.tokeniser,
                openai.plain_messages(body.messages),
                add_generation_prompt=body.add_generation_prompt,
            )
            encode = serving.tokeniser.encode_chat
        else:
            text = body.prompt or ""
            encode = partial(serving.tokeniser.encode, add_special_tokens=body.add_special_tokens)
        ids = await encode_text(serving.tokeniser, encode, text, limit, "prompt")
        return json_response(msgspec.json.encode({"count": len(ids), "max_model_len": limit, "tokens": ids}))

    @app.post("/detokenize")
    async def detokenize(http: HttpRequest) -> Response:
        serving = front.serving()
        tenant_of(http, front.keys)
        body = await parsed(partial(openai.decode, type=DetokenizeBody), await read_body(http))
        front.check_model(body.model)
        if any(id >= serving.tokeniser.vocab_size for id in body.tokens):
            raise bad_request("tokens: a token id is outside the vocabulary", "tokens")
        text = await asyncio.to_thread(serving.tokeniser.decode, body.tokens)
        return json_response(msgspec.json.encode({"prompt": text}))

    return Exchanges(heads(app), front.clock, watchers)
