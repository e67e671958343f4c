"""The engine's command: one front-end process with two ports, and the core process beside it.

Wires everything together and owns the order in which things start and end. Exit status: 0 after a drain,
1 when the core was lost or could not start.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from headway_engine import channel, config, logs, tracing
from headway_engine.access_log import AccessLog
from headway_engine.connections import KEEP_ALIVE_S, Connection, allow_many_files
from headway_engine.control import ControlError, control_app, decode_objectives
from headway_engine.core_client import DRAINING_RETRY_S, CoreClient
from headway_engine.core_process import tenant_policy
from headway_engine.exchange import Watcher
from headway_engine.keys import KeyRing, KeysError
from headway_engine.protocol import CONTROL_KEY_ENV, Objectives
from headway_engine.server import Front, public_app
from headway_engine.telemetry import Telemetry
from headway_engine.tenants import TenantPolicy

log = logging.getLogger("headway.front")

CORE_COMMAND = (sys.executable, "-m", "headway_engine.core_process")
ANSWER_TIME_S = 2
"""How long answers to requests that were given up may take to reach their clients."""
CORE_EXIT_S = 2.0
"""How long the core may take to leave its loop."""


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to us: two of them live in this process, and both must drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Entry point of `headway-engine`."""
    argv = sys.argv[1:]
    settings = config.parse(argv)
    logs.configure(settings.log_level, settings.log_format)
    sys.exit(uvloop.run(serve(settings, argv)))


async def serve(
    settings: config.EngineConfig, argv: Sequence[str], core_command: Sequence[str] = CORE_COMMAND
) -> int:
    """Run until a signal or the loss of the core; the exit status. `settings` was parsed from `argv`."""
    tenants = declared_tenants(settings)
    objectives = starting_objectives(settings)
    telemetry = Telemetry(objectives, start_time_s=time.time(), tenants=tuple(tenants.tenants))
    core = CoreClient(telemetry)
    name = config.served_name(settings)
    traces = tracing.tracer(os.environ)
    front = Front(core, telemetry, name, created=int(time.time()), keys=api_keys(settings), tenants=tenants)
    key = os.environ.get(CONTROL_KEY_ENV, "")
    apps = {
        settings.port: public_app(front, watchers(settings, traces)),
        settings.management_port: control_app(core, telemetry, key=key, stall_limit_s=settings.stall_limit_s),
    }
    allow_many_files()
    # 1. Listen before loading: probes and clients get true answers from the first moment.
    servers = [listen(app, settings.host, port) for port, app in apps.items()]
    serving = [asyncio.create_task(server.serve()) for server in servers]
    # 2. Start the core, which loads the model.
    ours, theirs = channel.pair()
    with theirs:
        process = start_core([*core_command, str(theirs.fileno()), *argv], theirs.fileno())
    end = await channel.FrontEnd.open(ours)
    reading = asyncio.create_task(core.run(end))
    log.info(
        logs.fields(
            "started",
            model=name,
            port=settings.port,
            management_port=settings.management_port,
            core=process.pid,
        )
    )
    # 3. Serve until asked to stop, or until there is nothing to serve with.
    signals = Signals()
    await first_of(signals.first.wait(), core.gone.wait())
    # 4. Finish what runs, or give it up with an answer.
    if not core.gone.is_set():
        await drain(core, signals, settings.drain_timeout_s)
    lost = core.gone.is_set()
    core.stop()
    # 5. Close the ports, then the core.
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*serving)
    reading.cancel()
    end.close()
    end_core(process)
    if traces is not None:
        await asyncio.to_thread(tracing.close, traces)
    # The last line is what a container's termination message ends with: it has the reason.
    status = process.returncode
    if lost:
        reason = why_lost(status, core.doing)
        log.error(logs.fields("stopped", lost_core=True, core_status=status, reason=reason))
    else:
        log.info(logs.fields("stopped", lost_core=False, core_status=status))
    return 1 if lost else 0


