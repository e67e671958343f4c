"""Tenants from the resource to the engine: read, written into the pods, and understood there."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from headway_engine import config
from headway_engine.core_process import tenant_policy
from headway_engine.keys import KeyRing
from headway_engine.tenants import Fairness as EngineFairness
from headway_engine.tenants import Tenant as EngineTenant
from headway_engine.tenants import TenantPolicy
from headway_operator import manifests
from headway_operator.manifests import Images, build
from headway_operator.reader import InvalidSpec
from headway_operator.resource import parse
from headway_operator.tenancy import Fairness, Tenancy, Tenant
from support.resources import Json, a_body, a_resource, specs

IMAGES = Images("headway-engine:1")
GOLD: Json = {"name": "gold", "weight": 4, "priority": 10}
BATCH: Json = {
    "name": "batch",
    "priority": -10,
    "maxQueuedRequests": 32,
    "maxQueuedTokens": 9000,
    "tokensPerSecond": 500,
    "burstTokens": 2000,
}


def template(tenancy: Json | None) -> Json:
    spec = {} if tenancy is None else {"tenancy": tenancy}
    result: Json = manifests.pod_template(a_resource(spec=spec), IMAGES)
    return result


def data(spec: Json) -> dict[str, str]:
    """Content of the ConfigMap."""
    resource = a_resource(spec=spec)
    objects = build(resource, images=IMAGES, control_key=None, limits=resource.batching.limits())
    (found,) = [o["data"] for o in objects if o["kind"] == "ConfigMap"]
    result: dict[str, str] = found
    return result


def as_the_engine_reads_it(spec: Json, folder: Path) -> TenantPolicy:
    """The policy of an engine that is started with what the resource became."""
    for name, text in data(spec).items():
        (folder / name).write_text(text)
    (container,) = manifests.pod_template(a_resource(spec=spec), IMAGES)["spec"]["containers"]
    arguments = [argument.replace("=/etc/headway/", f"={folder}/") for argument in container["args"]]
    return tenant_policy(config.parse(arguments))


def hash_of(tenancy: Json | None) -> str | None:
    annotations = template(tenancy)["metadata"].get("annotations", {})
    result: str | None = annotations.get("headway.dev/tenants-hash")
    return result


def test_a_tenancy_is_read() -> None:
    tenancy = a_resource(
        spec={"tenancy": {"tenants": [GOLD, BATCH], "keysSecretRef": {"name": "chat-keys"}}}
    ).tenancy
    assert tenancy == Tenancy(
        fairness=Fairness.VIRTUAL_TOKEN_COUNTER,
        tenants=(
            Tenant("gold", weight=4, priority=10),
            Tenant(
                "batch",
                priority=-10,
                max_queued_requests=32,
                max_queued_tokens=9000,
                tokens_per_second=500,
                burst_tokens=2000,
            ),
        ),
        keys_secret="chat-keys",
    )
    assert a_resource().tenancy == Tenancy()


@pytest.mark.parametrize(
    ("tenancy", "path"),
    [
        ({"tenants": ["gold"]}, "spec.tenancy.tenants[0]"),
        ({"tenants": [{"name": "a"}, {"name": "b", "weight": "2"}]}, "spec.tenancy.tenants[1].weight"),
        ({"tenants": {"a": 1}}, "spec.tenancy.tenants"),
        ({"fairness": "Lottery"}, "spec.tenancy.fairness"),
    ],
)
def test_what_cannot_be_read_is_named(tenancy: Json, path: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse(a_body(spec={"tenancy": tenancy}))
    assert [problem.path for problem in caught.value.problems] == [path]


@settings(max_examples=40, deadline=None)
@given(specs())
def test_the_engine_reads_the_tenants_that_the_user_wrote(
    tmp_path_factory: pytest.TempPathFactory, spec: Json
) -> None:
    policy = as_the_engine_reads_it(spec, tmp_path_factory.mktemp("config"))
    wanted = a_resource(spec=spec).tenancy
    assert policy == TenantPolicy(
        fairness=EngineFairness(wanted.fairness.value),
        tenants={
            tenant.name: EngineTenant(
                weight=tenant.weight,
                priority=tenant.priority,
                max_queued_requests=tenant.max_queued_requests,
                max_queued_tokens=tenant.max_queued_tokens,
                tokens_per_s=tenant.tokens_per_second,
                burst_tokens=tenant.burst_tokens,
            )
            for tenant in wanted.tenants
        },
    )


def test_order_of_arrival_reaches_the_engine(tmp_path: Path) -> None:
    policy = as_the_engine_reads_it({"tenancy": {"fairness": "FirstComeFirstServed"}}, tmp_path)
    assert policy.fairness is EngineFairness.FIRST_COME_FIRST_SERVED


def test_choices_of_controller_and_engine_are_the_same() -> None:
    assert {member.value for member in Fairness} == {member.value for member in EngineFairness}


@pytest.mark.parametrize("tenancy", [None, {}, {"tenants": []}, {"fairness": "VirtualTokenCounter"}])
def test_without_tenants_pods_are_as_they_were(tenancy: Json | None) -> None:
    """Nobody's pods are replaced for a section that says nothing."""
    assert template(tenancy) == template(None)
    assert hash_of(tenancy) is None
    assert "tenants.json" not in data({"tenancy": tenancy} if tenancy is not None else {})


