"""The objects that a resource owns: bring the live ones to what is declared, and write nothing in vain.

Works on manifests only; what they mean is not known here. Objects of other owners are never touched.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headway_operator.cluster import Cluster, Manifest
from headway_operator.drift import Drift, identity, with_digest
from headway_operator.manifests import OWNER_LABEL, selector
from headway_operator.resource import KIND, Resource

Live = dict[tuple[str, str, str, str], Manifest]

PRUNED_KINDS = (("apps/v1", "Deployment"), ("v1", "Service"), ("v1", "ConfigMap"), ("v1", "ServiceAccount"))
"""Kinds of which objects that are no longer declared are removed. Secrets are read by name only: listing
them would need the right to read everybody's."""


@dataclass(frozen=True, slots=True)
class Made:
    """What is there of the resource. Objects of others in the way are `foreign`: nothing was written then."""

    live: Live
    foreign: tuple[str, ...] = ()


class OwnedObjects:
    """Applies, compares and prunes through one `Cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._drift = Drift()

    def forget(self, resource_key: tuple[str, str]) -> None:
        self._drift.forget(*resource_key)

    async def make_so(self, resource: Resource, declared: Sequence[Manifest]) -> Made:
        """All of `declared` exist as declared, in order, and no other object of the resource does."""
        wanted = [with_digest(manifest) for manifest in declared]
        live = await self._live(resource, wanted)
        taken = [i for m in wanted if (i := identity(m)) in live and not _ours(live[i], resource)]
        if taken:
            ours = {i: found for i, found in live.items() if i not in taken}
            return Made(ours, tuple(f"{kind} {name}" for _, kind, _, name in taken))
        for manifest in wanted:
            await self._apply(manifest, live)
        keep = {identity(manifest) for manifest in wanted}
        for orphan in [i for i, found in live.items() if i not in keep and _prunable(found, resource)]:
            await self._cluster.delete(*orphan)
            del live[orphan]
        return Made(live)

    async def make_some_so(self, declared: Sequence[Manifest]) -> None:
        """These exist as declared; others are left alone."""
        for manifest in map(with_digest, declared):
            live = await self._cluster.get(*identity(manifest))
            await self._apply(manifest, {} if live is None else {identity(manifest): live})

    async def _apply(self, manifest: Manifest, live: Live) -> None:
        if not self._drift.found(manifest, live.get(identity(manifest))):
            return
        after = await self._cluster.apply(manifest)
        self._drift.applied(manifest, after)
        live[identity(manifest)] = after

    async def _live(self, resource: Resource, wanted: Sequence[Manifest]) -> Live:
        """What exists: everything that carries the resource's label, and whatever has a wanted name."""
        pages = await asyncio.gather(
            *(
                self._cluster.list(version, kind, resource.namespace, selector(resource.name))
                for version, kind in PRUNED_KINDS
            )
        )
        live = {identity(found): found for page in pages for found in page}
        missing = [i for m in wanted if (i := identity(m)) not in live]
        # An object of that name without our label may be somebody's: it must be seen before it is written.
        found_by_name = await asyncio.gather(*(self._cluster.get(*i) for i in missing))
        return live | {i: found for i, found in zip(missing, found_by_name, strict=True) if found is not None}


def _ours(live: Manifest, resource: Resource) -> bool:
    """Made for a resource of this name (this one, an earlier one, or one whose owner reference was cut)."""
    metadata = live["metadata"]
    if (metadata.get("labels") or {}).get(OWNER_LABEL) == resource.name:
        return True
    return any(
        owner.get("kind") == KIND and owner.get("name") == resource.name
        for owner in metadata.get("ownerReferences") or []
    )


def _prunable(live: Manifest, resource: Resource) -> bool:
    """Owned by this very resource, and of a kind that we declare: labels alone could be a user's."""
    return (live["apiVersion"], live["kind"]) in PRUNED_KINDS and any(
        owner.get("uid") == resource.uid and owner.get("controller")
        for owner in live["metadata"].get("ownerReferences") or []
    )
