"""Start a real engine (front end and core processes) on free ports, wait until it is ready, stop it.

Engines started here are ended by their process id only, and never outlive the test that asked for them.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway_local.guard import GUARD

TINY_MODEL = "random://llama?hidden=64&layers=2&heads=4&vocab=512&context=512"
CONTROL_KEY = "test-control-key"


@dataclass(slots=True)
class Engine:
    """A running engine."""

    process: subprocess.Popen[str]
    port: int
    management_port: int
    log_path: Path
    model_name: str
    key: str = CONTROL_KEY
    _core_pid: int = field(default=0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def management_url(self) -> str:
        return f"http://127.0.0.1:{self.management_port}"

    @property
    def core_pid(self) -> int:
        """Process id of the engine core: the front end's only child."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0])

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def get(
        self, path: str, *, management: bool = True, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """Status and body of a GET, whatever the status is."""
        return self.request("GET", path, management=management, headers=headers)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        management: bool = True,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        """Status and body. `body` is JSON, or bytes as they are. Control paths get the key."""
        headers = {"content-type": "application/json", **(headers or {})}
        if path.startswith("/control") and "authorization" not in headers:
            headers["authorization"] = f"Bearer {self.key}"
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        base = self.management_url if management else self.url
        request = urllib.request.Request(base + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def limits(self) -> dict[str, Any]:
        return dict(json.loads(self.get("/control/limits")[1]))

    def put_limits(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        """The limits in force with some values changed."""
        status, body = self.request("PUT", "/control/limits", {**self.limits(), **changes})
        return status, json.loads(body)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, keyed as `name` or `name{label="value"}`."""
        return samples_of(self.get("/metrics")[1])

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def samples_of(exposition: str) -> dict[str, float]:
    """Every sample of an exposition, keyed as `name` or `name{label="value"}`."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = {}
    for family in text_string_to_metric_families(exposition):
        for s in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(s.labels.items()))
            samples[f"{s.name}{{{labels}}}" if labels else s.name] = s.value
    return samples


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until(condition: Any, what: str, timeout_s: float = 60.0, every_s: float = 0.02) -> None:
    """Poll a condition; AssertionError with `what` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(every_s)


@contextlib.contextmanager
def engine_server(
    folder: Path,
    model: str = TINY_MODEL,
    arguments: Sequence[str] = (),
    *,
    env: dict[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "headway_engine"),
    wait_ready: bool = True,
    ready_timeout_s: float = 240.0,
) -> Iterator[Engine]:
    """A real engine process; its log goes to a file in `folder`. Killed at the end if it still lives."""
    port, management_port = free_port(), free_port()
    log_path = folder / f"engine-{port}.log"
    line = [
        *command,
        *("--model", model, "--host", "127.0.0.1", "--served-model-name", "tiny"),
        *("--port", str(port), "--management-port", str(management_port)),
        *("--dtype", "float32", "--device", "cpu", "--threads", "1"),
        *arguments,
    ]
    environment = {
        **os.environ,
        "HEADWAY_CONTROL_KEY": CONTROL_KEY,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **(env or {}),
    }
    with log_path.open("w") as log:
        process = subprocess.Popen(
            line, stdout=log, stderr=log, env=environment, text=True, start_new_session=True
        )
    GUARD.add(process.pid)  # a test run that is killed leaves no engine behind
    engine = Engine(process, port, management_port, log_path, "tiny")
    try:
        if wait_ready:
            wait_until_ready(engine, ready_timeout_s)
        yield engine
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        GUARD.remove(process.pid)


def wait_until_ready(engine: Engine, timeout_s: float = 240.0) -> None:
    """Wait for /readyz; AssertionError with the log when the engine ends or takes too long."""

    def ready() -> bool:
        if engine.process.poll() is not None:
            raise AssertionError(f"the engine ended with {engine.process.returncode}:\n{engine.log()}")
        try:
            return engine.get("/readyz")[0] == 200
        except OSError:
            return False

    try:
        wait_until(ready, "/readyz", timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{engine.log()}") from error
