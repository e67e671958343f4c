"""The kopf edge against a small HTTP server: what it asks, what it delivers, and that it never writes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from headway_operator import handlers
from headway_operator.manifests import OWNER_LABEL
from support.eventually import eventually
from support.fake_api import Answer, Asked, FakeApi

Key = tuple[str, str]


def resource(name: str, generation: int = 1, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "headway.dev/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"namespace": "default", "name": name, "uid": f"u-{name}", "generation": generation}
        | metadata,
        "spec": {},
    }


def pod(name: str, owner: str, ready: str = "False") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": f"u-{name}",
            "labels": {OWNER_LABEL: owner},
        },
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


@dataclass
class Edge:
    """kopf, running against a fake API server."""

    api: FakeApi
    changed: list[Key] = field(default_factory=list)
    delivered: list[tuple[Key, str, int]] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, *namespaces: str) -> None:
        registry = handlers.registry(
            login=Configuration(host=self.api.url, api_key={"BearerToken": "Bearer secret"}),
            changed=self.changed.append,
            delivered=lambda *what: self.delivered.append(what),
        )
        await handlers.watch(registry, namespaces=namespaces, stop=self.stop, started=self.started.set)

    @contextlib.asynccontextmanager
    async def running(self, *namespaces: str) -> AsyncIterator[None]:
        task = asyncio.create_task(self.run(*namespaces))
        try:
            kinds = ("inferencedeployments", "deployments", "pods")
            await eventually(lambda: task.done() or all(map(self.api.watched, kinds)), what="three watches")
            assert not task.done(), task.exception()
            yield
        finally:
            self.stop.set()
            await asyncio.wait_for(task, 20)


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with FakeApi().serving() as api:
        yield Edge(api)


async def test_what_exists_and_what_happens_becomes_keys(edge: Edge) -> None:
    """Resources at start, a new one, an edit, a pod that becomes ready, a deletion."""
    edge.api.lists["inferencedeployments"] = [resource("old")]
    edge.api.lists["pods"] = [pod("old-1", "old")]
    async with edge.running():
        await asyncio.wait_for(edge.started.wait(), 10)
        await eventually(lambda: edge.changed.count(("default", "old")) == 2, what="resource and pod")

        edge.api.happens("inferencedeployments", "ADDED", resource("new"))
        await eventually(lambda: ("default", "new") in edge.changed)
        edge.changed.clear()

        edge.api.happens("inferencedeployments", "MODIFIED", resource("new", generation=2))
        await eventually(lambda: edge.changed == [("default", "new")])
        assert edge.delivered[-1] == (("default", "new"), "u-new", 2)

        edge.api.happens("pods", "MODIFIED", pod("old-1", "old", ready="True"))
        await eventually(lambda: edge.changed == [("default", "new"), ("default", "old")])

        edge.api.happens("inferencedeployments", "DELETED", resource("new", generation=2))
        await eventually(lambda: edge.changed[2:] == [("default", "new")])


async def test_our_own_status_write_is_no_news(edge: Edge) -> None:
    """Or every write would cause the next look."""
    async with edge.running():
        edge.api.happens("inferencedeployments", "ADDED", resource("chat"))
        await eventually(lambda: edge.changed == [("default", "chat")])
        edge.api.happens("inferencedeployments", "MODIFIED", {**resource("chat"), "status": {"x": 1}})
        edge.api.happens("inferencedeployments", "ADDED", resource("last"))
        await eventually(lambda: ("default", "last") in edge.changed)
        assert edge.changed == [("default", "chat"), ("default", "last")]


async def test_nothing_is_ever_written_and_nothing_else_is_watched(edge: Edge) -> None:
    """No finalizer, no annotation, no peering, no events; namespaces and CRDs are not even listed."""
    async with edge.running():
        edge.api.happens("inferencedeployments", "ADDED", resource("chat"))
        edge.api.happens("inferencedeployments", "MODIFIED", resource("chat", deletionTimestamp="2026-01-01"))
        edge.api.happens("pods", "ADDED", pod("chat-1", "chat"))
        await eventually(lambda: len(edge.changed) >= 2)
    assert edge.api.writes == []
    listed = {asked.path.rsplit("/", 1)[-1] for asked in edge.api.requests}
    assert listed.isdisjoint({"namespaces", "customresourcedefinitions"})
    assert all(asked.headers["Authorization"] == "Bearer secret" for asked in edge.api.requests)


async def test_children_are_selected_by_the_server(edge: Edge) -> None:
    """The pods of others never reach this process."""
    async with edge.running():
        pass
    streams = [a for a in edge.api.requests if a.path.endswith(("/pods", "/deployments"))]
    assert streams
    assert all(asked.query["labelSelector"] == OWNER_LABEL for asked in streams)


async def test_only_the_named_namespaces_are_watched(edge: Edge) -> None:
    """A namespaced install has rights nowhere else."""
    task = asyncio.create_task(edge.run("team-a", "team-b"))
    await eventually(lambda: len([a for a in edge.api.requests if a.query.get("watch")]) >= 6)
    edge.stop.set()
    await asyncio.wait_for(task, 20)
    paths = {a.path for a in edge.api.requests if a.query.get("watch")}
    assert {path.split("/namespaces/")[1].split("/")[0] for path in paths} == {"team-a", "team-b"}


async def test_a_refused_token_is_tried_again(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """401 means: log in again, with what the token file holds now, even where that is the same."""
    monkeypatch.setattr(handlers, "LOGIN_AGAIN_S", 0.1)
    refused: list[Asked] = []

    def once(asked: Asked) -> Answer | None:
        if asked.query.get("watch") and len(refused) < 5:
            refused.append(asked)
            return Answer({"kind": "Status", "code": 401, "message": "expired"}, 401)
        return None

    edge.api.answers = once
    async with edge.running():
        edge.api.happens("inferencedeployments", "ADDED", resource("chat"))
        await eventually(lambda: ("default", "chat") in edge.changed)
    assert len(refused) == 5


def test_fingerprints_know_news_from_repetition() -> None:
    """Same name again after a deletion is news; another resourceVersion is not."""
    seen = handlers.Fingerprints()
    one = pod("p", "chat")
    assert seen.news(one, False, with_status=True)
    again = {**one, "metadata": {**one["metadata"], "resourceVersion": "9", "managedFields": []}}
    assert not seen.news(again, False, with_status=True)
    assert seen.news(pod("p", "chat", "True"), False, with_status=True)
    assert seen.news(one, True, with_status=True)
    assert seen.news(one, False, with_status=True)
