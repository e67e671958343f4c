"""The core as a process, seen from the other end of its channel."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway_engine import channel
from headway_engine.messages import Ready, Submit
from headway_engine.sequence import Request, SamplingParams

TESTS = Path(__file__).resolve().parents[1]

PREPARES_BADLY = """
import dataclasses, sys
from headway_engine import core_process
from support import fake_engine

def load(settings, progress):
    def prepare(request):
        raise RuntimeError("no grammar was ever like this")
    return dataclasses.replace(fake_engine.load(settings, progress), prepare=prepare)

sys.exit(core_process.main(sys.argv[1:], load))
"""


async def test_a_reader_of_commands_that_falls_takes_the_core_with_it() -> None:
    """Otherwise the process would live on deaf: no request, cancel or limit would ever reach the loop."""
    ours, theirs = channel.pair()
    with theirs:
        command = [sys.executable, "-c", PREPARES_BADLY, str(theirs.fileno()), "--model", "random://toy"]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": str(TESTS)}
        )
    end = await channel.FrontEnd.open(ours)
    try:
        while not isinstance(await end.receive(), Ready):
            pass
        request = Request(id="a", prompt=(1,), sampling=SamplingParams(max_tokens=1), arrival_s=0.0)
        end.send(Submit(request))
        with pytest.raises(channel.ChannelClosed):
            await _read_to_the_end(end)
        assert await asyncio.to_thread(process.wait, 60) == 1
    finally:
        end.close()
        process.kill()
        process.wait()


async def _read_to_the_end(end: channel.FrontEnd) -> None:
    while True:
        await end.receive()
