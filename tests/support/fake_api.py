"""A small HTTP server with the manners of a Kubernetes API server: discovery, list, watch, canned answers.

It judges nothing; tests look at what was asked (`requests`) and decide what is answered (`answers`, or the
objects of `lists`). For the truth about the API there is the real server in the cluster tests.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]

DISCOVERY: Mapping[str, Json] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [
            {
                "name": name,
                "versions": [{"groupVersion": f"{name}/{version}", "version": version}],
                "preferredVersion": {"groupVersion": f"{name}/{version}", "version": version},
            }
            for name, version in (
                ("apps", "v1"),
                ("headway.dev", "v1alpha1"),
                ("apiextensions.k8s.io", "v1"),
            )
        ],
    },
}
KINDS = {
    "/api/v1": (("pods", "Pod", True), ("namespaces", "Namespace", False), ("events", "Event", True)),
    "/apis/apps/v1": (("deployments", "Deployment", True),),
    "/apis/headway.dev/v1alpha1": (("inferencedeployments", "InferenceDeployment", True),),
    "/apis/apiextensions.k8s.io/v1": (("customresourcedefinitions", "CustomResourceDefinition", False),),
}


@dataclass(frozen=True)
class Asked:
    """One request as it came in."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """What is answered to it."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


class FakeApi:
    """Use `serving()`; the server listens on a free port of the loopback address."""

    def __init__(self) -> None:
        self.requests: list[Asked] = []
        self.answers: Callable[[Asked], Answer | None] = lambda asked: None
        self.lists: dict[str, list[Json]] = {}  # plural to objects
        self.url = ""
        self._version = 100
        self._watchers: dict[str, set[asyncio.Queue[Json]]] = {}
        self.stopping = asyncio.Event()

    def happens(self, plural: str, type_: str, body: Json) -> None:
        """A change: stored for later lists, and told to the watchers of today."""
        self._version += 1
        body = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self._version)}}
        name = body["metadata"]["name"]
        kept = [o for o in self.lists.get(plural, []) if o["metadata"]["name"] != name]
        self.lists[plural] = kept if type_ == "DELETED" else [*kept, body]
        for queue in self._watchers.get(plural, ()):
            queue.put_nowait({"type": type_, "object": body})

    def watched(self, plural: str) -> bool:
        return bool(self._watchers.get(plural))

    @property
    def writes(self) -> list[Asked]:
        return [asked for asked in self.requests if asked.method != "GET"]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeApi"]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A watcher that went away must not leave its handler behind: kopf waits for every task of the loop.
        runner = web.AppRunner(
            app, access_log=None, handle_signals=False, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.stopping.set()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        asked = Asked(
            request.method,
            request.path,
            dict(request.query),
            dict(request.headers),
            json.loads(text) if text else None,
        )
        self.requests.append(asked)
        answer = self.answers(asked)
        if answer is not None:
            await asyncio.sleep(answer.delay_s)
            if isinstance(answer.body, str):
                return web.Response(text=answer.body, status=answer.status, headers=answer.headers)
            return web.json_response(answer.body, status=answer.status, headers=answer.headers)
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if request.path in KINDS:
            return web.json_response(_kinds(request.path))
        plural = request.path.rsplit("/", 1)[-1]
        if request.query.get("watch"):
            return await self._watch(request, plural)
        found = {"metadata": {"resourceVersion": str(self._version)}, "items": self.lists.get(plural, [])}
        return web.json_response({"kind": "List", "apiVersion": "v1", **found})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        queue: asyncio.Queue[Json] = asyncio.Queue()
        self._watchers.setdefault(plural, set()).add(queue)
        try:
            while (event := await self._next(queue)) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watchers[plural].discard(queue)
        return response

    async def _next(self, queue: asyncio.Queue[Json]) -> Json | None:
        """The next event; None when the server stops."""
        event = asyncio.ensure_future(queue.get())
        stopping = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({event, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return event.result() if event.done() else None
        finally:
            event.cancel()
            stopping.cancel()


def _kinds(path: str) -> Json:
    verbs = ["get", "list", "watch", "patch", "create", "update", "delete"]
    return {
        "kind": "APIResourceList",
        "groupVersion": path.removeprefix("/apis/").removeprefix("/api/"),
        "resources": [
            {
                "name": plural,
                "kind": kind,
                "singularName": kind.lower(),
                "namespaced": namespaced,
                "verbs": verbs,
            }
            for plural, kind, namespaced in KINDS[path]
        ],
    }
