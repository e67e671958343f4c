"""The chart: one source for the API, least rights, restricted pods, values that are checked."""

import json
import re
from typing import Any

import pytest
import yaml

from headway_operator import settings
from headway_operator.owned import PRUNED_KINDS
from headway_operator.schema import load_crd
from support.helm import CHART, ROOT, render, run

Json = dict[str, Any]

VALUE_SETS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    **{path.stem: ("--values", str(path)) for path in sorted((CHART / "ci").glob("*.yaml"))},
}
every_value_set = pytest.mark.parametrize("values", VALUE_SETS.values(), ids=list(VALUE_SETS))


def of_kind(objects: list[Json], kind: str) -> list[Json]:
    return [manifest for manifest in objects if manifest["kind"] == kind]


def deployment(*arguments: str) -> Json:
    (found,) = of_kind(render(*arguments), "Deployment")
    return found


def environment(*arguments: str) -> dict[str, str]:
    (container,) = deployment(*arguments)["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable.get("value", "from the pod") for variable in container["env"]}


def rules(manifest: Json) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of a role."""
    return {
        (group, kind, verb)
        for rule in manifest["rules"]
        for group in rule["apiGroups"]
        for kind in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_chart_carries_the_api_that_the_project_has() -> None:
    """The copy is what helm can package; refresh it with: cp crds/*.yaml charts/headway/files/crds/"""
    ours = {path.name: path.read_text() for path in (ROOT / "crds").glob("*.yaml")}
    carried = {path.name: path.read_text() for path in (CHART / "files" / "crds").glob("*.yaml")}
    assert carried == ours


def test_the_rendered_api_is_the_same_and_outlives_the_release() -> None:
    (crd,) = of_kind(render(), "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == load_crd()


def test_the_api_can_go_with_the_release_or_be_left_to_others() -> None:
    (crd,) = of_kind(render("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in crd["metadata"]
    assert of_kind(render("--set", "crds.enabled=false"), "CustomResourceDefinition") == []


@every_value_set
def test_helm_finds_nothing_to_complain_about(values: tuple[str, ...]) -> None:
    done = run("lint", "--strict", str(CHART), *values)
    assert done.returncode == 0, done.stdout + done.stderr


@every_value_set
def test_every_object_says_whose_it_is(values: tuple[str, ...]) -> None:
    for manifest in render(*values):
        if manifest["kind"] == "CustomResourceDefinition":
            continue
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/instance"] == "headway"
        namespaced = manifest["kind"] not in ("ClusterRole", "ClusterRoleBinding")
        assert ("namespace" in manifest["metadata"]) == namespaced


@every_value_set
def test_no_role_holds_a_wildcard_or_opens_all_secrets(values: tuple[str, ...]) -> None:
    for role in [m for m in render(*values) if m["kind"] in ("Role", "ClusterRole")]:
        assert not [rule for rule in rules(role) if "*" in rule]
        assert not {verb for _, kind, verb in rules(role) if kind == "secrets"} & {"list", "watch", "delete"}
        assert not {kind for _, kind, _ in rules(role)} & {"customresourcedefinitions", "namespaces", "nodes"}


def test_the_rights_are_those_that_the_controller_uses() -> None:
    """A right more is a risk, a right less is an outage; the cluster tests read the audit log too."""
    (role,) = [r for r in of_kind(render(), "ClusterRole") if r["metadata"]["name"] == "headway-operator"]
    plural = {"Deployment": "deployments", "Service": "services", "ConfigMap": "configmaps"}
    plural["ServiceAccount"] = "serviceaccounts"
    children = {
        (version.rpartition("/")[0], plural[kind], verb)
        for version, kind in PRUNED_KINDS
        for verb in ("get", "list", "create", "patch", "delete")
    }
    assert rules(role) == {
        *children,
        *(("headway.dev", "inferencedeployments", verb) for verb in ("get", "list", "watch")),
        ("headway.dev", "inferencedeployments/status", "patch"),
        ("apps", "deployments", "watch"),
        *(("", "secrets", verb) for verb in ("get", "create", "patch")),
        *(("", "pods", verb) for verb in ("get", "list", "watch")),
        ("events.k8s.io", "events", "create"),
    }


def test_the_lease_may_be_written_and_no_other() -> None:
    (role,) = of_kind(render(), "Role")
    assert role["metadata"] | {"labels": None} == {
        "name": "headway-operator-lease",
        "namespace": "headway-system",
        "labels": None,
    }
    named = [rule for rule in role["rules"] if "resourceNames" in rule]
    assert [rule["resourceNames"] for rule in named] == [[environment()["HEADWAY_LEASE_NAME"]]]
    assert {verb for rule in role["rules"] if rule not in named for verb in rule["verbs"]} == {"create"}


def test_watching_some_namespaces_takes_rights_in_those_only() -> None:
    objects = render("--set", "watchNamespaces={models,default},rbac.aggregate=false")
    assert of_kind(objects, "ClusterRole") == []
    assert of_kind(objects, "ClusterRoleBinding") == []
    roles = [r for r in of_kind(objects, "Role") if r["metadata"]["name"] == "headway-operator"]
    assert {role["metadata"]["namespace"] for role in roles} == {"models", "default"}
    bindings = [b for b in of_kind(objects, "RoleBinding") if b["metadata"]["name"] == "headway-operator"]
    assert {binding["metadata"]["namespace"] for binding in bindings} == {"models", "default"}
    assert {b["subjects"][0]["namespace"] for b in bindings} == {"headway-system"}


def test_people_with_the_clusters_roles_can_use_the_api() -> None:
    roles = {role["metadata"]["name"]: role for role in of_kind(render(), "ClusterRole")}
    view, edit = roles["headway-operator-view"], roles["headway-operator-edit"]
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-admin"] == "true"
    assert {verb for _, _, verb in rules(view)} == {"get", "list", "watch"}
    assert ("headway.dev", "inferencedeployments/status", "patch") not in rules(edit)


@every_value_set
def test_the_controller_runs_under_the_restricted_standard(values: tuple[str, ...]) -> None:
    pod = deployment(*values)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert container["resources"]["requests"]
    assert container["resources"]["limits"]["memory"]
    assert {name for name in container if name.endswith("Probe")} == {
        "startupProbe",
        "readinessProbe",
        "livenessProbe",
    }


@every_value_set
def test_the_controller_can_read_the_settings_it_is_given(values: tuple[str, ...]) -> None:
    given = {name: "x" if value == "from the pod" else value for name, value in environment(*values).items()}
    read = settings.read(given)
    assert read.port == 8080
    assert read.lease_name == "headway-operator"


def test_settings_arrive_as_they_were_set() -> None:
    read = settings.read(
        environment(
            "--set",
            "watchNamespaces={a,b},logLevel=debug,logFormat=json,engine.image.tag=v7,engine.image.pullPolicy=Never",
        )
        | {"POD_NAME": "x", "POD_NAMESPACE": "y"}
    )
    assert read.watch_namespaces == ("a", "b")
    assert read.engine_image == "headway-engine:v7"
    assert (read.engine_pull_policy.value, read.log_level, read.log_format) == ("Never", "debug", "json")


def test_a_digest_wins_over_a_tag() -> None:
    digest = "sha256:" + "0" * 64
    (container,) = deployment("--set", f"image.digest={digest},image.tag=v1")["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["image"] == f"headway-operator@{digest}"


def test_replicas_stand_apart_and_leave_one_at_a_time() -> None:
    objects = render()
    (spread,) = deployment()["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert of_kind(render("--set", "replicas=1"), "PodDisruptionBudget") == []


def test_selectors_find_the_pods() -> None:
    values = ("--set", "networkPolicy.enabled=true,metrics.serviceMonitor.enabled=true")
    objects = render(*values)
    labels = deployment(*values)["spec"]["template"]["metadata"]["labels"].items()
    (service,) = of_kind(objects, "Service")
    (policy,) = of_kind(objects, "NetworkPolicy")
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert service["spec"]["selector"].items() <= labels
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_two_releases_do_not_meet() -> None:
    """Cluster-scoped names carry the release, so that a second one can live in another namespace."""
    names = {
        release: {
            (m["kind"], m["metadata"]["name"])
            for m in render("--set", "crds.enabled=false", release=release)
            if m["kind"].startswith("Cluster")
        }
        for release in ("headway", "second")
    }
    assert names["headway"].isdisjoint(names["second"])


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("replicas=many", "replicas"),
        ("replicaCount=2", "replicaCount"),
        ("crds.install=true", "install"),
        ("logLevel=loud", "logLevel"),
        ("logFormat=xml", "logFormat"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("image.digest=md5:1", "digest"),
        ("watchNamespaces={Not_A_Name}", "watchNamespaces"),
        ("networkPolicy.apiServerPorts={0}", "apiServerPorts"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(setting: str, named: str) -> None:
    done = run("template", "headway", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert named in done.stderr


def test_every_value_has_a_rule_and_every_rule_a_value() -> None:
    def paths(tree: Any, path: str = "") -> set[str]:
        if not isinstance(tree, dict) or not tree:
            return {path}
        return {found for key, part in tree.items() for found in paths(part, f"{path}.{key}")}

    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def known(node: Json, steps: list[str]) -> bool:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
        if not steps:
            return True
        below = node.get("properties", {}).get(steps[0])
        return known(below, steps[1:]) if below is not None else "additionalProperties" not in node

    assert [path for path in paths(values) if not known(schema, path.split(".")[1:])] == []
    assert set(schema["properties"]) - {"global"} == set(values)


def test_notes_name_the_next_three_commands() -> None:
    done = run("install", "headway", str(CHART), "--dry-run=client", "--namespace", "headway-system")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:")[1]
    assert len(re.findall(r"^\d\. ", notes, re.MULTILINE)) == 3
    assert notes.count("kubectl ") >= 3
    assert (ROOT / "examples" / "quickstart.yaml").is_file()
