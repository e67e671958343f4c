"""Comparing what is declared with what is live: nothing is applied in vain, nothing of ours is missed."""

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headway_operator.drift import DIGEST_ANNOTATION, Drift, differences, with_digest

WANTED: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"namespace": "default", "name": "chat", "labels": {"a": "b"}},
    "spec": {
        "replicas": 1,
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "image": "i:1",
                        "args": ["--a", "--b"],
                        "resources": {"limits": {"cpu": "1000m"}},
                    }
                ],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
            }
        },
    },
}


def stored(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a server makes of it: defaults added, empty fields dropped, quantities in canonical form."""
    live = copy.deepcopy(manifest)
    live["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": [{"manager": "headway"}]}
    live["spec"]["progressDeadlineSeconds"] = 600
    container = live["spec"]["template"]["spec"]["containers"][0]
    container["imagePullPolicy"] = "IfNotPresent"
    container["resources"]["limits"]["cpu"] = "1"
    live["status"] = {"readyReplicas": 1}
    return live


def test_defaults_and_others_fields_are_no_drift() -> None:
    """Only what we declare is compared."""
    wanted = with_digest(WANTED)
    live = stored(wanted)
    live["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "1000m"
    live["spec"]["template"]["spec"]["containers"].append({"name": "sidecar", "image": "mesh"})
    assert differences(wanted, live) == {}
    assert not Drift().found(wanted, live)


def test_what_the_server_rewrites_is_applied_once_and_then_known() -> None:
    """1000m is stored as 1: not the same text, not a drift."""
    drift, wanted = Drift(), with_digest(WANTED)
    live = stored(wanted)
    assert drift.found(wanted, live)
    drift.applied(wanted, live)
    assert not drift.found(wanted, live)
    drift.forget("default", "chat")
    assert drift.found(wanted, live)


def test_a_changed_field_is_drift_even_beside_a_rewritten_one() -> None:
    """Knowing one rewriting hides nothing else."""
    drift, wanted = Drift(), with_digest(WANTED)
    drift.applied(wanted, stored(wanted))
    live = stored(wanted)
    live["spec"]["template"]["spec"]["containers"][0]["image"] = "evil"
    assert drift.found(wanted, live)
    live = stored(wanted)
    live["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "2"
    assert drift.found(wanted, live)


def test_a_field_that_is_no_longer_declared_is_drift() -> None:
    """The live object holds it, nothing declared differs: only the digest can tell."""
    before = with_digest(WANTED)
    after = copy.deepcopy(WANTED)
    del after["metadata"]["labels"]["a"]
    wanted = with_digest(after)
    assert list(differences(wanted, stored(before))) == [
        f"/metadata/annotations/{DIGEST_ANNOTATION}",
        "/spec/template/spec/containers/engine/resources/limits/cpu",
    ]


def test_an_absent_object_is_drift() -> None:
    """It has to be made."""
    assert Drift().found(with_digest(WANTED), None)


def test_arguments_are_compared_in_order_and_length() -> None:
    """Lists without names are one value."""
    assert differences({"args": ["a", "b"]}, {"args": ["b", "a"]}) == {"/args/0": "b", "/args/1": "a"}
    assert differences({"args": ["a"]}, {"args": ["a", "b"]}) == {"/args": ["a", "b"]}
    assert differences({"args": []}, {}) == {}
    assert differences({"args": []}, {"args": ["a"]}) == {"/args": ["a"]}


def test_items_with_names_may_stand_in_any_order() -> None:
    """As the API server merges them."""
    wanted = [{"name": "a", "value": "1"}, {"name": "b", "value": "2"}]
    assert differences(wanted, [{"name": "x"}, *reversed(wanted)]) == {}
    assert differences(wanted, wanted[:1]) == {"/b/name": None, "/b/value": None}


def test_empty_and_absent_are_the_same_and_zero_is_not_missed() -> None:
    """The server drops empty fields; a 0 that it holds as 1 is drift."""
    assert differences({"a": "", "b": {}, "c": [], "d": False, "e": 0}, {}) == {}
    assert differences({"replicas": 0}, {"replicas": 1}) == {"/replicas": 1}


def test_the_digest_is_that_of_the_manifest_and_keeps_its_annotations() -> None:
    """The same manifest, the same digest; the original is not touched."""
    original = copy.deepcopy(WANTED)
    annotated = {**WANTED, "metadata": {**WANTED["metadata"], "annotations": {"x": "y"}}}
    one = with_digest(annotated)["metadata"]["annotations"]
    assert one["x"] == "y"
    assert one == with_digest(copy.deepcopy(annotated))["metadata"]["annotations"]
    assert one != with_digest(WANTED)["metadata"]["annotations"]
    assert original == WANTED


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "x", "y"]), inner),
    max_leaves=12,
)


@given(json_values)
def test_anything_equals_itself(value: object) -> None:
    """No shape of JSON is its own drift (two items of one name would be no valid object)."""
    if not _doubled(value):
        assert differences(value, value) == {}


def _doubled(value: object) -> bool:
    if isinstance(value, dict):
        return any(_doubled(v) for v in value.values())
    if isinstance(value, list):
        names = [v.get("name") for v in value if isinstance(v, dict) and isinstance(v.get("name"), str)]
        return len(set(names)) < len(names) or any(_doubled(v) for v in value)
    return False
