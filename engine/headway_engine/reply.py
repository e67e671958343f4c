"""One call on its way through the core: tokens come back and go out to the client, until one of the two ends.

A reply ends in one of four ways: answered, refused, cancelled because the client left or stopped
reading, or failed with the core. In each the core is told and the counters agree. Knows nothing of routes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway_engine import answers
from headway_engine.answers import ApiError, Head, bad_request
from headway_engine.core_client import CoreClient
from headway_engine.exchange import Exchange, exchange_of
from headway_engine.generation import Choice, Usage, usage
from headway_engine.logs import fields
from headway_engine.mailbox import CutOff, Mailbox, News
from headway_engine.openai import Call
from headway_engine.protocol import Outcome
from headway_engine.score_room import ScoreRoom
from headway_engine.sequence import (
    Event,
    Finished,
    FinishReason,
    PromptOut,
    Rejected,
    RejectReason,
    Request,
)

log = logging.getLogger("headway.front")

JSON = "application/json"
STALLED_READER_S = 60.0
"""A client that reads nothing for so long is taken to be gone."""
MOST_BETWEEN_LOOKS_S = 15.0
"""Clients are looked at so often at least, and four times in the time that they have."""


class CoreReply(Response):
    """Runs requests through the core while it watches the client; subclasses say what is answered.

    Starlette watches only the clients of its own streaming responses; a client that hangs up on a whole
    answer would be computed for to the end.
    """

    def __init__(
        self,
        core: CoreClient,
        requests: Sequence[Request],
        *,
        clock: Callable[[], float],
        stalled_reader_s: float,
    ) -> None:
        super().__init__()
        self._core = core
        self._clock = clock
        self._stalled_reader_s = stalled_reader_s
        self._requests = requests
        self._exchange = exchange_of({})
        self._box = Mailbox()
        self._streaming = False  # headers of a stream are out
        self._sending_since_s: float | None = None

    async def _compute(self, send: Send) -> None:
        """Submit the requests and answer. Raises ApiError when there is no answer, or no end of it."""
        raise NotImplementedError

    def _note(self, exchange: Exchange) -> None:
        """Leave in the exchange what is known in the end, however it ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._exchange = exchange_of(scope)
        self._exchange.journeys = self._box.journeys
        with self._core.answering():
            await self._run(receive, send)

    async def _run(self, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        between_looks_s = min(MOST_BETWEEN_LOOKS_S, self._stalled_reader_s / 4)
        try:
            while not self._stalled():
                tasks = {answering, leaving}
                done, _ = await asyncio.wait(
                    tasks, timeout=between_looks_s, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    break
            if answering.done():
                answering.result()
        finally:
            self._end_all(Outcome.ABORTED)
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self._note(self._exchange)

    def _end_all(self, outcome: Outcome) -> None:
        """What has not ended of the call ends now."""
        for request in self._requests:
            self._core.end(request.id, outcome)

    def _stalled(self) -> bool:
        """The client has taken nothing for so long that it is treated as gone."""
        since_s = self._sending_since_s
        return since_s is not None and self._clock() - since_s >= self._stalled_reader_s

    async def _answer(self, send: Send) -> None:
        try:
            await self._compute(send)
        except ApiError as error:
            self._exchange.failed(error.status, error.code)
            # Before the client hears of it, which may take long. All of the call ends as its client sees it.
            self._end_all(Outcome.FAILED if error.status == 500 else Outcome.REJECTED)
            if self._streaming:
                await self._send_body(send, answers.error_event(error), more=False)
            else:
                await self._start(send, error.status, JSON, error.headers())
                await self._send_body(send, error.body(), more=False)

    async def _send_whole(self, send: Send, body: bytes) -> None:
        await self._start(send, 200, JSON, {"content-length": str(len(body))})
        await self._send_body(send, body, more=False)

    async def _start(self, send: Send, status: int, content_type: str, headers: dict[str, str]) -> None:
        raw = [(b"content-type", content_type.encode())]
        raw += [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send_body(self, send: Send, body: bytes, *, more: bool) -> None:
        # A timer for each send would cost as much as the send.
        self._sending_since_s = self._clock()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since_s = None


class Reply(CoreReply):
    """The answer of a generating call, streams and whole answers alike."""

    def __init__(
        self,
        core: CoreClient,
        call: Call,
        requests: Sequence[Request],
        choices: Sequence[Choice],
        *,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
        stalled_reader_s: float = STALLED_READER_S,
        room: ScoreRoom | None = None,
    ) -> None:
        super().__init__(core, requests, clock=clock, stalled_reader_s=stalled_reader_s)
        self._call = call
        self._choices = choices
        self._room = room or ScoreRoom()
        each = len(choices) // len(requests)  # more than one where nothing is generated
        self._told = {r.id: choices[i * each : (i + 1) * each] for i, r in enumerate(requests)}
        self._request_of = {c.index: id for id, told in self._told.items() for c in told}
        self._head = Head(call.kind, answers.new_id(call.kind), int(time.time()), model_name)

    def _note(self, exchange: Exchange) -> None:
        exchange.response_id = self._head.id
        exchange.usage = self._usage()
        exchange.finish_reasons = tuple(c.told_reason for c in self._choices if c.told_reason)

    async def _compute(self, send: Send) -> None:
        values = self._scores()
        if not self._room.take(values):
            self._core.turn_away(len(self._requests))
            raise self._room.refusal(values)
        try:
            self._core.submit(self._requests, self._box)
            if self._call.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        finally:
            self._room.give_back(values)

    def _scores(self) -> int:
        """Log-probabilities of prompts in the whole answer."""
        if not self._call.scores:
            return 0
        return sum(len(c.prompt) for c in self._choices) * (self._call.sampling.prompt_logprobs + 1)

    async def _whole(self, send: Send) -> None:
        while not all(c.done for c in self._choices):
            await self._push(await self._box.take())
        deltas = [d for d in (c.take() for c in self._choices) if d]
        write = partial(answers.answer, self._head, deltas, self._usage(), logprobs=self._call.logprobs)
        # The log-probabilities of long prompts are megabytes, and every stream would wait for them.
        body = await asyncio.to_thread(write) if self._call.scores else write()
        await self._send_whole(send, body)

    async def _stream(self, send: Send) -> None:
        call = self._call
        while not all(c.done for c in self._choices):
            await self._push(await self._box.take())
            events = []
            for choice in self._choices:
                delta = choice.take()
                if delta is not None:
                    usage_now = self._usage() if call.continuous_usage else None
                    events.append(
                        answers.chunk(self._head, delta, usage=usage_now, usage_field=call.include_usage)
                    )
            if events:
                await self._start_stream(send)
                await self._send_body(send, b"".join(events), more=True)
        last = answers.usage_chunk(self._head, self._usage()) if call.include_usage else b""
        await self._send_body(send, last + answers.DONE, more=False)

    async def _push(self, news: list[News]) -> None:
        """Take news in. Raises ApiError when a choice was refused or failed: that ends the whole answer."""
        for item in news:
            if isinstance(item, Rejected):
                raise refusal(item)
            if isinstance(item, CutOff):
                raise cut_off(item)
            for choice in self._concerned(item):
                if choice.done:
                    continue
                choice.push(item)
                if isinstance(item, PromptOut):
                    await asyncio.sleep(0)  # there may be many, and others' tokens are to go out between
                if choice.failure is not None:
                    raise failure(choice.failure)
                if choice.stopped_here:
                    self._core.end(self._request_of[choice.index], Outcome.FINISHED)

    def _concerned(self, event: Event) -> Sequence[Choice]:
        """Whose event it is. The scores of a prompt are for all its samples: the first asked for them."""
        told = self._told[event.id]
        if not isinstance(event, PromptOut):
            return told
        first = told[0].index
        return self._choices[first : first + self._call.n]

    def _usage(self) -> Usage:
        return usage(self._choices, self._call.n)

    async def _start_stream(self, send: Send) -> None:
        """Headers of a stream go out with its first event: until then, a refusal can still be a 429."""
        if not self._streaming:
            self._streaming = True
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._start(send, 200, "text/event-stream; charset=utf-8", headers)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def cut_off(item: CutOff) -> ApiError:
    """The end of the engine as a status."""
    return ApiError(503, item.message, code=item.code, retry_after_s=item.retry_after_s)


def refusal(rejected: Rejected, field: str = "prompt") -> ApiError:
    """The scheduler's refusal as a status; `field` of the body holds what was refused."""
    message, retry_s = rejected.message, rejected.retry_after_s
    match rejected.reason:
        case RejectReason.TOO_LONG:
            return bad_request(message, field, "context_length_exceeded")
        case RejectReason.QUEUE_FULL:
            return ApiError(429, message, code=str(rejected.reason), retry_after_s=retry_s)
        case RejectReason.DRAINING:
            return ApiError(503, message, code=str(rejected.reason), retry_after_s=retry_s)


def failure(finished: Finished) -> ApiError:
    """A sequence that ended without an answer, as a status."""
    if finished.reason is FinishReason.TIMEOUT:
        message = finished.message or "the request waited longer than the queue timeout"
        return ApiError(429, message, code="queue_timeout", retry_after_s=1.0)
    # What an exception says is for us; the id leads the client's report to the line of the log.
    log.error(fields("request-failed", id=finished.id, reason=finished.reason, error=finished.message))
    message = f"the engine failed to compute this request (request id {finished.id})"
    return ApiError(500, message, code=str(finished.reason))
