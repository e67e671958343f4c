"""Ports of pods that share one address."""

import itertools
import socket

from headway_local import ports

POD = {
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
    moved = ports.moved(POD, ports.ENGINE_PORT_OPTIONS, lambda: next(numbers))
    container = moved["spec"]["containers"][0]
    assert [p["containerPort"] for p in container["ports"]] == [50_000, 50_001, 9000]
    assert container["args"] == [
        "--model", "m", "--host", "x", "--port", "50000", "--management-port", "50001",
    ]  # fmt: skip
    assert container["startupProbe"]["httpGet"]["port"] == 50_001
    assert container["readinessProbe"]["httpGet"]["port"] == "management"
    assert container["livenessProbe"]["tcpSocket"]["port"] == 9000
    assert container["lifecycle"]["preStop"]["httpGet"]["port"] == 50_000


def test_the_original_pod_is_left_alone() -> None:
    """Its template is compared later; a changed one would roll the pods."""
    before = repr(POD)
    ports.moved(POD, ports.ENGINE_PORT_OPTIONS)
    assert repr(POD) == before


def test_a_free_port_can_be_bound() -> None:
    """That is what it is for."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", ports.free_port()))
