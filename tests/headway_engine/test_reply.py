"""One call on its way through the core: slow readers, stalled ones, and those who leave."""

import asyncio

from headway_engine.messages import Abort, Submit
from headway_engine.protocol import Outcome
from headway_engine.sequence import Finished, FinishReason, Started, TokenOut
from support.core_line import Bench, never, settle


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


async def test_a_drain_waits_for_an_answer_that_is_still_on_its_way():
    """The core is done long before a slow reader is; the ports must stay open until then."""
    b = Bench()
    go_on = asyncio.Event()

    async def slow(message):
        if message["type"] == "http.response.body":
            await go_on.wait()

    reply = asyncio.ensure_future(b.reply()({}, never, slow))
    idle = asyncio.ensure_future(b.core.idle())
    await settle()
    await b.report(Started("a", 0), TokenOut("a", ord("x")), Finished("a", FinishReason.LENGTH))
    await settle()
    assert b.core.in_flight == 0
    assert not idle.done()
    go_on.set()
    await asyncio.wait_for(asyncio.gather(reply, idle), 10)


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