def test_an_edit_of_a_tenant_replaces_pods() -> None:
    """The engine reads tenants at start: the ConfigMap alone would change nothing that runs."""
    before = hash_of({"tenants": [GOLD, BATCH]})
    edits: list[dict[str, Any]] = [{**GOLD, "weight": 5}, {**GOLD, "priority": 9}, {**GOLD, "name": "gold2"}]
    hashes = [before, *(hash_of({"tenants": [edit, BATCH]}) for edit in edits), hash_of({"tenants": [BATCH]})]
    assert None not in hashes
    assert len(set(hashes)) == len(hashes)


def test_an_edit_that_only_reorders_tenants_replaces_no_pod() -> None:
    assert template({"tenants": [GOLD, BATCH]}) == template({"tenants": [BATCH, GOLD]})
    assert data({"tenancy": {"tenants": [GOLD, BATCH]}}) == data({"tenancy": {"tenants": [BATCH, GOLD]}})


def test_our_annotation_stands_beside_the_users_and_wins() -> None:
    overlay = {"annotations": {"a/b": "c", "headway.dev/tenants-hash": "mine"}}
    spec = {"tenancy": {"tenants": [GOLD]}, "podTemplate": overlay}
    annotations = manifests.pod_template(a_resource(spec=spec), IMAGES)["metadata"]["annotations"]
    assert annotations == {"a/b": "c", "headway.dev/tenants-hash": hash_of({"tenants": [GOLD]})}


def test_keys_are_mounted_read_only_from_the_users_secret_and_nowhere_copied() -> None:
    tenancy = {"keysSecretRef": {"name": "chat-keys"}}
    pod = template(tenancy)["spec"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "headway-keys"]
    assert volume["secret"] == {"secretName": "chat-keys", "defaultMode": 0o440}
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "headway-keys"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/etc/headway-keys", True)
    read = config.parse(pod["containers"][0]["args"])
    assert (str(read.keys_file), read.tenants_file) == ("/etc/headway-keys", None)


def test_a_pod_without_its_keys_does_not_start_with_an_open_api() -> None:
    """An optional volume would be an empty folder, or none; either way nobody would notice at once."""
    (volume,) = [
        v
        for v in template({"keysSecretRef": {"name": "chat-keys"}})["spec"]["volumes"]
        if v["name"] == "headway-keys"
    ]
    assert not volume["secret"].get("optional")


def test_the_keys_of_a_secret_are_those_of_its_tenants(tmp_path: Path) -> None:
    """A Secret's data, as files, is what the engine takes for keys."""
    for name, text in {"gold": "k1\nk2", "batch": "k3"}.items():
        (tmp_path / name).write_text(text)
    ring = KeyRing(tmp_path)
    assert [ring.tenant(key) for key in ("k1", "k2", "k3", "")] == ["gold", "gold", "batch", None]
