"""One client of the OpenAI routes: sends an ask, behaves as the ask says, and judges what it gets.

Knows the rules every answer obeys (status, choices, usage, finish reasons, schemas, vectors, the end of a
stream), and nothing of other clients.
"""

import asyncio
import base64
import contextlib
import json
import math
import socket
from array import array
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import aiohttp
import jsonschema

from support.traffic import EMBEDDINGS, Ask, Manner

LONGEST_ANSWER_S = 300.0
"""A client that waits so long has found a bug, on any machine that is worth soaking on."""
LONGEST_STALL_S = 90.0
"""The engine takes a client that reads nothing for 60 s to be gone; this one looks what came of it after."""
SMALL_WINDOW_BYTES = 4096
"""Receive buffer of clients that do not read: the smaller, the sooner the engine feels it."""

LENGTH_TOLERANCE = 1e-3
LEAST_LIKENESS = 0.999
"""Cosine of two vectors of the same input, whatever batches they were computed in."""

FINISH_REASONS = {"stop", "length"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an ask ended for its client: a word to count by, and what was wrong (empty: nothing)."""

    word: str
    complaint: str = ""


async def send(http: aiohttp.ClientSession, base: str, ask: Ask) -> Outcome:
    """Send an ask to the engine at `base` and go through with its manner."""
    if ask.manner in (Manner.PAUSES, Manner.STALLS):
        return await _read_slowly(base, ask)
    patience_s = ask.after_s if ask.manner is Manner.LEAVES else LONGEST_ANSWER_S
    try:
        async with asyncio.timeout(patience_s):
            return await _exchange(http, base, ask)
    except TimeoutError:
        if ask.manner is Manner.LEAVES:
            return Outcome("left")
        return Outcome("no answer", f"no whole answer in {patience_s:.0f} s to {_short(ask)}")
    except (aiohttp.ClientError, ConnectionError) as error:
        return Outcome("broken", f"{type(error).__name__}: {error}: {_short(ask)}")


async def _exchange(http: aiohttp.ClientSession, base: str, ask: Ask) -> Outcome:
    async with http.post(base + ask.path, data=ask.body, headers=_headers(ask)) as response:
        body = await response.read()
        return judged(ask, response.status, body)


async def _read_slowly(base: str, ask: Ask) -> Outcome:
    """Speaks HTTP/1.0 by hand: what is not read must stay in the engine, and not in a client's buffers."""
    host, _, port = base.removeprefix("http://").partition(":")
    plug = socket.socket()
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_WINDOW_BYTES)
    plug.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(plug, (host, int(port)))
        await loop.sock_sendall(
            plug,
            f"POST {ask.path} HTTP/1.0\r\ncontent-type: application/json\r\n"
            f"content-length: {len(ask.body)}\r\n\r\n".encode()
            + ask.body,
        )
        first = await asyncio.wait_for(loop.sock_recv(plug, 1), LONGEST_ANSWER_S)
        await asyncio.sleep(LONGEST_STALL_S if ask.manner is Manner.STALLS else ask.after_s)
        raw = bytearray(first)
        with contextlib.suppress(ConnectionError):  # cut off: what came until then is judged
            while piece := await asyncio.wait_for(loop.sock_recv(plug, 1 << 16), LONGEST_ANSWER_S):
                raw += piece
    except (TimeoutError, ConnectionError) as error:
        return Outcome("broken", f"{type(error).__name__} {error}: slow reader of {_short(ask)}")
    finally:
        plug.close()
    head, _, body = bytes(raw).partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status == 200 and ask.manner is Manner.STALLS and not body.rstrip().endswith(b"[DONE]"):
        return Outcome("cut off")
    outcome = judged(ask, status, body)
    if outcome.word != "200":
        return outcome
    return Outcome(
        "stalled, read whole" if ask.manner is Manner.STALLS else "paused, read whole", outcome.complaint
    )


