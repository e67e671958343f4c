"""The controller's own `/metrics`, `/healthz` and `/readyz`.

Numbers come in as plain calls; health is a list of questions that answer with a complaint or nothing.
Knows nothing of Kubernetes, resources or what a reconcile does.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from headway_engine.logs import fields

Complaint = str | None
Check = Callable[[], Complaint]

LAG_PERIOD_S = 0.5
LAG_MEMORY_S = 30.0
LAG_LIMIT_S = 5.0

logger = logging.getLogger(__name__)


class Telemetry:
    """What the controller counts about itself, in a registry of its own."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._last_scrape_s: float | None = None
        self.registry = CollectorRegistry()
        self._reconciles = Counter(
            "headway_operator_reconciles", "Reconciles by result.", ["result"], registry=self.registry
        )
        self._seconds = Histogram(
            "headway_operator_reconcile_seconds",
            "Duration of one reconcile.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120),
            registry=self.registry,
        )
        self._decisions = Counter(
            "headway_operator_decisions", "Tuner decisions by verdict.", ["verdict"], registry=self.registry
        )
        self._refused = Counter(
            "headway_operator_limits_not_taken",
            "Limits or objectives that a pod did not take.",
            registry=self.registry,
        )
        self._written = Counter("headway_operator_status_writes", "Status writes.", registry=self.registry)
        self._depth = Gauge(
            "headway_operator_queue_depth", "Resources due and not yet worked on.", registry=self.registry
        )
        self._late = Gauge(
            "headway_operator_queue_late_seconds",
            "How long the resource that waits longest has been due.",
            registry=self.registry,
        )
        self._leader = Gauge(
            "headway_operator_leader", "1 while this process holds the lease.", registry=self.registry
        )
        self._scrape_age = Gauge(
            "headway_operator_last_scrape_age_seconds",
            "Since any engine pod answered a scrape; -1 before the first answer.",
            registry=self.registry,
        )
        self._scrape_age.set_function(self._age_s)
        for result in ("success", "error"):
            self._reconciles.labels(result)

    def reconciled(self, seconds: float, failure: Exception | None) -> None:
        self._reconciles.labels("success" if failure is None else "error").inc()
        self._seconds.observe(seconds)

    def decided(self, verdict: str) -> None:
        self._decisions.labels(verdict).inc()

    def scraped(self) -> None:
        self._last_scrape_s = self._now_s()

    def limits_not_taken(self) -> None:
        self._refused.inc()

    def status_written(self) -> None:
        self._written.inc()

    def watch(
        self, *, depth: Callable[[], float], late_s: Callable[[], float], leading: Callable[[], bool]
    ) -> None:
        """Gauges that are read when `/metrics` is asked for."""
        self._depth.set_function(depth)
        self._late.set_function(late_s)
        self._leader.set_function(lambda: 1.0 if leading() else 0.0)

    def _age_s(self) -> float:
        return -1.0 if self._last_scrape_s is None else self._now_s() - self._last_scrape_s


class LoopLag:
    """How late the event loop runs its timers: a blocking call anywhere shows here."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []  # when, how late

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            planned_s = loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.record(loop.time(), loop.time() - planned_s)

    def record(self, now_s: float, late_s: float) -> None:
        self._seen = [seen for seen in self._seen if now_s - seen[0] < LAG_MEMORY_S]
        self._seen.append((now_s, late_s))

    def complaint(self) -> Complaint:
        worst_s = max((late_s for _, late_s in self._seen), default=0.0)
        return f"the event loop was blocked for {worst_s:.1f} s" if worst_s > LAG_LIMIT_S else None


class WatchAge:
    """Is the watch alive? Every generation that a read shows must have been delivered by the watch as well.

    A quiet cluster delivers nothing, so the age of the last event says nothing; a change that a read saw
    and that the watch has still not brought after `limit_s` does.
    """

    def __init__(self, now_s: Callable[[], float], limit_s: float = 120.0) -> None:
        self._now_s = now_s
        self._limit_s = limit_s
        self._delivered: dict[tuple[str, str], tuple[str, int]] = {}
        self._missing: dict[tuple[str, str], tuple[str, int, float]] = {}

    def delivered(self, key: tuple[str, str], uid: str, generation: int) -> None:
        """The watch brought this generation."""
        self._delivered[key] = (uid, generation)
        missing = self._missing.get(key)
        if missing is not None and (missing[0] != uid or missing[1] <= generation):
            del self._missing[key]

    def seen(self, key: tuple[str, str], uid: str, generation: int) -> None:
        """A read showed this generation."""
        known = self._delivered.get(key)
        if known is not None and known[0] == uid and known[1] >= generation:
            return
        missing = self._missing.get(key)
        if missing is None or missing[0] != uid:
            self._missing[key] = (uid, generation, self._now_s())

    def forget(self, key: tuple[str, str]) -> None:
        self._delivered.pop(key, None)
        self._missing.pop(key, None)

    def complaint(self) -> Complaint:
        for key, (_, generation, since_s) in self._missing.items():
            age_s = self._now_s() - since_s
            if age_s > self._limit_s:
                return (
                    f"the watch has not brought generation {generation} of {'/'.join(key)} in {age_s:.0f} s"
                )
        return None


class Server:
    """The HTTP side. `health` complaints mean restart me; `ready` complaints mean wait for me."""

    def __init__(self, telemetry: Telemetry, *, health: Sequence[Check], ready: Sequence[Check]) -> None:
        self._telemetry = telemetry
        self._checks = {"/healthz": tuple(health), "/readyz": tuple(ready)}
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (a free one for 0)."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        for path in self._checks:
            app.router.add_get(path, self._answer)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        bound = int(self._runner.addresses[0][1])
        logger.info(fields("listening", port=bound))
        return bound

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._telemetry.registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    async def _answer(self, request: web.Request) -> web.Response:
        complaints = [said for check in self._checks[request.path] if (said := check())]
        return web.Response(text="\n".join(complaints) or "ok", status=503 if complaints else 200)
