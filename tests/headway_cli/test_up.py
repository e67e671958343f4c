"""`headway up` as a user runs it: a real engine process with a tiny random model behind one endpoint."""

import asyncio
import json
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from headway_cli import client
from headway_cli.client import Api, Ending, Endpoint
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
    """Start, answer, a trace with a report, an edit of nothing, Ctrl-C with a stream open: exit 0."""
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


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (TINY.replace("  slo:", "  slow:"), (), "spec.slow: is not a field"),
        (TINY.replace("runtime: {", "runtime: {image: other/image, "), (), "spec.runtime.image"),
        (TINY, ("--trace", "none.csv"), "No such file"),
    ],
)
async def test_what_the_user_must_mend_is_said_and_ends_with_2(
    tmp_path: Path, text: str, words: tuple[str, ...], says: str
) -> None:
    """Before anything is started that would have to be cleaned up."""
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    async with up(file, *words) as (process, said):
        assert await process.wait() == 2
        await eventually(lambda: says in "\n".join(said))


async def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    """With the option that helps."""
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, up(file, "--port", str(port)) as (process, said):
        assert await process.wait() == 2
        await eventually(lambda: "--port 0 takes any" in "\n".join(said))


@pytest.mark.slow
async def test_an_engine_that_cannot_start_is_given_up_with_its_log(tmp_path: Path) -> None:
    """Exit 1, and the reason that the engine gave."""
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY.replace("random://llama?", "random://nosuchmodel?"))
    async with up(file) as (process, said):
        assert await asyncio.wait_for(process.wait(), 120) == 1
        await eventually(lambda: "nosuchmodel" in "\n".join(said) and "log" in "\n".join(said))
