"""A node of a Kubernetes cluster that runs its pods as local processes.

Registers the node, renews its lease, watches the pods bound to it, runs each by `PodProcess` with an address
of its own, reports their status and lets them go when they are deleted. It acts as the node's own user, under
the rules that bind a real kubelet.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from headway_local.kube_api import ApiError, KubeApi
from headway_local.objects import Manifest, PodConfigError, Token
from headway_local.pod import PodOptions, PodProcess

LEASE_RENEW_S = 3.0
RETRY_S = 0.5
CAPACITY = {"cpu": "16", "memory": "64Gi", "pods": "200", "ephemeral-storage": "100Gi"}


class ApiObjects:
    """ConfigMaps, Secrets and tokens from the API server, as the node may read them."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    async def config_map(self, namespace: str, name: str) -> Manifest | None:
        """The ConfigMap, or None."""
        return await self._read(f"/api/v1/namespaces/{namespace}/configmaps/{name}")

    async def secret(self, namespace: str, name: str) -> Manifest | None:
        """The Secret, or None."""
        return await self._read(f"/api/v1/namespaces/{namespace}/secrets/{name}")

    async def token(self, pod: Manifest, audience: str, lifetime_s: int) -> Token | None:
        """A token bound to the pod (TokenRequest)."""
        meta = pod["metadata"]
        account = pod["spec"].get("serviceAccountName", "default")
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        spec: Manifest = {"expirationSeconds": lifetime_s, "boundObjectRef": bound}
        if audience:
            spec["audiences"] = [audience]
        path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        try:
            status = (await self._api.create(path, body))["status"]
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            raise PodConfigError(f"no token for service account {account}: {error}") from error
        ends = datetime.fromisoformat(status["expirationTimestamp"].replace("Z", "+00:00"))
        return Token(status["token"], ends.timestamp())

    async def _read(self, path: str) -> Manifest | None:
        """The object. A node may read it only once the authorizer has seen the pod's binding, so a refusal
        is a reason to try again."""
        try:
            return await self._api.find(path)
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            raise PodConfigError(str(error)) from error


class _Bound:
    """A pod bound to this node, and the task that keeps its status in the API."""

    def __init__(self, api: KubeApi, process: PodProcess) -> None:
        self.process = process
        self._api = api
        self._latest: Manifest | None = None
        self._dirty = asyncio.Event()
        self._sent = asyncio.Event()
        self.deleting: asyncio.Task[None] | None = None
        self.writer = asyncio.create_task(self._write())

    @property
    def path(self) -> str:
        meta = self.process.pod["metadata"]
        return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"

    def report(self, status: Manifest) -> None:
        self._latest = status
        self._sent.clear()
        self._dirty.set()

    async def flushed(self) -> None:
        """Wait until the latest status is in the API."""
        if self._latest is not None:
            await self._sent.wait()

    async def _write(self) -> None:
        uid = self.process.pod["metadata"]["uid"]
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                # The uid makes the server refuse where another pod took the name.
                await self._api.patch(
                    f"{self.path}/status", {"metadata": {"uid": uid}, "status": self._latest}
                )
            except ApiError as error:
                if error.code not in (404, 409):
                    await self._again()
                    continue
            except (aiohttp.ClientError, TimeoutError):
                await self._again()
                continue
            if not self._dirty.is_set():
                self._sent.set()

    async def _again(self) -> None:
        await asyncio.sleep(RETRY_S)
        self._dirty.set()


