"""Processes die at the worst moment, and everything comes back to the desired state by itself."""

import json
import os
import signal

import msgspec
import pytest

from cluster.controller import Controller
from cluster.node import Node
from cluster.plane import Plane
from cluster.served import Served, small, stream
from headway_local.pod import PodProcess
from headway_operator.resource import parse
from headway_operator.tuner.memory import Memory, to_status
from support.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def kill(process: PodProcess) -> None:
    """kill -9 of the container's main process."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


def restarts(pod: dict[str, object]) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])  # type: ignore[index]


async def test_a_killed_engine_comes_back_with_the_limits_it_had(
    plane: Plane, node: Node, controller: Controller, namespace: str
) -> None:
    chat = Served(plane, node, namespace, small()).wait_ready()
    chat.patch({"batching": {"maxBatchTokens": 200, "maxBatchSequences": 3}})
    [pod] = chat.pods()

    async def in_force() -> bool:
        return await chat.limit(pod, "max_batch_sequences") == 3

    await eventually(in_force, what="the edited limits")
    kill(chat.processes()[0])

    def back() -> bool:
        [now] = chat.pods()
        ready = {c["type"]: c["status"] for c in now["status"]["conditions"]}["Ready"]
        return restarts(now) == 1 and ready == "True"

    await eventually(back, timeout_s=90, every_s=0.2, what="the engine is back in the same pod")
    await eventually(in_force, what="the edited limits after the restart")
    assert await chat.limit(pod, "max_batch_tokens") == 200
    async with chat.client() as client:
        assert await stream(client, "chat", 20) == (20, "length")


async def test_a_killed_controller_goes_on_from_the_status_and_no_pod_notices(
    plane: Plane, node: Node, controller: Controller, namespace: str
) -> None:
    """What the tuner had set stands in the status only; a new controller puts it back in force."""
    body = small(tuning={"mode": "Auto", "interval": "2s"})
    chat = Served(plane, node, namespace, body).wait_ready()
    [pod] = chat.pods()
    controller.stop()
    base = parse(chat.body()).batching.limits()
    tuned = msgspec.structs.replace(base, max_batch_tokens=177)
    state = to_status(Memory(base=base, tuned=tuned))
    patch = {"status": {"tuning": {"state": state}}}
    chat.kubectl("patch", "infd", "chat", "--subresource=status", "--type=merge", "-p", json.dumps(patch))
    controller.start()

    async def restored() -> bool:
        return await chat.limit(pod, "max_batch_tokens") == 177

    await eventually(restored, timeout_s=60, what="the tuned limit from the status")

    # kill -9 of the controller, then of the engine: the engine starts with what the status says.
    [process] = controller.pods()
    kill(process)
    kill(chat.processes()[0])

    async def both_back() -> bool:
        [now] = chat.pods()
        ready = {c["type"]: c["status"] for c in now["status"]["conditions"]}["Ready"]
        return restarts(now) == 1 and ready == "True" and await restored()

    await eventually(both_back, timeout_s=90, every_s=0.2, what="engine and limits are back")
    [same] = chat.pods()
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert process.facts.restarts >= 1

    # And it works on: an edit is followed.
    chat.patch({"batching": {"maxBatchTokens": 256, "maxBatchSequences": 5}})

    async def followed() -> bool:
        return await chat.limit(pod, "max_batch_sequences") == 5

    await eventually(followed, timeout_s=60, what="an edit after the crash")
