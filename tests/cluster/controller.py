"""Headway's controller on the plane: its Helm chart installed, its pod running under its own account."""

import time

from cluster.node import Node
from cluster.plane import ROOT, Plane
from headway_local.pod import PodProcess

SYSTEM = "headway-system"
RELEASE = "headway"
REPLICAS = 1  # the chart's default is two; a second process costs each test more than it tells
START_TIMEOUT_S = 60.0


class Controller:
    """The installed controller. It is stopped as a cluster's owner would do it: no replicas."""

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
        chart = str(ROOT / "charts/headway")
        options = ["--create-namespace", "--set", f"replicas={REPLICAS}", "--wait", "--timeout", "180s"]
        self._plane.helm("install", RELEASE, chart, "-n", SYSTEM, *options)

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
