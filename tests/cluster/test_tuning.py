"""The closed loop on a real control plane: traffic, a broken promise, a limit moved live, the reason told."""

import asyncio
from random import Random

import pytest

from cluster.controller import Controller
from cluster.node import Node
from cluster.plane import Plane
from cluster.served import Served, small
from headway_cli import openloop, traces
from headway_cli.client import Api, Ending, Endpoint
from support.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FAR_TOO_LARGE = 2048
LONGEST_PROMPT, LONGEST_OUTPUT = 2000, 60
REQUESTS_PER_S = 2.0
MODEL = "random://llama?hidden=256&layers=4&heads=4&kv_heads=2&vocab=512&context=4096&seed=3"


def azure(duration_s: float) -> list[openloop.Planned]:
    """The Azure conversation trace as it ships, thinned to this model; its tokens are bytes."""
    chance = Random(5)
    trace = traces.shipped()
    thinned = traces.scaled(trace, REQUESTS_PER_S / traces.requests_per_second(trace), chance)
    stretch = traces.fitted(traces.window(thinned, 0, duration_s), LONGEST_PROMPT, LONGEST_OUTPUT)
    letters = "abcdefghijklmnopqrstuvwxyz "
    return [
        openloop.Planned(a.at_s, "".join(chance.choices(letters, k=a.prompt_tokens)), a.output_tokens)
        for a in stretch.arrivals
    ]


async def test_a_far_too_large_token_budget_is_cut_live_and_status_event_and_engine_agree(
    plane: Plane, node: Node, controller: Controller, namespace: str
) -> None:
    """Steps of 2048 prompt tokens stall every running stream; the tuner sees what a token costs and cuts."""
    body = small(
        model={"uri": MODEL, "maxModelLen": 2560},
        batching={
            "maxBatchTokens": FAR_TOO_LARGE,
            "prefillChunkTokens": FAR_TOO_LARGE,
            "kvCache": {"prefixCaching": False},
            "capacity": {"maxBatchTokens": FAR_TOO_LARGE},
        },
        slo={"itl": {"p95": "50ms"}},
        tuning={"mode": "Auto", "interval": "2s"},
    )
    chat = Served(plane, node, namespace, body).wait_ready()
    [pod] = chat.pods()
    done = asyncio.Event()
    endpoint = Endpoint(chat.url().removesuffix("/v1"), "chat", Api.COMPLETIONS)

    async def cut() -> bool:
        return await chat.limit(pod, "max_batch_tokens") < FAR_TOO_LARGE

    async with asyncio.TaskGroup() as group:
        traffic = group.create_task(openloop.replay(azure(300), endpoint, stop=done))
        try:
            await eventually(cut, timeout_s=200, every_s=1, what="a smaller budget in force")
        finally:
            done.set()

    async def agreed() -> bool:
        """Status and engine say the same value, and an event says it too."""
        metrics = await chat.metrics(pod)
        in_force = int(metrics["headway_limit", (("parameter", "max_batch_tokens"),)])
        status = chat.body()["status"]
        parameters = {p["name"]: p for p in status["parameters"]}
        events = plane.objects("-n", namespace, "events.events.k8s.io")
        notes = [e["note"] for e in events if e.get("reason") == "LimitsChanged"]
        told = any(f"→ {in_force}:" in note and "maxBatchTokens" in note for note in notes)
        same_generation = status["tuning"].get("generation") == metrics["headway_limits_generation", ()]
        return told and same_generation and parameters["maxBatchTokens"].get("applied") == in_force

    await eventually(agreed, timeout_s=60, every_s=0.5, what="one value everywhere")
    answers = [record.answer for record in traffic.result()]
    assert answers
    assert {a.ending for a in answers} == {Ending.FINISHED}, "no request may fail"
    [same] = chat.pods()
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0
    assert chat.body()["spec"]["batching"]["maxBatchTokens"] == FAR_TOO_LARGE, "the spec is the user's"
