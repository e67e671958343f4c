"""Pods as the API shows them, and what the fleet makes of them."""

from typing import Any

import pytest

from headway_engine.protocol import MANAGEMENT_PORT
from headway_operator.fleet import PodRef
from headway_operator.pods import pod_ref, pods_of
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
