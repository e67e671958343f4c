"""A `Cluster` without Kubernetes: objects in memory, pods as processes of this machine.

It is the door through which `headway up` runs the controller. It stores what is applied, counts generations,
collects garbage, and does the work of two controllers of Kubernetes: Deployments become pods, and pods run.
Nothing outlives the process. Knows nothing of engines and of what the objects mean to Headway.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway_local import rollout
from headway_local.adapt import ENGINE_PORT_OPTIONS, adapt
from headway_local.objects import PodConfigError, Token
from headway_local.pod import PodOptions, PodProcess
from headway_local.pod_status import stamp
from headway_operator.cluster import Gone, Manifest

Identity = tuple[str, str, str]  # kind, namespace, name

POD_ADDRESS = "127.0.0.1"
TEMPLATE_HASH = "pod-template-hash"


@dataclass(frozen=True, slots=True)
class Event:
    """An event that the controller posted."""

    at: datetime
    type: str
    reason: str
    note: str


@dataclass(slots=True)
class _Pod:
    """A pod and its process. `stopping` is the task that ends it."""

    manifest: Manifest
    process: PodProcess
    revision: str
    deployment: Identity
    stopping: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def view(self) -> Manifest:
        """The object as the API would show it."""
        return {**self.manifest, "status": self.process.status}


class LocalCluster:
    """Objects, and the pods of Deployments. `on_change` hears every object that was stored or removed.

    Use inside a running event loop; `close` stops the pods. Logs of pods lie under `folder`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        options: PodOptions | None = None,
        port_options: Mapping[str, str] = ENGINE_PORT_OPTIONS,
        kept_volumes: Mapping[str, Path] | None = None,
        on_change: Callable[[Manifest], None] = lambda manifest: None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.folder = folder
        self.on_change = on_change
        self.on_event = on_event
        self.events: list[Event] = []
        self._options = options or PodOptions(claims=folder / "claims")
        self._port_options = port_options
        self._kept_volumes = kept_volumes or {}
        self._objects: dict[Identity, Manifest] = {}
        self._applied: dict[Identity, Manifest] = {}
        self._pods: dict[str, _Pod] = {}
        self._version = 0
        self._closing = False
        self._wake = asyncio.Event()
        self._control = asyncio.create_task(self._run(), name="local deployments")

    # The Cluster protocol.

    async def apply(self, manifest: Manifest) -> Manifest:
        identity = _identity(manifest)
        live = self._objects.get(identity) or _head(manifest)
        # What was applied before and is not applied now goes; what others set stays (a scaler's replicas).
        merged = _merged(_without(live, self._applied.get(identity, {}), manifest), manifest)
        self._applied[identity] = copy.deepcopy(manifest)
        self._store(identity, merged)
        return copy.deepcopy(self._objects[identity])

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        if kind == "Pod":
            pod = self._pods.get(name)
            return copy.deepcopy(pod.view) if pod else None
        return copy.deepcopy(self._objects.get((kind, namespace, name)))

    async def list(
        self, api_version: str, kind: str, namespace: str, labels: Mapping[str, str]
    ) -> list[Manifest]:
        stored = [o for (k, _, _), o in sorted(self._objects.items()) if k == kind]
        found = [p.view for p in self._pods.values()] if kind == "Pod" else stored
        return [
            copy.deepcopy(o)
            for o in found
            if namespace in ("", o["metadata"]["namespace"])
            and labels.items() <= (o["metadata"].get("labels") or {}).items()
        ]

    async def apply_status(self, manifest: Manifest) -> None:
        identity = _identity(manifest)
        live = self._objects.get(identity)
        if live is None:
            raise Gone(f"{identity[0]} {identity[2]}: not found")
        self._store(identity, {**live, "status": copy.deepcopy(manifest["status"])})

    async def delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        self.remove(kind, namespace, name)

    async def post_event(
        self, regarding: Manifest, *, type_: str, reason: str, note: str, action: str
    ) -> None:
        event = Event(datetime.now(UTC), type_, reason, note)
        self.events.append(event)
        self.on_event(event)

    # What pods ask (ObjectSource).

    async def config_map(self, namespace: str, name: str) -> Manifest | None:
        return copy.deepcopy(self._objects.get(("ConfigMap", namespace, name)))

    async def secret(self, namespace: str, name: str) -> Manifest | None:
        return copy.deepcopy(self._objects.get(("Secret", namespace, name)))

    async def token(self, pod: Manifest, audience: str, lifetime_s: int) -> Token | None:
        return None  # there is no API server that would take one

    # What the user does.

    def put(self, manifest: Manifest) -> Manifest:
        """Create an object, or replace all but its status: `kubectl replace`."""
        identity = _identity(manifest)
        live = self._objects.get(identity)
        after = copy.deepcopy(manifest)
        if live is not None:
            after["metadata"] = {**live["metadata"], **after["metadata"]}
            if "status" in live:
                after["status"] = live["status"]
        self._store(identity, after)
        return copy.deepcopy(self._objects[identity])

    def edit(self, kind: str, namespace: str, name: str, change: Callable[[Manifest], None]) -> Manifest:
        """Change an object in place: `kubectl edit`. Raises Gone."""
        live = self._objects.get((kind, namespace, name))
        if live is None:
            raise Gone(f"{kind} {name}: not found")
        after = copy.deepcopy(live)
        change(after)
        return self.put(after)

    def peek(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """The object as it stands, for reading only."""
        return self._objects.get((kind, namespace, name))

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object and all that it owns. A pod of a Deployment is stopped, and replaced."""
        if kind == "Pod":
            if pod := self._pods.get(name):
                self._stop(pod)
            return
        gone = self._objects.pop((kind, namespace, name), None)
        self._applied.pop((kind, namespace, name), None)
        if gone is None:
            return
        self.on_change(copy.deepcopy(gone))
        for (k, ns, n), other in list(self._objects.items()):
            owners = other["metadata"].get("ownerReferences") or []
            if owners and all(o["uid"] == gone["metadata"]["uid"] for o in owners):
                self.remove(k, ns, n)
        self._wake.set()

    # Pods.

    def processes(self) -> tuple[PodProcess, ...]:
        """The pods' processes, oldest first; those that are being stopped too."""
        return tuple(pod.process for pod in self._pods.values())

    async def close(self, grace_s: float | None = None) -> None:
        """Stop all pods inside their grace periods, or inside `grace_s` (0: kill).

        A second call while the first waits may shorten the time.
        """
        self._closing = True
        self._control.cancel()
        await asyncio.gather(self._control, return_exceptions=True)
        await asyncio.gather(*(pod.process.stop(grace_s) for pod in list(self._pods.values())))
        tasks = [pod.stopping for pod in self._pods.values() if pod.stopping]
        await asyncio.gather(*tasks)

    # Inside.

    def _store(self, identity: Identity, after: Manifest) -> None:
        before = self._objects.get(identity)
        metadata = after["metadata"]
        if before is None:
            metadata |= {
                "uid": str(uuid.uuid4()),
                "generation": 1,
                "creationTimestamp": stamp(datetime.now(UTC)),
            }
        elif before == after:
            return
        elif before.get("spec") != after.get("spec"):
            metadata["generation"] = before["metadata"]["generation"] + 1
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self._objects[identity] = after
        if identity[0] in ("Deployment", "ConfigMap", "Secret"):
            self._wake.set()
        self.on_change(copy.deepcopy(after))

    async def _run(self) -> None:
        """Whenever something changed: bring pods to what Deployments say, and volumes to what objects say."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for identity in [i for i in self._objects if i[0] == "Deployment"]:
                self._bring_about(identity)
            for pod in list(self._pods.values()):
                if (pod.deployment not in self._objects) and pod.stopping is None:
                    self._stop(pod)
                elif pod.stopping is None and pod.process.facts.sandbox:
                    # A missing object leaves the old content, as in the kubelet.
                    with contextlib.suppress(PodConfigError):
                        await pod.process.refresh_volumes()

    def _bring_about(self, identity: Identity) -> None:
        """One step of one Deployment, and its status."""
        deployment = self._objects[identity]
        spec = deployment["spec"]
        replicas = int(spec.get("replicas", 1))
        revision = _revision(spec["template"])
        step = rollout.step(self._views(identity, revision), replicas, rollout.strategy(spec))
        for name in step.stop:
            self._stop(self._pods[name])
        for _ in range(step.start):
            self._start(deployment, revision)
        status = rollout.status(deployment, self._views(identity, revision), stamp(datetime.now(UTC)))
        self._store(identity, {**deployment, "status": status})

    def _views(self, identity: Identity, revision: str) -> tuple[rollout.PodView, ...]:
        return tuple(
            rollout.PodView(p.name, p.revision == revision, p.process.facts.ready, p.stopping is not None)
            for p in self._pods.values()
            if p.deployment == identity
        )

    def _start(self, deployment: Manifest, revision: str) -> None:
        template = copy.deepcopy(deployment["spec"]["template"])
        owner = deployment["metadata"]
        metadata = dict(template.get("metadata") or {})
        metadata |= {
            "name": f"{owner['name']}-{revision}-{secrets.token_hex(3)[:5]}",
            "namespace": owner["namespace"],
            "uid": str(uuid.uuid4()),
            "creationTimestamp": stamp(datetime.now(UTC)),
            "labels": {**(metadata.get("labels") or {}), TEMPLATE_HASH: revision},
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "name": owner["name"],
                    "uid": owner["uid"],
                    "controller": True,
                }
            ],
        }
        plain = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        manifest = adapt(plain, port_options=self._port_options, kept_volumes=self._kept_volumes)
        process = PodProcess(
            manifest,
            pod_ip=POD_ADDRESS,
            folder=self.folder / metadata["name"],
            source=self,
            options=self._options,
            on_status=lambda status: self._pod_changed(metadata["name"]),
        )
        pod = _Pod(manifest, process, revision, _identity(deployment))
        self._pods[pod.name] = pod
        process.start()

    def _stop(self, pod: _Pod) -> None:
        if pod.stopping is not None:
            return
        pod.manifest["metadata"]["deletionTimestamp"] = stamp(datetime.now(UTC))

        async def end() -> None:
            await pod.process.stop()
            del self._pods[pod.name]
            self.on_change(copy.deepcopy(pod.view))
            self._wake.set()

        pod.stopping = asyncio.create_task(end(), name=f"stop {pod.name}")
        self.on_change(copy.deepcopy(pod.view))

    def _pod_changed(self, name: str) -> None:
        if pod := self._pods.get(name):
            self.on_change(copy.deepcopy(pod.view))
            self._wake.set()


def _identity(manifest: Manifest) -> Identity:
    metadata = manifest["metadata"]
    return (manifest["kind"], metadata["namespace"], metadata["name"])


def _head(manifest: Manifest) -> Manifest:
    metadata = manifest["metadata"]
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {"namespace": metadata["namespace"], "name": metadata["name"]},
    }


def _revision(template: Manifest) -> str:
    """Short hash of a pod template: equal templates, equal pods."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def _merged(live: Any, applied: Any) -> Any:
    """Applied fields over live ones, maps merged and lists replaced; shares nothing with either."""
    if isinstance(live, dict) and isinstance(applied, dict):
        rest = {k: copy.deepcopy(v) for k, v in live.items() if k not in applied}
        return rest | {k: _merged(live.get(k), v) for k, v in applied.items()}
    return copy.deepcopy(applied)


def _without(live: Any, before: Any, now: Any) -> Any:
    """`live` less the fields that were applied before and are not now."""
    if not (isinstance(live, dict) and isinstance(before, dict)):
        return live
    still = now if isinstance(now, dict) else {}
    return {
        k: _without(v, before[k], still.get(k)) if k in before else v
        for k, v in live.items()
        if k not in before or k in still
    }
