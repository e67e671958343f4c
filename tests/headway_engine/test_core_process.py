"""The core as a process, seen from the other end of its channel."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from headway_engine import channel, file_digest
from headway_engine.gguf_packed import index_folder
from headway_engine.messages import Ready
from headway_engine.model_source import default_cache_dir, resolve, weights_folder
from support import fake_engine, tiny_gguf
from support.engine_server import engine_server, wait_until

TESTS = Path(__file__).resolve().parents[1]

CORE = "import sys; from support import fake_engine; sys.exit(fake_engine.main(['core', *sys.argv[1:]]))"


async def test_a_reader_of_commands_that_falls_takes_the_core_with_it() -> None:
    """Otherwise the process would live on deaf: no request, cancel or limit would ever reach the loop."""
    ours, theirs = channel.pair()
    with theirs:
        command = [sys.executable, "-c", CORE, str(theirs.fileno()), "--model", "random://toy"]
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}
        )
    end = await channel.FrontEnd.open(ours)
    try:
        while not isinstance(await end.receive(), Ready):
            pass
        end.send(NoCommand())  # type: ignore[arg-type]
        with pytest.raises(channel.ChannelClosed):
            await _read_to_the_end(end)
        assert await asyncio.to_thread(process.wait, 60) == 1
    finally:
        end.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize("reason", ["model: it holds other bytes", ""])
def test_a_model_that_turns_out_to_be_wrong_ends_the_engine(reason: str, tmp_path: Path) -> None:
    """A check that takes longer than a start may take goes on beside the work. Whatever is still answered
    after it failed would be wrong too, so the process ends at once, with the reason as its last words."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    environment = {"FAKE_DISPROOF": str(fifo)}
    with engine_server(tmp_path, command=fake_engine.COMMAND, env=environment) as engine:
        body = {"model": engine.model_name, "prompt": "abc", "max_tokens": 2}
        assert engine.request("POST", "/v1/completions", body, management=False)[0] == 200
        fifo.write_text(reason)
        if reason:
            assert engine.process.wait(60) == 1
            assert "error headway.core core-disproved" in engine.log()
            assert f'lost_core=True core_status=1 reason="{reason}"' in engine.log().splitlines()[-1]
        else:
            assert engine.request("POST", "/v1/completions", body, management=False)[0] == 200
            assert engine.terminate() == 0


@pytest.mark.slow
def test_a_large_file_that_is_not_what_is_remembered_of_it_ends_the_engine(tmp_path: Path) -> None:
    """The real core: it is ready without having read the file, and has it read beside the work."""
    cache, path = tmp_path / "cache", tiny_gguf.write(tmp_path / "m.gguf", seed=1)
    with path.open("r+b") as file:
        file.truncate(file_digest.REMEMBER_FROM_BYTES)  # zeros at its end, which take no room on the disk
    source = resolve(f"file://{path}", "main", cache)
    index_folder(source, lambda _: None)
    weights_folder(source, lambda _: None)
    assert source.content is not None
    with path.open("r+b") as file:
        file.write(tiny_gguf.write(tmp_path / "other.gguf", seed=2).read_bytes())

    def settled() -> bool:
        os.utime(path)
        return file_digest.Identity.of(path).changed_ns % 1_000_000_000 != 0

    wait_until(settled, "a time that can be trusted")
    identity = file_digest.Identity.of(path)
    wait_until(lambda: identity.settled(time.time_ns()), "a change that is long ago")
    record = cache / "digests" / f"{identity.key}.json"
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps({"digest": source.content.digest}))
    environment = {"HEADWAY_CACHE": str(cache), "HEADWAY_KERNELS": str(default_cache_dir() / "kernels")}
    with engine_server(tmp_path, arguments=["--model", f"file://{path}"], env=environment) as engine:
        assert engine.process.wait(120) == 1
        assert "holds other bytes than when it was read last" in engine.log().splitlines()[-1]
    assert not record.exists(), "so that the next start reads the file"


class NoCommand(msgspec.Struct, frozen=True, tag="no_command"):
    """What no core understands."""


async def _read_to_the_end(end: channel.FrontEnd) -> None:
    while True:
        await end.receive()
