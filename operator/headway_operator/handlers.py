"""The kopf edge: watch events in, keys out. kopf watches and reconnects; it never writes, never reconciles.

Only `on.event` handlers, so kopf puts no finalizer and no annotation on anything. Whatever it delivers only
means "look at this key"; what is true is read from the API by the reconciler.
"""

import asyncio
import datetime
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import kopf

from headway_operator.cluster_kube import Login, bearer_token
from headway_operator.manifests import OWNER_LABEL
from headway_operator.resource import GROUP, PLURAL, VERSION

Key = tuple[str, str]

RECONNECT_S = 1.0
LOGIN_AGAIN_S = 5.0
NEVER = datetime.timedelta(days=3650)
BACKOFFS_S = (0.2, 0.5, 1.0, 2.0, 3.0) + (5.0,) * 10
"""After the last of these kopf gives up and the process ends. Recovery after an outage takes at most 5 s."""

logger = logging.getLogger(__name__)


class Fingerprints:
    """Tells news from repetition: a relist, a bookmark's echo or our own status write is no news."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str], str] = {}

    def news(self, body: Mapping[str, Any], gone: bool, *, with_status: bool) -> bool:
        """True where the parts that matter differ from those seen last."""
        metadata = body.get("metadata") or {}
        key = (str(body.get("kind")), metadata.get("namespace", ""), metadata.get("name", ""))
        if gone:
            self._seen.pop(key, None)
            return True
        relevant = {
            "uid": metadata.get("uid"),
            "generation": metadata.get("generation"),
            "deleting": metadata.get("deletionTimestamp"),
        }
        if with_status:
            ignored = ("managedFields", "resourceVersion")
            relevant["metadata"] = {k: v for k, v in metadata.items() if k not in ignored}
            relevant["spec"], relevant["status"] = body.get("spec"), body.get("status")
        text = json.dumps(relevant, sort_keys=True, default=str)
        mark = hashlib.sha256(text.encode()).hexdigest()
        if self._seen.get(key) == mark:
            return False
        self._seen[key] = mark
        return True


def registry(
    *,
    login: Login,
    changed: Callable[[Key], None],
    delivered: Callable[[Key, str, int], None],
) -> kopf.OperatorRegistry:
    """Handlers that call `changed` for every key to look at and `delivered` for every generation seen."""
    handlers = kopf.OperatorRegistry()
    fingerprints = Fingerprints()
    pace = _Pace(LOGIN_AGAIN_S)

    @kopf.on.login(registry=handlers, backoff=LOGIN_AGAIN_S)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        """Our own login; asked again, not too often, when the API server says 401."""
        await pace.wait()
        return await connection(login)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def resource_event(body: Mapping[str, Any], type: str | None, **_: Any) -> None:
        metadata = body["metadata"]
        key = (metadata["namespace"], metadata["name"])
        delivered(key, metadata["uid"], metadata.get("generation", 0))
        if fingerprints.news(body, type == "DELETED", with_status=False):
            changed(key)

    async def child_event(body: Mapping[str, Any], type: str | None, **_: Any) -> None:
        metadata = body["metadata"]
        owner = (metadata.get("labels") or {}).get(OWNER_LABEL)
        if owner and fingerprints.news(body, type == "DELETED", with_status=True):
            changed((metadata["namespace"], owner))

    labels = {OWNER_LABEL: kopf.PRESENT}
    kopf.on.event("apps", "v1", "deployments", labels=labels, registry=handlers, id="deployment")(child_event)
    kopf.on.event("", "v1", "pods", labels=labels, registry=handlers, id="pod")(child_event)
    return handlers


class _Pace:
    """Lets the first caller through at once and every later one `every_s` after the one before."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_s = 0.0

    async def wait(self) -> None:
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._next_s)
        self._next_s = start_s + self._every_s
        await asyncio.sleep(start_s - now_s)


async def connection(login: Login) -> kopf.ConnectionInfo:
    """The official client's credentials in kopf's words.

    Each call gives another expiration, so that kopf takes the same token once more: it ends the process
    when credentials it has seen refused come again, and a 401 may be the API server's passing trouble.
    """
    token = await bearer_token(login)
    return kopf.ConnectionInfo(
        server=login.host,
        ca_path=login.ssl_ca_cert,
        insecure=not login.verify_ssl,
        scheme=token.scheme if token else None,
        token=token.token if token else None,
        certificate_path=login.cert_file,
        private_key_path=login.key_file,
        expiration=datetime.datetime.now(datetime.UTC) + NEVER,
    )


def kopf_settings() -> kopf.OperatorSettings:
    """No peering, no scanning, no writes; streams that are noticed when they die."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.error_backoffs = BACKOFFS_S
    settings.watching.reconnect_backoff = RECONNECT_S
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 250
    settings.watching.chunk_size = 500
    settings.watching.label_selectors["apps", "v1", "deployments"] = OWNER_LABEL
    settings.watching.label_selectors["", "v1", "pods"] = OWNER_LABEL
    return settings


async def watch(
    handlers: kopf.OperatorRegistry,
    *,
    namespaces: Collection[str],
    stop: asyncio.Event,
    started: Callable[[], None],
) -> None:
    """Deliver events until `stop`, or until kopf gives up (then it raises).

    kopf cancels, at its end, every task that was started after it: stop your own first.
    """
    ready = asyncio.Event()

    async def announce() -> None:
        await ready.wait()
        # kopf installs signal handlers of its own in the same turn; they are undone after it.
        for _ in range(3):
            await asyncio.sleep(0)
        started()

    announcing = asyncio.create_task(announce(), name="kopf started")
    try:
        await _run(handlers, namespaces, stop, ready)
    finally:
        announcing.cancel()


def _run(
    handlers: kopf.OperatorRegistry, namespaces: Collection[str], stop: asyncio.Event, ready: asyncio.Event
) -> Awaitable[None]:
    return kopf.operator(
        registry=handlers,
        settings=kopf_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        stop_flag=stop,
        ready_flag=ready,
    )
