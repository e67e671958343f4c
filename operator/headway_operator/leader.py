"""One leader among several controllers: a Lease that is taken, renewed, and given back on a planned stop.

Whether a lease has run out is judged by how long *we* have seen it unchanged, never by the clock of the
machine that wrote it, so clocks may differ. A leader that cannot renew stops its work before anyone else
can have taken over. Knows of Kubernetes only the shape of a lease record.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from headway_engine.logs import fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """The record as stored. `version` changes with every write; times are the writer's wall clock."""

    holder: str
    duration_s: int
    acquired_s: float
    renewed_s: float
    transitions: int
    version: str = ""


class LeaseUnavailable(Exception):
    """The store could not be read or written just now, or someone else was faster."""


class LeaseStore(Protocol):
    """Where the record is kept; writes fail with LeaseUnavailable when `version` is stale."""

    async def read(self) -> Lease | None: ...

    async def create(self, lease: Lease) -> Lease: ...

    async def replace(self, lease: Lease) -> Lease: ...


class LeadershipLost(Exception):
    """The lease could not be renewed in time; the work has been stopped, the process should end."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. `renew_s` < `lease_s` is what keeps two leaders from overlapping."""

    lease_s: int = 15
    renew_s: float = 10.0
    retry_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Sight:
    """A record and when we first saw it in this state, on our own monotonic clock."""

    lease: Lease
    since_s: float


def look(before: Sight | None, lease: Lease, now_s: float) -> Sight:
    """The clock starts anew with every change of the record."""
    return before if before is not None and before.lease == lease else Sight(lease, now_s)


def may_take(sight: Sight, me: str, now_s: float) -> bool:
    """Free, ours already (a restart of the same pod), or unchanged for its whole duration."""
    lease = sight.lease
    return lease.holder in ("", me) or now_s - sight.since_s >= lease.duration_s


class Leader:
    """Runs something only while this process holds the lease.

    `wall_s` is written into the record for people to read; decisions use the event loop's clock.
    """

    def __init__(
        self,
        store: LeaseStore,
        me: str,
        *,
        wall_s: Callable[[], float],
        chance: Callable[[], float],
        timing: Timing = Timing(),
    ) -> None:
        self._store = store
        self._me = me
        self._wall_s = wall_s
        self._chance = chance
        self._timing = timing
        self._held: Lease | None = None

    @property
    def leading(self) -> bool:
        return self._held is not None

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Wait for the lease, run `lead` to its end, give the lease back.

        LeadershipLost when it could not be kept. Cancelling stops `lead` first and then gives back.
        """
        await self._acquire()
        logger.info(fields("leading", leader=self._me))
        work = asyncio.ensure_future(lead())
        keep = asyncio.create_task(self._keep(), name="lease")
        try:
            await asyncio.wait({work, keep}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The work ends before the lease does: no write of ours may follow another's first one.
            for task in (work, keep):
                task.cancel()
            await asyncio.gather(work, keep, return_exceptions=True)
            await self._release()
        if not keep.cancelled() and (lost := keep.exception()) is not None:
            raise lost
        if not work.cancelled():
            work.result()

    async def _acquire(self) -> None:
        sight: Sight | None = None
        while True:
            with contextlib.suppress(LeaseUnavailable, TimeoutError):
                async with asyncio.timeout(self._timing.renew_s):
                    lease = await self._store.read()
                    if lease is None:
                        self._held = await self._store.create(self._fresh(None))
                        return
                    sight = look(sight, lease, self._now_s())
                    if may_take(sight, self._me, self._now_s()):
                        self._held = await self._store.replace(self._fresh(lease))
                        return
            # Spread the candidates, or they all race each time.
            await asyncio.sleep(self._timing.retry_s * (1 + 0.2 * self._chance()))

    async def _keep(self) -> None:
        deadline_s = self._now_s() + self._timing.renew_s
        while True:
            await asyncio.sleep(min(self._timing.retry_s, max(0.0, deadline_s - self._now_s())))
            started_s = self._now_s()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - started_s)):
                    await self._renew()
            except (LeaseUnavailable, TimeoutError) as error:
                if self._now_s() >= deadline_s:
                    self._held = None
                    raise LeadershipLost(
                        f"the lease could not be renewed for {self._timing.renew_s:g} s: {error}"
                    ) from error
                logger.warning(fields("lease-not-renewed", error=error))
            else:
                # Counted from before the write: the others may have seen it that early.
                deadline_s = started_s + self._timing.renew_s

    async def _renew(self) -> None:
        assert self._held is not None
        try:
            self._held = await self._store.replace(replace(self._held, renewed_s=self._wall_s()))
        except LeaseUnavailable:
            # An answer that was lost, or someone's edit, leaves us with a stale version: read and go on,
            # but only while the record still names us.
            stored = await self._store.read()
            if stored is None or stored.holder != self._me:
                holder = "nobody" if stored is None else stored.holder or "nobody"
                self._held = None
                raise LeadershipLost(f"the lease is held by {holder} now") from None
            self._held = await self._store.replace(replace(stored, renewed_s=self._wall_s()))

    async def _release(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        try:
            async with asyncio.timeout(self._timing.retry_s):
                try:
                    await self._store.replace(self._empty(held))
                except LeaseUnavailable:
                    # A renewal that was cut off may have reached the store.
                    stored = await self._store.read()
                    if stored is None or stored.holder != self._me:
                        return
                    await self._store.replace(self._empty(stored))
            logger.info(fields("lease-given-back"))
        except (LeaseUnavailable, TimeoutError) as error:
            logger.warning(fields("lease-not-given-back", why="it will run out", error=error))

    def _empty(self, lease: Lease) -> Lease:
        return replace(lease, holder="", duration_s=1, renewed_s=self._wall_s())

    def _fresh(self, old: Lease | None) -> Lease:
        now_s = self._wall_s()
        same_holder = old is not None and old.holder == self._me
        return Lease(
            holder=self._me,
            duration_s=self._timing.lease_s,
            acquired_s=old.acquired_s if old is not None and same_holder else now_s,
            renewed_s=now_s,
            transitions=(0 if old is None else old.transitions + (not same_holder)),
            version="" if old is None else old.version,
        )

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
