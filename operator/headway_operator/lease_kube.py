"""The leader's record as a coordination.k8s.io Lease. Knows nothing of elections."""

import datetime
from typing import Any

from headway_operator.cluster import ClusterError, Manifest
from headway_operator.cluster_kube import KubeCluster, micro_time
from headway_operator.leader import Lease, LeaseUnavailable

API_VERSION = "coordination.k8s.io/v1"


class KubeLeaseStore:
    """A `LeaseStore` on one Lease object."""

    def __init__(self, cluster: KubeCluster, namespace: str, name: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name

    async def read(self) -> Lease | None:
        try:
            found = await self._cluster.get(API_VERSION, "Lease", self._namespace, self._name)
        except ClusterError as error:
            raise LeaseUnavailable(str(error)) from error
        return None if found is None else _lease(found)

    async def create(self, lease: Lease) -> Lease:
        try:
            return _lease(await self._cluster.create(self._manifest(lease)))
        except ClusterError as error:
            raise LeaseUnavailable(str(error)) from error

    async def replace(self, lease: Lease) -> Lease:
        try:
            return _lease(await self._cluster.replace(self._manifest(lease)))
        except ClusterError as error:
            raise LeaseUnavailable(str(error)) from error

    def _manifest(self, lease: Lease) -> Manifest:
        metadata: dict[str, Any] = {"namespace": self._namespace, "name": self._name}
        if lease.version:
            metadata["resourceVersion"] = lease.version
        return {
            "apiVersion": API_VERSION,
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": lease.holder,
                "leaseDurationSeconds": lease.duration_s,
                "acquireTime": _time(lease.acquired_s),
                "renewTime": _time(lease.renewed_s),
                "leaseTransitions": lease.transitions,
            },
        }


def _lease(manifest: Manifest) -> Lease:
    spec = manifest.get("spec") or {}
    return Lease(
        holder=spec.get("holderIdentity") or "",
        duration_s=int(spec.get("leaseDurationSeconds") or 1),
        acquired_s=_seconds(spec.get("acquireTime")),
        renewed_s=_seconds(spec.get("renewTime")),
        transitions=int(spec.get("leaseTransitions") or 0),
        version=manifest["metadata"]["resourceVersion"],
    )


def _time(seconds: float) -> str:
    return micro_time(datetime.datetime.fromtimestamp(seconds, datetime.UTC))


def _seconds(text: str | None) -> float:
    """Times are for people here; one that cannot be read is 0 and does no harm."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0
