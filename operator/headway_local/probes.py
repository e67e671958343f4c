"""Startup, readiness and liveness probes: what to ask, and when answers make a verdict.

`Counter` is pure; `check` does one attempt over HTTP, TCP or by a command that the caller runs.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from headway_local.objects import Manifest, PodConfigError

ExecCommand = Callable[[list[str], float], Awaitable[tuple[int, str]]]
"""Runs a command in the container within so many seconds: exit code and output."""


@dataclass(frozen=True, slots=True)
class HttpGet:
    """Success is any status from 200 to 399."""

    host: str
    port: int
    path: str
    headers: Mapping[str, str]
    tls: bool = False


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """Success is a connection."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Exec:
    """Success is exit code 0."""

    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of a container with the API's defaults filled in."""

    action: HttpGet | TcpSocket | Exec
    initial_delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    success_threshold: int = 1
    failure_threshold: int = 3
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of one attempt; `message` says what was seen."""

    ok: bool
    message: str = ""


class Counter:
    """Runs of equal answers; a verdict changes when a run reaches its threshold."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._ok = False
        self._run = 0

    def observe(self, ok: bool) -> bool | None:
        """The verdict that this answer completes (True passed, False failed), or None while undecided."""
        self._run = self._run + 1 if ok == self._ok else 1
        self._ok = ok
        threshold = self._probe.success_threshold if ok else self._probe.failure_threshold
        return ok if self._run >= threshold else None


def parse(probe: Manifest | None, container: Manifest, pod_ip: str) -> Probe | None:
    """The probe of a container spec; None where it has none. Raises PodConfigError for an unknown kind."""
    if not probe:
        return None
    ports = {port.get("name"): int(port["containerPort"]) for port in container.get("ports") or ()}

    def port(value: int | str) -> int:
        if isinstance(value, str) and not value.isdigit():
            if value not in ports:
                raise PodConfigError(f"probe names port {value}, which the container does not have")
            return ports[value]
        return int(value)

    action: HttpGet | TcpSocket | Exec
    if get := probe.get("httpGet"):
        headers = {header["name"]: header["value"] for header in get.get("httpHeaders") or ()}
        tls = get.get("scheme", "HTTP").upper() == "HTTPS"
        action = HttpGet(get.get("host") or pod_ip, port(get["port"]), get.get("path") or "/", headers, tls)
    elif tcp := probe.get("tcpSocket"):
        action = TcpSocket(tcp.get("host") or pod_ip, port(tcp["port"]))
    elif command := probe.get("exec"):
        action = Exec(tuple(command["command"]))
    else:
        raise PodConfigError(f"unsupported probe {sorted(probe)}")
    grace = probe.get("terminationGracePeriodSeconds")
    return Probe(
        action,
        initial_delay_s=float(probe.get("initialDelaySeconds") or 0),
        period_s=float(probe.get("periodSeconds") or 10),
        timeout_s=float(probe.get("timeoutSeconds") or 1),
        success_threshold=int(probe.get("successThreshold") or 1),
        failure_threshold=int(probe.get("failureThreshold") or 3),
        grace_s=None if grace is None else float(grace),
    )


async def check(probe: Probe, run: ExecCommand) -> Answer:
    """One attempt; never raises for a target that does not answer."""
    action = probe.action
    try:
        async with asyncio.timeout(probe.timeout_s):
            match action:
                case HttpGet():
                    status = await _get(action)
                    return Answer(200 <= status < 400, f"HTTP probe failed with statuscode: {status}")
                case TcpSocket():
                    _, writer = await asyncio.open_connection(action.host, action.port)
                    await _close(writer)
                    return Answer(True)
                case Exec():
                    code, output = await run(list(action.command), probe.timeout_s)
                    return Answer(code == 0, output.strip()[-500:] or f"exit code {code}")
    except TimeoutError:
        return Answer(False, f"probe timed out after {probe.timeout_s:g} s")
    except (OSError, ValueError) as error:
        return Answer(False, str(error))


async def _get(action: HttpGet) -> int:
    context = None
    if action.tls:
        # As the kubelet: a probe asks whether the server answers, not who it is.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(action.host, action.port, ssl=context)
    headers = {"Host": f"{action.host}:{action.port}", "User-Agent": "kube-probe/1.37", "Connection": "close"}
    lines = [
        f"GET {action.path} HTTP/1.1",
        *(f"{k}: {v}" for k, v in {**headers, **action.headers}.items()),
        "",
        "",
    ]
    try:
        writer.write("\r\n".join(lines).encode())
        status_line = await reader.readline()
        parts = status_line.split()
        if len(parts) < 2:
            raise ValueError("connection closed before a response")
        return int(parts[1])
    finally:
        await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def watch(probe: Probe, run: ExecCommand, on_verdict: Callable[[bool, str], None]) -> None:
    """Probe for ever; `on_verdict` hears every verdict, repeated ones too. Cancel to end."""
    await asyncio.sleep(probe.initial_delay_s)
    counter = Counter(probe)
    while True:
        answer = await check(probe, run)
        verdict = counter.observe(answer.ok)
        if verdict is not None:
            on_verdict(verdict, answer.message)
        await asyncio.sleep(probe.period_s)
