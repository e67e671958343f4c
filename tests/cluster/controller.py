"""Headway's controller on the plane: installed as a user installs it, a pod under its own account."""

import time
from typing import Any

from cluster.node import Node
from cluster.plane import ROOT, Plane
from headway_local.pod import PodProcess

SYSTEM = "headway-system"
NAME = "headway-operator"
ENGINE_IMAGE = "example.invalid/headway-engine:test"
OPERATOR_IMAGE = "example.invalid/headway-operator:test"
START_TIMEOUT_S = 60.0


class Controller:
    """The installed controller. Stopping it is what a cluster's owner would do: no replicas."""

    def __init__(self, plane: Plane, node: Node) -> None:
        self._plane = plane
        self._node = node
        self.installed_s = time.time()
        self._install()
        [deployment] = plane.objects("-n", SYSTEM, "deployments")
        self._deployment = deployment["metadata"]["name"]
        self.replicas = int(deployment["spec"]["replicas"])
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        self.user = f"system:serviceaccount:{SYSTEM}:{account}"

    def _install(self) -> None:
        self._plane.kubectl("create", "namespace", SYSTEM)
        self._plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        self._plane.apply(*_objects())
        self._plane.kubectl("-n", SYSTEM, "rollout", "status", f"deployment/{NAME}", "--timeout=60s")

    def pods(self) -> list[PodProcess]:
        """Its processes."""
        return self._node.kubelet.pods(SYSTEM)

    def stop(self) -> None:
        """No controller any more."""
        self._scale(0)
        self._plane.wait_for(lambda: not self.pods(), "end of the controller", START_TIMEOUT_S)

    def start(self) -> None:
        """As many as were installed."""
        self._scale(self.replicas)
        self._plane.kubectl(
            "-n", SYSTEM, "rollout", "status", f"deployment/{self._deployment}", "--timeout=60s"
        )

    def _scale(self, replicas: int) -> None:
        self._plane.kubectl("-n", SYSTEM, "scale", f"deployment/{self._deployment}", f"--replicas={replicas}")


def _objects() -> list[dict[str, Any]]:
    def meta(name: str = NAME) -> dict[str, Any]:
        return {"name": name, "namespace": SYSTEM}

    def rule(group: str, resources: str, verbs: str) -> dict[str, Any]:
        return {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}

    everything = "get list watch create patch delete"
    rules = [
        rule("headway.dev", "inferencedeployments", "get list watch"),
        rule("headway.dev", "inferencedeployments/status", "patch"),
        rule("", "services configmaps secrets serviceaccounts", everything),
        rule("apps", "deployments", everything),
        rule("", "pods", "get list watch"),
        rule("events.k8s.io", "events", "create patch"),
        rule("coordination.k8s.io", "leases", "get create update patch"),
    ]
    env = [
        {"name": "HEADWAY_ENGINE_IMAGE", "value": ENGINE_IMAGE},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
    ]
    container = {
        "name": "operator",
        "image": OPERATOR_IMAGE,
        "env": env,
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 1},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10},
    }
    labels = {"app": NAME}
    template = {
        "metadata": {"labels": labels},
        "spec": {"serviceAccountName": NAME, "containers": [container]},
    }
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": SYSTEM}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME}
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta()},
        {"apiVersion": rbac, "kind": "ClusterRole", "metadata": {"name": NAME}, "rules": rules},
        {
            "apiVersion": rbac,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": NAME},
            "subjects": [subject],
            "roleRef": role,
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta(),
            "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
        },
    ]
