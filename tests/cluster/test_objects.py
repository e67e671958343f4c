"""What the controller would write is what the API server takes: objects, pods, and the API itself."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import yaml

from cluster.controller import Controller
from cluster.plane import ROOT, Plane
from headway_operator.manifests import Images, build
from headway_operator.resource import parse
from headway_operator.schema import admit, load_crd
from support.bad_resources import GOOD
from support.resources import UID

Json = dict[str, Any]
HEADROOM = 10


def objects(body: Json, namespace: str) -> list[Json]:
    """What the resource becomes in a namespace."""
    stored = admit(body)
    stored["metadata"] |= {"uid": UID, "namespace": namespace}
    resource = parse(stored)
    limits = resource.batching.limits()
    return build(resource, images=Images("example/engine:1"), control_key="k", limits=limits)


def applied(plane: Plane, *manifests: Json) -> str:
    """Server-side apply as a dry run with strict fields; the API server's complaints."""
    bundle = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
    done = plane.kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
        stdin=json.dumps(bundle),
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr


def test_what_good_resources_become_is_accepted(plane: Plane, namespace: str) -> None:
    """One request bundle for the whole table: a row takes milliseconds, a kubectl a second."""
    bundle = []
    for number, (_, body) in enumerate(GOOD):
        bundle += objects({**body, "metadata": {"name": f"good-{number}"}}, namespace)
    assert applied(plane, *bundle) == ""


def test_engine_pods_are_allowed_where_only_restricted_pods_are(plane: Plane, namespace: str) -> None:
    """The namespace enforces the restricted Pod Security Standard, and the API server judges."""
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    template = objects(dict(GOOD)["a model that a package ships"], namespace)[-1]["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
    pod["metadata"] |= {"name": "engine", "namespace": namespace}
    pod["spec"]["serviceAccountName"] = "default"  # an account of its own is not there in a dry run
    assert applied(plane, pod) == ""
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    assert "allowPrivilegeEscalation" in applied(plane, pod)


def test_the_examples_are_accepted_together(plane: Plane, controller: Controller, namespace: str) -> None:
    paths = sorted((ROOT / "examples").glob("*.yaml"))
    bodies = [body for path in paths for body in yaml.safe_load_all(path.read_text())]
    for body in bodies:
        body["metadata"]["namespace"] = namespace
    assert applied(plane, *bodies) == ""


def rules(node: Any) -> Iterator[Json]:
    """Every rule in a schema."""
    if isinstance(node, dict):
        yield from node.get("x-kubernetes-validations", [])
        for part in node.values():
            yield from rules(part)
    elif isinstance(node, list):
        for part in node:
            yield from rules(part)


def test_the_rules_cost_less_than_a_tenth_of_what_the_api_server_allows(plane: Plane) -> None:
    """Every rule ten times over is still within its budget, for a rule and for the whole schema."""
    crd = load_crd()
    crd["spec"]["group"] = "cost.example"
    crd["metadata"]["name"] = f"{crd['spec']['names']['plural']}.cost.example"
    found = list(rules(crd))
    assert len(found) > 20
    for rule in found:
        rule["rule"] = " && ".join([f"({rule['rule']})"] * HEADROOM)
    assert applied(plane, crd) == ""
