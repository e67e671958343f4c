"""An embeddings call on its way through the core, portion by portion, until one of the two ends.

Knows nothing of routes, and nothing of how a vector is made.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.types import Send

from headway_engine import embeddings
from headway_engine.core_client import CoreClient
from headway_engine.embeddings import EmbeddingsCall, Feed
from headway_engine.exchange import Exchange
from headway_engine.generation import Usage
from headway_engine.mailbox import CutOff, News
from headway_engine.protocol import Limits
from headway_engine.reply import STALLED_READER_S, CoreReply, cut_off, failure, refusal
from headway_engine.sequence import (
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    Request,
    RequestId,
    VectorOut,
)
from headway_engine.tenants import Tenant

INLINE_VECTOR_BYTES = 1 << 18
"""Answers with more of them are written in a thread: every stream would wait for them."""
DRAIN_PAUSE_S = 1.0
"""The longest pause before an input comes again in a drain: nobody else comes, so there is soon room."""


class EmbeddingsReply(CoreReply):
    """The answer of an embeddings call. Its inputs go to the core as `Feed` says."""

    def __init__(
        self,
        core: CoreClient,
        call: EmbeddingsCall,
        requests: Sequence[Request],
        *,
        limits: Limits,
        tenant: Tenant,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
        stalled_reader_s: float = STALLED_READER_S,
    ) -> None:
        super().__init__(core, requests, clock=clock, stalled_reader_s=stalled_reader_s)
        self._call = call
        self._feed = Feed(requests, limits, tenant)
        self._model_name = model_name
        self._vectors: dict[RequestId, bytes] = {}
        self._prompt_tokens = sum(len(r.prompt) for r in requests)
        self._refused: Rejected | None = None  # the latest input held back since one was answered

    def _note(self, exchange: Exchange) -> None:
        exchange.usage = Usage(self._prompt_tokens, 0, 0)

    async def _compute(self, send: Send) -> None:
        feed = self._feed
        self._core.accept(self._requests, self._box)
        self._core.hand_over(feed.take())
        while not feed.done:
            for item in await self._box.take():
                self._push(item)
            if self._refused is not None and feed.idle and not feed.done:
                if not feed.answered:
                    raise refusal(self._refused, "input")
                await self._pause(self._refused.retry_after_s)
                self._refused = None
            if portion := feed.take():
                # These wait from now on: the queue timeout is not for the whole call.
                now_s = self._clock()
                portion = [msgspec.structs.replace(r, arrival_s=now_s) for r in portion]
                self._core.hand_over(portion)
        await self._send_whole(send, await self._body())

    def _push(self, item: News) -> None:
        """Take news in. Raises ApiError when an input was refused for good, or failed."""
        match item:
            case VectorOut():
                self._vectors[item.id] = item.vector
            case Finished(reason=FinishReason.STOP):
                self._feed.end(item.id)
                self._refused = None
            case Finished(reason=FinishReason.TIMEOUT) if self._feed.answered:
                # Between two portions nothing of the call runs, so the core takes the next for a newcomer.
                self._hold_back(Rejected(item.id, RejectReason.QUEUE_FULL, item.message))
            case Finished():
                raise failure(item)
            case Rejected(reason=RejectReason.QUEUE_FULL):
                self._hold_back(item)
            case Rejected():
                raise refusal(item, "input")
            case CutOff():
                raise cut_off(item)
            case _:
                pass  # it runs, or has to give way for a while

    def _hold_back(self, refused: Rejected) -> None:
        self._refused = refused
        self._feed.hold_back(refused.id)

    async def _pause(self, seconds: float) -> None:
        """Before an input comes again. A drain makes it short, and the end of the engine, which is news, ends
        it."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._box.filled())]
        if self._core.ending.is_set():
            seconds = min(seconds, DRAIN_PAUSE_S)
        else:
            waits.append(asyncio.ensure_future(self._core.ending.wait()))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _body(self) -> bytes:
        vectors = [self._vectors[r.id] for r in self._requests]
        tokens = self._prompt_tokens
        if sum(map(len, vectors)) <= INLINE_VECTOR_BYTES:
            return embeddings.answer(self._call, vectors, self._model_name, tokens)
        return await asyncio.to_thread(embeddings.answer, self._call, vectors, self._model_name, tokens)
