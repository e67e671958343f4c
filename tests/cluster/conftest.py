"""One plane and one node for all cluster tests; each test has a Kubernetes namespace of its own.

The tests run in this process, whose main thread visits the plane's network while a cluster test is on.
"""

import os
import re
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

from cluster.controller import SYSTEM, Controller
from cluster.node import Node
from cluster.plane import Plane, PlaneError
from headway_local.kube_api import KubeApi

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here, and run it last: the plane's memory is then held no longer than needed."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
    items.sort(key=lambda item: HERE in item.path.parents)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what was in its namespace, and what its pods said."""
    report = yield
    values = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed and "namespace" in values:
        plane, node, name = values["plane"], values["node"], values["namespace"]
        kinds = "deploy,rs,pods,svc,endpointslices,events"
        objects = plane.kubectl("-n", name, "get", kinds, "-o", "wide", check=False)
        report.sections.append(("objects", objects.stdout))
        if "controller" in values:
            resources = plane.kubectl("-n", name, "get", "infd", "-o", "yaml", check=False)
            report.sections.append(("resources", resources.stdout))
        for pod in node.kubelet.pods(name) + node.kubelet.pods(SYSTEM):
            title = f"log of {pod.pod['metadata']['name']}"
            report.sections.append((title, f"{pod.facts}\n{pod.log_tail(60)}"))
    return report


@pytest.fixture(scope="session")
def plane() -> Iterator[Plane]:
    """The control plane. Skips where the machine cannot have one, but never in CI."""
    try:
        running = Plane.start()
    except PlaneError as error:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            raise
        pytest.skip(f"no control plane: {error}")
    yield running
    running.stop()


@pytest.fixture(scope="session")
def node(plane: Plane) -> Iterator[Node]:
    """The node whose pods are processes."""
    running = Node(plane)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def controller(plane: Plane, node: Node) -> Controller:
    """The installed controller, and with it the InferenceDeployment API."""
    return Controller(plane, node)


@pytest.fixture
async def api(plane: Plane, namespace: str) -> AsyncIterator[KubeApi]:
    """The API as the admin sees it, as plain JSON."""
    async with KubeApi(plane.admin) as client:
        yield client


@pytest.fixture
def namespace(plane: Plane, node: Node, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this test's own; the test's thread is inside the plane's network meanwhile."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    name = f"t-{words[:40].strip('-')}-{os.urandom(2).hex()}"
    plane.kubectl("create", "namespace", name)
    plane.wait_for(
        lambda: plane.kubectl("-n", name, "get", "sa", "default", check=False).returncode == 0,
        f"default service account in {name}",
    )
    with plane.network.entered():
        yield name
    plane.kubectl("delete", "namespace", name, "--wait=false")
