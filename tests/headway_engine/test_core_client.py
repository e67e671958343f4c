"""The front end's hold on the core, and a reply that runs through it, with a channel made of a list."""

import asyncio

import pytest

from headway_engine import openai
from headway_engine.core_client import CoreClient, CoreGone, Phase
from headway_engine.generation import Choice
from headway_engine.messages import Abort, Died, Gauges, LimitsApplied, SetLimits, StepReport, Submit
from headway_engine.protocol import Limits, Objectives, Outcome
from headway_engine.sequence import Finished, FinishReason, Request, SamplingParams, Started, TokenOut
from headway_engine.server import Front, Reply
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
        front = Front(self.core, self.telemetry, "m", created=0, stalled_reader_s=stalled_reader_s)
        body = b'{"prompt": "x", "stream": true}' if stream else b'{"prompt": "x"}'
        choice = Choice(0, [1], decode, lambda id: (decode([id]), bytes([id])))
        return Reply(front, openai.parse_completion(body), [request(max_tokens=max_tokens)], [choice])


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


async def test_a_reader_that_does_not_read_is_cancelled_and_its_text_is_bounded():
    """Row C.8 82: what piles up is the request's own tokens; after a while the client is taken to be gone."""
    b = Bench()
    sends = []

    async def stuck(message):
        sends.append(message)
        if message["type"] == "http.response.body":
            await never()

    reply = asyncio.ensure_future(b.reply(stalled_reader_s=0.05)({}, never, stuck))
    await settle()
    await b.report(Started("a", 0), TokenOut("a", ord("x")))
    await settle()
    for _ in range(100):
        await b.report(TokenOut("a", ord("y")))
    await asyncio.wait_for(reply, 10)
    assert [m["type"] for m in sends] == ["http.response.start", "http.response.body"]
    assert b.line.sent[-1] == Abort("a")
    assert b.telemetry.outcomes_total[Outcome.ABORTED] == 1
    assert b.core.in_flight == 0


async def test_tokens_that_pile_up_behind_a_slow_reader_come_in_one_piece():
    """Row C.8 80: coalescing is what keeps the queue of a stream bounded."""
    b = Bench()
    bodies = []
    go_on = asyncio.Event()

    async def slow(message):
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            await go_on.wait()

    reply = asyncio.ensure_future(b.reply()({}, never, slow))
    await settle()
    await b.report(Started("a", 0), TokenOut("a", ord("0")))
    await settle()
    for digit in "12345":
        await b.report(TokenOut("a", ord(digit)))
    await b.report(Finished("a", FinishReason.LENGTH))
    go_on.set()
    await asyncio.wait_for(reply, 10)
    assert len(bodies) == 3
    assert b'"12345"' in bodies[1]
    assert bodies[2] == b"data: [DONE]\n\n"


async def test_a_client_that_leaves_while_waiting_is_forgotten_at_once():
    """Row C.3 20: nothing has been computed yet, and nothing has been sent."""
    b = Bench()
    gone = asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError("nothing is sent to a client that has left")

    reply = asyncio.ensure_future(b.reply(stream=False)({}, receive, send))
    await settle()
    gone.set()
    await asyncio.wait_for(reply, 10)
    assert [type(c) for c in b.line.sent] == [Submit, Abort]
    assert b.telemetry.in_flight == 0


async def test_requests_submitted_to_a_lost_core_end_at_once():
    """The core may die between the check and the submit."""
    b = Bench()
    b.core.lose("gone")
    sent = []

    async def send(message):
        sent.append(message)

    await asyncio.wait_for(b.reply(stream=False)({}, never, send), 10)
    assert sent[0]["status"] == 500
    assert b"gone" in sent[1]["body"]
    assert b.telemetry.outcomes_total[Outcome.FAILED] == 1


async def test_the_last_words_of_a_core_are_the_reason_given():
    """Died says why; the end of the channel only says that."""
    b = Bench()
    await b.core._take(Died("the device is gone"))
    b.core.lose("the channel ended")
    assert (b.core.phase, b.core.doing) == (Phase.GONE, "the device is gone")


async def test_a_change_of_limits_waits_for_its_own_answer():
    """Another ticket's answer is not mine; a lost core raises."""
    b = Bench()
    asked = asyncio.ensure_future(b.core.set_limits(Limits(window_ms=5)))
    await settle()
    (command,) = b.line.sent
    assert isinstance(command, SetLimits)
    await b.core._take(LimitsApplied(0, Limits(window_ms=1)))
    assert not asked.done()
    await b.core._take(LimitsApplied(command.ticket, Limits(window_ms=5, generation=1)))
    assert (await asked).generation == 1
    lost = asyncio.ensure_future(b.core.set_limits(Limits(window_ms=6)))
    await settle()
    b.core.lose("gone")
    with pytest.raises(CoreGone, match="gone"):
        await lost
    with pytest.raises(CoreGone):
        await b.core.set_limits(Limits())


async def test_stall_is_measured_from_the_last_report_or_from_the_first_pending_request():
    """An engine that was idle for hours is not stalled when a request comes."""
    b = Bench()
    b.now_s = 9_000.0
    assert b.core.stalled_s() == 0.0
    reply = asyncio.ensure_future(b.reply()({}, never, lambda m: settle()))
    await settle()
    b.now_s += 3.0
    assert b.core.stalled_s() == 3.0
    await b.report(Started("a", 0))
    assert b.core.stalled_s() == 0.0
    reply.cancel()


async def test_idle_comes_back_when_the_last_request_ends():
    """What a drain waits for."""
    b = Bench()
    replies = asyncio.ensure_future(b.reply()({}, never, lambda m: settle()))
    await settle()
    waiting = asyncio.ensure_future(b.core.idle())
    await settle()
    assert not waiting.done()
    await b.report(TokenOut("a", 65), Finished("a", FinishReason.STOP))
    await asyncio.wait_for(asyncio.gather(waiting, replies), 10)
