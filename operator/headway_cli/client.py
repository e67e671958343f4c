"""One streamed request to an OpenAI endpoint, timed from the client's side.

Knows nothing of traces and SLOs: it sends a prompt and says what became of it. Times are monotonic.
"""

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp
import msgspec

TRANSPORT_ERRORS = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


class Api(StrEnum):
    """Which of the two OpenAI calls carries the prompt."""

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Api.CHAT else "/v1/completions"


class Ending(StrEnum):
    """How a request ended, seen from outside. REJECTED is 429 or 503: the server said no in good order."""

    FINISHED = "finished"
    REJECTED = "rejected"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request.

    `ttft_s` counts from sending to the first piece with text in it, None where none came. `gaps_s` are the
    times between pieces. `http_status` is 0 where no answer came at all.
    """

    ending: Ending
    http_status: int
    ttft_s: float | None
    gaps_s: tuple[float, ...]
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go, and as which model."""

    url: str  # without /v1
    model: str
    api: Api = Api.CHAT
    api_key: str = ""

    def headers(self) -> dict[str, str]:
        """The bearer key, where there is one."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    prompt: str,
    max_tokens: int,
    *,
    exact_length: bool = False,
    timeout_s: float = 600.0,
    keep_text: bool = False,
    on_text: "asyncio.Queue[str] | None" = None,
) -> Answer:
    """Send one prompt and read the stream to its end. Never raises for what the server or the network does.

    `exact_length` asks for `max_tokens` tokens whatever the model says (`ignore_eos`), as traces need it.
    """
    body: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.api is Api.CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if exact_length:
        body["ignore_eos"] = True
    reading = _Reading(started_s=time.monotonic())
    status = 0
    try:
        async with session.post(
            endpoint.url + endpoint.api.path,
            json=body,
            headers=endpoint.headers(),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            status = response.status
            if status != 200:
                message = _error_text(await response.read())
                ending = Ending.REJECTED if status in (429, 503) else Ending.FAILED
                return reading.answer(ending, status, error=message)
            async for data in response.content.iter_any():
                for piece in reading.feed(data, time.monotonic()):
                    if on_text is not None:
                        on_text.put_nowait(piece)
    except TRANSPORT_ERRORS as e:
        return reading.answer(Ending.FAILED, status, error=f"{type(e).__name__}: {e}".rstrip(": "))
    if reading.error or not reading.done:
        return reading.answer(Ending.FAILED, status, error=reading.error or "the stream was cut off")
    return reading.answer(Ending.FINISHED, status, keep_text=keep_text)


async def served_model(session: aiohttp.ClientSession, url: str, api_key: str = "") -> str:
    """The first model that the endpoint lists. Raises aiohttp.ClientError, OSError or ValueError."""
    headers = Endpoint(url, "", api_key=api_key).headers()
    timeout = aiohttp.ClientTimeout(total=30)
    async with session.get(f"{url}/v1/models", headers=headers, timeout=timeout) as response:
        response.raise_for_status()
        models = (await response.json()).get("data") or []
    if not models:
        raise ValueError("the endpoint lists no model")
    return str(models[0]["id"])


@dataclass(slots=True)
class _Reading:
    """A stream of server-sent events, half read."""

    started_s: float
    rest: bytes = b""
    first_s: float | None = None
    last_s: float = 0.0
    done: bool = False
    error: str = ""
    usage: tuple[int, int] | None = None
    gaps_s: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """Take bytes that arrived at `now_s`; the texts that were completed by them."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        texts = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done = True
            elif text := self._chunk(payload):
                self._arrived(now_s)
                texts.append(text)
        self.pieces += texts
        return texts

    def _chunk(self, payload: bytes) -> str:
        try:
            chunk = msgspec.json.decode(payload)
        except msgspec.DecodeError:
            self.error = f"not JSON: {payload[:80]!r}"
            return ""
        if "error" in chunk:
            self.error = str(chunk["error"].get("message", chunk["error"]))
            return ""
        if usage := chunk.get("usage"):
            self.usage = (int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)))
        texts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in chunk.get("choices", ())]
        return "".join(texts)

    def _arrived(self, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s

    def answer(self, ending: Ending, status: int, *, error: str = "", keep_text: bool = False) -> Answer:
        prompt_tokens, output_tokens = self.usage or (0, len(self.pieces))
        return Answer(
            ending=ending,
            http_status=status,
            ttft_s=None if self.first_s is None else self.first_s - self.started_s,
            gaps_s=tuple(self.gaps_s),
            e2e_s=time.monotonic() - self.started_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            text="".join(self.pieces) if keep_text else "",
            error=error,
        )


def _error_text(body: bytes) -> str:
    """The message of an OpenAI error body, or the beginning of whatever came."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip()
