"""The chart on a real control plane: two replicas in some namespaces only, upgraded, removed."""

import os
from collections.abc import Iterator

import pytest

from cluster.controller import Controller
from cluster.node import Node
from cluster.plane import ROOT, Plane
from support.resources import a_body

CHART = str(ROOT / "charts" / "headway")


@pytest.fixture
def second(plane: Plane, node: Node, controller: Controller, namespace: str) -> Iterator[str]:
    """Namespace of a second release that watches this test's namespace; the first one owns the API."""
    name = f"second-{os.urandom(2).hex()}"
    plane.kubectl("create", "namespace", name)
    helm(plane, "install", name, namespace, "--set", "replicas=2")
    yield name
    plane.helm("uninstall", "second", "-n", name, "--ignore-not-found")
    plane.kubectl("delete", "namespace", name, "--wait=false")


def helm(plane: Plane, verb: str, where: str, watched: str, *options: str) -> None:
    """Install or upgrade, and wait until helm calls it current."""
    settings = ("--set", f"crds.enabled=false,rbac.aggregate=false,watchNamespaces={{{watched}}}")
    plane.helm(verb, "second", CHART, "-n", where, *settings, *options, "--wait", "--timeout", "90s")


def test_the_life_of_a_release_with_rights_in_one_namespace(
    plane: Plane, controller: Controller, namespace: str, second: str
) -> None:
    """It works there and asks for nothing that is forbidden; upgraded; removed, and the API stays."""
    works_inside_its_rights(plane, namespace, second)
    is_upgraded(plane, namespace, second)
    is_removed_and_the_api_stays(plane, namespace, second)


def works_inside_its_rights(plane: Plane, namespace: str, second: str) -> None:
    """Both replicas are ready, one leads, and all that it touches lies in the namespace."""
    user = f"system:serviceaccount:{second}:second-headway-operator"
    plane.apply(a_body("quiet", namespace=namespace, spec={"replicas": 0}))

    def has_read_it() -> bool:
        return any(e.verb == "get" and e.name == "quiet" for e in plane.audit(user=user))

    plane.wait_for(has_read_it, "second controller reads the resource", 60)
    assert plane.forbidden(user=user) == []
    touched = {e.namespace for e in plane.audit(user=user) if e.resource != "leases" and e.namespace}
    assert touched == {namespace}
    lease = plane.objects("-n", second, "lease", "second-headway-operator")
    pods = plane.objects("-n", second, "pods")
    assert len(pods) == 2
    assert lease["spec"]["holderIdentity"] in {pod["metadata"]["name"] for pod in pods}


def is_upgraded(plane: Plane, namespace: str, second: str) -> None:
    helm(plane, "upgrade", second, namespace, "--set", "replicas=1,logLevel=debug")
    [pod] = [p for p in plane.objects("-n", second, "pods") if "deletionTimestamp" not in p["metadata"]]
    env = {variable["name"]: variable.get("value") for variable in pod["spec"]["containers"][0]["env"]}
    assert env["HEADWAY_LOG_LEVEL"] == "debug"


def is_removed_and_the_api_stays(plane: Plane, namespace: str, second: str) -> None:
    plane.helm("uninstall", "second", "-n", second, "--wait", "--timeout", "60s")
    mine = ("-l", "app.kubernetes.io/instance=second")
    kinds = "deployments,services,serviceaccounts,roles,rolebindings,poddisruptionbudgets"
    for where in (second, namespace):
        assert plane.objects("-n", where, kinds, *mine) == []
    assert plane.objects("crd", "inferencedeployments.headway.dev")["metadata"]["name"]
