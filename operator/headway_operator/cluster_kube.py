"""The door to a real API server: the official asynchronous client, plain paths, plain JSON.

One client, one login, a timeout on every call, and each HTTP failure translated once into the errors of
`cluster`. It knows kinds only by name: nothing here is about InferenceDeployments except the status path.
"""

import asyncio
import datetime
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from headway_operator.cluster import ClusterError, Conflict, Forbidden, Gone, Manifest, Refused, TryAgain

FIELD_MANAGER = "headway"
STATUS_MANAGER = "headway-status"
REPORTER = "headway.dev/controller"

CALL_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 4.0
LIST_CHUNK = 500
_NAMESPACE_ENDS = "NamespaceTerminating"
"""The cause of a 403 that is not about rights: nothing new may be made where all is being deleted."""
NOTE_LIMIT = 1024  # characters; the API server refuses a longer event note


class LoginFailed(Exception):
    """Neither a service account nor a kubeconfig could be read."""


Login = Configuration


async def log_in(kubeconfig: Path | None = None) -> Login:
    """Credentials from the kubeconfig that is named, or the pod's service account, or the user's kubeconfig.

    A token stays fresh by itself. LoginFailed where none of them can be read.
    """
    configuration = Configuration()
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
    try:
        if kubeconfig is None and in_pod:
            load_incluster_config(client_configuration=configuration)
        else:
            path = str(kubeconfig) if kubeconfig else None
            await load_kube_config(config_file=path, client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise LoginFailed(f"no way to log in to a cluster: {error}") from error
    return configuration


@dataclass(frozen=True, slots=True)
class BearerToken:
    """What goes into the Authorization header, split as kopf wants it."""

    scheme: str
    token: str


async def bearer_token(configuration: Login) -> BearerToken | None:
    """The token in force now (a rotated file is read again here), or None for client certificates."""
    header = await configuration.get_api_key_with_prefix("BearerToken")
    if not header:
        return None
    scheme, _, token = header.strip().rpartition(" ")
    return BearerToken(scheme=(scheme or "bearer").capitalize(), token=token)


class KubeCluster:
    """A `Cluster` on a real API server. Close it when done."""

    def __init__(self, configuration: Login, *, instance: str = "headway") -> None:
        self._client = ApiClient(configuration)
        self._client.user_agent = "headway-operator"
        self._instance = instance

    async def close(self) -> None:
        await self._client.close()

    async def apply(self, manifest: Manifest) -> Manifest:
        """Forced server-side apply: fields that we declare are ours."""
        return await self._apply(_object_path(manifest), manifest, FIELD_MANAGER)

    async def apply_status(self, manifest: Manifest) -> None:
        await self._apply(f"{_object_path(manifest)}/status", manifest, STATUS_MANAGER)

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest | None:
        try:
            return await self._call("GET", _path(api_version, kind, namespace, name))
        except Gone:
            return None

    async def list(
        self, api_version: str, kind: str, namespace: str, labels: Mapping[str, str]
    ) -> list[Manifest]:
        """All objects, fetched in chunks; an empty namespace means every namespace."""
        path = _path(api_version, kind, namespace)
        query = {"limit": str(LIST_CHUNK)}
        if labels:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        found: list[Manifest] = []
        while True:
            page = await self._call("GET", path, query=query)
            # Items of a list carry neither kind nor version; a reader should not have to know that.
            found += [{"apiVersion": api_version, "kind": kind, **item} for item in page.get("items") or []]
            more = page.get("metadata", {}).get("continue")
            if not more:
                return found
            query["continue"] = more

    async def delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        try:
            await self._call(
                "DELETE",
                _path(api_version, kind, namespace, name),
                body={"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"},
            )
        except Gone:
            return

    async def create(self, manifest: Manifest) -> Manifest:
        """Create; Conflict where the name is taken."""
        metadata = manifest["metadata"]
        path = _path(manifest["apiVersion"], manifest["kind"], metadata["namespace"])
        return await self._call("POST", path, body=manifest, query={"fieldManager": FIELD_MANAGER})

    async def replace(self, manifest: Manifest) -> Manifest:
        """Replace this resourceVersion; Conflict where someone was faster."""
        return await self._call(
            "PUT", _object_path(manifest), body=manifest, query={"fieldManager": FIELD_MANAGER}
        )

    async def post_event(
        self, regarding: Manifest, *, type_: str, reason: str, note: str, action: str
    ) -> None:
        metadata = regarding["metadata"]
        namespace = metadata["namespace"]
        await self.create(
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(8)}", "namespace": namespace},
                "eventTime": micro_time(datetime.datetime.now(datetime.UTC)),
                "reportingController": REPORTER,
                "reportingInstance": self._instance,
                "type": type_,
                "reason": reason,
                "note": note if len(note) <= NOTE_LIMIT else note[: NOTE_LIMIT - 1] + "…",
                "action": action,
                "regarding": {
                    "apiVersion": regarding["apiVersion"],
                    "kind": regarding["kind"],
                    "namespace": namespace,
                    "name": metadata["name"],
                    "uid": metadata.get("uid", ""),
                },
            }
        )

    async def _apply(self, path: str, manifest: Manifest, manager: str) -> Manifest:
        return await self._call(
            "PATCH",
            path,
            body=manifest,
            query={"fieldManager": manager, "force": "true", "fieldValidation": "Strict"},
            content_type="application/apply-patch+yaml",
        )

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Manifest | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """One request; its JSON on success, a ClusterError otherwise."""
        what = f"{method} {path}"
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                parts = await self._client.param_serialize(
                    method=method,
                    resource_path=path,
                    query_params=list((query or {}).items()),
                    header_params={"Accept": "application/json", "Content-Type": content_type},
                    body=body,
                    auth_settings=["BearerToken"],
                )
                response = await self._client.call_api(
                    *parts,
                    _request_timeout=aiohttp.ClientTimeout(
                        total=CALL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S
                    ),
                )
                raw = await response.read()
        except (aiohttp.ClientError, ApiException, OSError) as error:  # OSError: TimeoutError, too
            raise TryAgain(f"{what}: {type(error).__name__} {error}".rstrip()) from error
        if response.status >= 400:
            raise translate(what, response.status, raw, response.getheader("Retry-After"))
        try:
            answer = json.loads(raw)
        except ValueError as error:
            raise TryAgain(f"{what}: the answer is not JSON") from error
        return answer if isinstance(answer, dict) else {}


