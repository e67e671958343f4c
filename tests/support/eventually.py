"""Waiting for a condition instead of sleeping for a guess."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(
    condition: Callable[[], T | Awaitable[T]],
    *,
    timeout_s: float = 30.0,
    every_s: float = 0.02,
    what: str = "",
) -> T:
    """The first truthy value of `condition` (may be async); AssertionError with the last one otherwise."""
    last: object = None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        outcome = condition()
        value = await outcome if inspect.isawaitable(outcome) else outcome
        if value:
            return value  # type: ignore[return-value]
        last = value
        if loop.time() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or 'condition'}; last seen: {last!r}")
        await asyncio.sleep(every_s)
