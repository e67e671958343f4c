"""The only door to the Kubernetes API, and the shape that any other door must have.

`Cluster` is what reconcile needs of the world; `headway up` has one that keeps objects in memory and
runs pods as processes. Manifests are plain dicts, the API's own JSON.
"""

from collections.abc import Mapping
from typing import Any, Protocol

Manifest = dict[str, Any]


class Cluster(Protocol):
    """Everything the controller does to, or asks of, Kubernetes."""

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply of a child under our field manager; creates it when absent."""

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """The object, or None where there is none."""

    async def list(
        self, api_version: str, kind: str, namespace: str, labels: Mapping[str, str]
    ) -> list[Manifest]:
        """Objects that carry all these labels."""

    async def apply_status(self, manifest: Manifest) -> None:
        """Server-side apply of the status of an InferenceDeployment (whole intended status)."""

    async def delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        """Delete if present."""

    async def post_event(
        self, regarding: Manifest, *, type_: str, reason: str, note: str, action: str
    ) -> None:
        """An events.k8s.io/v1 event on the object; callers post on transitions only."""
