"""What is known of a pod, and the status the API shows for it. Pure: facts in, dict out.

Covers pods of one container. The texts and reasons are the kubelet's, since people and tools look for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum

from headway_local.objects import Manifest


class Phase(StrEnum):
    """The pod as a whole."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not started, or between two starts."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    """The process is there."""

    started_at: datetime


@dataclass(frozen=True, slots=True)
class Terminated:
    """The process ended; `signal` is 0 where it exited by itself."""

    exit_code: int
    signal: int
    started_at: datetime
    finished_at: datetime
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Everything the status is made from."""

    phase: Phase = Phase.PENDING
    state: Waiting | Running | Terminated = Waiting("ContainerCreating")
    last_end: Terminated | None = None
    restarts: int = 0
    started: bool = False  # startup probe passed, or there is none
    ready: bool = False
    sandbox: bool = False  # address and volumes are there
    container_id: str = ""
    start_time: datetime | None = None

    def change(self, **values: object) -> "PodFacts":
        """A copy with some fields replaced."""
        return replace(self, **values)  # type: ignore[arg-type]


def stamp(moment: datetime) -> str:
    """The API's time format: whole seconds, UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _state(state: Waiting | Running | Terminated, container_id: str) -> Manifest:
    match state:
        case Waiting(reason, message):
            return {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        case Running(started_at):
            return {"running": {"startedAt": stamp(started_at)}}
        case Terminated():
            body: Manifest = {
                "exitCode": state.exit_code,
                "reason": state.reason,
                "startedAt": stamp(state.started_at),
                "finishedAt": stamp(state.finished_at),
                "containerID": container_id,
            }
            if state.message:
                body["message"] = state.message
            if state.signal:
                body["signal"] = state.signal
            return {"terminated": body}


def build(
    pod: Manifest, facts: PodFacts, previous: Manifest | None, *, pod_ip: str, host_ip: str, now: datetime
) -> Manifest:
    """The pod's status. `previous` is the status sent before: its times stay where nothing turned."""
    container = pod["spec"]["containers"][0]
    name = container["name"]
    succeeded = facts.phase is Phase.SUCCEEDED
    if facts.ready:
        unready: Manifest = {}
    elif facts.phase.final:
        unready = {"reason": "PodCompleted"} if succeeded else {"reason": "PodFailed"}
    else:
        unready = {"reason": "ContainersNotReady", "message": f"containers with unready status: [{name}]"}
    generation = pod["metadata"].get("generation")
    wanted: tuple[tuple[str, bool, Manifest], ...] = (
        ("PodReadyToStartContainers", facts.sandbox and not facts.phase.final, {}),
        ("Initialized", True, {"reason": "PodCompleted"} if succeeded else {}),
        ("Ready", facts.ready, unready),
        ("ContainersReady", facts.ready, unready),
        ("PodScheduled", True, {}),
    )
    before: Mapping[str, Manifest] = {c["type"]: c for c in (previous or {}).get("conditions") or ()}
    conditions = []
    for kind, true, extra in wanted:
        status = "True" if true else "False"
        known = before.get(kind)
        same = known is not None and known.get("status") == status
        since = known["lastTransitionTime"] if known is not None and same else stamp(now)
        observed = {"observedGeneration": generation} if generation else {}
        conditions.append(
            {
                "type": kind,
                "status": status,
                "lastProbeTime": None,
                "lastTransitionTime": since,
                **observed,
                **extra,
            }
        )
    container_status: Manifest = {
        "name": name,
        "image": container["image"],
        "imageID": f"local://{container['image']}",
        "ready": facts.ready,
        "started": facts.started,
        "restartCount": facts.restarts,
        "state": _state(facts.state, facts.container_id),
        "lastState": _state(facts.last_end, facts.container_id) if facts.last_end else {},
    }
    if facts.container_id:
        container_status["containerID"] = facts.container_id
    status_dict: Manifest = {
        "phase": str(facts.phase),
        "conditions": conditions,
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "qosClass": (pod.get("status") or {}).get("qosClass", "BestEffort"),
        "containerStatuses": [container_status],
    }
    if generation:
        status_dict["observedGeneration"] = generation
    if facts.start_time:
        status_dict["startTime"] = stamp(facts.start_time)
    if facts.sandbox:
        status_dict["podIP"] = pod_ip
        status_dict["podIPs"] = [{"ip": pod_ip}]
    return status_dict
