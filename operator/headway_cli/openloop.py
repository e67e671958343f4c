"""Open-loop replay of a trace: every request leaves when the trace says so, whatever the server does.

A closed loop would hide queueing, because a slow server would then be asked less. How late requests left
is recorded, so that a client too slow for the load shows up as such. Knows nothing of terminals.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import aiohttp

from headway_cli import client, prompts
from headway_cli.client import Api, Endpoint
from headway_cli.report import Record
from headway_cli.traces import Arrival

CHAT_FRAME_TOKENS = 30
"""About what a chat template adds to a prompt (SmolLM2: 27 with its system prompt)."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to be sent `at_s` seconds after the start."""

    at_s: float
    prompt: str
    output_tokens: int


def plan(arrivals: Sequence[Arrival], chance: Random, api: Api = Api.CHAT) -> list[Planned]:
    """Arrivals with text for prompts; made beforehand, so that sending costs nothing but sending."""
    frame = CHAT_FRAME_TOKENS if api is Api.CHAT else 0
    return [
        Planned(a.at_s, prompts.prompt(max(1, a.prompt_tokens - frame), chance), max(1, a.output_tokens))
        for a in arrivals
    ]


async def replay(
    planned: Sequence[Planned],
    endpoint: Endpoint,
    *,
    on_record: Callable[[Record], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    exact_length: bool = True,
    timeout_s: float = 600.0,
) -> list[Record]:
    """Send every request at its time and wait for all answers; records in order of their ends.

    When `stop` is set nothing more is sent, and what runs is awaited. Cancelling this coroutine cancels
    the requests.
    """
    records: list[Record] = []
    running: set[asyncio.Task[None]] = set()
    connector = aiohttp.TCPConnector(limit=0)  # open loop: no queue in the client
    async with aiohttp.ClientSession(connector=connector) as session:
        started_s = time.monotonic()

        async def send(one: Planned) -> None:
            lag_s = time.monotonic() - started_s - one.at_s
            answer = await client.ask(
                session, endpoint, one.prompt, one.output_tokens,
                exact_length=exact_length, timeout_s=timeout_s,
            )  # fmt: skip
            record = Record(due_s=one.at_s, send_lag_s=lag_s, answer=answer)
            records.append(record)
            on_record(record)

        try:
            for one in planned:
                if await _stopped(stop, started_s + one.at_s - time.monotonic()):
                    break
                task = asyncio.create_task(send(one))
                running.add(task)
                task.add_done_callback(running.discard)
            if running:
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
    return records


async def _stopped(stop: asyncio.Event | None, wait_s: float) -> bool:
    """Wait out `wait_s` seconds, or less when `stop` is set; whether it is."""
    if stop is None:
        await asyncio.sleep(max(0.0, wait_s))
        return False
    if wait_s > 0 and not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), wait_s)
        except TimeoutError:
            return False
    return stop.is_set()
