"""The core as a process, seen from the other end of its channel."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headway_engine import channel
from headway_engine.messages import Ready

TESTS = Path(__file__).resolve().parents[1]

CORE = "import sys; from support import fake_engine; sys.exit(fake_engine.main(['core', *sys.argv[1:]]))"


async def test_a_reader_of_commands_that_falls_takes_the_core_with_it() -> None:
    """Otherwise the process would live on deaf: no request, cancel or limit would ever reach the loop."""
    ours, theirs = channel.pair()
    with theirs:
        command = [sys.executable, "-c", CORE, str(theirs.fileno()), "--model", "random://toy"]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": str(TESTS)}
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


class NoCommand(msgspec.Struct, frozen=True, tag="no_command"):
    """What no core understands."""


async def _read_to_the_end(end: channel.FrontEnd) -> None:
    while True:
        await end.receive()
