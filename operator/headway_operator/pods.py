"""Where the engines of a resource are: its pods, as the fleet wants to know them."""

from headway_engine.protocol import MANAGEMENT_PORT
from headway_operator.cluster import Cluster, Manifest
from headway_operator.fleet import PodRef
from headway_operator.manifests import selector
from headway_operator.resource import Resource


async def pods_of(resource: Resource, cluster: Cluster) -> tuple[PodRef, ...]:
    """Pods that are not on their way out, by name. Ready or not is part of the answer."""
    found = await cluster.list("v1", "Pod", resource.namespace, selector(resource.name))
    pods = [pod for body in found if (pod := pod_ref(body)) is not None]
    return tuple(sorted(pods, key=lambda pod: pod.name))


def pod_ref(body: Manifest) -> PodRef | None:
    """Where the pod's management port is; None for a pod that ends, has ended, or has no address yet."""
    found = body.get("status") or {}
    if "deletionTimestamp" in body["metadata"] or found.get("phase") in ("Succeeded", "Failed"):
        return None
    address = found.get("podIP")
    if not address:
        return None
    ports = [p for c in body["spec"].get("containers") or [] for p in c.get("ports") or []]
    port = next((p["containerPort"] for p in ports if p.get("name") == "management"), MANAGEMENT_PORT)
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in found.get("conditions") or [])
    return PodRef(name=body["metadata"]["name"], address=address, management_port=port, ready=ready)
