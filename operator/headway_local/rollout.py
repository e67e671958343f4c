"""Which pods of a Deployment to start and which to stop next, as the Deployment controller decides it.

Pure: numbers and pods in, a step out. Steps are small and repeat until nothing is left to do. Knows
nothing of processes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PodView:
    """What matters of a pod. `current`: made from the template that is wanted now."""

    name: str
    current: bool
    ready: bool
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Strategy:
    """How pods are replaced. `recreate` stops all old ones before the first new one starts."""

    recreate: bool = False
    max_surge: int = 1
    max_unavailable: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """Pods to start (by number) and to stop (by name) now."""

    start: int = 0
    stop: tuple[str, ...] = ()


def strategy(spec: Mapping[str, Any]) -> Strategy:
    """The strategy of a Deployment's spec, percentages resolved: surge rounds up, unavailable down."""
    declared = spec.get("strategy") or {}
    if declared.get("type") == "Recreate":
        return Strategy(recreate=True)
    rolling = declared.get("rollingUpdate") or {}
    replicas = int(spec.get("replicas", 1))
    surge = _count(rolling.get("maxSurge", "25%"), replicas, math.ceil)
    unavailable = _count(rolling.get("maxUnavailable", "25%"), replicas, math.floor)
    if surge == 0 and unavailable == 0:  # nothing could ever move; Kubernetes does the same
        unavailable = 1
    return Strategy(max_surge=surge, max_unavailable=unavailable)


def _count(value: int | str, replicas: int, rounding: Any) -> int:
    if isinstance(value, str) and value.endswith("%"):
        return int(rounding(int(value[:-1]) * replicas / 100))
    return int(value)


def step(pods: Sequence[PodView], replicas: int, how: Strategy) -> Step:
    """What to do now so that `replicas` pods of the current template come to run.

    A pod that is stopping no longer counts, except that a Recreate waits until it has gone.
    """
    alive = [p for p in pods if not p.stopping]
    new = [p for p in alive if p.current]
    old = [p for p in alive if not p.current]
    surplus = _first(new, len(new) - replicas)
    if how.recreate:
        if old or any(p.stopping and not p.current for p in pods):
            return Step(stop=(*_names(old), *_names(surplus)))
        return Step(start=max(0, replicas - len(new)), stop=_names(surplus))
    room = replicas + how.max_surge - len(alive)
    start = max(0, min(replicas - len(new), room))
    # An old pod that is not ready serves nobody: it may go at once. Ready ones go while enough remain.
    unready = [p for p in old if not p.ready]
    spare = sum(p.ready for p in alive) - sum(p.ready for p in surplus) - (replicas - how.max_unavailable)
    ready = _first([p for p in old if p.ready], spare)
    return Step(start=start, stop=(*_names(unready), *_names(ready), *_names(surplus)))


def _first(pods: Sequence[PodView], count: int) -> list[PodView]:
    """`count` pods to stop, those that serve nobody first."""
    return sorted(pods, key=lambda p: (p.ready, p.name))[: max(0, count)]


def _names(pods: Sequence[PodView]) -> tuple[str, ...]:
    return tuple(p.name for p in pods)


def status(deployment: Mapping[str, Any], pods: Sequence[PodView], now: str) -> dict[str, Any]:
    """The status that the Deployment controller would write at `now`."""
    spec = deployment["spec"]
    replicas = int(spec.get("replicas", 1))
    how = strategy(spec)
    alive = [p for p in pods if not p.stopping]
    updated = sum(p.current for p in alive)
    ready = sum(p.ready for p in alive)
    needed = 0 if how.recreate else replicas - how.max_unavailable
    available = ready >= max(needed, min(1, replicas))
    complete = updated == replicas == len(alive) == ready
    before = {c["type"]: c for c in (deployment.get("status") or {}).get("conditions") or ()}

    def condition(type_: str, true: bool, reason: str) -> dict[str, Any]:
        value = "True" if true else "False"
        known = before.get(type_)
        since = known["lastTransitionTime"] if known and known["status"] == value else now
        return {"type": type_, "status": value, "reason": reason, "message": "", "lastTransitionTime": since}

    return {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": len(alive),
        "updatedReplicas": updated,
        "readyReplicas": ready,
        "availableReplicas": ready,
        "unavailableReplicas": max(0, replicas - ready),
        "conditions": [
            condition(
                "Available", available, f"MinimumReplicas{'Available' if available else 'Unavailable'}"
            ),
            condition("Progressing", True, "NewReplicaSetAvailable" if complete else "ReplicaSetUpdated"),
        ],
    }
