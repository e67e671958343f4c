"""A small OpenAI endpoint with the manners a test asks for: how fast, how many, and what goes wrong."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from support.eventually import eventually


@dataclass
class FakeEndpoint:
    """`refuse_after`: requests beyond so many get 429. `cut_after`: streams break after so many tokens.
    `hold_until`: nobody gets a token before so many requests have come."""

    first_s: float = 0.0
    gap_s: float = 0.0
    refuse_after: int = 1_000_000
    cut_after: int = 1_000_000
    hold_until: int = 0
    error_event: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if len(self.bodies) > self.refuse_after:
            error = {"error": {"message": "the queue is full", "type": "rate_limit_error"}}
            return web.json_response(error, status=429, headers={"Retry-After": "1"})
        return await self._stream(request, body)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        if chat:  # as OpenAI does: a first event with the role and no text
            await response.write(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        await asyncio.sleep(self.first_s)
        await eventually(lambda: len(self.bodies) >= self.hold_until, what="requests to arrive")
        for n in range(body["max_tokens"]):
            if n == self.cut_after:
                if self.error_event:
                    await response.write(event({"error": {"message": "the engine is shutting down"}}))
                assert request.transport is not None
                request.transport.close()
                return response
            choice = {"delta": {"content": f"w{n} "}} if chat else {"text": f"w{n} "}
            await response.write(event({"choices": [choice]}))
            await asyncio.sleep(self.gap_s)
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        await response.write(event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@asynccontextmanager
async def fake_endpoint(**manners: Any) -> AsyncIterator[FakeEndpoint]:
    """A running fake."""
    fake = FakeEndpoint(**manners)
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/v1/chat/completions", fake.generate)
    app.router.add_post("/v1/completions", fake.generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield fake
    finally:
        await runner.cleanup()
