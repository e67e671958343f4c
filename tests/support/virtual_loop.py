"""An event loop whose clock jumps to the next timer instead of waiting: an hour passes in milliseconds.

Only for code that waits on timers, locks and events; there is no real I/O to wait for in such a test.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.SelectSelector):
    """Tells the loop that it waited as long as it wanted to."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: nothing is due and nothing can happen")
        self.loop.clock_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only while everything waits."""

    def __init__(self) -> None:
        selector = _NoWaiting()
        super().__init__(selector)
        selector.loop = self
        self.clock_s = 0.0

    def time(self) -> float:
        return self.clock_s


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
