"""The plane and its node do what a cluster does: the ground that the end-to-end tests stand on."""

import os
import signal
from typing import Any

import aiohttp

from cluster.node import Node
from cluster.plane import Plane
from support.eventually import eventually

SERVER = """
import http.server, os, signal, sys, threading
class H(http.server.BaseHTTPRequestHandler):
    broken = False
    def do_GET(self):
        if self.path == '/break': H.broken = True
        self.send_response(500 if H.broken and self.path == '/live' else 200)
        self.end_headers()
        self.wfile.write((os.environ['VERSION'] + ' ' + os.environ['POD_NAME']).encode())
    def log_message(self, *a): pass
s = http.server.ThreadingHTTPServer((os.environ['POD_IP'], 8000), H)
signal.signal(signal.SIGTERM, lambda *a: threading.Thread(target=s.shutdown).start())
s.serve_forever()
"""


def field(path: str) -> dict[str, Any]:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def deployment(version: str = "one", replicas: int = 2) -> dict[str, Any]:
    container = {
        "name": "web",
        "image": "python:3",
        "args": ["-c", SERVER],
        "env": [
            {"name": "VERSION", "value": version},
            {"name": "POD_NAME", **field("metadata.name")},
            {"name": "POD_IP", **field("status.podIP")},
        ],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        "livenessProbe": {
            "httpGet": {"path": "/live", "port": "http"},
            "periodSeconds": 1,
            "timeoutSeconds": 5,  # a slow machine is not a broken server
            "failureThreshold": 2,
        },
        # Time for the endpoint to be taken out before the server stops.
        "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 5},
            },
        },
    }


SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web"},
    "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]},
}


def within(namespace: str, *manifests: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**m, "metadata": {**m["metadata"], "namespace": namespace}} for m in manifests]


async def answer(url: str) -> str:
    """The body, over a connection of its own."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


async def rolled_out(plane: Plane, namespace: str) -> None:
    plane.kubectl("-n", namespace, "rollout", "status", "deployment/web", "--timeout=60s")


def cluster_ip(plane: Plane, namespace: str) -> str:
    return str(plane.objects("-n", namespace, "service", "web")["spec"]["clusterIP"])


async def test_a_deployment_becomes_ready_and_its_service_spreads_connections(
    plane: Plane, namespace: str
) -> None:
    plane.apply(*within(namespace, deployment(), SERVICE))
    await rolled_out(plane, namespace)
    pods = {pod["metadata"]["name"] for pod in plane.objects("-n", namespace, "pods")}
    url = f"http://{cluster_ip(plane, namespace)}/"

    async def all_seen() -> bool:
        return {(await answer(url)).split()[1] for _ in range(4)} == pods

    await eventually(all_seen, what="both pods answer through the Service")


async def test_a_broken_container_is_restarted_by_its_liveness_probe(
    plane: Plane, node: Node, namespace: str
) -> None:
    plane.apply(*within(namespace, deployment(replicas=1)))
    await rolled_out(plane, namespace)
    [pod] = plane.objects("-n", namespace, "pods")
    await answer(f"http://{pod['status']['podIP']}:8000/break")

    def restarted() -> bool:
        [now] = plane.objects("-n", namespace, "pods")
        [status] = now["status"]["containerStatuses"]
        assert now["metadata"]["uid"] == pod["metadata"]["uid"]
        return bool(status["restartCount"] == 1 and status["ready"])

    await eventually(restarted, what="one restart, ready again")


async def test_a_killed_process_comes_back_in_the_same_pod(plane: Plane, node: Node, namespace: str) -> None:
    plane.apply(*within(namespace, deployment(replicas=1)))
    await rolled_out(plane, namespace)
    [process] = node.kubelet.pods(namespace)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)

    def back() -> bool:
        [pod] = plane.objects("-n", namespace, "pods")
        [status] = pod["status"]["containerStatuses"]
        ended = status["lastState"].get("terminated", {})
        return bool(status["restartCount"] == 1 and status["ready"] and ended["exitCode"] == 137)

    await eventually(back, what="restarted after kill -9")


async def test_a_rolling_update_never_leaves_the_service_without_an_answer(
    plane: Plane, namespace: str
) -> None:
    plane.apply(*within(namespace, deployment("one"), SERVICE))
    await rolled_out(plane, namespace)
    url = f"http://{cluster_ip(plane, namespace)}/"
    assert (await answer(url)).startswith("one ")
    plane.apply(*within(namespace, deployment("two")))

    async def only_new() -> bool:
        # An answer that fails raises here, and with it the test.
        return all([(await answer(url)).startswith("two ") for _ in range(4)])

    await eventually(only_new, timeout_s=60, what="only the new version answers")


async def test_deleting_a_deployment_leaves_no_pod_and_no_process(
    plane: Plane, node: Node, namespace: str
) -> None:
    plane.apply(*within(namespace, deployment(), SERVICE))
    await rolled_out(plane, namespace)
    pids = [process.pid for process in node.kubelet.pods(namespace)]
    assert len(pids) == 2
    plane.kubectl("-n", namespace, "delete", "deployment", "web")
    await eventually(lambda: not plane.objects("-n", namespace, "pods"), what="no pods")
    await eventually(lambda: not node.kubelet.pods(namespace), what="no processes")
    for pid in pids:
        assert pid is not None
        assert not os.path.exists(f"/proc/{pid}")


async def test_the_node_is_forbidden_nothing_that_it_needs(plane: Plane, namespace: str) -> None:
    """The kubelet acts as the node's own user, within the rules for nodes.

    The authorizer learns a moment late which pods are the node's; what is refused then is asked again.
    """
    allowed = {(e.verb, e.resource, e.namespace) for e in plane.audit(user="system:node:") if e.code < 300}
    refused = {(e.verb, e.resource, e.namespace) for e in plane.forbidden("system:node:")}
    assert allowed
    assert refused <= allowed
    assert plane.forbidden("system:kube-proxy") == []
