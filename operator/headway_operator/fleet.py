"""The only door to engine pods: scrape their metrics, put limits and objectives.

A pod that does not answer is a value (`Unreachable`), so that one of them never ends a tick. Knows
nothing of what the numbers mean.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from headway_engine.protocol import LIMITS_PATH, METRICS_PATH, OBJECTIVES_PATH, Limits, Objectives
from headway_operator.metrics import MetricsError, Sample, parse

MAX_EXPOSITION_BYTES = 4_000_000
_T = TypeVar("_T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class PodRef:
    """Where one engine pod listens. `name` is the pod's and unique in the deployment."""

    name: str
    address: str
    management_port: int
    ready: bool
    trouble: str = ""
    """What keeps the pod from serving, in words that stay the same while it does."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A pod that gave no usable answer, and why."""

    reason: str


class FleetError(Exception):
    """A pod did not take what it was sent. `field` is the refused one, where the pod named it."""

    def __init__(self, pod: str, reason: str, field: str = "") -> None:
        super().__init__(f"{pod}: {reason}")
        self.pod = pod
        self.reason = reason
        self.field = field


class Fleet(Protocol):
    """What the controller asks of engine pods."""

    async def scrape(self, pods: Sequence[PodRef]) -> dict[str, Sample | Unreachable]:
        """One reading of each pod, by pod name; never raises for a pod."""

    async def set_limits(self, pod: PodRef, key: str, limits: Limits) -> Limits:
        """Put limits in force; returns what the pod has in force now. Raises FleetError."""

    async def set_objectives(self, pod: PodRef, key: str, objectives: Objectives) -> Objectives:
        """Put histogram boundaries at these targets. Raises FleetError."""

    async def close(self) -> None:
        """Let go of connections."""


class HttpFleet:
    """Fleet over HTTP. One connection pool; at most `concurrency` pods are asked at once: many more than
    can be expected to hang together, since a pod that hangs keeps its place for the whole timeout."""

    def __init__(self, *, timeout_s: float = 3.0, concurrency: int = 256) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def scrape(self, pods: Sequence[PodRef]) -> dict[str, Sample | Unreachable]:
        found = await asyncio.gather(*(self._scrape_one(pod) for pod in pods))
        return dict(zip((pod.name for pod in pods), found, strict=True))

    async def set_limits(self, pod: PodRef, key: str, limits: Limits) -> Limits:
        return await self._put(pod, key, LIMITS_PATH, limits)

    async def set_objectives(self, pod: PodRef, key: str, objectives: Objectives) -> Objectives:
        return await self._put(pod, key, OBJECTIVES_PATH, objectives)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _scrape_one(self, pod: PodRef) -> Sample | Unreachable:
        try:
            async with (
                self._slots,
                self._client().get(_url(pod, METRICS_PATH), allow_redirects=False) as response,
            ):
                body = await _read(response)
                if response.status != 200:
                    return Unreachable(f"{METRICS_PATH} answered {response.status}")
            return parse(body.decode("utf-8"))
        except (MetricsError, UnicodeDecodeError) as error:
            return Unreachable(f"{METRICS_PATH} is not readable: {error}")
        except TimeoutError:
            return Unreachable(f"no answer in {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError, _TooLarge) as error:
            return Unreachable(str(error) or type(error).__name__)

    async def _put(self, pod: PodRef, key: str, path: str, value: _T) -> _T:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = msgspec.json.encode(value)
        try:
            async with (
                self._slots,
                self._client().put(
                    _url(pod, path), data=data, headers=headers, allow_redirects=False
                ) as response,
            ):
                body = await _read(response)
                status = response.status
        except TimeoutError as error:
            raise FleetError(pod.name, f"PUT {path}: no answer in {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, _TooLarge) as error:
            raise FleetError(pod.name, f"PUT {path}: {str(error) or type(error).__name__}") from error
        if status != 200:
            field, message = _refusal(body)
            raise FleetError(pod.name, f"PUT {path} answered {status}: {message}", field)
        try:
            return msgspec.json.decode(body, type=type(value))
        except msgspec.DecodeError as error:
            raise FleetError(pod.name, f"PUT {path} answered something else: {error}") from error

    def _client(self) -> aiohttp.ClientSession:
        # Made on first use: a session belongs to the running event loop. Proxies of the environment are
        # not for pods. Redirects are never followed: they would carry the key elsewhere.
        if self._session is None:
            # The semaphore is the one limit: the connector's own (100) would let pods that hang use up the
            # time of those that wait behind them.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, trust_env=False)
        return self._session


class _TooLarge(Exception):
    """A body beyond what an engine could mean."""


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_EXPOSITION_BYTES:
            raise _TooLarge(f"answer is larger than {MAX_EXPOSITION_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _url(pod: PodRef, path: str) -> str:
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    return f"http://{host}:{pod.management_port}{path}"


def _refusal(body: bytes) -> tuple[str, str]:
    """Field and message of a refusal: `{field, message}`, OpenAI's error form, or whatever else came."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return "", body[:200].decode("utf-8", "replace").strip() or "no reason given"
    error = document.get("error", document) if isinstance(document, Mapping) else {}
    if not isinstance(error, Mapping):
        return "", str(error)[:200]
    field = error.get("param") or error.get("field") or ""
    message = error.get("message") or error.get("detail") or "no reason given"
    return str(field), str(message)[:200]
