"""One pod as local processes, with the life that Kubernetes gives it: start, probes, restarts, graceful end.

`PodProcess` runs pods of one container and no init containers. It knows nothing of the Kubernetes API:
objects come from an `ObjectSource`, and every change of status goes to a callback.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from headway_local import environment, pod_status, probes
from headway_local.guard import GUARD
from headway_local.images import Images
from headway_local.objects import Manifest, ObjectSource, PodConfigError
from headway_local.pod_status import Phase, PodFacts, Running, Terminated, Waiting
from headway_local.volumes import Mount, Volumes

_LAUNCHER = str(Path(__file__).with_name("launch.py"))
_MIN_GRACE_AFTER_PRE_STOP_S = 2.0
_TAIL_BYTES = 4096
EXIT_RUNNER_FAILED = 128
_INHERITED = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "XDG_CACHE_HOME", "HEADWAY_CACHE",
    "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "COVERAGE_PROCESS_START",
    "OMP_WAIT_POLICY", "GOMP_SPINCOUNT",
)  # fmt: skip


def inherited_env() -> dict[str, str]:
    """What a pod takes over from the runner's environment: where programs and caches are, and no more."""
    return {key: os.environ[key] for key in _INHERITED if key in os.environ} | {"PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class BackOff:
    """Wait before a restart. The first restart is immediate, as in the kubelet."""

    first_s: float = 10.0
    most_s: float = 300.0
    reset_after_s: float = 600.0  # of running well

    def after(self, crashes: int) -> float:
        """Seconds to wait after this many ends in a row."""
        return 0.0 if crashes <= 1 else min(self.most_s, self.first_s * 2 ** min(crashes - 2, 30))


@dataclass(frozen=True, slots=True)
class PodOptions:
    """How pods are run on this machine."""

    images: Images = field(default_factory=Images)
    host_ip: str = "127.0.0.1"
    claims: Path = Path(".headway/claims")
    back_off: BackOff = BackOff()
    config_retry_s: float = 1.0
    bind_mounts: bool = False  # real mount paths; see `mounts_work`
    base_env: Mapping[str, str] = field(default_factory=inherited_env)


async def mounts_work() -> bool:
    """Whether pods can have a mount namespace here (Linux, root, and not forbidden by the machine)."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    spec = {
        "argv": ["true"],
        "cwd": "/",
        "parent": os.getpid(),
        "mounts": [["/usr", "/headway-mount-probe", True]],
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", _LAUNCHER, json.dumps(spec), stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait() == 0


_COMMAND_LINE = ("command", "args")


def _machine_paths() -> list[str]:
    """Where this interpreter and its packages are, on this machine."""
    return [sys.prefix, sys.base_prefix, sys.executable, *(path for path in sys.path if path.startswith("/"))]


def rewrite(word: str, mounts: Sequence[Mount]) -> str:
    """`word` with a mount path at its start (or after `=`) replaced by the folder behind it.

    This stands in for real mounts where the runner may not mount: `--limits-file=/etc/x/limits.json`.
    """
    prefix, equals, tail = word.partition("=")
    candidate = tail if equals and tail.startswith("/") else word
    for mount in sorted(mounts, key=lambda mount: len(mount.path), reverse=True):
        if candidate == mount.path or candidate.startswith(mount.path + "/"):
            moved = str(mount.source) + candidate[len(mount.path) :]
            return f"{prefix}={moved}" if candidate is not word else moved
    return word


class PodProcess:
    """Runs one pod from `start` to `stop`. Folder layout: `log.txt`, `volumes/NAME/`."""

    def __init__(
        self,
        pod: Manifest,
        *,
        pod_ip: str,
        folder: Path,
        source: ObjectSource,
        options: PodOptions,
        on_status: Callable[[Manifest], None] = lambda status: None,
    ) -> None:
        self.pod = pod
        self.pod_ip = pod_ip
        self.folder = folder
        self.log_path = folder / "log.txt"
        self._source = source
        self._options = options
        self._on_status = on_status
        self._volumes = Volumes(
            pod, folder, source, claims=options.claims, pod_ip=pod_ip, host_ip=options.host_ip
        )
        self._facts = PodFacts()
        self._status: Manifest | None = None
        self._stopping = asyncio.Event()
        self._kill_now = asyncio.Event()
        self._changed = asyncio.Event()
        self._grace_s = float(pod["spec"].get("terminationGracePeriodSeconds", 30))
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._env: dict[str, str] = {}
        self._mounts: list[Mount] = []
        self._base: Mapping[str, str] = {}

    # What others may ask.

    @property
    def facts(self) -> PodFacts:
        """The present facts."""
        return self._facts

    @property
    def status(self) -> Manifest:
        """The status as the Kubernetes API shows it."""
        return self._status or self._build_status()

    @property
    def pid(self) -> int | None:
        """Process id of the container's main process while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the container's output, all starts together."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 256 * lines))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    async def wait_for(self, condition: Callable[[PodFacts], bool], timeout_s: float) -> PodFacts:
        """Wait until the facts fulfil a condition; TimeoutError with the log's tail otherwise."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self._facts):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            name = self.pod["metadata"]["name"]
            raise TimeoutError(f"pod {name} is {self._facts}; its log ends:\n{self.log_tail()}") from None
        return self._facts

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the pod is ready; RuntimeError with the log's tail where it has ended instead."""
        facts = await self.wait_for(lambda facts: facts.ready or facts.phase.final, timeout_s)
        if not facts.ready:
            raise RuntimeError(f"pod {self.pod['metadata']['name']} ended:\n{self.log_tail()}")

    # What others may do.

    def start(self) -> None:
        """Begin; returns at once. Needs a running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"pod {self.pod['metadata']['name']}")
            self._task.add_done_callback(self._fell)

    async def stop(self, grace_s: float | None = None) -> None:
        """preStop, SIGTERM, wait, SIGKILL; returns when nothing is left. A second call may shorten it."""
        if grace_s is not None:
            self._grace_s = grace_s
            if self._stopping.is_set() and grace_s <= 0:
                self._kill_now.set()
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def refresh_volumes(self) -> None:
        """Bring ConfigMap, Secret and token volumes up to date in the running pod."""
        await self._volumes.project()

    def remove_folder(self) -> None:
        """Delete log and volumes; persistent claims stay."""
        self._volumes.remove()

    # Its life.

    async def _run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._set(start_time=_now(), state=Waiting("ContainerCreating"))
        crashes = 0
        while not self._stopping.is_set():
            try:
                argv = await self._prepare()
            except PodConfigError as error:
                self._set(state=Waiting("CreateContainerConfigError", str(error)))
                await self._sleep(self._options.config_retry_s)
                continue
            began = time.monotonic()
            end = await self._run_container(argv)
            crashes = 1 if time.monotonic() - began >= self._options.back_off.reset_after_s else crashes + 1
            self._set(state=end, ready=False, started=False)
            policy = self.pod["spec"].get("restartPolicy", "Always")
            again = policy == "Always" or (policy == "OnFailure" and end.exit_code != 0)
            if self._stopping.is_set() or not again:
                break
            wait_s = self._options.back_off.after(crashes)
            if wait_s > 0:
                name = self.pod["spec"]["containers"][0]["name"]
                message = f"back-off {wait_s:g}s restarting failed container={name}"
                self._set(state=Waiting("CrashLoopBackOff", message), last_end=end)
                await self._sleep(wait_s)
                if self._stopping.is_set():
                    self._set(state=end)
                    break
            self._set(restarts=self._facts.restarts + 1, last_end=end)
        ended = self._facts.state
        good = isinstance(ended, Terminated) and ended.exit_code == 0
        self._set(phase=Phase.SUCCEEDED if good else Phase.FAILED, ready=False)

    def _fell(self, task: "asyncio.Task[None]") -> None:
        """The runner itself failed: that must not look like a pod that takes long to start."""
        if task.cancelled() or task.exception() is None:
            return
        text = "".join(traceback.format_exception(task.exception()))
        self._note(text)
        now = _now()
        end = Terminated(
            EXIT_RUNNER_FAILED, 0, self._facts.start_time or now, now, "RunnerError", text[-1024:]
        )
        self._set(phase=Phase.FAILED, state=end, ready=False)

    async def _prepare(self) -> list[str]:
        """Volumes, environment and command line of the next start."""
        spec, options = self.pod["spec"], self._options
        if len(spec["containers"]) != 1 or spec.get("initContainers"):
            raise PodConfigError("only pods of one container and no init containers run as processes")
        container = spec["containers"][0]
        await self._volumes.project()
        self._mounts = self._volumes.mounts(container)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probes.parse(container.get(kind), container, self.pod_ip)  # raises now what would raise later
        self._set(sandbox=True)
        base = {**options.base_env, **options.images.env(container["image"], self.pod_ip)}
        self._base = base
        env = await environment.resolve(
            container, self.pod, self._source, pod_ip=self.pod_ip, host_ip=options.host_ip, base=base
        )
        moved = self._moved_mounts(base)
        # Only what the pod itself says is about its mounts; the interpreter's own paths are the machine's.
        env = {key: value if base.get(key) == value else rewrite(value, moved) for key, value in env.items()}
        words = {part: [rewrite(word, moved) for word in container.get(part) or ()] for part in _COMMAND_LINE}
        argv = options.images.argv({**container, **words}, self.pod_ip)
        self._env = env
        return [environment.expand(word, env) for word in argv]

    def _moved_mounts(self, base: Mapping[str, str]) -> list[Mount]:
        """Mounts that are not at their paths: all where mounting is not allowed, and always those that
        would hide the interpreter or the packages that the process runs from (a work tree in /tmp)."""
        if not self._options.bind_mounts:
            return list(self._mounts)
        needed = [*_machine_paths(), *(value for value in base.values() if value.startswith("/"))]
        return [m for m in self._mounts if any(path.startswith(m.path + "/") for path in needed)]

    async def _spawn(self, argv: list[str], output: int) -> asyncio.subprocess.Process:
        working_dir = self.pod["spec"]["containers"][0].get("workingDir") or "/"
        moved = self._moved_mounts(self._base)
        mounts = [[str(m.source.absolute()), m.path, m.read_only] for m in self._mounts if m not in moved]
        spec = {"argv": argv, "cwd": working_dir, "parent": os.getpid(), "mounts": mounts}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", _LAUNCHER, json.dumps(spec),
            env=self._env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        GUARD.add(process.pid)
        return process

    async def _run_container(self, argv: list[str]) -> Terminated:
        container = self.pod["spec"]["containers"][0]
        startup = probes.parse(container.get("startupProbe"), container, self.pod_ip)
        with self.log_path.open("ab") as log:
            process = await self._spawn(argv, log.fileno())
        self._process = process
        started_at = _now()
        self._set(
            phase=Phase.RUNNING,
            state=Running(started_at),
            container_id=f"process://{uuid.uuid4().hex}",
            started=startup is None,
            ready=startup is None and not container.get("readinessProbe"),
        )
        probing = asyncio.create_task(self._probe(process, startup, container))
        exited = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({exited, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await self._terminate(process, self._grace_s)
            code = await exited
        finally:
            for task in (probing, stopping):
                task.cancel()
            await asyncio.gather(probing, stopping, return_exceptions=True)
            _kill_group(process.pid)
            GUARD.remove(process.pid)
        self._process = None
        return self._ended(code, started_at)

    def _ended(self, code: int, started_at: datetime) -> Terminated:
        number = -code if code < 0 else 0
        exit_code = 128 + number if number else code
        reason = "Completed" if exit_code == 0 else "Error"
        policy = self.pod["spec"]["containers"][0].get("terminationMessagePolicy", "File")
        message = self.log_tail(80)[-2048:] if exit_code and policy == "FallbackToLogsOnError" else ""
        return Terminated(exit_code, number, started_at, _now(), reason, message)

    async def _probe(
        self, process: asyncio.subprocess.Process, startup: probes.Probe | None, container: Manifest
    ) -> None:
        """Startup first, then readiness and liveness side by side; ends when cancelled."""
        readiness = probes.parse(container.get("readinessProbe"), container, self.pod_ip)
        liveness = probes.parse(container.get("livenessProbe"), container, self.pod_ip)
        if startup is not None:
            passed = asyncio.Event()

            def judge(ok: bool, message: str) -> None:
                if ok:
                    passed.set()
                else:
                    self._unhealthy(process, startup, "startup", message)

            watching = asyncio.create_task(probes.watch(startup, self._exec, judge))
            try:
                await passed.wait()
            finally:
                watching.cancel()
            self._set(started=True, ready=readiness is None and not self._stopping.is_set())

        async with asyncio.TaskGroup() as group:
            if readiness is not None:
                group.create_task(
                    probes.watch(readiness, self._exec, lambda ok, message: self._set(ready=ok))
                )
            if liveness is not None:

                def alive(ok: bool, message: str) -> None:
                    if not ok:
                        self._unhealthy(process, liveness, "liveness", message)

                group.create_task(probes.watch(liveness, self._exec, alive))

    def _unhealthy(
        self, process: asyncio.subprocess.Process, probe: probes.Probe, kind: str, message: str
    ) -> None:
        """A failed startup or liveness probe: end the container, and the restart policy does the rest."""
        if self._stopping.is_set() or process.returncode is not None or self._killing:
            return
        self._note(f"{kind} probe failed: {message}; the container is restarted")
        grace_s = self._grace_s if probe.grace_s is None else probe.grace_s
        self._killing_task = asyncio.create_task(self._terminate(process, grace_s))

    _killing_task: asyncio.Task[None] | None = None

    @property
    def _killing(self) -> bool:
        return self._killing_task is not None and not self._killing_task.done()

    async def _terminate(self, process: asyncio.subprocess.Process, grace_s: float) -> None:
        """preStop, SIGTERM, wait, SIGKILL. The whole takes `grace_s`; 2 s more where preStop used it up."""
        deadline = time.monotonic() + grace_s
        hook = ((self.pod["spec"]["containers"][0].get("lifecycle") or {}).get("preStop")) or {}
        if grace_s > 0 and hook:
            await self._race(process, asyncio.create_task(self._pre_stop(hook)), grace_s)
            deadline = max(deadline, time.monotonic() + _MIN_GRACE_AFTER_PRE_STOP_S)
        if process.returncode is None and grace_s > 0:
            _signal(process.pid, signal.SIGTERM)
            left_s = max(0.0, deadline - time.monotonic())
            await self._race(process, asyncio.create_task(process.wait()), left_s)
        if process.returncode is None:
            _kill_group(process.pid)
            await process.wait()

    async def _race(
        self, process: asyncio.subprocess.Process, work: "asyncio.Task[object]", limit_s: float
    ) -> None:
        """Wait for `work`, at most `limit_s`, until the process ends or must be killed now."""
        gone = asyncio.create_task(process.wait())
        kill = asyncio.create_task(self._kill_now.wait())
        await asyncio.wait({work, gone, kill}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, gone, kill):
            task.cancel()
        await asyncio.gather(work, gone, kill, return_exceptions=True)

    async def _pre_stop(self, hook: Manifest) -> None:
        if "sleep" in hook:
            await asyncio.sleep(float(hook["sleep"]["seconds"]))
        elif "exec" in hook:
            code, output = await self._exec(list(hook["exec"]["command"]), self._grace_s)
            if code != 0:
                self._note(f"preStop hook exited with {code}: {output.strip()[-500:]}")
        elif "httpGet" in hook:
            container = self.pod["spec"]["containers"][0]
            probe = probes.parse({**hook, "timeoutSeconds": self._grace_s}, container, self.pod_ip)
            assert probe is not None
            await probes.check(probe, self._exec)

    async def _exec(self, command: list[str], timeout_s: float) -> tuple[int, str]:
        """Run a command beside the container, with its mounts and environment."""
        moved = self._moved_mounts(self._base)
        argv = [rewrite(word, moved) for word in command]
        if command[0] in ("python", "python3"):
            argv[0] = self._options.images.python
        process = await self._spawn(argv, asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate()
        finally:
            _kill_group(process.pid)
            GUARD.remove(process.pid)
            await process.wait()
        return process.returncode or 0, output[-_TAIL_BYTES:].decode(errors="replace")

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or less when the pod is to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _note(self, text: str) -> None:
        """A line of the runner's own in the pod's log."""
        with self.log_path.open("a") as log:
            log.write(f"[pod] {text}\n")

    def _set(self, **values: object) -> None:
        facts = self._facts.change(**values)
        if facts == self._facts and self._status is not None:
            return
        self._facts = facts
        self._status = self._build_status()
        self._changed.set()
        self._on_status(self._status)

    def _build_status(self) -> Manifest:
        return pod_status.build(
            self.pod, self._facts, self._status, pod_ip=self.pod_ip, host_ip=self._options.host_ip, now=_now()
        )


def _now() -> datetime:
    return datetime.now(UTC)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_group(group: int) -> None:
    """SIGKILL to all that is left of a container: each runs in a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
