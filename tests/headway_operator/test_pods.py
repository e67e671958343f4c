"""Pods as the API shows them, and what the fleet makes of them."""

from typing import Any

import pytest

from headway_engine.protocol import MANAGEMENT_PORT
from headway_operator.fleet import PodRef
from headway_operator.pods import last_words, pod_ref, pods_of, trouble
from support.fake_cluster import FakeCluster
from support.resources import a_resource


def a_pod(name: str = "chat-1", owner: str = "chat", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "default",
            "name": name,
            "labels": {"headway.dev/inference-deployment": owner},
        },
        "spec": {
            "containers": [{"name": "engine", "ports": [{"name": "management", "containerPort": 9001}]}]
        },
        "status": {
            "phase": "Running",
            "podIP": "10.244.0.5",
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        | status,
    }


def test_a_running_pod_is_where_its_address_and_named_port_are() -> None:
    """The port may be another one than the default: all pods of one machine share its ports."""
    assert pod_ref(a_pod()) == PodRef("chat-1", "10.244.0.5", 9001, ready=True)


def test_a_pod_that_names_no_port_has_the_default_one() -> None:
    """A sidecar's ports are not the engine's."""
    pod = a_pod()
    pod["spec"]["containers"] = [{"name": "mesh", "ports": [{"name": "admin", "containerPort": 1}]}]
    found = pod_ref(pod)
    assert found is not None
    assert found.management_port == MANAGEMENT_PORT


@pytest.mark.parametrize(
    "conditions", [[], [{"type": "Ready", "status": "False"}], [{"type": "Initialized", "status": "True"}]]
)
def test_a_pod_that_does_not_say_so_is_not_ready(conditions: list[dict[str, str]]) -> None:
    """Absent, false, or another condition."""
    found = pod_ref(a_pod(conditions=conditions))
    assert found is not None
    assert not found.ready


@pytest.mark.parametrize(
    "status", [{"podIP": ""}, {"podIP": None}, {"phase": "Failed"}, {"phase": "Succeeded"}]
)
def test_a_pod_without_an_address_or_at_its_end_is_none(status: dict[str, Any]) -> None:
    """There is nobody to talk to."""
    assert pod_ref(a_pod(**status)) is None


def test_a_pod_on_its_way_out_is_none() -> None:
    """It drains, and needs no new limits for that."""
    pod = a_pod()
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert pod_ref(pod) is None


async def test_only_the_resources_own_pods_are_found_in_order() -> None:
    """By label, by name."""
    cluster = FakeCluster()
    for name, owner in (("chat-b", "chat"), ("chat-a", "chat"), ("other-a", "other")):
        cluster.put(a_pod(name, owner))
    assert [pod.name for pod in await pods_of(a_resource(), cluster)] == ["chat-a", "chat-b"]


def a_container(ready: bool = False, **values: Any) -> dict[str, Any]:
    return {"name": "engine", "image": "engine:1", "ready": ready, "restartCount": 0, "state": {}} | values


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


@pytest.mark.parametrize(
    ("container", "says"),
    [
        (a_container(restartCount=3, lastState=ended(1)), "ended with exit status 1 and is started again"),
        (a_container(restartCount=1, state=ended(1)), "ended with exit status 1"),
        (a_container(restartCount=2, lastState=ended(137, "OOMKilled")), "exit status 137 (OOMKilled)"),
        (
            a_container(
                restartCount=2, lastState=ended(1), state={"waiting": {"reason": "CrashLoopBackOff"}}
            ),
            "`kubectl logs chat-1 --previous` says why",
        ),
        (
            a_container(restartCount=2, lastState=ended(1, message="a line\nValueError: no {such} model\n")),
            "started again: ValueError: no {such} model",
        ),
        (a_container(state={"waiting": {"reason": "ErrImagePull"}}), "engine:1 cannot be pulled"),
        (a_container(state={"waiting": {"reason": "ImagePullBackOff"}}), "engine:1 cannot be pulled"),
        (
            a_container(
                state={"waiting": {"reason": "CreateContainerConfigError", "message": 'no key {"a"}'}}
            ),
            'cannot be started: no key {"a"}',
        ),
    ],
)
@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
def test_what_waiting_alone_does_not_mend_is_trouble(kind: str, container: dict[str, Any], says: str) -> None:
    """A wrong model, too little memory, a wrong image, a Secret without the key."""
    pod = a_pod(conditions=[], **{kind: [container]})
    assert says in trouble(pod)
    assert trouble(pod).startswith("pod chat-1: container engine ")
    more = a_pod(conditions=[], **{kind: [container | {"restartCount": container["restartCount"] + 7}]})
    if container["restartCount"]:
        assert trouble(more) == trouble(pod), "a status that changes with every restart is written for ever"


@pytest.mark.parametrize(
    "container",
    [
        a_container(),
        a_container(state={"waiting": {"reason": "ContainerCreating"}}),
        a_container(state={"waiting": {"reason": "PodInitializing"}}),
        a_container(state={"running": {}}),
        a_container(ready=True, restartCount=5, lastState=ended(1), state={"running": {}}),
    ],
)
def test_a_pod_that_starts_or_serves_has_no_trouble(container: dict[str, Any]) -> None:
    """Nor one that came back."""
    assert trouble(a_pod(containerStatuses=[container])) == ""


def test_a_pod_that_fits_on_no_node_is_told_of_and_never_asked() -> None:
    """It has no address, and the scheduler's words name what is missing."""
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU left"}
    found = pod_ref(a_pod(podIP="", phase="Pending", conditions=[waits]))
    assert found is not None
    assert (found.ready, found.address) == (False, "")
    assert found.trouble == "pod chat-1 fits on no node: no GPU left"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("", ""),
        ("\n \n", ""),
        ('12:00 error front loading\n12:01 error stopped reason="no \\"such\\" model"', 'no "such" model'),
        ("12:01 error front stopped reason=gone", "gone"),
        ('{"time": "12:01", "message": "stopped", "reason": "too little memory"}\n', "too little memory"),
        ('{"time": "12:01", "message": "stopped"}', ""),
        ('{"cut off', ""),
        ('12:01 stopped reason="\\x"', ""),
        ("12:01 pid 77 torch.cuda.OutOfMemoryError: no memory", "OutOfMemoryError: no memory"),
        ("12:01 worker 3 was killed", ""),
    ],
)  # fmt: skip
def test_last_words_are_taken_only_where_they_stay_the_same(message: str, says: str) -> None:
    """Ours in both forms, Python's own, and nothing that a clock or a count would change."""
    assert last_words(message) == says


def test_last_words_are_bounded() -> None:
    assert len(last_words("ValueError: " + "x" * 5000)) == 500
