"""An in-memory `Cluster` that merges, counts and fails like the real one, as far as the controller can tell.

Server-side apply keeps what each manager declared: a field that a manager stops declaring goes, a field of
others stays, named list items merge by name, an apply that changes nothing leaves resourceVersion alone.
The real API server remains the judge (tests/cluster); this one is for speed and for faults on demand.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway_operator.cluster import Conflict, Gone, Manifest

Identity = tuple[str, str, str, str]

MERGE_KEYS = ("name", "type")
"""Fields that name the items of a list in the objects we use (containers, ports, env; conditions)."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request; `changed` is whether the stored object differs after it."""

    verb: str
    kind: str
    name: str
    changed: bool = False


@dataclass(slots=True)
class Fault:
    """The `at`-th call (counted from 1) raises `error`, before its effect or after it (a lost answer)."""

    at: int
    error: Exception
    after_effect: bool = False


@dataclass
class FakeCluster:
    """Objects by identity. `calls` and `events` are for assertions; `fault` is armed by a test."""

    calls: list[Call] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    fault: Fault | None = None
    changed: Callable[[Manifest], None] = lambda manifest: None
    _objects: dict[Identity, Manifest] = field(default_factory=dict)
    _declared: dict[tuple[Identity, str], Manifest] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _call_number: int = 0

    # The Cluster protocol.

    async def apply(self, manifest: Manifest) -> Manifest:
        key = _identity(manifest)
        with self._call("apply", key) as call:
            before = self._objects.get(key)
            if manifest.get("metadata", {}).get("resourceVersion"):
                raise Conflict(f"{key}: an apply carries no resourceVersion")
            after = self._merge(key, manifest, "headway")
            call.changed = self._store(key, before, after)
        return copy.deepcopy(self._objects[key])

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        key = (api_version, kind, namespace, name)
        with self._call("get", key):
            return copy.deepcopy(self._objects.get(key))

    async def list(
        self, api_version: str, kind: str, namespace: str, labels: Mapping[str, str]
    ) -> list[Manifest]:
        with self._call("list", (api_version, kind, namespace, "")):
            return [
                copy.deepcopy(found)
                for key, found in sorted(self._objects.items())
                if key[:2] == (api_version, kind)
                and namespace in ("", key[2])
                and labels.items() <= (found["metadata"].get("labels") or {}).items()
            ]

    async def apply_status(self, manifest: Manifest) -> None:
        key = _identity(manifest)
        with self._call("apply_status", key) as call:
            before = self._objects.get(key)
            if before is None:
                raise Gone(f"{key}: not found")
            if set(manifest) - {"apiVersion", "kind", "metadata", "status"}:
                raise Conflict(f"{key}: a status apply carries the status only")
            declared = {"status": copy.deepcopy(manifest["status"])}
            after = self._merge(key, {**_head(manifest), **declared}, "headway-status")
            after["metadata"]["generation"] = before["metadata"]["generation"]
            call.changed = self._store(key, before, after)

    async def delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        key = (api_version, kind, namespace, name)
        with self._call("delete", key) as call:
            call.changed = self._remove(key)

    async def post_event(
        self, regarding: Manifest, *, type_: str, reason: str, note: str, action: str
    ) -> None:
        with self._call("post_event", _identity(regarding)) as call:
            call.changed = True
            self.events.append({"type": type_, "reason": reason, "note": note, "action": action})

    # What the rest of the world does to the cluster.

    def put(self, manifest: Manifest) -> Manifest:
        """`kubectl create` or `kubectl replace`: another manager's whole object; not counted as a call."""
        key = _identity(manifest)
        before = self._objects.get(key)
        after = copy.deepcopy(manifest)
        if before is not None:
            after["metadata"] = {**before["metadata"], **after["metadata"]}
            after.setdefault("status", before.get("status", {}))
        self._store(key, before, after)
        return copy.deepcopy(self._objects[key])

    def edit(self, identity: Identity, change: Callable[[Manifest], None]) -> Manifest:
        """`kubectl edit`: change the stored object in place."""
        before = self._objects[identity]
        after = copy.deepcopy(before)
        change(after)
        self._store(identity, before, after)
        return copy.deepcopy(self._objects[identity])

    def remove(self, identity: Identity) -> None:
        """`kubectl delete`, garbage collection included; not counted as a call."""
        self._remove(identity)

    def peek(self, kind: str, name: str, namespace: str = "default") -> Manifest | None:
        """The stored object, not counted as a call."""
        for key, found in self._objects.items():
            if key[1:] == (kind, namespace, name):
                return copy.deepcopy(found)
        return None

    def all(self, kind: str | None = None) -> Sequence[Manifest]:
        """Every stored object (of a kind), not counted as a call."""
        return [
            copy.deepcopy(found) for key, found in sorted(self._objects.items()) if kind in (None, key[1])
        ]

    @property
    def writes(self) -> Sequence[Call]:
        """Requests that write, whether or not they changed anything: what an audit log would show."""
        return [call for call in self.calls if call.verb not in ("get", "list")]

    def run_deployments(self, *, ready: bool = True) -> None:
        """What the Deployment controller and the nodes would do: pods of the current template."""
        for deployment in self.all("Deployment"):
            metadata, spec = deployment["metadata"], deployment["spec"]
            revision = f"{abs(hash(repr(spec['template']))) % 16**8:08x}"
            wanted = {f"{metadata['name']}-{revision}-{n}" for n in range(spec.get("replicas", 1))}
            namespace = metadata["namespace"]
            for pod in self.all("Pod"):
                owned = pod["metadata"]["name"].startswith(f"{metadata['name']}-")
                if (
                    owned
                    and pod["metadata"]["namespace"] == namespace
                    and pod["metadata"]["name"] not in wanted
                ):
                    self._remove(_identity(pod))
            for name in sorted(wanted):
                if self.peek("Pod", name, namespace) is None:
                    self._start_pod(deployment, name)
                self.edit(("v1", "Pod", namespace, name), lambda pod: _set_ready(pod, ready))
            self._report_deployment(deployment, len(wanted), len(wanted) if ready else 0)

    def _report_deployment(self, deployment: Manifest, pods: int, ready: int) -> None:
        def report(live: Manifest) -> None:
            live["status"] = {
                "observedGeneration": live["metadata"]["generation"],
                "replicas": pods,
                "updatedReplicas": pods,
                "readyReplicas": ready,
                "availableReplicas": ready,
            }

        self.edit(_identity(deployment), report)

    def _start_pod(self, deployment: Manifest, name: str) -> None:
        template = copy.deepcopy(deployment["spec"]["template"])
        metadata = {**template.get("metadata", {}), "name": name}
        metadata["namespace"] = deployment["metadata"]["namespace"]
        metadata["ownerReferences"] = [_owner(deployment)]
        number = next(self._numbers)
        self.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": metadata,
                "spec": template["spec"],
                "status": {"phase": "Running", "podIP": f"10.244.{number // 250}.{number % 250 + 1}"},
            }
        )

    # Inside.

    def _call(self, verb: str, key: Identity) -> "_Recorded":
        return _Recorded(self, Call(verb, key[1], key[3]))

    def _merge(self, key: Identity, manifest: Manifest, manager: str) -> Manifest:
        before = self._objects.get(key) or _head(manifest)
        previous = self._declared.get((key, manager))
        kept = _without(copy.deepcopy(before), previous, manifest) if previous else copy.deepcopy(before)
        self._declared[(key, manager)] = copy.deepcopy(manifest)
        merged: Manifest = _merged(kept, copy.deepcopy(manifest))
        return merged

    def _store(self, key: Identity, before: Manifest | None, after: Manifest) -> bool:
        metadata = after["metadata"]
        if before is None:
            metadata |= {"uid": f"uid-{next(self._numbers)}", "generation": 1}
            metadata["creationTimestamp"] = "2026-01-01T00:00:00Z"
        elif before == after:
            return False
        elif before.get("spec") != after.get("spec"):
            metadata["generation"] = before["metadata"]["generation"] + 1
        metadata["resourceVersion"] = str(next(self._numbers))
        self._objects[key] = after
        self.changed(copy.deepcopy(after))
        return True

    def _remove(self, key: Identity) -> bool:
        gone = self._objects.pop(key, None)
        if gone is None:
            return False
        for declared in [d for d in self._declared if d[0] == key]:
            del self._declared[declared]
        self.changed(copy.deepcopy(gone))
        for other, found in list(self._objects.items()):
            owners = found["metadata"].get("ownerReferences") or []
            if owners and all(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                self._remove(other)
        return True


@dataclass
class _Recorded:
    """One call being made: counts it, raises the armed fault before or after the effect."""

    cluster: FakeCluster
    call: Call
    changed: bool = False
    due: bool = False

    def __enter__(self) -> "_Recorded":
        cluster = self.cluster
        cluster._call_number += 1
        fault = cluster.fault
        self.due = fault is not None and fault.at == cluster._call_number
        if fault is not None and self.due and not fault.after_effect:
            cluster.calls.append(self.call)
            raise fault.error
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        call = Call(self.call.verb, self.call.kind, self.call.name, self.changed)
        self.cluster.calls.append(call)
        fault = self.cluster.fault
        if kind is None and self.due and fault is not None and fault.after_effect:
            raise fault.error


def _identity(manifest: Manifest) -> Identity:
    metadata = manifest["metadata"]
    return (manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])