def judged(ask: Ask, status: int, body: bytes) -> Outcome:
    """What a whole answer is worth."""
    word = str(status)
    if ask.bad:
        fine = 400 <= status < 500 and "error" in json.loads(body)
        return Outcome(word, "" if fine else f"{status} to a bad body: {ask.body[:200]!r}: {body[:200]!r}")
    if status == 429:
        return Outcome(word)
    if status != 200:
        return Outcome(word, f"{status} {body[:300]!r} to {_short(ask)}")
    try:
        if ask.stream:
            wrong = _wrong_stream(ask, body)
        elif ask.path == EMBEDDINGS:
            wrong = _wrong_vectors(ask, json.loads(body))
        else:
            wrong = _wrong_answer(ask, json.loads(body))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        wrong = f"{type(error).__name__}: {error}: {body[-300:]!r}"
    return Outcome(word, f"{wrong}: {_short(ask)}" if wrong else "")


def _wrong_answer(ask: Ask, answer: dict[str, Any]) -> str:
    texts = {}
    for choice in answer["choices"]:
        texts[choice["index"]] = (
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice["finish_reason"],
        )
    usage = answer["usage"]
    if usage["completion_tokens"] > ask.sequences * _most_tokens(ask):
        return f"usage {usage}"
    return _wrong_choices(ask, texts)


def _wrong_vectors(ask: Ask, answer: dict[str, Any]) -> str:
    """One for each input, in order, alike in size, finite, of length 1, and the same for the same input."""
    if [item["index"] for item in answer["data"]] != list(range(ask.sequences)):
        return f"{len(answer['data'])} vectors instead of {ask.sequences}, or out of order"
    vectors = [_floats(item["embedding"]) for item in answer["data"]]
    if len({len(vector) for vector in vectors}) != 1 or not vectors[0]:
        return f"vectors of {sorted({len(vector) for vector in vectors})} dimensions"
    for index, vector in enumerate(vectors):
        length = math.hypot(*vector)
        if not abs(length - 1) < LENGTH_TOLERANCE:  # what is no number is neither
            return f"vector {index} has length {length}"
    one, other = (vectors[place] for place in ask.twins)
    likeness = math.fsum(a * b for a, b in zip(one, other, strict=True))
    if likeness < LEAST_LIKENESS:
        return f"vectors {ask.twins} are of one input and have a cosine of {likeness}"
    if answer["usage"]["prompt_tokens"] < ask.sequences:
        return f"usage {answer['usage']}"
    return ""


def _floats(embedding: list[float] | str) -> list[float]:
    """The vector in either encoding."""
    if isinstance(embedding, str):
        return array("f", base64.b64decode(embedding)).tolist()
    return embedding


def _wrong_stream(ask: Ask, body: bytes) -> str:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1].strip() != b"[DONE]":
        return f"a stream that ends with {body[-300:]!r}"
    texts: defaultdict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    for event in events[:-1]:
        chunk = json.loads(event)
        if "error" in chunk:
            return f"an error in the stream: {chunk}"
        for choice in chunk["choices"]:
            index = choice["index"]
            if index in reasons:
                return f"choice {index} goes on after its end"
            texts[index] += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    return _wrong_choices(ask, {i: (texts[i], reasons.get(i, "none")) for i in texts | reasons})


def _wrong_choices(ask: Ask, choices: dict[int, tuple[str, str]]) -> str:
    """`choices`: index to text and finish reason."""
    if sorted(choices) != list(range(ask.sequences)):
        return f"choices {sorted(choices)} instead of {ask.sequences}"
    for index, (text, reason) in choices.items():
        if reason not in FINISH_REASONS:
            return f"choice {index} ends with {reason}"
        if ask.expects is not None and text != ask.expects[index]:
            return f"{text!r} instead of {ask.expects[index]!r}"
        if ask.schema is not None and reason == "stop":
            jsonschema.validate(json.loads(text), ask.schema)
    return ""


def _headers(ask: Ask) -> dict[str, str]:
    return {"content-type": "application/json", **ask.headers}


def _most_tokens(ask: Ask) -> int:
    return int(json.loads(ask.body)["max_tokens"])


def _short(ask: Ask) -> str:
    return f"{ask.path} {ask.body[:300]!r}"
