"""Does a live object still hold what we declare? Pure comparison, so that nothing is written in vain.

Two things can differ: what we declare now against what we declared last (seen by a digest that travels on
the object), and what the live object holds against what we declare (seen field by field). Fields that we
do not declare belong to others and are not looked at.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway_operator.cluster import Manifest

DIGEST_ANNOTATION = "headway.dev/declared"


def with_digest(manifest: Manifest) -> Manifest:
    """The same manifest, carrying the digest of itself as an annotation."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = {**(metadata.get("annotations") or {}), DIGEST_ANNOTATION: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def differences(wanted: Any, live: Any, path: str = "") -> dict[str, Any]:
    """Path -> live value for every declared field that the live object holds differently.

    List items with a name are matched by it, as the API server merges them; other lists are compared whole.
    What is empty on one side and absent on the other is equal: the server drops empty fields.
    """
    if isinstance(wanted, Mapping):
        found: dict[str, Any] = {}
        holder = live if isinstance(live, Mapping) else {}
        for key, value in wanted.items():
            found |= differences(value, holder.get(key), f"{path}/{key}")
        return found
    if _is_list(wanted):
        names = _names(wanted)
        if names is None:
            return _compare_in_order(wanted, live, path)
        by_name = {_name(item): item for item in live or [] if _name(item) is not None}
        found = {}
        for name, item in zip(names, wanted, strict=True):
            found |= differences(item, by_name.get(name), f"{path}/{name}")
        return found
    return {} if _same(wanted, live) else {path: live}


def _compare_in_order(wanted: Sequence[Any], live: Any, path: str) -> dict[str, Any]:
    if not wanted and not live:
        return {}
    if not _is_list(live) or len(live) != len(wanted):
        return {path: live}
    found: dict[str, Any] = {}
    for index, (ours, theirs) in enumerate(zip(wanted, live, strict=True)):
        found |= differences(ours, theirs, f"{path}/{index}")
    return found


def _same(wanted: Any, live: Any) -> bool:
    return bool(wanted == live) or (live is None and not wanted)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _name(item: Any) -> str | None:
    return item.get("name") if isinstance(item, Mapping) and isinstance(item.get("name"), str) else None


def _names(items: Sequence[Any]) -> list[str] | None:
    names = [_name(item) for item in items]
    return None if not names or None in names else [name for name in names if name is not None]


def identity(manifest: Manifest) -> tuple[str, str, str, str]:
    """What makes an object the same object: version, kind, namespace, name."""
    metadata = manifest["metadata"]
    return manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"]


class Drift:
    """Remembers how the API server rewrote what we declared, so that its rewriting is not taken for drift.

    A quantity of "1000m" is stored as "1": declared and live differ for ever, and that is fine. What
    differs right after our own apply is remembered per object, and only other differences count.
    """

    def __init__(self) -> None:
        self._rewritten: dict[tuple[str, str, str, str], tuple[str, dict[str, Any]]] = {}

    def found(self, wanted: Manifest, live: Manifest | None) -> bool:
        """True where `wanted` (with its digest) has to be applied."""
        if live is None:
            return True
        differing = differences(wanted, live)
        if not differing:
            return False
        return self._rewritten.get(identity(wanted)) != (_digest(wanted), differing)

    def applied(self, wanted: Manifest, live: Manifest) -> None:
        """The API server answered our apply of `wanted` with `live`."""
        differing = differences(wanted, live)
        if differing:
            self._rewritten[identity(wanted)] = (_digest(wanted), differing)
        else:
            self._rewritten.pop(identity(wanted), None)

    def forget(self, namespace: str, owner: str) -> None:
        """Drop what is remembered of the objects of one owner; their names all start with its name."""
        for key in [k for k in self._rewritten if k[2] == namespace and k[3].startswith(owner)]:
            del self._rewritten[key]


def _digest(manifest: Manifest) -> str:
    return str(manifest["metadata"]["annotations"][DIGEST_ANNOTATION])