def _head(manifest: Manifest) -> Manifest:
    metadata = manifest["metadata"]
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {"namespace": metadata["namespace"], "name": metadata["name"]},
    }


def _owner(manifest: Manifest) -> dict[str, Any]:
    metadata = manifest["metadata"]
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }


def _set_ready(pod: Manifest, ready: bool) -> None:
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]


def _merge_key(items: Any) -> str | None:
    """The field that names every item of a list; None for a list that is replaced whole."""
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        return None
    return next((key for key in MERGE_KEYS if all(isinstance(i.get(key), str) for i in items)), None)


def _merged(live: Any, declared: Any) -> Any:
    if isinstance(live, dict) and isinstance(declared, dict):
        return {**live, **{k: _merged(live.get(k), v) for k, v in declared.items()}}
    key = _merge_key(declared)
    if key is None or _merge_key(live) != key:
        return declared
    ours = {item[key]: item for item in declared}
    kept = [_merged(item, ours.pop(item[key])) if item[key] in ours else item for item in live]
    return kept + list(ours.values())


def _without(live: Any, previous: Any, declared: Any) -> Any:
    """`live` less what was declared before and is not declared now."""
    if isinstance(live, dict) and isinstance(previous, dict):
        now = declared if isinstance(declared, dict) else {}
        return {
            key: _without(value, previous[key], now.get(key)) if key in previous else value
            for key, value in live.items()
            if key not in previous or key in now
        }
    key = _merge_key(previous)
    if key is None or _merge_key(live) != key:
        return live
    before = {item[key]: item for item in previous}
    now_by_name = {item[key]: item for item in declared or []}
    return [
        _without(item, before[item[key]], now_by_name[item[key]]) if item[key] in before else item
        for item in live
        if item[key] not in before or item[key] in now_by_name
    ]
