"""Builders of pods for tests, and an object source in memory."""

from typing import Any

from headway_local.objects import Manifest, Token


class Objects:
    """ConfigMaps and Secrets by name, as plain text; tests may change them while a pod runs."""

    def __init__(
        self,
        config_maps: dict[str, dict[str, str]] | None = None,
        secrets: dict[str, dict[str, str]] | None = None,
        token: Token | None = None,
    ) -> None:
        self.config_maps = config_maps or {}
        self.secrets = secrets or {}
        self.token_value = token

    async def config_map(self, namespace: str, name: str) -> Manifest | None:
        return {"data": self.config_maps[name]} if name in self.config_maps else None

    async def secret(self, namespace: str, name: str) -> Manifest | None:
        return {"stringData": self.secrets[name]} if name in self.secrets else None

    async def token(self, pod: Manifest, audience: str, lifetime_s: int) -> Token | None:
        return self.token_value


def python_pod(code: str, *, argument: str = "", **fields: Any) -> Manifest:
    """Pod p that runs Python code; `env` and `volumeMounts` go to the container, the rest to the spec."""
    container: dict[str, Any] = {
        "name": "c",
        "image": "python:3",
        "args": ["-c", code, *([argument] if argument else [])],
    }
    for key in ("env", "envFrom", "volumeMounts"):
        if key in fields:
            container[key] = fields.pop(key)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "default", "uid": "u"},
        "spec": {"containers": [container], **fields},
    }
