"""`python -m headway_operator`: settings from the environment, everything wired together, a clean end.

Exit codes: 0 after SIGTERM or SIGINT, 1 when the lease or the watch was lost (start me again), 2 for
settings or credentials that cannot work.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable

from headway_engine import logs
from headway_engine.logs import fields
from headway_operator import handlers
from headway_operator.cluster import ClusterError, Forbidden, Gone, TryAgain
from headway_operator.cluster_kube import KubeCluster, Login, LoginFailed, log_in
from headway_operator.fleet import HttpFleet
from headway_operator.leader import Leader, LeadershipLost
from headway_operator.lease_kube import KubeLeaseStore
from headway_operator.manifests import Images
from headway_operator.queue import Cause, Key, WorkQueue
from headway_operator.reconcile import Reconciler
from headway_operator.resource import API_VERSION, KIND
from headway_operator.server import Complaint, LoopLag, Server, Telemetry, WatchAge
from headway_operator.settings import Settings, SettingsError, read

RESYNC_S = 300.0
KIND_RETRY_S = 2.0
QUEUE_LATE_LIMIT_S = 60.0
RUN_LIMIT_S = 300.0
STOP_S = 5.0

logger = logging.getLogger("headway_operator")


class SystemClock:
    """The machine's clocks."""

    def wall_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()


class Reporter(Telemetry):
    """What reconcile tells of itself: to the metrics, and to the watch check."""

    def __init__(self, watch_age: WatchAge) -> None:
        super().__init__(time.monotonic)
        self._watch_age = watch_age

    def read(self, key: Key, uid: str, generation: int) -> None:
        self._watch_age.seen(key, uid, generation)


class Controller:
    """One process: probes from the start, the work only while leading."""

    def __init__(self, settings: Settings, cluster: KubeCluster, fleet: HttpFleet) -> None:
        self._settings = settings
        self._cluster = cluster
        self._watch_age = WatchAge(time.monotonic)
        self._reporter = Reporter(self._watch_age)
        self._reconciler = Reconciler(
            cluster,
            fleet,
            images=Images(engine=settings.engine_image, pull_policy=settings.engine_pull_policy.value),
            clock=SystemClock(),
            randomness=secrets.token_bytes,
            reports=self._reporter,
        )
        self._queue = WorkQueue(self._work, chance=random.random, patience=_patience, finished=self._finished)
        self._lag = LoopLag()
        self._leader = Leader(
            KubeLeaseStore(cluster, settings.namespace, settings.lease_name),
            settings.identity,
            wall_s=time.time,
            chance=random.random,
        )
        self._reporter.watch(
            depth=lambda: self._queue.depth,
            late_s=lambda: self._queue.late_s,
            leading=lambda: self._leader.leading,
        )
        self._watching = False
        self.server = Server(
            self._reporter,
            health=(self._stalled, self._lag.complaint, self._watch_age.complaint),
            ready=(self._not_watching,),
        )

    async def run(self, login: Login, on_signals: Callable[[], None]) -> None:
        """Serve, wait for the lease, work, until cancelled or until it cannot go on (then it raises)."""
        await self.server.start(self._settings.host, self._settings.port)
        lag = asyncio.create_task(self._lag.run(), name="loop lag")
        try:
            await self._leader.run(lambda: self._lead(login, on_signals))
        finally:
            lag.cancel()
            await self.server.close()

    async def _lead(self, login: Login, on_signals: Callable[[], None]) -> None:
        await self._kind_is_served()
        stop = asyncio.Event()

        def started() -> None:
            self._watching = True
            on_signals()

        work = asyncio.create_task(self._queue.run(), name="work queue")
        resync = asyncio.create_task(self._resync(), name="resync")
        watching = asyncio.create_task(
            handlers.watch(
                handlers.registry(login=login, changed=self._queue.add, delivered=self._watch_age.delivered),
                namespaces=self._settings.watch_namespaces,
                stop=stop,
                started=started,
            ),
            name="watch",
        )
        try:
            done, _ = await asyncio.wait({work, resync, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._watching = False
            await _cancelled((work, resync))
            stop.set()
            await asyncio.wait({watching}, timeout=STOP_S)
            await _cancelled((watching,))

    async def _kind_is_served(self) -> None:
        """Wait until the API server knows our kind: kopf looks for it only once."""
        told = False
        while True:
            try:
                for namespace in self._namespaces():
                    await self._cluster.list(API_VERSION, KIND, namespace, {})
                return
            except (Gone, TryAgain, Forbidden) as error:
                if not told:
                    logger.warning(fields("waiting-for-kind", kind=KIND, error=error))
                    told = True
            await asyncio.sleep(KIND_RETRY_S)

    async def _resync(self) -> None:
        """Every few minutes all resources are listed, should the watch have missed one."""
        while True:
            await asyncio.sleep(RESYNC_S)
            try:
                for namespace in self._namespaces():
                    for body in await self._cluster.list(API_VERSION, KIND, namespace, {}):
                        metadata = body["metadata"]
                        key = (metadata["namespace"], metadata["name"])
                        self._watch_age.seen(key, metadata["uid"], metadata.get("generation", 0))
                        self._queue.add(key)
            except ClusterError as error:
                logger.warning(fields("resync-failed", error=error))

    def _namespaces(self) -> Iterable[str]:
        return self._settings.watch_namespaces or ("",)

    async def _work(self, key: Key, cause: Cause) -> float | None:
        after_s = (await self._reconciler.reconcile(*key, tick_only=cause is Cause.TICK)).after_s
        if after_s is None:
            self._watch_age.forget(key)
        return after_s

    def _finished(self, key: Key, seconds: float, failure: Exception | None) -> None:
        self._reporter.reconciled(seconds, failure)

    def _stalled(self) -> Complaint:
        if self._queue.late_s > QUEUE_LATE_LIMIT_S:
            return f"a resource has been due for {self._queue.late_s:.0f} s"
        if self._queue.longest_run_s > RUN_LIMIT_S:
            return f"a reconcile has been running for {self._queue.longest_run_s:.0f} s"
        return None

    def _not_watching(self) -> Complaint:
        return "leading, but not watching yet" if self._leader.leading and not self._watching else None


def _patience(error: Exception) -> float:
    return error.after_s if isinstance(error, TryAgain) else 0.0


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def serve(settings: Settings) -> int:
    """Run until a signal or a failure; the exit code."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

    on_signals()
    login = await log_in()
    fleet = HttpFleet()
    cluster = KubeCluster(login, instance=settings.identity)
    try:
        controller = Controller(settings, cluster, fleet)
        running = asyncio.create_task(controller.run(login, on_signals), name="controller")
        return await _until(stop.wait(), running)
    finally:
        await fleet.close()
        await cluster.close()


async def _until(stop: Awaitable[object], running: asyncio.Task[None]) -> int:
    stopping = asyncio.ensure_future(stop)
    await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        logger.info(fields("stopping", why="a signal"))
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, LeadershipLost):
            await running
        return 0
    stopping.cancel()
    try:
        running.result()
    except LeadershipLost as error:
        logger.error(fields("leadership-lost", why=error))
    except Exception:
        logger.exception(fields("controller-failed"))
    else:
        logger.error(fields("watch-ended"))
    return 1


def main() -> int:
    """The process."""
    try:
        settings = read(os.environ)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    logs.configure(settings.log_level, settings.log_format)
    if settings.log_level != "debug":
        # kopf says that it called us, for every event of every pod.
        logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        return asyncio.run(serve(settings))
    except LoginFailed as error:
        logger.error(fields("login-failed", why=error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
