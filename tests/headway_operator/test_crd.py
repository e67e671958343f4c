"""Rules that the API's schema keeps: everything described, bounded, closed, small, and equal to the code."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from headway_operator import resource, tenancy
from headway_operator.resource import Effect, duration_ms, restart_class
from headway_operator.schema import load_crd, openapi_schema
from headway_operator.tuner.decision import TUNABLES

Json = dict[str, Any]

CRD = load_crd()
SCHEMA = openapi_schema(CRD)


def walk(schema: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Every node with its dotted path; `[]` for items, `{}` for the values of a map."""
    yield path, schema
    for key, part in schema.get("properties", {}).items():
        yield from walk(part, f"{path}.{key}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


SPEC = dict(walk(SCHEMA["properties"]["spec"], "spec"))
STATUS = dict(walk(SCHEMA["properties"]["status"], "status"))
EVERYTHING = {**SPEC, **STATUS}
FIELDS = {path: node for path, node in SPEC.items() if path != "spec"}
LEAVES = {path: node for path, node in FIELDS.items() if "properties" not in node}
EFFECT = re.compile(r"\b(Live|Restart|Immutable)\.$")


def test_there_is_one_version_stored_and_served() -> None:
    (version,) = CRD["spec"]["versions"]
    assert (version["name"], version["served"], version["storage"]) == ("v1alpha1", True, True)
    assert CRD["spec"]["names"]["shortNames"] == ["infd"]
    assert CRD["spec"]["names"]["categories"] == ["headway"]
    assert CRD["metadata"]["name"] == f"{resource.PLURAL}.{resource.GROUP}"


def test_plain_kubectl_apply_can_carry_it() -> None:
    """Client-side apply keeps the whole object in an annotation; small stays far from its limit."""
    assert len(json.dumps(CRD, separators=(",", ":"))) < 64 * 1024


def test_yaml_means_what_it_says() -> None:
    """A comma in an unquoted flow mapping makes a key with no value."""
    empty = [path for path, node in EVERYTHING.items() if None in node.values()]
    assert empty == []


def test_every_field_is_described() -> None:
    silent = [path for path, node in EVERYTHING.items() if len(node.get("description", "")) <= 3]
    assert silent == []


def test_a_description_says_default_and_effect() -> None:
    """`kubectl explain` is the reference manual: unit, default, and what an edit does to running pods."""
    wrong = []
    for path, node in LEAVES.items():
        text = node["description"]
        member = path.endswith(("[]", "{}"))
        if not EFFECT.search(text) or (not member and "default" not in text.lower()):
            wrong.append((path, text))
        if "default" in node:
            default = node["default"]
            written = str(default).lower() if isinstance(default, bool) else str(default)
            if f"Default {written}" not in text:
                wrong.append((path, text))
    assert wrong == []


def test_the_effect_in_a_description_is_the_effect_in_the_code() -> None:
    wrong = []
    for path, node in LEAVES.items():
        (written,) = EFFECT.findall(node["description"])
        if Effect(written) is not restart_class(path.removeprefix("spec.").rstrip("[]{}")):
            wrong.append(path)
    assert wrong == []


def test_numbers_are_whole_bounded_and_say_their_unit() -> None:
    wrong = []
    for path, node in SPEC.items():
        if node.get("type") not in ("integer", "number"):
            continue
        text = node["description"] + SPEC[path.rsplit(".", 1)[0]].get("description", "")
        says_unit = path == "spec.replicas" or re.search(r"Unit |in (tokens|sequences)", text)
        if node["type"] != "integer" or not {"minimum", "maximum"} <= node.keys() or not says_unit:
            wrong.append(path)
    assert wrong == []


def bounded(node: Json) -> bool:
    """Whether the longest value that the schema lets through is known."""
    match node.get("type"):
        case "string":
            return "enum" in node or "maxLength" in node
        case "array":
            return {"maxItems", "x-kubernetes-list-type"} <= node.keys()
        case "object":
            return "properties" in node or "maxProperties" in node
        case kind:
            return kind != "number"  # the API has no floats


def test_everything_is_bounded_so_that_rules_are_cheap() -> None:
    assert [path for path, node in EVERYTHING.items() if not bounded(node)] == []


def test_the_status_is_closed() -> None:
    """What the controller writes by mistake is refused and seen, not kept."""
    assert [path for path, node in STATUS.items() if "x-kubernetes-preserve-unknown-fields" in node] == []


def test_the_spec_is_open_only_where_a_pod_would_be_copied() -> None:
    opened = {path for path, node in SPEC.items() if "x-kubernetes-preserve-unknown-fields" in node}
    affinity = {
        f"spec.podTemplate.affinity.{kind}" for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity")
    }
    assert opened == {*affinity, "spec.podTemplate.volumes[]"}


def test_a_duration_has_its_pattern_its_range_and_a_readable_default() -> None:
    durations = {path: node for path, node in SPEC.items() if "(h|m|s|ms)" in str(node.get("pattern"))}
    assert len(durations) == 3 + 1 + 12  # limits, interval and drain; targets
    for node in durations.values():
        assert node["pattern"] == "^([0-9]{1,5}(h|m|s|ms)){1,4}$"
        assert any("duration(self)" in rule["rule"] for rule in node["x-kubernetes-validations"])
        assert duration_ms(node.get("default", "0s")) >= 0


def test_every_rule_says_in_words_what_it_wants_and_points_at_a_field_that_exists() -> None:
    for path, node in EVERYTHING.items():
        for rule in node.get("x-kubernetes-validations", []):
            assert rule["message"], path
            assert f"{path}{rule.get('fieldPath', '')}" in EVERYTHING


def snake(path: str) -> str:
    """`batching.queue.maxTokens` as the code would name it."""
    return re.sub(r"([A-Z])", lambda found: f"_{found[1].lower()}", path.replace(".", "_"))


RENAMED = {
    "queue_max_requests": "max_queued_requests",
    "queue_max_tokens": "max_queued_tokens",
    "kv_cache_memory_percent": "kv_memory_percent",
    "kv_cache_block_tokens": "kv_block_tokens",
    "kv_cache_prefix_caching": "prefix_caching",
    "hf_token_secret_ref": "hf_token",
    "keys_secret_ref": "keys_secret",
}
"""Fields that the code names otherwise, for a reason: shorter, or as the engine's protocol has them."""


def in_code(kind: type) -> set[str]:
    """Names of the values' fields without their units."""
    return {re.sub(r"_(s|ms)$", "", field.name) for field in dataclasses.fields(kind)}


def in_schema(path: str, *, inside: tuple[str, ...] = ()) -> set[str]:
    """Names of the fields below a path, and of those inside some of them."""
    names = set()
    for key, part in SPEC[path]["properties"].items():
        below = [f"{key}.{inner}" for inner in part["properties"]] if key in inside else [key]
        names |= {snake(name) for name in below}
    return {RENAMED.get(name, name) for name in names}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("spec.model", resource.Model),
        ("spec.runtime", resource.Runtime),
        ("spec.slo", resource.Slo),
        ("spec.tuning", resource.Tuning),
        ("spec.tuning.bounds", resource.Bounds),
        ("spec.tenancy", tenancy.Tenancy),
        ("spec.tenancy.tenants[]", tenancy.Tenant),
        ("spec.rollout", resource.Rollout),
    ],
)
def test_schema_and_code_have_the_same_fields(path: str, kind: type) -> None:
    """A field that is accepted is read, and a field that is read can be written."""
    assert in_code(kind) == in_schema(path)


