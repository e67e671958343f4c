"""Where the engines of a resource are: its pods, as the fleet wants to know them."""

import json
import re
from collections.abc import Mapping
from typing import Any

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
    """Where the pod's management port is, and what ails it; None for a pod that ends, has ended, or has no
    address yet and no trouble."""
    found = body.get("status") or {}
    if "deletionTimestamp" in body["metadata"] or found.get("phase") in ("Succeeded", "Failed"):
        return None
    address = found.get("podIP") or ""
    what = trouble(body)
    if not address and not what:
        return None
    ports = [p for c in body["spec"].get("containers") or [] for p in c.get("ports") or []]
    port = next((p["containerPort"] for p in ports if p.get("name") == "management"), MANAGEMENT_PORT)
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in found.get("conditions") or [])
    return PodRef(
        name=body["metadata"]["name"],
        address=address,
        management_port=port,
        ready=ready and bool(address),
        trouble=what,
    )


LAST_WORDS = 500
"""Characters of a container's last words that a condition has room for."""

_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_NO_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


def trouble(body: Manifest) -> str:
    """What keeps a pod from serving that waiting alone does not mend; empty for a pod that just starts.

    No counts and no back-off times in it: it is written to a status, which should not change with them.
    """
    name, found = body["metadata"]["name"], body.get("status") or {}
    for condition in found.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return f"pod {name} fits on no node: {condition.get('message') or 'Unschedulable'}"
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in found.get(key) or []:
            if words := _container_trouble(container, name):
                return f"pod {name}: container {container.get('name')} {words}"
    return ""


def _container_trouble(container: Mapping[str, Any], pod: str) -> str:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting: Mapping[str, Any] = state.get("waiting") or {}
    reason = waiting.get("reason") or ""
    if reason in _NO_IMAGE:
        return f"has no image: {container.get('image')} cannot be pulled"
    if reason in _NO_START:
        return f"cannot be started: {waiting.get('message') or reason}"
    ended: Mapping[str, Any] | None = state.get("terminated") or last.get("terminated")
    if container.get("ready") or not container.get("restartCount") or not ended:
        return ""
    why = ended.get("reason") or "Error"
    said = "" if why in ("Error", "Completed") else f" ({why})"
    words = f"ended with exit status {ended.get('exitCode')}{said} and is started again"
    if last := last_words(ended.get("message") or ""):
        return f"{words}: {last}"
    return f"{words}; `kubectl logs {pod} --previous` says why"


_REASON = re.compile(r' reason=("(?:[^"\\]|\\.)*"|\S+)$')
_RAISED = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+$")


def last_words(message: str) -> str:
    """Why a container ended, from the end of its log as the kubelet keeps it; empty where that says nothing.

    Our engine's last line carries a `reason`, as text or as JSON; other engines end in Python's own words.
    Nothing else is taken: a line with times or counts in it would change the status at every restart.
    """
    line = next((line for line in reversed(message.splitlines()) if line.strip()), "").strip()
    try:
        if line.startswith("{"):
            return str(json.loads(line).get("reason", ""))[:LAST_WORDS]
        if found := _REASON.search(line):
            word = found[1]
            return str(json.loads(word) if word.startswith('"') else word)[:LAST_WORDS]
    except ValueError:
        return ""  # cut off, or somebody else's form
    raised = _RAISED.search(line)
    return raised[0][:LAST_WORDS] if raised else ""
