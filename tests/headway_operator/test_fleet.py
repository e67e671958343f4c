"""The door to engine pods, against real HTTP servers on loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from aiohttp import web

from headway_engine.protocol import LIMITS_PATH, METRICS_PATH, OBJECTIVES_PATH, Limits, Metric, Objectives
from headway_operator.fleet import FleetError, HttpFleet, PodRef, Unreachable
from headway_operator.metrics import Sample

KEY = "the-control-key"
EXPOSITION = "headway_requests_running 4\nheadway_requests_arrived_total 2\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pods:
    """Starts servers that play engine pods."""

    def __init__(self) -> None:
        self._runners: list[web.AppRunner] = []

    async def start(self, name: str = "pod", **routes: Handler) -> PodRef:
        app = web.Application()
        if "metrics" in routes:
            app.router.add_get(METRICS_PATH, routes["metrics"])
        if "limits" in routes:
            app.router.add_put(LIMITS_PATH, routes["limits"])
        if "objectives" in routes:
            app.router.add_put(OBJECTIVES_PATH, routes["objectives"])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._runners.append(runner)
        return PodRef(name, "127.0.0.1", runner.addresses[0][1], ready=True)

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    started = Pods()
    yield started
    await started.stop()


@pytest.fixture
async def fleet() -> AsyncIterator[HttpFleet]:
    opened = HttpFleet(timeout_s=5.0)
    yield opened
    await opened.close()


@pytest.fixture
async def hasty_fleet() -> AsyncIterator[HttpFleet]:
    """For pods that never answer: it waits for a second."""
    opened = HttpFleet(timeout_s=1.0)
    yield opened
    await opened.close()


async def healthy(_: web.Request) -> web.Response:
    return web.Response(text=EXPOSITION)


async def hanging(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def answering(status: int, body: str, content_type: str = "application/json") -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, content_type=content_type)

    return handler


async def engine_limits(request: web.Request) -> web.Response:
    """As the engine does it: checks the key, numbers what it put in force."""
    if request.headers.get("Authorization") != f"Bearer {KEY}":
        return web.json_response({"error": {"message": "wrong or missing control key"}}, status=401)
    wanted = msgspec.json.decode(await request.read(), type=Limits)
    in_force = msgspec.structs.replace(wanted, generation=wanted.generation + 1)
    return web.Response(body=msgspec.json.encode(in_force), content_type="application/json")


async def test_a_scrape_reads_every_pod(pods: Pods, fleet: HttpFleet) -> None:
    refs = [await pods.start(f"pod-{i}", metrics=healthy) for i in range(3)]
    found = await fleet.scrape(refs)
    assert list(found) == ["pod-0", "pod-1", "pod-2"]
    for sample in found.values():
        assert isinstance(sample, Sample)
        assert sample.gauges[Metric.RUNNING] == 4


async def test_pods_that_cannot_be_read_are_values_beside_those_that_can(
    pods: Pods, hasty_fleet: HttpFleet
) -> None:
    closed = await pods.start("closed", metrics=healthy)
    await pods.stop()
    refs = [
        closed,
        await pods.start("garbage", metrics=answering(200, "<html>", "text/html")),
        await pods.start("empty", metrics=answering(200, "", "text/plain")),
        await pods.start("failing", metrics=answering(500, "no", "text/plain")),
        await pods.start("binary", metrics=_binary),
        await pods.start("hanging", metrics=hanging),
        await pods.start("stalling", metrics=_stalling),
        await pods.start("healthy", metrics=healthy),
    ]
    found = await hasty_fleet.scrape(refs)
    assert isinstance(found.pop("healthy"), Sample)
    reasons = {name: value.reason for name, value in found.items() if isinstance(value, Unreachable)}
    assert set(reasons) == {"closed", "garbage", "empty", "failing", "binary", "hanging", "stalling"}
    assert "500" in reasons["failing"]
    assert "not readable" in reasons["garbage"]
    assert "not readable" in reasons["binary"]
    assert "no answer in 1 s" in reasons["hanging"]
    assert "no answer in 1 s" in reasons["stalling"]
    assert reasons["closed"]


async def _binary(_: web.Request) -> web.Response:
    return web.Response(body=b"\xff\xfe\x00headway")


async def _stalling(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"headway_requests_running 4\n")
    await asyncio.Event().wait()
    return response


async def test_an_endless_answer_is_cut_off(pods: Pods, fleet: HttpFleet) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"# " + b"x" * 65_536 + b"\n")

    found = await fleet.scrape([await pods.start("endless", metrics=endless)])
    value = found["endless"]
    assert isinstance(value, Unreachable)
    assert "larger than" in value.reason


async def test_no_pods_are_no_answers(fleet: HttpFleet) -> None:
    assert await fleet.scrape([]) == {}


async def test_many_pods_are_asked_a_few_at_a_time(pods: Pods) -> None:
    asked, most = 0, 0

    async def counting(_: web.Request) -> web.Response:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        await asyncio.sleep(0)
        asked -= 1
        return web.Response(text=EXPOSITION)

    ref = await pods.start("x", metrics=counting)
    fleet = HttpFleet(timeout_s=10, concurrency=4)
    refs = [PodRef(f"pod-{i}", ref.address, ref.management_port, True) for i in range(40)]
    found = await fleet.scrape(refs)
    await fleet.close()
    assert len(found) == 40
    assert most <= 4


async def test_pods_that_hang_do_not_keep_others_from_being_asked(pods: Pods) -> None:
    """More of them than the 100 connections that a client opens where nobody says otherwise."""
    stuck, well = await pods.start("stuck", metrics=hanging), await pods.start("well", metrics=healthy)
    refs = [PodRef(f"stuck-{i}", stuck.address, stuck.management_port, True) for i in range(120)]
    fleet = HttpFleet(timeout_s=5.0)
    waiting = asyncio.create_task(fleet.scrape(refs))
    try:
        await asyncio.sleep(0)
        found = await fleet.scrape([well])
        assert not waiting.done()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await fleet.close()
    assert isinstance(found["well"], Sample)


async def test_limits_are_put_whole_and_read_back(pods: Pods, fleet: HttpFleet) -> None:
    pod = await pods.start(limits=engine_limits)
    wanted = Limits(generation=6, max_batch_tokens=640)
    in_force = await fleet.set_limits(pod, KEY, wanted)
    assert in_force.generation == 7
    assert in_force.same_values(wanted)


async def test_a_wrong_key_is_an_error_that_says_so(pods: Pods, fleet: HttpFleet) -> None:
    pod = await pods.start(limits=engine_limits)
    with pytest.raises(FleetError, match=r"401.*wrong or missing control key") as caught:
        await fleet.set_limits(pod, "not-the-key", Limits())
    assert caught.value.pod == "pod"
    assert "not-the-key" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        '{"field": "max_batch_tokens", "message": "9000 is outside 1..512"}',
        '{"error": {"message": "9000 is outside 1..512", "param": "max_batch_tokens"}}',
    ],
    ids=["the engine's own form", "OpenAI's form"],
)
async def test_a_refusal_names_the_field(pods: Pods, fleet: HttpFleet, body: str) -> None:
    pod = await pods.start(limits=answering(422, body))
    with pytest.raises(FleetError, match=r"422.*9000 is outside") as caught:
        await fleet.set_limits(pod, KEY, Limits())
    assert caught.value.field == "max_batch_tokens"


@pytest.mark.parametrize(
    ("status", "body"),
    [(500, "Internal Server Error"), (503, ""), (404, "[]"), (422, '{"error": "no"}'), (400, "null")],
)
async def test_any_other_answer_is_an_error_too(pods: Pods, fleet: HttpFleet, status: int, body: str) -> None:
    pod = await pods.start(limits=answering(status, body))
    with pytest.raises(FleetError, match=str(status)):
        await fleet.set_limits(pod, KEY, Limits())


@pytest.mark.parametrize("body", ["", "ok", "{}x", '{"max_batch_tokens": "many"}', '{"colour": 3}'])
async def test_an_answer_that_is_no_limits_is_not_taken_for_success(
    pods: Pods, fleet: HttpFleet, body: str
) -> None:
    pod = await pods.start(limits=answering(200, body))
    with pytest.raises(FleetError, match="something else"):
        await fleet.set_limits(pod, KEY, Limits())


async def test_a_pod_that_hangs_on_a_put_is_an_error_after_the_timeout(
    pods: Pods, hasty_fleet: HttpFleet
) -> None:
    pod = await pods.start(limits=hanging)
    with pytest.raises(FleetError, match=r"no answer in 1 s"):
        await hasty_fleet.set_limits(pod, KEY, Limits())


async def test_a_pod_that_is_gone_is_an_error(pods: Pods, fleet: HttpFleet) -> None:
    pod = await pods.start(limits=engine_limits)
    await pods.stop()
    with pytest.raises(FleetError, match="PUT /control/limits"):
        await fleet.set_limits(pod, KEY, Limits())


async def test_objectives_are_put_the_same_way(pods: Pods, fleet: HttpFleet) -> None:
    async def objectives(request: web.Request) -> web.Response:
        return web.Response(body=await request.read(), content_type="application/json")

    pod = await pods.start(objectives=objectives)
    wanted = Objectives(ttft_ms=500, itl_ms=50)
    assert await fleet.set_objectives(pod, KEY, wanted) == wanted


async def test_the_key_does_not_follow_a_redirect(pods: Pods, fleet: HttpFleet) -> None:
    seen: list[str | None] = []

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({})

    other = await pods.start("other", limits=elsewhere)

    async def redirecting(_: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{other.management_port}{LIMITS_PATH}")

    pod = await pods.start(limits=redirecting)
    with pytest.raises(FleetError, match="307"):
        await fleet.set_limits(pod, KEY, Limits())
    assert seen == []


async def test_a_fleet_can_be_closed_twice_and_before_use() -> None:
    fleet = HttpFleet()
    await fleet.close()
    await fleet.close()
