"""Pods that share one address and one machine."""

import itertools
import socket
from pathlib import Path
from typing import Any

from headway_local.adapt import adapt, free_port

POD: dict[str, Any] = {
    "metadata": {"name": "p"},
    "spec": {
        "containers": [
            {
                "name": "engine",
                "args": ["--model", "m", "--port", "8000", "--management-port=8001", "--host", "x"],
                "ports": [
                    {"name": "http", "containerPort": 8000},
                    {"name": "management", "containerPort": 8001},
                    {"name": "other", "containerPort": 9000},
                ],
                "startupProbe": {"httpGet": {"port": 8001, "path": "/readyz"}},
                "readinessProbe": {"httpGet": {"port": "management", "path": "/readyz"}},
                "livenessProbe": {"tcpSocket": {"port": 9000}},
                "lifecycle": {"preStop": {"httpGet": {"port": 8000}}},
            }
        ]
    },
}


def test_ports_move_in_the_pod_its_probes_and_its_arguments() -> None:
    """Names stay, unknown ports stay, an option that was there is not there twice."""
    numbers = itertools.count(50_000)
    moved = adapt(POD, new_port=lambda: next(numbers))
    container = moved["spec"]["containers"][0]
    assert [p["containerPort"] for p in container["ports"]] == [50_000, 50_001, 9000]
    assert container["args"] == [
        "--model", "m", "--host", "x", "--port", "50000", "--management-port", "50001",
    ]  # fmt: skip
    assert container["startupProbe"]["httpGet"]["port"] == 50_001
    assert container["readinessProbe"]["httpGet"]["port"] == "management"
    assert container["livenessProbe"]["tcpSocket"]["port"] == 9000
    assert container["lifecycle"]["preStop"]["httpGet"]["port"] == 50_000


def test_a_kept_volume_becomes_a_folder_of_the_machine(tmp_path: Path) -> None:
    """What is in it outlives the pod; other volumes stay what they are."""
    volumes = [{"name": "cache", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    pod = {**POD, "spec": {**POD["spec"], "volumes": volumes}}
    adapted = adapt(pod, kept_volumes={"cache": tmp_path})
    assert adapted["spec"]["volumes"] == [
        {"name": "cache", "hostPath": {"path": str(tmp_path)}},
        {"name": "tmp", "emptyDir": {}},
    ]


def test_a_pause_for_load_balancers_is_left_out() -> None:
    """There are none here, and Ctrl-C should not take seconds for nothing."""
    container = {"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 5}}}}
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [container]}}
    assert adapt(pod)["spec"]["containers"] == [{"name": "engine", "lifecycle": {}}]


def test_the_original_pod_is_left_alone() -> None:
    """Its template is compared later; a changed one would roll the pods."""
    before = repr(POD)
    adapt(POD)
    assert repr(POD) == before


def test_a_free_port_can_be_bound() -> None:
    """That is what it is for."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", free_port()))
