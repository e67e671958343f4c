"""`headway up` as a user runs it: a real engine process with a tiny random model behind one endpoint."""

import asyncio
import json
import re
import shutil
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import aiohttp
import pytest

from headway_cli import client
from headway_cli.__main__ import main
from headway_cli.client import Api, Ending, Endpoint
from headway_cli.up import changes, event_line, short_line
from headway_local.local_cluster import Event
from support.eventually import eventually

TINY = """apiVersion: headway.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: tiny}
spec:
  model: {uri: "random://llama?hidden=32&layers=2&vocab=300&context=4000&heads=4&kv_heads=2"}
  batching:
    maxBatchTokens: 256
    maxBatchSequences: 8
    prefillChunkTokens: 64
    kvCache: {memoryPercent: 5}
    capacity: {maxBatchTokens: 512, maxBatchSequences: 16}
  slo: {ttft: {p95: 5s}, itl: {p95: 1s}}
  tuning: {mode: "Off"}
  runtime: {extraArgs: [--threads=1, --kv-blocks=600]}
"""


@asynccontextmanager
async def up(file: Path, *words: str) -> AsyncIterator[tuple[Process, list[str]]]:
    """The running command and the lines that it has said so far."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headway_cli", "up", "-f", str(file), "--port", "0", *words,
        stdout=PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said: list[str] = []

    async def listen() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            said.append(line.decode().rstrip())

    listening = asyncio.create_task(listen())
    try:
        yield process, said
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await listening


def endpoint(said: list[str]) -> Endpoint | None:
    """Where it serves, once it says so."""
    found = re.search(r"Ready after .*: (http://127\.0\.0\.1:\d+)/v1 serves (\w+)", "\n".join(said))
    return Endpoint(found[1], found[2], Api.COMPLETIONS) if found else None


@pytest.mark.slow
async def test_it_serves_shows_what_happens_and_ends_well(tmp_path: Path) -> None:
    """Start, answer, a trace with a report, a good edit, a bad one, Ctrl-C with a stream open: exit 0."""
    file, trace, out = tmp_path / "tiny.yaml", tmp_path / "trace.csv", tmp_path / "report.json"
    file.write_text(TINY)
    rows = "".join(f"{n * 100},1,60,8\n" for n in range(10))
    trace.write_text("timestamp_ms,client_id,input_length,output_length\n" + rows)
    async with (
        up(file, "--trace", str(trace), "--json", str(out)) as (process, said),
        aiohttp.ClientSession() as session,
    ):

        def progress() -> object:
            assert process.returncode is None, "\n".join(said)
            return endpoint(said)

        where = await eventually(progress, timeout_s=120)
        assert isinstance(where, Endpoint)
        text = "\n".join(said)
        assert "curl " in text
        assert "from openai import OpenAI" in text
        assert "starting the engine" in text
        assert await client.served_model(session, where.url) == "tiny"

        await eventually(out.is_file, timeout_s=60)
        summary = json.loads(out.read_text())["summary"]
        assert (summary["offered"], summary["finished"]) == (10, 10)
        await eventually(lambda: "attainment" in "\n".join(said))
        assert any("maxBatchTokens=" in line for line in said)

        file.write_text(TINY.replace("maxBatchTokens: 256", "maxBatchTokens: 200"))
        await eventually(lambda: any("maxBatchTokens=200" in line for line in said))
        file.write_text(TINY.replace("maxBatchTokens: 256", "maxBatchTokens: many"))
        await eventually(lambda: any("was not applied" in line for line in said))

        pieces: asyncio.Queue[str] = asyncio.Queue()
        streaming = asyncio.create_task(
            client.ask(session, where, "go on", 600, exact_length=True, on_text=pieces)
        )
        await pieces.get()
        process.send_signal(signal.SIGINT)
        await eventually(lambda: any("Stopping" in line for line in said))
        newcomer = await client.ask(session, where, "too late", 2)
        answer = await streaming
        assert answer.ending is Ending.FINISHED, answer.error
        assert answer.output_tokens == 600
        assert newcomer.ending is not Ending.FINISHED
        assert newcomer.http_status in (0, 503)  # 0: the endpoint had gone already
        assert await process.wait() == 0


@pytest.mark.slow
async def test_tenants_with_keys_are_served_and_an_edit_of_the_keys_is_followed(tmp_path: Path) -> None:
    """Two keys are two tenants, no key is a 401, and a new key in the file works with the same pod."""
    tenancy = (
        "  tenancy: {tenants: [{name: gold, weight: 4}, {name: batch}], keysSecretRef: {name: tiny-keys}}\n"
    )
    secret = "---\napiVersion: v1\nkind: Secret\nmetadata: {name: tiny-keys}\n"
    secret += "stringData: {gold: g-key, batch: b-key}\n"
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY + tenancy + secret)
    async with up(file) as (process, said), aiohttp.ClientSession() as session:

        def progress() -> object:
            assert process.returncode is None, "\n".join(said)
            return endpoint(said)

        where = await eventually(progress, timeout_s=120)
        assert isinstance(where, Endpoint)
        assert "Authorization: Bearer A-KEY-OF-A-TENANT" in "\n".join(said)

        async def status(key: str) -> int:
            body = {"prompt": "a", "max_tokens": 1}
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{where.url}/v1/completions", json=body, headers=headers) as answer:
                return answer.status

        assert [await status(key) for key in ("g-key", "b-key", "other")] == [200, 200, 401]
        file.write_text(TINY + tenancy + secret.replace("g-key", "new-key"))

        async def taken_in() -> bool:
            return await status("new-key") == 200

        await eventually(taken_in, every_s=0.2)
        assert [await status(key) for key in ("g-key", "b-key")] == [401, 200]
        assert not any("ended" in line for line in said)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (TINY.replace("  slo:", "  slow:"), [], "spec.slow: is not a field"),
        (TINY.replace("runtime: {", "runtime: {image: other/image, "), [], "spec.runtime.image"),
        (TINY, ["--trace", "none.csv"], "No such file"),
    ],
)
def test_what_the_user_must_mend_is_said_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], says: str
) -> None:
    """Before any pod is started."""
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert main(["up", "-f", str(file), "--port", "0", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_port_in_use_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the option that helps."""
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["up", "-f", str(file), "--port", str(taken.getsockname()[1])]) == 2
    assert "--port 0 takes any" in capsys.readouterr().err


def test_an_event_reads_as_a_line_as_changes_and_in_short() -> None:
    """The full sentence for the summary, the first words for the table."""
    note = (
        "maxBatchTokens 400 → 160: ITL binds (x0.4). Step = 54 ms; target 580 ms; window 1 → 2: idle. Often"
    )
    event = Event(datetime(2026, 1, 1, 12, 0, 0).astimezone(), "Normal", "LimitsRecommended", note)
    assert event_line(event) == f"12:00:00  would set {note}"
    assert changes(event)[1] == "window 1 → 2: idle. Often"
    assert short_line(event) == "12:00:00  would set maxBatchTokens 400 → 160: ITL binds; window 1 → 2: idle"


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_given_up_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1, the reason that the engine gave, and where its whole log is."""
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY.replace("--threads=1", "--nonsense"))
    assert main(["up", "-f", str(file), "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "unrecognized arguments: --nonsense" in said
    log = re.search(r"\((/.*/log\.txt)\)", said)
    assert log is not None
    assert Path(log[1]).is_file()
    shutil.rmtree(Path(log[1]).parents[1])