def translate(what: str, status: int, raw: bytes, retry_after: str | None) -> ClusterError:
    """The error class for an HTTP status; the API server's own message goes into the text."""
    message = f"{what}: {status} {_message(raw)}"
    if status == 404:
        return Gone(message)
    if status == 409:
        return Conflict(message)
    if status == 410 or (status == 403 and _NAMESPACE_ENDS in _causes(raw)):
        return Gone(message)
    if status == 401:
        # A token between two rotations: the next attempt reads the new one. It says nothing about rights.
        return TryAgain(message)
    if status == 403:
        return Forbidden(message)
    if status == 429 or status >= 500:
        try:
            after_s = max(0.1, float(retry_after)) if retry_after else 1.0
        except ValueError:
            after_s = 1.0
        return TryAgain(message, after_s)
    return Refused(message)


def _message(raw: bytes) -> str:
    try:
        answer: Any = json.loads(raw)
    except ValueError:
        return raw[:300].decode(errors="replace")
    return str(answer.get("message", "")) if isinstance(answer, dict) else str(answer)[:300]


def _causes(raw: bytes) -> set[str]:
    """The machine-readable reasons in the API server's answer."""
    try:
        return {cause["reason"] for cause in json.loads(raw)["details"]["causes"]}
    except (ValueError, LookupError, TypeError):
        return set()


def micro_time(moment: datetime.datetime) -> str:
    """The API's MicroTime."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def plural(kind: str) -> str:
    """The path word of a kind: NetworkPolicy -> networkpolicies, Ingress -> ingresses."""
    word = kind.lower()
    if word.endswith("y"):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("s", "x", "ch")) else f"{word}s"


def _path(api_version: str, kind: str, namespace: str, name: str = "") -> str:
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    space = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{root}{space}/{plural(kind)}" + (f"/{quote(name, safe='')}" if name else "")


def _object_path(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    return _path(manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])
