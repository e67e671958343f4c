"""The whole path on a real control plane: apply a resource, get tokens, edit it, delete it."""

import asyncio
import time
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.controller import SYSTEM, Controller
from cluster.node import Node
from cluster.plane import ROOT, AuditEntry, Plane
from cluster.served import Served, Stopwatch, small, stream
from support.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.model
async def test_the_quickstart_answers_paris_through_its_service(
    plane: Plane, node: Node, controller: Controller, namespace: str
) -> None:
    body = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
    chat = Served(plane, node, namespace, body).wait_ready()

    table = chat.kubectl("get", "infd").splitlines()
    assert table[0].split() == [
        "NAME", "MODEL", "ENGINE", "READY", "REPLICAS", "TTFT-P95", "ITL-P95", "SLO", "TUNING", "AGE",
    ]  # fmt: skip
    assert table[1].split()[:4] == ["chat", body["spec"]["model"]["uri"], "headway", "True"]

    async with chat.client() as client:
        [model] = (await client.models.list()).data
        answer = await client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=40,
            stream=True,
        )
        pieces = [choice.delta.content or "" async for chunk in answer for choice in chunk.choices]
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 2, "the answer came in one piece"

    [pod] = chat.pods()
    metrics = await chat.metrics(pod)
    assert metrics["headway_requests_arrived_total", ()] >= 1
    assert await _operator_metrics(controller)


async def _operator_metrics(controller: Controller) -> list[Any]:
    """The controller's own /metrics, parsed."""
    [pod] = controller.pods()
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://{pod.pod_ip}:8080/metrics")
    return list(text_string_to_metric_families(answer.text))


async def test_an_edited_limit_is_in_force_in_running_pods_and_a_restart_field_rolls_them(
    plane: Plane, node: Node, controller: Controller, namespace: str
) -> None:
    chat = Served(plane, node, namespace, small()).wait_ready()
    [pod] = chat.pods()
    assert await chat.limit(pod, "max_batch_tokens") == 256

    watch = Stopwatch()
    chat.patch({"batching": {"maxBatchTokens": 200}})

    async def in_force() -> bool:
        return await chat.limit(pod, "max_batch_tokens") == 200

    await eventually(in_force, what="the new limit in the engine")
    print(f"edit to effect: {watch.seconds:.2f} s")
    [same] = chat.pods()
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0

    def told() -> bool:
        parameters = {p["name"]: p for p in chat.body()["status"]["parameters"]}
        return bool(parameters["maxBatchTokens"].get("applied") == 200)

    await eventually(told, what="the applied value in status")

    # A field that needs a restart: pods are replaced while streams run, and every stream finishes.
    done = asyncio.Event()
    outcomes: list[tuple[int, str | None]] = []

    async def keep_asking() -> None:
        while not done.is_set():
            async with chat.client() as client:
                outcomes.append(await stream(client, "chat", 200))

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(keep_asking())
        await eventually(lambda: len(outcomes) > 1, what="streams before the roll")
        chat.patch({"batching": {"kvCache": {"blockTokens": 32}}})

        def replaced() -> bool:
            names = {p["metadata"]["name"] for p in chat.pods()}
            return pod["metadata"]["name"] not in names and len(chat.processes()) == 1

        await eventually(replaced, timeout_s=120, every_s=0.5, what="the old pod has gone")
        done.set()
    assert len(outcomes) > 2
    assert set(outcomes) == {(200, "length")}
    [fresh] = chat.pods()
    assert await chat.limit(fresh, "max_batch_tokens") == 200


async def test_deleting_a_resource_removes_everything_it_owned_with_and_without_the_controller(
    plane: Plane, node: Node, controller: Controller, namespace: str
) -> None:
    first = Served(plane, node, namespace, small("first")).wait_ready()
    assert {name.split("/")[0].split(".")[0] for name in first.owned()} >= {
        "deployment", "replicaset", "pod", "service", "configmap", "secret", "serviceaccount",
    }  # fmt: skip
    first.kubectl("delete", "infd", "first", "--timeout=30s")
    first.wait_gone()

    second = Served(plane, node, namespace, small("second"))
    await eventually(lambda: len(second.owned()) >= 7, what="the objects of the second")
    controller.stop()
    try:
        second.kubectl("delete", "infd", "second", "--timeout=30s")
        second.wait_gone()
    finally:
        controller.start()


async def test_a_settled_resource_is_never_written_and_the_controller_is_never_refused(
    plane: Plane, node: Node, controller: Controller, namespace: str
) -> None:
    """The audit log tells: nothing but the lease is written, and no request was forbidden."""
    chat = Served(plane, node, namespace, small()).wait_ready()
    chat.plane.wait_for(lambda: bool(chat.condition("Ready").get("status") == "True"), "Ready")

    # Other tests' namespaces are still being deleted: objects vanish there, are made again, and the API
    # server forbids everybody to make anything.
    mine = {namespace, SYSTEM, ""}

    def writes(since_s: float) -> list[AuditEntry]:
        all_writes = plane.writes(controller.user, since_s)
        return [e for e in all_writes if e.resource != "leases" and e.namespace in mine]

    # Starting ends with some status writes; then nothing is left to say.
    await eventually(
        lambda: not writes(time.time() - 10), timeout_s=60, every_s=0.5, what="the end of starting"
    )
    since_s = time.time()
    await asyncio.sleep(15)  # three times the tuning interval; a silence cannot be waited for otherwise
    assert writes(since_s) == []
    assert [e for e in plane.forbidden(controller.user) if e.namespace in mine] == []
