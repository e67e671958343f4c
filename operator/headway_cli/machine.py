"""All of Headway on one machine: the controller's own code over objects in memory and pods as processes.

Only the door to Kubernetes differs from a cluster; manifests, reconcile, fleet and tuner are the same.
Knows nothing of terminals and traffic.
"""

import asyncio
import os
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from headway_cli.errors import Failed, UserError
from headway_engine.protocol import READY_PATH, Limits
from headway_local.images import Images as LocalImages
from headway_local.local_cluster import Event, LocalCluster
from headway_local.objects import PodConfigError
from headway_local.pod import PodOptions, PodProcess, inherited_env
from headway_local.pod_status import Waiting
from headway_local.proxy import Backend, Forwarder
from headway_operator.cluster import ClusterError, Manifest, TryAgain
from headway_operator.fleet import HttpFleet, PodRef
from headway_operator.manifests import Images
from headway_operator.metrics import Sample
from headway_operator.queue import Cause, Key, WorkQueue
from headway_operator.reconcile import Reconciler
from headway_operator.resource import KIND, Resource, parse
from headway_operator.schema import admit

ENGINE_IMAGE = "headway-engine:local"
CACHE_VOLUME = "headway-cache"


PROBED_NEXT = "the engine is ready; requests go to it after its next probe"


class WallClock:
    """The machine's clocks."""

    def wall_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()


class LastReport:
    """Remembers the tuner's last verdict; nobody scrapes the controller here."""

    def __init__(self) -> None:
        self.verdict = ""

    def read(self, key: Key, uid: str, generation: int) -> None:
        return

    def scraped(self) -> None:
        return

    def decided(self, verdict: str) -> None:
        self.verdict = verdict

    def limits_not_taken(self) -> None:
        return

    def status_written(self) -> None:
        return


