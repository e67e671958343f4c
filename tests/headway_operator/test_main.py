"""The process itself: exit codes, probes, the lease taken and given back, a clean end."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from support.eventually import eventually
from support.fake_api import Answer, Asked, FakeApi

TOKEN = "a-token-for-nobody-else"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


class Lease:
    """The lease endpoint of an API server: one record with a version."""

    def __init__(self) -> None:
        self.record: dict[str, object] | None = None
        self.version = 0

    def __call__(self, asked: Asked) -> Answer | None:
        if not asked.path.startswith(LEASE):
            return None
        if asked.method == "GET":
            return Answer(self.record) if self.record else Answer({"message": "not found"}, 404)
        self.version += 1
        self.record = {
            **asked.body,
            "metadata": {**asked.body["metadata"], "resourceVersion": str(self.version)},
        }
        return Answer(self.record)

    @property
    def holder(self) -> str | None:
        return self.record["spec"]["holderIdentity"] if self.record else None  # type: ignore[index,no-any-return]


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi().serving() as api:
        yield api


def kubeconfig(folder: Path, server: str) -> Path:
    path = folder / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "clusters": [{"name": "k", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {"token": TOKEN}}],
            }
        )
    )
    return path


async def start(**environment: str) -> asyncio.subprocess.Process:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HEADWAY_", "KUBE", "POD_"))}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headway_operator",
        env={**inherited, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def end(process: asyncio.subprocess.Process) -> tuple[int, str]:
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, output.decode()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


async def test_settings_that_cannot_work_are_named_and_the_process_ends_with_2() -> None:
    """Before anything is tried."""
    code, output = await end(await start(HEADWAY_OPERATOR_PORT="http"))
    assert code == 2
    assert [line.split("=")[0] for line in output.splitlines()] == [
        "HEADWAY_ENGINE_IMAGE",
        "HEADWAY_OPERATOR_PORT",
    ]


async def test_no_way_to_log_in_ends_with_2(tmp_path: Path) -> None:
    """And says what was looked for."""
    code, output = await end(
        await start(HEADWAY_ENGINE_IMAGE="i", KUBECONFIG=str(tmp_path / "absent"), HOME=str(tmp_path))
    )
    assert code == 2
    assert "no way to log in" in output


async def test_it_leads_watches_answers_probes_and_ends_cleanly(api: FakeApi, tmp_path: Path) -> None:
    """SIGTERM: exit 0, and the lease is free for the next one."""
    lease = Lease()
    api.answers = lease
    port = free_port()
    process = await start(
        HEADWAY_ENGINE_IMAGE="i",
        HEADWAY_OPERATOR_HOST="127.0.0.1",
        HEADWAY_OPERATOR_PORT=str(port),
        KUBECONFIG=str(kubeconfig(tmp_path, api.url)),
        POD_NAME="headway-operator-0",
        HEADWAY_LOG_FORMAT="json",
        HEADWAY_LOG_LEVEL="debug",
    )
    try:
        kinds = ("inferencedeployments", "deployments", "pods")
        await eventually(
            lambda: process.returncode is not None or all(map(api.watched, kinds)),
            timeout_s=60,
            what="three watches",
        )
        assert lease.holder == "headway-operator-0"
        async with aiohttp.ClientSession() as client:

            async def ask(path: str) -> tuple[int, str]:
                async with client.get(f"http://127.0.0.1:{port}{path}") as response:
                    return response.status, await response.text()

            assert await ask("/healthz") == (200, "ok")
            await eventually(lambda: _ready(ask), what="readiness")
            assert "headway_operator_leader 1.0" in (await ask("/metrics"))[1]
        process.send_signal(signal.SIGTERM)
        code, output = await end(process)
    finally:
        if process.returncode is None:
            process.kill()
    assert code == 0, output
    assert lease.holder == ""
    assert "Traceback" not in output, output
    assert TOKEN not in output, output
    lines = [json.loads(line) for line in output.splitlines()]
    said = [line["message"] for line in lines if line["logger"].startswith("headway_operator")]
    assert said == ["listening", "leading", "stopping", "lease-given-back"]
    assert next(line["port"] for line in lines if line["message"] == "listening") == port


async def _ready(ask: object) -> bool:
    return await ask("/readyz") == (200, "ok")  # type: ignore[operator,no-any-return]


async def test_a_lease_that_is_taken_away_ends_the_process_with_1(api: FakeApi, tmp_path: Path) -> None:
    """Whoever restarts it makes it a candidate again; the thief keeps the lease."""
    lease = Lease()
    api.answers = lease
    process = await start(
        HEADWAY_ENGINE_IMAGE="i",
        HEADWAY_OPERATOR_HOST="127.0.0.1",
        HEADWAY_OPERATOR_PORT="0",
        KUBECONFIG=str(kubeconfig(tmp_path, api.url)),
        POD_NAME="headway-operator-0",
    )
    try:
        await eventually(lambda: lease.holder == "headway-operator-0", timeout_s=60, what="the lease")

        def taken(asked: Asked) -> Answer | None:
            if asked.path.startswith(LEASE) and asked.method == "PUT":
                return Answer({"message": "the object has been modified"}, 409)
            return lease(asked)

        assert lease.record is not None
        lease.record = {**lease.record, "spec": {"holderIdentity": "thief", "leaseDurationSeconds": 15}}
        api.answers = taken
        code, output = await end(process)
    finally:
        if process.returncode is None:
            process.kill()
    assert code == 1
    assert "held by thief" in output
    assert lease.holder == "thief"
