"""One streaming completion as its client sees it: chunks, each with the time at which it came."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp


async def sse_chunks(
    session: aiohttp.ClientSession, base: str, body: dict[str, Any]
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """POST /v1/completions; pairs of time.perf_counter() and chunk until [DONE]. RuntimeError on a refusal
    and on an error in mid-stream."""
    async with session.post(f"{base}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            at_s = time.perf_counter()
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"error in a stream: {chunk}")
            yield at_s, chunk
