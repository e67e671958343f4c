"""What a pod asks of the world around it: ConfigMaps, Secrets and service-account tokens.

The test plane answers from the Kubernetes API, `headway up` from memory. Manifests are plain dicts, the API's
own JSON.
"""

from dataclasses import dataclass
from typing import Any, Protocol

Manifest = dict[str, Any]


class PodConfigError(Exception):
    """The pod cannot start as things stand (a ConfigMap is missing, say); it is tried again later."""


@dataclass(frozen=True, slots=True)
class Token:
    """A service-account token and the wall-clock second (epoch) at which it ends."""

    value: str
    expires_at_s: float


class ObjectSource(Protocol):
    """Where a pod's environment and volumes come from."""

    async def config_map(self, namespace: str, name: str) -> Manifest | None:
        """The ConfigMap, or None where there is none."""

    async def secret(self, namespace: str, name: str) -> Manifest | None:
        """The Secret (values in base64, as the API has them), or None."""

    async def token(self, pod: Manifest, audience: str, lifetime_s: int) -> Token | None:
        """A token of the pod's service account; None where there are no tokens (`headway up`)."""
