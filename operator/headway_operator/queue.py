"""Which resource to work on next: one worker per key, in order, with back-off and a regular resync.

`Schedule` is bookkeeping on times that are passed in; `WorkQueue` runs the work. Neither knows what the
work is, nor anything of Kubernetes.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum

from headway_engine.logs import fields

Key = tuple[str, str]

logger = logging.getLogger(__name__)


class Cause(IntEnum):
    """Why a key is due. The stronger one wins when both are waiting."""

    TICK = 0  # its own timer
    CHANGE = 1  # something was edited, failed before, or is due for a full look


@dataclass(frozen=True, slots=True)
class BackOff:
    """Seconds until the next try after the n-th failure in a row."""

    first_s: float = 0.2
    factor: float = 2.0
    most_s: float = 60.0

    def delay_s(self, failures: int, chance: float) -> float:
        """Between half and the whole of the exponential delay; `chance` is from 0 to 1."""
        whole = min(self.most_s, self.first_s * self.factor ** min(failures - 1, 30))
        return whole * (0.5 + 0.5 * chance)


@dataclass(slots=True)
class _Wait:
    due_s: float
    since_s: float
    order: int
    cause: Cause


@dataclass(slots=True)
class Schedule:
    """Keys with the time they are due. A key that is worked on is never handed out a second time."""

    back_off: BackOff = field(default_factory=BackOff)
    resync_s: float = 300.0
    _waiting: dict[Key, _Wait] = field(default_factory=dict)
    _running: dict[Key, float] = field(default_factory=dict)
    _failures: dict[Key, int] = field(default_factory=dict)
    _resync_at_s: dict[Key, float] = field(default_factory=dict)
    _order: int = 0

    def add(self, key: Key, cause: Cause, now_s: float, after_s: float = 0.0) -> None:
        """Due in `after_s`, or sooner where it already is; a running key waits until it is done."""
        self._order += 1
        due_s = now_s + max(0.0, after_s)
        known = self._waiting.get(key)
        if known is None:
            self._waiting[key] = _Wait(due_s, now_s, self._order, cause)
            return
        known.cause = max(known.cause, cause)
        if due_s < known.due_s:
            known.due_s, known.since_s, known.order = due_s, now_s, self._order

    def take(self, now_s: float) -> tuple[Key, Cause] | None:
        """The next key, marked as running; None where none is due.

        Changes go before ticks (somebody waits for an edit), and of each the one that has been due longest.
        """
        ready = [
            (-wait.cause, wait.due_s, wait.order, key)
            for key, wait in self._waiting.items()
            if wait.due_s <= now_s and key not in self._running
        ]
        if not ready:
            return None
        key = min(ready)[3]
        wait = self._waiting.pop(key)
        self._running[key] = now_s
        resync_due = now_s >= self._resync_at_s.get(key, math.inf)
        return key, Cause.CHANGE if resync_due else wait.cause

    def done(self, key: Key, cause: Cause, now_s: float, after_s: float | None, chance: float) -> None:
        """The work went well; due again in `after_s`, or forgotten where that is None."""
        self._running.pop(key, None)
        self._failures.pop(key, None)
        if after_s is None:
            self._resync_at_s.pop(key, None)
            return
        if cause is Cause.CHANGE or key not in self._resync_at_s:
            # Spread out, so that a thousand resources seen at start are not looked at together for ever.
            self._resync_at_s[key] = now_s + self.resync_s * (0.9 + 0.2 * chance)
        self.add(key, Cause.TICK, now_s, min(after_s, max(0.0, self._resync_at_s[key] - now_s)))

    def failed(self, key: Key, now_s: float, chance: float, at_least_s: float = 0.0) -> float:
        """The work failed; due again after a back-off, whose seconds are returned."""
        self._running.pop(key, None)
        self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = max(at_least_s, self.back_off.delay_s(self._failures[key], chance))
        self.add(key, Cause.CHANGE, now_s, delay_s)
        return delay_s

    def next_due_s(self) -> float | None:
        """When the next key that can be taken is due."""
        return min(
            (wait.due_s for key, wait in self._waiting.items() if key not in self._running), default=None
        )

    def depth(self, now_s: float) -> int:
        """Keys that are due and not yet worked on."""
        return sum(wait.due_s <= now_s for wait in self._waiting.values())

    def late_s(self, now_s: float) -> float:
        """How long the key that waits longest has been due and not been started."""
        due_s = self.next_due_s()
        return 0.0 if due_s is None else max(0.0, now_s - due_s)

    def longest_run_s(self, now_s: float) -> float:
        """How long the slowest work now running has taken."""
        return max((now_s - start_s for start_s in self._running.values()), default=0.0)


Work = Callable[[Key, Cause], Awaitable[float | None]]
"""Seconds until the key is due again; None when it is gone and to be forgotten."""


class WorkQueue:
    """Runs `work` for due keys, at most `workers` at once. Time is the event loop's clock.

    `patience` says how long at least to wait after an error (a server's Retry-After);
    `finished` hears of every run: key, seconds, error or None.
    """

    def __init__(
        self,
        work: Work,
        *,
        chance: Callable[[], float],
        workers: int = 32,
        schedule: Schedule | None = None,
        work_timeout_s: float = 120.0,
        patience: Callable[[Exception], float] = lambda error: 0.0,
        finished: Callable[[Key, float, Exception | None], None] = lambda key, seconds, error: None,
    ) -> None:
        self._work = work
        self._chance = chance
        self._workers = workers
        self._schedule = schedule or Schedule()
        self._work_timeout_s = work_timeout_s
        self._patience = patience
        self._finished = finished
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, key: Key) -> None:
        """Something about this key changed: look at it at once."""
        self._schedule.add(key, Cause.CHANGE, self._now_s())
        self._changed.set()

    @property
    def depth(self) -> int:
        return self._schedule.depth(self._now_s())

    @property
    def late_s(self) -> float:
        return self._schedule.late_s(self._now_s())

    @property
    def longest_run_s(self) -> float:
        return self._schedule.longest_run_s(self._now_s())

    async def run(self) -> None:
        """Hand out work until cancelled; then work in progress is cancelled and waited for."""
        try:
            while True:
                self._start_due()
                await self._wait_for_more()
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_due(self) -> None:
        while len(self._tasks) < self._workers and (due := self._schedule.take(self._now_s())):
            task = asyncio.create_task(self._run_one(*due), name=f"reconcile {'/'.join(due[0])}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # After the discard: a freed place wakes the loop.
            task.add_done_callback(lambda _: self._changed.set())

    async def _wait_for_more(self) -> None:
        next_s = self._schedule.next_due_s() if len(self._tasks) < self._workers else None
        try:
            async with asyncio.timeout(None if next_s is None else max(0.0, next_s - self._now_s())):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    async def _run_one(self, key: Key, cause: Cause) -> None:
        start_s = self._now_s()
        failure: Exception | None = None
        try:
            async with asyncio.timeout(self._work_timeout_s):
                after_s = await self._work(key, cause)
        except Exception as error:  # one key's trouble, of whatever sort, must not stop the others
            failure = error
            delay_s = self._schedule.failed(key, self._now_s(), self._chance(), self._patience(error))
            name = "/".join(key)
            logger.warning(
                fields("reconcile-failed", resource=name, error=_describe(error), again_s=round(delay_s, 1))
            )
            logger.debug(fields("reconcile-failed", resource=name), exc_info=error)
        else:
            self._schedule.done(key, cause, self._now_s(), after_s, self._chance())
        self._finished(key, self._now_s() - start_s, failure)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