def cache_folder() -> Path:
    """Where converted models are kept: HEADWAY_CACHE, else the user's cache folder."""
    if explicit := os.environ.get("HEADWAY_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"


class OneMachine:
    """One resource, served. Call `start`, then `wait_ready`; `close` in the end, always."""

    def __init__(
        self,
        resource: Manifest,
        others: Sequence[Manifest] = (),
        *,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._resource = resource
        self._others = others
        self._folder = folder
        self._host = host
        self._port = port
        self._on_event = on_event
        self._report = LastReport()
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self._generation = 0
        metadata = resource["metadata"]
        self.key: Key = (metadata["namespace"], metadata["name"])

    # Life.

    async def start(self) -> str:
        """Open the endpoint and begin to start pods; the endpoint's URL. Raises UserError."""
        images = LocalImages()
        image = parse(self._resource).runtime.image or ENGINE_IMAGE
        try:
            images.rule(image)
        except PodConfigError as e:
            raise UserError(
                f"spec.runtime.image: {image} cannot be run without a cluster",
                "Leave the image out, and the engine of this installation is used",
            ) from e
        cache = cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
        self._session = aiohttp.ClientSession()
        self._fleet = HttpFleet()
        self.cluster = LocalCluster(
            self._folder,
            options=PodOptions(images=images, claims=cache / "claims", base_env=inherited_env()),
            kept_volumes={CACHE_VOLUME: cache},
            on_change=self._changed,
            on_event=self._on_event,
        )
        self._reconciler = Reconciler(
            self.cluster,
            self._fleet,
            images=Images(engine=ENGINE_IMAGE),
            clock=WallClock(),
            randomness=secrets.token_bytes,
            reports=self._report,
        )
        self._queue = WorkQueue(self._work, chance=random.random, patience=_patience)
        try:
            await self._open_endpoint()
        except UserError:
            await self.cluster.close(0)
            await self._session.close()
            raise
        for other in self._others:
            self.cluster.put(other)
        self.cluster.put(self._resource)
        self._tasks.append(asyncio.create_task(self._queue.run(), name="reconcile"))
        return self.url

    async def wait_ready(self, on_state: Callable[[str], None], *, every_s: float = 0.25) -> None:
        """Wait until requests are served; `on_state` hears what is going on. Raises Failed with the log."""
        while not self.ready_pods():
            on_state(await self.state())
            for process in self.cluster.processes():
                self._check_hopeless(process)
            await asyncio.sleep(every_s)

    async def close(self, *, kill: bool = False) -> None:
        """Newcomers get 503, streams finish inside the drain time; with `kill` nothing is waited for.

        May be called again with `kill` while the first call waits.
        """
        self._draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.cluster.close(0 if kill else None)
        await self._forwarder.close()
        await self._refuser.cleanup()
        await self._fleet.close()
        await self._session.close()

    # What others may ask.

    @property
    def url(self) -> str:
        """The stable endpoint, without /v1."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        return f"http://{host}:{self._port}"

    @property
    def resource(self) -> Resource:
        """The resource as it is now."""
        return parse(self._live())

    @property
    def status(self) -> Mapping[str, Any]:
        """Its status, as the controller wrote it last."""
        return self._live().get("status") or {}

    @property
    def verdict(self) -> str:
        """What the tuner decided last, in one word."""
        return self._report.verdict

    def ready_pods(self) -> list[PodProcess]:
        """Pods that serve."""
        return [p for p in self.cluster.processes() if p.facts.ready]

    async def state(self) -> str:
        """In words: ready, or what it is waiting for."""
        if self._draining:
            return "shutting down"
        pods = self.cluster.processes()
        ready = self.ready_pods()
        if ready:
            return "ready" if len(ready) == len(pods) else f"{len(ready)} of {len(pods)} pods ready"
        if not pods:
            problems = [
                c["message"]
                for c in self.status.get("conditions", ())
                if c["type"] == "Stalled" and c["status"] == "True"
            ]
            return problems[0] if problems else "creating pods"
        return await self._pod_state(pods[-1])

    async def scrape(self) -> dict[str, Sample]:
        """The metrics of every pod that answers."""
        refs = [
            PodRef(p.pod["metadata"]["name"], p.pod_ip, _port(p, "management"), p.facts.ready)
            for p in self.ready_pods()
        ]
        found = await self._fleet.scrape(refs)
        return {name: sample for name, sample in found.items() if isinstance(sample, Sample)}

    def edit(self, change: Callable[[Manifest], None]) -> int:
        """`kubectl edit`: change the spec of the running resource; its new generation. Raises InvalidSpec."""

        def checked(body: Manifest) -> None:
            change(body["spec"])
            admit({key: body[key] for key in ("apiVersion", "kind", "metadata", "spec")})

        after = self.cluster.edit(KIND, *self.key, checked)
        return int(after["metadata"]["generation"])

    def replace(self, resource: Manifest, others: Sequence[Manifest] = ()) -> int:
        """`kubectl apply` of an edited file: put another admitted resource, and what stands beside it, in
        place; the generation then."""
        for other in others:
            self.cluster.put(other)
        after = self.cluster.put({**resource, "metadata": {**resource["metadata"], "namespace": self.key[0]}})
        return int(after["metadata"]["generation"])

    async def until_in_force(self, holds: Callable[[Limits], bool], timeout_s: float = 60.0) -> None:
        """Wait until every pod that serves reports limits like these. Raises Failed."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    samples = await self.scrape()
                    if samples and all(s.limits is not None and holds(s.limits) for s in samples.values()):
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError as e:
            raise Failed(f"the limits were not in force after {timeout_s:g} s") from e

    # Inside.

    async def _work(self, key: Key, cause: Cause) -> float | None:
        return (await self._reconciler.reconcile(*key, tick_only=cause is Cause.TICK)).after_s

    def _changed(self, manifest: Manifest) -> None:
        """What the controller would hear from its watches: edits of the resource, and what pods do."""
        kind = manifest["kind"]
        if kind == KIND:
            generation = int(manifest["metadata"]["generation"])
            if generation == self._generation:
                return  # our own status
            self._generation = generation
        elif kind not in ("Deployment", "Pod"):
            return
        self._queue.add(self.key)

    def _live(self) -> Manifest:
        body = self.cluster.peek(KIND, *self.key)
        assert body is not None, "nobody deletes the resource here"
        return body

    async def _pod_state(self, pod: PodProcess) -> str:
        state = pod.facts.state
        if isinstance(state, Waiting) and state.message:
            return f"{state.reason}: {state.message}"
        url = f"http://{pod.pod_ip}:{_port(pod, 'management')}{READY_PATH}"
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as answer:
                words = (await answer.text()).strip()
                return PROBED_NEXT if answer.status == 200 else words
        except (aiohttp.ClientError, OSError, TimeoutError):
            return "starting the engine process"

    def _check_hopeless(self, pod: PodProcess) -> None:
        """Two ends before the first request could be served are no accident."""
        state = pod.facts.state
        if isinstance(state, Waiting) and state.reason == "CrashLoopBackOff":
            raise Failed(
                f"the engine ended {pod.facts.restarts + 1} times before it could serve. "
                f"The end of its log ({pod.log_path}):\n{pod.log_tail(20)}"
            )

    async def _open_endpoint(self) -> None:
        """One port for all pods; while none serves, it answers 503 with the reason."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._refuse)
        self._refuser = web.AppRunner(app, access_log=None)
        await self._refuser.setup()
        site = web.TCPSite(self._refuser, "127.0.0.1", 0)
        await site.start()
        self._refuser_port = int(self._refuser.addresses[0][1])
        self._forwarder = Forwarder(self._host, self._port, self._backends)
        try:
            self._port = await self._forwarder.start()
        except OSError as e:
            await self._refuser.cleanup()
            raise UserError(
                f"port {self._port} cannot be opened: {e.strerror or e}",
                "Choose another with --port N; --port 0 takes any that is free",
            ) from e

    def _backends(self) -> list[Backend]:
        ready = [] if self._draining else [(p.pod_ip, _port(p, "http")) for p in self._serving()]
        return ready or [("127.0.0.1", self._refuser_port)]

    def _serving(self) -> list[PodProcess]:
        """Ready, and not on the way out."""
        return [p for p in self.ready_pods() if "deletionTimestamp" not in p.pod["metadata"]]

    async def _refuse(self, request: web.Request) -> web.Response:
        reason = await self.state()
        body = {"error": {"message": f"not ready: {reason}", "type": "server_error", "code": "unavailable"}}
        return web.json_response(body, status=503, headers={"Retry-After": "2", "Connection": "close"})


def _patience(error: Exception) -> float:
    """How long at least to wait after a failed run."""
    return error.after_s if isinstance(error, TryAgain) else 1.0 if isinstance(error, ClusterError) else 0.0


def _port(pod: PodProcess, name: str) -> int:
    ports = pod.pod["spec"]["containers"][0]["ports"]
    return next(int(p["containerPort"]) for p in ports if p["name"] == name)