class Signals:
    """SIGTERM and SIGINT: the first one drains, a second one is impatient."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def drain(core: CoreClient, signals: Signals, timeout_s: float) -> None:
    """Refuse newcomers, let running requests finish; those that do not in time get an answer that says so."""
    phase = logs.Change(core.phase.value, "draining")
    log.info(
        logs.fields("draining", phase=phase, why="a signal", in_flight=core.in_flight, timeout_s=timeout_s)
    )
    core.drain()
    await first_of(core.idle(), signals.second.wait(), core.gone.wait(), asyncio.sleep(timeout_s))
    if core.in_flight:
        log.warning(logs.fields("drain-cut-short", in_flight=core.in_flight))
        core.cut_off("the engine is shutting down", "draining", DRAINING_RETRY_S)


def listen(app: ASGIApp, host: str, port: int) -> Server:
    """A server for one port. No access log: requests are counted, changes are logged."""
    return Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            http=Connection,
            timeout_graceful_shutdown=ANSWER_TIME_S,
        )
    )


def start_core(command: Sequence[str], fd: int) -> subprocess.Popen[bytes]:
    """The core process, holding the other end of the channel."""
    environment = core_environment(os.environ)
    return subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL, env=environment)


def why_lost(status: int | None, said: str) -> str:
    """What is known of a core that ended: what it `said`, or what its exit status tells of a signal."""
    if status is None or status >= 0:
        return said
    name = signal.Signals(-status).name
    if name == "SIGKILL":
        return f"{said}: {name}, probably for its memory; lower kvCache.memoryPercent, or give it more memory"
    if name in ("SIGILL", "SIGFPE", "SIGSEGV", "SIGBUS", "SIGABRT"):
        way_out = "HEADWAY_CPU_ISA takes a lower instruction set, HEADWAY_KERNELS=off no kernels"
        return f"{said}: {name}, a mistake in its code; {way_out}"
    return f"{said}: {name}"


def core_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What the core inherits, with OpenMP's threads told not to spin for long while they wait for each other.

    The front end, other pods and whatever else runs want the cores too, and a thread that spins on a core
    which its neighbour waits for makes a step twice as slow (`bench/README.md`); on idle cores a short spin
    costs nothing. Whoever chose a policy keeps it.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & ours.keys()
    return dict(ours) if chosen else {**ours, "GOMP_SPINCOUNT": "1000"}


def end_core(process: subprocess.Popen[bytes]) -> None:
    """The core ends with its channel; one that hangs in a step does not get to hold up the exit."""
    try:
        process.wait(timeout=CORE_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def watchers(settings: config.EngineConfig, traces: tracing.Tracer | None) -> list[Watcher]:
    """Who wants to know of requests. The tracer goes first: the access log names its traces."""
    chosen: list[Watcher | None] = [traces, AccessLog() if settings.access_log else None]
    return [watcher for watcher in chosen if watcher is not None]


def starting_objectives(settings: config.EngineConfig) -> Objectives:
    """Objectives of the file, or none. Exits with words for a file that says something else."""
    if settings.objectives_file is None:
        return Objectives()
    try:
        return decode_objectives(settings.objectives_file.read_bytes())
    except (OSError, ControlError) as error:
        raise SystemExit(f"--objectives-file {settings.objectives_file}: {error}") from error


def declared_tenants(settings: config.EngineConfig) -> TenantPolicy:
    """What the tenants file says. Exits with words for a bad one, before the core would stumble over it."""
    try:
        return tenant_policy(settings)
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"--tenants-file {settings.tenants_file}: {error}") from error


def api_keys(settings: config.EngineConfig) -> KeyRing | None:
    """Whose keys are whose, or None when the API is open. Exits with words for bad ones."""
    if settings.keys_file is None:
        return None
    try:
        return KeyRing(settings.keys_file)
    except KeysError as error:
        raise SystemExit(f"--keys-file {error}") from error


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    main()
