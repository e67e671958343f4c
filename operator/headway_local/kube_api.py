"""The Kubernetes API as plain JSON over one connection pool: what the node agent and the proxy need of it.

Knows paths and verbs, nothing of kinds. The controller has its own door (`headway_operator.cluster`); this
one is for the pieces that stand in for a cluster's nodes.
"""

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import yaml

from headway_local.objects import Manifest

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class ApiError(Exception):
    """The server refused; `code` is the HTTP status and `status` its Status object."""

    def __init__(self, code: int, status: Manifest) -> None:
        super().__init__(f"{code}: {status.get('message', status)}")
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a watch. SYNCED comes once, after the objects that were there at the start."""

    type: str  # ADDED | MODIFIED | DELETED | SYNCED
    object: Manifest


class KubeApi:
    """A client made from a kubeconfig file; use as an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        context = next(c["context"] for c in config["contexts"] if c["name"] == config["current-context"])
        cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == context["cluster"])
        user = next(u["user"] for u in config["users"] if u["name"] == context["user"])
        self._server = cluster["server"].rstrip("/")
        ca = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=ca)
        if "client-certificate-data" in user:
            # ssl reads key and certificate from files only.
            with tempfile.NamedTemporaryFile(suffix=".pem") as file:
                for part in ("client-certificate-data", "client-key-data"):
                    file.write(base64.b64decode(user[part]) + b"\n")
                file.flush()
                self._tls.load_cert_chain(file.name)
        self._headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "KubeApi":
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> Manifest:
        """One call; ApiError for any status of 400 or more."""
        assert self._session is not None
        data = None if body is None else json.dumps(body).encode()
        async with self._session.request(
            method,
            self._server + path,
            params=dict(query or {}),
            data=data,
            headers={"Content-Type": content_type} if data is not None else {},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as response:
            text = await response.text()
            try:
                answer = json.loads(text)
            except ValueError:
                answer = {"message": text}
            if response.status >= 400:
                raise ApiError(response.status, answer)
            return answer if isinstance(answer, dict) else {"items": answer}

    async def get(self, path: str, **query: str) -> Manifest:
        """GET."""
        return await self.request("GET", path, query=query)

    async def find(self, path: str) -> Manifest | None:
        """GET, with None for an object that is not there."""
        try:
            return await self.request("GET", path)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def create(self, path: str, body: Manifest, **query: str) -> Manifest:
        """POST."""
        return await self.request("POST", path, body, query=query)

    async def patch(self, path: str, body: Manifest, *, kind: str = MERGE_PATCH, **query: str) -> Manifest:
        """PATCH."""
        return await self.request("PATCH", path, body, content_type=kind, query=query)

    async def apply(self, path: str, body: Manifest, *, manager: str) -> Manifest:
        """Server-side apply, taking over fields of others."""
        query = {"fieldManager": manager, "force": "true"}
        return await self.request("PATCH", path, body, content_type=APPLY_PATCH, query=query)

    async def delete(self, path: str, body: Manifest | None = None) -> None:
        """DELETE; an object that is not there is fine."""
        try:
            await self.request("DELETE", path, body)
        except ApiError as error:
            if error.code != 404:
                raise

    async def watch(self, path: str, **query: str) -> AsyncIterator[Event]:
        """List, then follow for ever; a broken watch is resumed from a new list.

        After a resumption an object may come as ADDED again, and one that vanished meanwhile as DELETED.
        """
        known: dict[str, Manifest] = {}
        while True:
            try:
                listing = await self.get(path, **query)
                version = listing["metadata"]["resourceVersion"]
                now = {item["metadata"]["uid"]: item for item in listing["items"]}
                for uid in known.keys() - now.keys():
                    yield Event("DELETED", known[uid])
                known = now
                for item in listing["items"]:
                    yield Event("ADDED", item)
                yield Event("SYNCED", {})
                async for event in self._follow(path, version, query):
                    meta = event.object["metadata"]
                    if event.type == "DELETED":
                        known.pop(meta["uid"], None)
                    else:
                        known[meta["uid"]] = event.object
                    yield event
            except (aiohttp.ClientError, TimeoutError, ApiError):
                # The server is away, or it refuses for now (429, 410): the next list tells.
                await asyncio.sleep(0.5)

    async def _follow(self, path: str, version: str, query: Mapping[str, str]) -> AsyncIterator[Event]:
        assert self._session is not None
        params = {**query, "watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
        async with self._session.get(self._server + path, params=params, timeout=timeout) as response:
            if response.status != 200:
                raise ApiError(response.status, {"message": await response.text()})
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError(event["object"].get("code", 500), event["object"])
                    if event["type"] != "BOOKMARK":
                        yield Event(event["type"], event["object"])
