"""The door to the API server over a real socket: paths, headers, errors, patience, and fresh tokens."""

import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import Configuration
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from headway_operator import cluster_kube
from headway_operator.cluster import ClusterError, Conflict, Forbidden, Gone, Refused, TryAgain
from headway_operator.cluster_kube import (
    BearerToken,
    KubeCluster,
    LoginFailed,
    bearer_token,
    log_in,
    plural,
)
from support.fake_api import Answer, Asked, FakeApi

CONFIG_MAP = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"namespace": "team", "name": "chat-limits"},
    "data": {"a": "b"},
}
RESOURCE = {
    "apiVersion": "headway.dev/v1alpha1",
    "kind": "InferenceDeployment",
    "metadata": {"namespace": "team", "name": "chat", "uid": "u-1"},
}


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi().serving() as api:
        yield api


@pytest.fixture
async def cluster(api: FakeApi) -> AsyncIterator[KubeCluster]:
    cluster = KubeCluster(Configuration(host=api.url), instance="headway-operator-0")
    yield cluster
    await cluster.close()


def answer(api: FakeApi, status: int, body: Any = None, **headers: str) -> None:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    api.answers = lambda asked: Answer(body or {"message": "because"}, status, names)


async def test_apply_is_a_forced_server_side_apply_of_the_whole_manifest(
    api: FakeApi, cluster: KubeCluster
) -> None:
    """One manager, force, strict field validation; the answer is the live object."""
    answer(api, 200, {**CONFIG_MAP, "live": True})
    assert (await cluster.apply(CONFIG_MAP))["live"] is True
    (asked,) = api.requests
    assert (asked.method, asked.path) == ("PATCH", "/api/v1/namespaces/team/configmaps/chat-limits")
    assert asked.query == {"fieldManager": "headway", "force": "true", "fieldValidation": "Strict"}
    assert asked.headers["Content-Type"] == "application/apply-patch+yaml"
    assert asked.body == CONFIG_MAP


async def test_status_goes_to_its_subresource_under_its_own_manager(
    api: FakeApi, cluster: KubeCluster
) -> None:
    """So that the spec's owner and the status' owner never fight."""
    await cluster.apply_status({**RESOURCE, "status": {"observedGeneration": 3}})
    (asked,) = api.requests
    path = "/apis/headway.dev/v1alpha1/namespaces/team/inferencedeployments/chat/status"
    assert asked.path == path
    assert asked.query["fieldManager"] == "headway-status"


async def test_empty_objects_and_empty_strings_are_sent_as_they_are(
    api: FakeApi, cluster: KubeCluster
) -> None:
    """`emptyDir: {}` means something."""
    manifest = {**CONFIG_MAP, "spec": {"emptyDir": {}, "items": [], "nothing": "", "off": False}}
    await cluster.apply(manifest)
    assert api.requests[0].body == manifest


async def test_an_absent_object_is_none(api: FakeApi, cluster: KubeCluster) -> None:
    """A 404 is an answer and no error, for reads and deletions."""
    answer(api, 404)
    assert await cluster.get("v1", "Secret", "team", "key") is None
    await cluster.delete("v1", "Secret", "team", "key")
    assert [asked.method for asked in api.requests] == ["GET", "DELETE"]


async def test_lists_are_read_in_chunks_and_say_what_their_items_are(
    api: FakeApi, cluster: KubeCluster
) -> None:
    """The continue token is followed; labels are selected by the server."""

    def pages(asked: Asked) -> Answer:
        first = "continue" not in asked.query
        items = [{"metadata": {"name": "one" if first else "two"}}]
        return Answer({"items": items, "metadata": {"continue": "more"} if first else {}})

    api.answers = pages
    found = await cluster.list("apps/v1", "Deployment", "team", {"b": "2", "a": "1"})
    assert [(o["kind"], o["apiVersion"], o["metadata"]["name"]) for o in found] == [
        ("Deployment", "apps/v1", "one"),
        ("Deployment", "apps/v1", "two"),
    ]
    assert api.requests[0].query == {"limit": "500", "labelSelector": "a=1,b=2"}
    assert api.requests[1].query["continue"] == "more"


async def test_a_list_over_all_namespaces_has_no_namespace_in_its_path(
    api: FakeApi, cluster: KubeCluster
) -> None:
    """Cluster-wide mode."""
    await cluster.list("headway.dev/v1alpha1", "InferenceDeployment", "", {})
    assert api.requests[0].path == "/apis/headway.dev/v1alpha1/inferencedeployments"


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, Refused),
        (401, TryAgain),
        (403, Forbidden),
        (404, Gone),
        (409, Conflict),
        (410, Gone),
        (422, Refused),
        (429, TryAgain),
        (500, TryAgain),
        (503, TryAgain),
    ],
)
async def test_every_status_has_one_meaning(
    api: FakeApi, cluster: KubeCluster, status: int, error: type[ClusterError]
) -> None:
    """And the API server's own words are in the message."""
    answer(api, status)
    with pytest.raises(error, match=f"PATCH .*: {status} because"):
        await cluster.apply(CONFIG_MAP)