class Kubelet:
    """One node. `run` until cancelled; every pod is gone when it returns."""

    def __init__(
        self,
        api: KubeApi,
        *,
        name: str,
        folder: Path,
        options: PodOptions,
        capacity: Mapping[str, str] | None = None,
        refresh_volumes_s: float = 10.0,
        pod_network: str = "10.244.1.0",
    ) -> None:
        self.name = name
        self.refresh_volumes_s = refresh_volumes_s
        self.heartbeat = True  # False: the node goes silent, as if its machine had died
        self.registered = asyncio.Event()
        self._api = api
        self._folder = folder
        self._options = options
        self._capacity = {**CAPACITY, **(capacity or {})}
        self._source = ApiObjects(api)
        self._bound: dict[str, _Bound] = {}
        self._started: set[str] = set()
        self._network = ".".join(pod_network.split(".")[:2])
        # Addresses are not reused: a late connection to a dead pod must not reach another one.
        self._addresses = itertools.count(256 * int(pod_network.split(".")[2]) + 10)

    def pods(self, namespace: str | None = None) -> list[PodProcess]:
        """The pods of this node, of one namespace or all."""
        found = [bound.process for bound in self._bound.values()]
        return [p for p in found if namespace in (None, p.pod["metadata"]["namespace"])]

    def pod(self, namespace: str, name: str) -> PodProcess | None:
        """One pod by name."""
        return next((p for p in self.pods(namespace) if p.pod["metadata"]["name"] == name), None)

    async def run(self) -> None:
        """Be a node until cancelled."""
        await self._register()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._heartbeats())
                group.create_task(self._follow())
                group.create_task(self._refresh())
        finally:
            await self._leave()

    # The node object.

    async def _register(self) -> None:
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.name,
                "labels": {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux"},
            },
        }
        try:
            await self._api.create("/api/v1/nodes", node)
        except ApiError as error:
            if error.code != 409:
                raise
        await self._report_node()
        self.registered.set()

    async def _report_node(self) -> None:
        now = _time()
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "pods run as processes",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        calm = [
            {**ready, "type": kind, "status": "False", "reason": "KubeletHas" + enough, "message": "enough"}
            for kind, enough in (
                ("MemoryPressure", "SufficientMemory"),
                ("DiskPressure", "NoDiskPressure"),
                ("PIDPressure", "SufficientPID"),
            )
        ]
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "addresses": [
                {"type": "InternalIP", "address": self._options.host_ip},
                {"type": "Hostname", "address": self.name},
            ],
            "conditions": [*calm, ready],
        }
        await self._api.patch(f"/api/v1/nodes/{self.name}/status", {"status": status})

    async def _heartbeats(self) -> None:
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": self.name, "leaseDurationSeconds": 40},
        }
        while True:
            if self.heartbeat:
                renewed = {**lease, "spec": {**lease["spec"], "renewTime": _time(micro=True)}}  # type: ignore[dict-item]
                with contextlib.suppress(ApiError, aiohttp.ClientError, TimeoutError):
                    try:
                        await self._api.patch(f"{path}/{self.name}", renewed)
                    except ApiError as error:
                        if error.code != 404:
                            raise
                        await self._api.create(path, renewed)
            await asyncio.sleep(LEASE_RENEW_S)

    # Its pods.

    async def _follow(self) -> None:
        async for event in self._api.watch("/api/v1/pods", fieldSelector=f"spec.nodeName={self.name}"):
            if event.type == "SYNCED":
                continue
            pod = event.object
            uid = pod["metadata"]["uid"]
            bound = self._bound.get(uid)
            if event.type == "DELETED":
                # Forced away: the object is gone, its processes follow.
                if bound is not None and bound.deleting is None:
                    bound.deleting = asyncio.create_task(self._end(uid, bound, grace_s=0.0, report=False))
                continue
            if bound is None:
                if uid in self._started or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                    continue
                bound = self._begin(pod)
            bound.process.pod = pod
            if "deletionTimestamp" in pod["metadata"]:
                grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
                if bound.deleting is None:
                    bound.deleting = asyncio.create_task(self._end(uid, bound, grace_s=grace_s, report=True))
                elif grace_s == 0:
                    shortened = asyncio.create_task(bound.process.stop(0.0))
                    shortened.add_done_callback(lambda task: task.exception())

    def _begin(self, pod: Manifest) -> _Bound:
        meta = pod["metadata"]
        number = next(self._addresses)
        process = PodProcess(
            pod,
            pod_ip=f"{self._network}.{number // 256}.{number % 256}",
            folder=self._folder / f"{meta['namespace']}_{meta['name']}_{meta['uid'][:8]}",
            source=self._source,
            options=self._options,
            on_status=lambda status: self._bound[meta["uid"]].report(status),
        )
        bound = self._bound[meta["uid"]] = _Bound(self._api, process)
        self._started.add(meta["uid"])
        process.start()
        return bound

    async def _end(self, uid: str, bound: _Bound, *, grace_s: float, report: bool) -> None:
        await bound.process.stop(grace_s)
        if report:
            await bound.flushed()
            body = {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "gracePeriodSeconds": 0,
                "preconditions": {"uid": uid},
            }
            while True:
                try:
                    await self._api.delete(bound.path, body)
                    break
                except ApiError as error:
                    if error.code == 409:  # another pod has the name by now
                        break
                    await asyncio.sleep(RETRY_S)
                except (aiohttp.ClientError, TimeoutError):
                    await asyncio.sleep(RETRY_S)
        bound.writer.cancel()
        self._bound.pop(uid, None)

    async def _refresh(self) -> None:
        """Bring changed ConfigMaps, Secrets and tokens into running pods, after a delay as in a real node."""
        while True:
            await asyncio.sleep(self.refresh_volumes_s)
            for process in self.pods():
                if process.facts.sandbox and not process.facts.phase.final:
                    # A missing object leaves the old content, as in the kubelet.
                    with contextlib.suppress(PodConfigError):
                        await process.refresh_volumes()

    async def _leave(self) -> None:
        await asyncio.gather(
            *(bound.process.stop(0.0) for bound in self._bound.values()), return_exceptions=True
        )
        tasks = [task for bound in self._bound.values() for task in (bound.writer, bound.deleting) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _time(*, micro: bool = False) -> str:
    now = datetime.now(UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")
