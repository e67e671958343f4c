"""The only door to the Kubernetes API, and the shape that any other door must have.

`Cluster` is what reconcile needs of the world; `cluster_kube` keeps it with a real API server, and
`headway up` has one that keeps objects in memory and runs pods as processes. Manifests are plain dicts,
the API's own JSON. Every door speaks of failure in the few classes below and in no others.
"""

from collections.abc import Mapping
from typing import Any, Protocol

Manifest = dict[str, Any]


class ClusterError(Exception):
    """The API did not do what was asked; the subclass says what that means for the caller."""


class Conflict(ClusterError):
    """Someone else changed or made the object first; read again, then decide again."""


class Gone(ClusterError):
    """The object, its namespace or its kind is not there (any more)."""


class Forbidden(ClusterError):
    """Our rights or our token do not allow it; trying at once cannot help."""


class Refused(ClusterError):
    """The API server judged the object and found it wrong; the message names the fields."""


class TryAgain(ClusterError):
    """Overload, outage or timeout; the same call may work in `after_s` seconds."""

    def __init__(self, message: str, after_s: float = 1.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Cluster(Protocol):
    """Everything the controller does to, or asks of, Kubernetes. Failures are ClusterErrors."""

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
