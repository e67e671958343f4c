"""The public port: OpenAI's routes on a core client. Reads bodies, hands them on, writes what comes back.

A request's task ends in one of four ways: answered, refused, cancelled because the client left or
stopped reading, or failed with the core. In each the core is told and the counters agree. Knows
nothing of torch.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway_engine import openai
from headway_engine.core_client import CoreClient, Mailbox, News, Phase
from headway_engine.generation import Choice, usage
from headway_engine.messages import Ready
from headway_engine.openai import ApiError, Call, Head, bad_request
from headway_engine.protocol import TENANT_HEADER, Limits, Outcome
from headway_engine.sequence import Finished, FinishReason, Rejected, RejectReason, Request
from headway_engine.telemetry import Telemetry
from headway_engine.text import TextError, Tokeniser

MAX_BODY_BYTES = 32 << 20
INLINE_PROMPT_CHARS = 2_000
"""Longer prompts are tokenised in a thread: other requests' tokens go out meanwhile."""
STALLED_READER_S = 60.0
"""A client that reads nothing for so long is taken to be gone."""
STARTING_RETRY_S = 5.0
DRAINING_RETRY_S = 2.0
_TENANT = re.compile(r"[A-Za-z0-9._:@-]{1,64}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Serving:
    """What is there once the core is ready."""

    ready: Ready
    tokeniser: Tokeniser
    limits: Limits

    @property
    def vocab_size(self) -> int:
        """Ids below this one have a meaning and weights. A tokenizer may know more than the model."""
        return min(self.tokeniser.vocab_size, self.ready.vocab_size or self.tokeniser.vocab_size)


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
        keys: Mapping[str, str] | None = None,
        stalled_reader_s: float = STALLED_READER_S,
    ) -> None:
        self.core = core
        self.telemetry = telemetry
        self.served_name = served_name
        self.created = created
        self.clock = clock
        self.keys = None if keys is None else {digest(key): tenant for key, tenant in keys.items()}
        self.stalled_reader_s = stalled_reader_s

    def serving(self) -> Serving:
        """Raises 503 while there is nothing to serve with."""
        core = self.core
        if core.draining:
            raise ApiError(
                503, "the engine is shutting down", code="draining", retry_after_s=DRAINING_RETRY_S
            )
        if core.phase is not Phase.READY or not (core.ready and core.tokeniser and core.limits):
            raise ApiError(
                503, f"the engine is not ready: {core.doing}", code="starting", retry_after_s=STARTING_RETRY_S
            )
        return Serving(core.ready, core.tokeniser, core.limits)

    async def generate(self, http: HttpRequest, parse: Callable[[bytes], Call]) -> Response:
        """A generating route, up to the point where the core is asked."""
        arrival_s = self.clock()
        try:
            serving = self.serving()
        except ApiError:
            self.telemetry.turned_away()
            raise
        tenant = tenant_of(http, self.keys)
        call = parse(await read_body(http))
        self.check_model(call.model)
        prompts = await encode_prompts(call, serving)
        requests, choices = build(call, prompts, serving, tenant=tenant, arrival_s=arrival_s)
        self.check_flood(len(requests), serving.limits)
        return Reply(self, call, requests, choices)

    def check_model(self, name: str) -> None:
        """404 for another model than the one served; no name means that one."""
        if name and name != self.served_name:
            raise ApiError(
                404, f"the model {name!r} does not exist; this engine serves {self.served_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip

    def check_flood(self, count: int, limits: Limits) -> None:
        """429 before the core is asked, when more wait than it could ever let in: during a long step its
        inbox must not grow without bound. Finer refusals are the scheduler's."""
        if self.core.unstarted + count > limits.max_queued_requests + limits.max_batch_sequences:
            self.telemetry.turned_away(count)
            raise ApiError(
                429, f"the queue is full ({limits.max_queued_requests} requests)",
                code="queue_full", retry_after_s=1.0,
            )  # fmt: skip


async def read_body(http: HttpRequest) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    declared = http.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async for piece in http.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise too_large
    except ClientDisconnect as error:
        raise bad_request("the client left before its body was complete") from error
    return bytes(body)


def tenant_of(http: HttpRequest, keys: Mapping[bytes, str] | None) -> str:
    """Who asks. With keys, the key says it, and no key is a 401; without, the header does, and no header is
    the tenant without a name."""
    if keys is not None:
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        tenant = keys.get(digest(given))
        if tenant is None:
            raise ApiError(401, "this API needs a valid key", code="invalid_api_key")
        return tenant
    tenant = http.headers.get(TENANT_HEADER, "")
    if tenant and not _TENANT.fullmatch(tenant):
        raise bad_request(f"{TENANT_HEADER} must be 1 to 64 letters, digits or ._:@-")
    return tenant


def digest(key: str) -> bytes:
    """Keys are kept and looked up by digest: how long a look-up takes says nothing about them."""
    return hashlib.sha256(key.encode()).digest()


async def encode_prompts(call: Call, serving: Serving) -> list[list[int]]:
    """Token ids of each prompt; 400 for one that is empty, over-long or not of this model."""
    tokeniser = serving.tokeniser
    limit = serving.ready.capacity.max_model_tokens - 1  # room for one token of output
    if call.messages:
        text = render(tokeniser, call.messages, add_generation_prompt=True, **call.template_values)
        ids = await encode_text(tokeniser, tokeniser.encode_chat, text, limit, "messages")
        return [checked(ids, limit, serving.vocab_size, "messages")]
    prompts = []
    for prompt in call.prompts:
        if isinstance(prompt, str):
            ids = await encode_text(tokeniser, tokeniser.encode, prompt, limit, "prompt")
        else:
            ids = list(prompt)
        prompts.append(checked(ids, limit, serving.vocab_size, "prompt"))
    return prompts


def render(tokeniser: Tokeniser, messages: Any, **values: Any) -> str:
    """The prompt of a chat; 400 when the model's template refuses it."""
    try:
        return tokeniser.render_chat(messages, **values)
    except TextError as error:
        raise bad_request(str(error), "messages", "chat_template") from error


async def encode_text(
    tokeniser: Tokeniser, encode: Callable[[str], list[int]], text: str, limit: int, param: str
) -> list[int]:
    """Token ids; a text that must be too long is refused by its length, before any work."""
    if len(text) > (limit + 1) * tokeniser.longest_token_chars:
        raise too_long(f"at least {len(text) // tokeniser.longest_token_chars}", limit, param)
    if len(text) <= INLINE_PROMPT_CHARS:
        return encode(text)
    return await asyncio.to_thread(encode, text)


def checked(ids: list[int], limit: int, vocab_size: int, param: str) -> list[int]:
    """The ids, when they can be run."""
    if not ids:
        raise bad_request(f"{param}: must not be empty", param)
    if len(ids) > limit:
        raise too_long(str(len(ids)), limit, param)
    if max(ids) >= vocab_size:
        raise bad_request(f"{param}: token id {max(ids)} is outside the vocabulary ({vocab_size})", param)
    return ids


def too_long(count: str, limit: int, param: str) -> ApiError:
    return bad_request(
        f"{param}: {count} tokens; this model takes at most {limit} and one of output",
        param,
        "context_length_exceeded",
    )


def build(
    call: Call, prompts: list[list[int]], serving: Serving, *, tenant: str, arrival_s: float
) -> tuple[list[Request], list[Choice]]:
    """One Request and one Choice for every prompt and sample. Raises 400 for what the model cannot do."""
    context = serving.ready.capacity.max_model_tokens
    tokeniser = serving.tokeniser
    asked = call.sampling
    if asked.max_tokens > context:
        name = call.max_tokens_field
        raise bad_request(
            f"{name}: {asked.max_tokens} is above the model's context of {context} tokens", name
        )
    if any(token >= serving.vocab_size for token, _ in asked.logit_bias):
        raise bad_request("logit_bias: a token id is outside the vocabulary", "logit_bias")
    ends = frozenset(() if call.ignore_eos else serving.ready.stop_token_ids) | frozenset(
        asked.stop_token_ids
    )
    requests, choices = [], []
    for number, prompt in enumerate(prompts):
        room = context - len(prompt)
        max_tokens = min(asked.max_tokens or room, room)
        for sample in range(call.n):
            index = number * call.n + sample
            sampling = msgspec.structs.replace(
                asked,
                max_tokens=max_tokens,
                min_tokens=min(asked.min_tokens, max_tokens),
                top_k=min(asked.top_k, serving.vocab_size),
                seed=openai.seed_of(call, index),
                stop_token_ids=tuple(sorted(ends)),
            )
            requests.append(
                Request(
                    id=secrets.token_hex(12),
                    prompt=tuple(prompt),
                    sampling=sampling,
                    arrival_s=arrival_s,
                    tenant=tenant,
                    priority=call.priority,
                    cache_salt=tenant,
                )
            )
            choices.append(
                Choice(
                    index,
                    prompt,
                    tokeniser.decode,
                    tokeniser.piece,
                    stops=call.stops,
                    stop_token_ids=ends,
                    min_tokens=sampling.min_tokens,
                    echo=tokeniser.decode(prompt) if call.echo else "",
                )
            )
    return requests, choices


class Reply(Response):
    """Runs one call through the core while it watches the client, for streams and whole answers alike.

    Starlette watches only the clients of its own streaming responses; a client that hangs up on a whole
    answer would be computed for to the end.
    """

    def __init__(self, front: Front, call: Call, requests: list[Request], choices: list[Choice]) -> None:
        super().__init__()
        self._front = front
        self._call = call
        self._requests = requests
        self._choices = {r.id: c for r, c in zip(requests, choices, strict=True)}
        self._box = Mailbox()
        self._head = Head(call.kind, openai.new_id(call.kind), int(time.time()), front.served_name)
        self._streaming = False  # headers of a stream are out
        self._sending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        core = self._front.core
        core.submit(self._requests, self._box)
        answering = asyncio.ensure_future(self._answer(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            stalled_s = self._front.stalled_reader_s
            while not self._stalled(stalled_s):
                tasks = {answering, leaving}
                done, _ = await asyncio.wait(tasks, timeout=stalled_s, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
            if answering.done():
                answering.result()
        finally:
            for request in self._requests:
                core.end(request.id, Outcome.ABORTED)
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    def _stalled(self, limit_s: float) -> bool:
        """The client has taken nothing for so long that it is treated as gone."""
        since_s = self._sending_since_s
        return since_s is not None and self._front.clock() - since_s >= limit_s

    async def _answer(self, send: Send) -> None:
        try:
            if self._call.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        except ApiError as error:
            if self._streaming:
                await self._send_body(send, openai.error_event(error), more=False)
            else:
                await self._start(send, error.status, JSON, error.headers())
                await self._send_body(send, error.body(), more=False)

    async def _whole(self, send: Send) -> None:
        while not all(c.done for c in self._choices.values()):
            self._push(await self._box.take())
        deltas = [c.take() for c in self._choices.values()]
        body = openai.answer(
            self._head, [d for d in deltas if d], self._usage(), logprobs=self._call.logprobs
        )
        await self._start(send, 200, JSON, {"content-length": str(len(body))})
        await self._send_body(send, body, more=False)

    async def _stream(self, send: Send) -> None:
        call = self._call
        while not all(c.done for c in self._choices.values()):
            self._push(await self._box.take())
            events = []
            for choice in self._choices.values():
                delta = choice.take()
                if delta is not None:
                    usage_now = self._usage() if call.continuous_usage else None
                    events.append(
                        openai.chunk(self._head, delta, usage=usage_now, usage_field=call.include_usage)
                    )
            if events:
                await self._start_stream(send)
                await self._send_body(send, b"".join(events), more=True)
        last = openai.usage_chunk(self._head, self._usage()) if call.include_usage else b""
        await self._send_body(send, last + openai.DONE, more=False)

    def _push(self, news: list[News]) -> None:
        """Take news in. Raises ApiError when a choice was refused or failed: that ends the whole answer."""
        for item in news:
            if isinstance(item, Rejected):
                raise refusal(item)
            choice = self._choices[item.id]
            if choice.done:
                continue
            choice.push(item)
            if choice.failure is not None:
                raise failure(choice.failure)
            if choice.stopped_here:
                self._front.core.end(item.id, Outcome.FINISHED)

    def _usage(self) -> Any:
        return usage(list(self._choices.values()), self._call.n)

    async def _start_stream(self, send: Send) -> None:
        """Headers of a stream go out with its first event: until then, a refusal can still be a 429."""
        if not self._streaming:
            self._streaming = True
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._start(send, 200, "text/event-stream; charset=utf-8", headers)

    async def _start(self, send: Send, status: int, content_type: str, headers: dict[str, str]) -> None:
        raw = [(b"content-type", content_type.encode())]
        raw += [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send_body(self, send: Send, body: bytes, *, more: bool) -> None:
        # A timer for each send would cost as much as the send.
        self._sending_since_s = self._front.clock()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since_s = None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(rejected: Rejected) -> ApiError:
    """The scheduler's refusal as a status."""
    message, retry_s = rejected.message, rejected.retry_after_s
    match rejected.reason:
        case RejectReason.TOO_LONG:
            return bad_request(message, "prompt", "context_length_exceeded")
        case RejectReason.QUEUE_FULL:
            return ApiError(429, message, code=str(rejected.reason), retry_after_s=retry_s)
        case RejectReason.DRAINING:
            return ApiError(503, message, code=str(rejected.reason), retry_after_s=retry_s)


def failure(finished: Finished) -> ApiError:
    """A sequence that ended without an answer, as a status."""
    if finished.reason is FinishReason.TIMEOUT:
        message = finished.message or "the request waited longer than the queue timeout"
        return ApiError(429, message, code="queue_timeout", retry_after_s=1.0)
    return ApiError(500, finished.message or "the engine gave the request up", code=str(finished.reason))


class RequestIds:
    """Gives every answer an X-Request-Id: the client's own if it is printable, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v.decode("latin-1") for k, v in scope["headers"] if k == b"x-request-id"), "")
        id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", id.encode("latin-1"))]
            await send(message)

        await self._app(scope, receive, send_with_id)


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers=headers, media_type=JSON)


async def api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return json_response(error.body(), error.status, error.headers())


async def http_error(_: HttpRequest, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's form too."""
    assert isinstance(error, HTTPException)
    return json_response(ApiError(error.status_code, str(error.detail)).body(), error.status_code)


async def unexpected_error(_: HttpRequest, error: Exception) -> Response:
    return json_response(ApiError(500, f"internal error: {type(error).__name__}").body(), 500)


def public_app(front: Front) -> ASGIApp:
    """The application of the public port."""
    app = FastAPI(title="Headway engine", docs_url=None, redoc_url=None)
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected_error)

    @app.post("/v1/chat/completions", openapi_extra=openai.request_body(openai.ChatBody))
    async def chat_completions(http: HttpRequest) -> Response:
        return await front.generate(http, openai.parse_chat)

    @app.post("/v1/completions", openapi_extra=openai.request_body(openai.CompletionBody))
    async def completions(http: HttpRequest) -> Response:
        return await front.generate(http, openai.parse_completion)

    def model() -> dict[str, Any]:
        context = front.serving().ready.capacity.max_model_tokens
        return openai.model(front.served_name, front.created, context)

    @app.get("/v1/models")
    async def models(http: HttpRequest) -> Response:
        tenant_of(http, front.keys)
        return json_response(msgspec.json.encode({"object": "list", "data": [model()]}))

    @app.get("/v1/models/{name:path}")
    async def one_model(http: HttpRequest, name: str) -> Response:
        tenant_of(http, front.keys)
        front.check_model(name)
        return json_response(msgspec.json.encode(model()))

    @app.post("/tokenize", openapi_extra=openai.request_body(openai.TokenizeBody))
    async def tokenize(http: HttpRequest) -> Response:
        serving = front.serving()
        tenant_of(http, front.keys)
        body = openai.decode(await read_body(http), openai.TokenizeBody)
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

    @app.post("/detokenize", openapi_extra=openai.request_body(openai.DetokenizeBody))
    async def detokenize(http: HttpRequest) -> Response:
        serving = front.serving()
        tenant_of(http, front.keys)
        body = openai.decode(await read_body(http), openai.DetokenizeBody)
        front.check_model(body.model)
        if any(id >= serving.tokeniser.vocab_size for id in body.tokens):
            raise bad_request("tokens: a token id is outside the vocabulary", "tokens")
        text = await asyncio.to_thread(serving.tokeniser.decode, body.tokens)
        return json_response(msgspec.json.encode({"prompt": text}))

    return RequestIds(app)