def test_every_bound_is_of_something_that_the_tuner_moves() -> None:
    """And everything it moves has one: a range that nobody reads would be a promise without effect."""
    assert in_code(resource.Bounds) == set(TUNABLES)


def test_schema_and_code_have_the_same_batching_fields() -> None:
    nested = ("queue", "kvCache", "capacity")
    assert in_code(resource.Batching) == in_schema("spec.batching", inside=nested)


def test_schema_and_code_have_the_same_sections() -> None:
    of_the_object = {"namespace", "name", "uid", "generation", "deleting"}
    assert in_code(resource.Resource) - of_the_object == in_schema("spec")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("spec.batching.mode", resource.BatchingMode),
        ("spec.tuning.mode", resource.TuningMode),
        ("spec.tuning.onMetricsLoss", resource.OnMetricsLoss),
        ("spec.tenancy.fairness", tenancy.Fairness),
        ("spec.rollout.strategy", resource.RolloutStrategy),
    ],
)
def test_choices_in_schema_and_code_are_the_same(path: str, kind: Any) -> None:
    assert set(SPEC[path]["enum"]) == {member.value for member in kind}


def test_columns_show_fields_that_exist() -> None:
    (version,) = CRD["spec"]["versions"]
    for column in version["additionalPrinterColumns"]:
        plain = re.sub(r"\[\?\([^)]*\)\]", "[]", column["jsonPath"]).removeprefix(".")
        assert plain in EVERYTHING or plain == "metadata.creationTimestamp", column
    narrow = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert narrow == ["Model", "Engine", "Ready", "Replicas", "TTFT-P95", "ITL-P95", "SLO", "Tuning", "Age"]


def test_autoscalers_find_what_they_need() -> None:
    (version,) = CRD["spec"]["versions"]
    scale = version["subresources"]["scale"]
    assert scale == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    assert {path.removeprefix(".") for path in scale.values()} <= set(EVERYTHING)
