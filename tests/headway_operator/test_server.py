"""The controller's own endpoints, over a real socket, and the checks behind them."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway_operator.server import LAG_MEMORY_S, LoopLag, Server, Telemetry, WatchAge
from support.eventually import eventually


class Clock:
    """Seconds that a test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        yield session


async def test_metrics_tell_what_happened(clock: Clock, client: aiohttp.ClientSession) -> None:
    """Counts, durations and gauges parse as Prometheus text."""
    telemetry = Telemetry(clock)
    telemetry.watch(depth=lambda: 3.0, late_s=lambda: 1.5, leading=lambda: True)
    telemetry.reconciled(0.2, None)
    telemetry.reconciled(0.3, ValueError())
    telemetry.decided("Shrink")
    telemetry.scraped()
    clock.now_s += 4.0
    server = Server(telemetry, health=[], ready=[])
    port = await server.start("127.0.0.1", 0)
    try:
        async with client.get(f"http://127.0.0.1:{port}/metrics") as response:
            text = await response.text()
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    finally:
        await server.close()
    values = {
        (s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert values[("headway_operator_reconciles_total", "success")] == 1
    assert values[("headway_operator_reconciles_total", "error")] == 1
    assert values[("headway_operator_reconcile_seconds_count",)] == 2
    assert values[("headway_operator_decisions_total", "Shrink")] == 1
    assert values[("headway_operator_queue_depth",)] == 3
    assert values[("headway_operator_queue_late_seconds",)] == 1.5
    assert values[("headway_operator_leader",)] == 1
    assert values[("headway_operator_last_scrape_age_seconds",)] == 4


async def test_a_complaint_turns_a_probe_red_with_its_reason(
    clock: Clock, client: aiohttp.ClientSession
) -> None:
    """Health and readiness are asked anew each time and are independent."""
    sick: list[str] = []
    server = Server(Telemetry(clock), health=[lambda: sick[0] if sick else None], ready=[lambda: None])
    port = await server.start("127.0.0.1", 0)

    async def ask(path: str) -> tuple[int, str]:
        async with client.get(f"http://127.0.0.1:{port}{path}") as response:
            return response.status, await response.text()

    try:
        assert await ask("/healthz") == (200, "ok")
        sick.append("the queue is stuck")
        assert await ask("/healthz") == (503, "the queue is stuck")
        assert await ask("/readyz") == (200, "ok")
    finally:
        await server.close()


async def test_a_blocked_event_loop_is_noticed() -> None:
    """The measuring task sees that its timer came late."""
    lag = LoopLag()
    running = asyncio.create_task(lag.run())
    try:
        await eventually(lambda: lag._seen)
        assert lag.complaint() is None
    finally:
        running.cancel()
    lag.record(100.0, 30.0)
    assert lag.complaint() == "the event loop was blocked for 30.0 s"
    lag.record(100.0 + LAG_MEMORY_S, 0.0)
    assert lag.complaint() is None


def test_a_generation_that_the_watch_never_brings_is_a_dead_watch(clock: Clock) -> None:
    """A read saw the edit; the watch stays silent."""
    age = WatchAge(clock, limit_s=60.0)
    key = ("default", "chat")
    age.delivered(key, "u1", 1)
    age.seen(key, "u1", 1)
    clock.now_s += 3600.0
    assert age.complaint() is None, "a quiet cluster is not a dead watch"
    age.seen(key, "u1", 2)
    clock.now_s += 61.0
    age.seen(key, "u1", 3)
    assert age.complaint() == "the watch has not brought generation 2 of default/chat in 61 s"
    age.delivered(key, "u1", 2)
    assert age.complaint() is None


def test_a_resource_made_anew_or_deleted_is_not_waited_for(clock: Clock) -> None:
    """The same name with another uid starts over; a deleted one is forgotten."""
    age = WatchAge(clock, limit_s=60.0)
    key = ("default", "chat")
    age.delivered(key, "old", 9)
    age.seen(key, "new", 1)
    clock.now_s += 61.0
    assert age.complaint() is not None
    age.delivered(key, "new", 1)
    assert age.complaint() is None
    age.seen(key, "newer", 1)
    age.forget(key)
    clock.now_s += 61.0
    assert age.complaint() is None
