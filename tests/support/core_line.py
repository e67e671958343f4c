"""A core client on a channel made of a list, and replies that run through it: no process, no socket."""

import asyncio

from headway_engine import openai
from headway_engine.core_client import CoreClient
from headway_engine.generation import Choice
from headway_engine.messages import Gauges, StepReport
from headway_engine.protocol import Objectives
from headway_engine.reply import Reply
from headway_engine.sequence import Request, SamplingParams
from headway_engine.telemetry import Telemetry


class Line:
    """Both directions of a channel: what was sent, and what is to be received."""

    def __init__(self):
        self.sent = []
        self.coming = asyncio.Queue()

    def send(self, command):
        self.sent.append(command)

    async def receive(self):
        report = await self.coming.get()
        if isinstance(report, Exception):
            raise report
        return report


class Bench:
    """A core client on a line, with a clock that is set by hand."""

    def __init__(self):
        self.now_s = 100.0
        self.telemetry = Telemetry(Objectives(), start_time_s=0.0)
        self.core = CoreClient(self.telemetry, clock=lambda: self.now_s)
        self.line = Line()
        self.core._end = self.line

    async def report(self, *events, **fields):
        await self.core._take(StepReport(at_s=0.0, events=events, gauges=Gauges(), **fields))

    def reply(self, max_tokens=9, stream=True, stalled_reader_s=60.0):
        body = b'{"prompt": "x", "stream": true}' if stream else b'{"prompt": "x"}'
        choice = Choice(0, [1], decode, lambda id: (decode([id]), bytes([id])))
        call = openai.parse_completion(body)
        requests = [request(max_tokens=max_tokens)]
        return Reply(self.core, call, requests, [choice], model_name="m", stalled_reader_s=stalled_reader_s)


def decode(ids):
    return bytes(ids).decode("utf-8", "replace")


def request(id="a", max_tokens=9):
    return Request(id=id, prompt=(1,), sampling=SamplingParams(max_tokens=max_tokens), arrival_s=100.0)


async def never():
    await asyncio.Event().wait()


async def settle():
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)