@pytest.mark.parametrize(
    ("details", "error"),
    [
        ({"causes": [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]}, Gone),
        ({"causes": [{"reason": "Other"}, {"reason": "NamespaceTerminating"}]}, Gone),
        ({"causes": [{"reason": "Other"}]}, Forbidden),
        ({"causes": [{}]}, Forbidden),
        ({"causes": None}, Forbidden),
        ({}, Forbidden),
        (None, Forbidden),
    ],
)
async def test_a_403_from_a_namespace_that_is_being_deleted_is_not_about_rights(
    api: FakeApi, cluster: KubeCluster, details: Any, error: type[ClusterError]
) -> None:
    """Nothing new may be made there, which the API server says with the status of a missing right."""
    answer(api, 403, {"message": "forbidden: it is being terminated", "details": details})
    with pytest.raises(error, match="being terminated"):
        await cluster.apply(CONFIG_MAP)


@pytest.mark.parametrize(("header", "after_s"), [("7", 7.0), ("soon", 1.0), (None, 1.0)])
async def test_retry_after_is_heard(
    api: FakeApi, cluster: KubeCluster, header: str | None, after_s: float
) -> None:
    """What cannot be read counts as a second."""
    answer(api, 429, **({"Retry_After": header} if header else {}))
    with pytest.raises(TryAgain) as caught:
        await cluster.get("v1", "Secret", "team", "key")
    assert caught.value.after_s == after_s


async def test_an_unreachable_server_is_worth_another_try(api: FakeApi) -> None:
    """Connection refused, over and over, is TryAgain and nothing else."""
    cluster = KubeCluster(Configuration(host="http://127.0.0.1:1"))
    try:
        with pytest.raises(TryAgain):
            await cluster.apply(CONFIG_MAP)
    finally:
        await cluster.close()


async def test_a_silent_server_is_given_up(
    api: FakeApi, cluster: KubeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call waits for ever."""
    monkeypatch.setattr(cluster_kube, "CALL_TIMEOUT_S", 0.2)
    api.answers = lambda asked: Answer({}, delay_s=30.0)
    with pytest.raises(TryAgain, match="Timeout"):
        await cluster.get("v1", "Secret", "team", "key")


async def test_an_answer_that_is_no_json_is_worth_another_try(api: FakeApi, cluster: KubeCluster) -> None:
    """A proxy's error page, say."""
    api.answers = lambda asked: Answer("<html>")
    with pytest.raises(TryAgain, match="not JSON"):
        await cluster.get("v1", "Secret", "team", "key")


async def test_an_event_names_the_object_and_the_reporter(api: FakeApi, cluster: KubeCluster) -> None:
    """events.k8s.io/v1; a note that is too long is cut."""
    await cluster.post_event(RESOURCE, type_="Normal", reason="LimitsChanged", note="x" * 2000, action="Tune")
    (asked,) = api.requests
    assert (asked.method, asked.path) == ("POST", "/apis/events.k8s.io/v1/namespaces/team/events")
    body = asked.body
    assert body["regarding"] == {**RESOURCE["metadata"], **{k: RESOURCE[k] for k in ("apiVersion", "kind")}}  # type: ignore[dict-item]
    assert body["reportingInstance"] == "headway-operator-0"
    assert len(body["note"]) == 1024
    assert datetime.datetime.fromisoformat(body["eventTime"]).microsecond >= 0
    assert body["metadata"]["name"].startswith("chat.")


async def test_a_rotated_token_is_used_without_a_restart(api: FakeApi, tmp_path: Path) -> None:
    """The service account's file is read again when it is a minute old."""
    token, ca = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    ca.write_text("unused over http")
    host, port = api.url.removeprefix("http://").split(":")
    loader = InClusterConfigLoader(
        str(token), str(ca), environ={"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    )
    login = Configuration()
    loader.load_and_set(login)
    login.host, login.ssl_ca_cert = loader.host, loader.ssl_ca_cert = api.url, None
    cluster = KubeCluster(login)
    try:
        assert await bearer_token(login) == BearerToken("Bearer", "first")
        await cluster.get("v1", "Secret", "team", "key")
        token.write_text("second")
        loader.token_expires_at = datetime.datetime.now()
        await cluster.get("v1", "Secret", "team", "key")
        assert await bearer_token(login) == BearerToken("Bearer", "second")
    finally:
        await cluster.close()
    assert [asked.headers["Authorization"] for asked in api.requests] == ["bearer first", "bearer second"]


async def test_a_kubeconfig_logs_in_where_there_is_no_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no login at all is one clear error."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(LoginFailed):
        await log_in(tmp_path / "absent")
    config = tmp_path / "config"
    config.write_text(
        """{"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:9"}}],
            "users": [{"name": "u", "user": {"token": "secret"}}]}"""
    )
    login = await log_in(config)
    assert login.host == "http://127.0.0.1:9"
    assert await bearer_token(login) == BearerToken("Bearer", "secret")


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("Deployment", "deployments"),
        ("NetworkPolicy", "networkpolicies"),
        ("Ingress", "ingresses"),
        ("InferenceDeployment", "inferencedeployments"),
        ("Lease", "leases"),
    ],
)
def test_kinds_become_path_words(kind: str, word: str) -> None:
    """As the API names them."""
    assert plural(kind) == word
