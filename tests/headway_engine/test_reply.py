"""One call on its way through the core: slow readers, stalled ones, and those who leave."""

import asyncio
import json

import pytest

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


async def test_a_stalled_reader_is_found_soon_after_its_limit(monkeypatch):
    """Looked for four times within the limit, and every 15 s where the limit is long."""
    for limit_s, between_s in ((5.0, 1.25), (60.0, 15.0), (3600.0, 15.0)):
        waits = []
        wait = asyncio.wait

        async def watched(tasks, *, timeout=None, _wait=wait, _waits=waits, **options):
            _waits.append(timeout)
            return await _wait(tasks, timeout=timeout, **options)

        monkeypatch.setattr(asyncio, "wait", watched)
        b = Bench()
        reply = asyncio.ensure_future(b.reply(stalled_reader_s=limit_s)({}, never, lambda m: settle()))
        await settle()
        reply.cancel()
        monkeypatch.undo()
        assert waits == [between_s]


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
    b.core.lose("RuntimeError: secret")
    start, body = await answered(b.reply(stream=False))
    assert start["status"] == 503
    assert b"engine_gone" in body["body"]
    assert b.telemetry.outcomes_total[Outcome.FAILED] == 1


async def answered(reply, *steps):
    """What a reply sends until it is over, with some steps on the way."""
    sent = []

    async def send(message):
        sent.append(message)

    replying = asyncio.ensure_future(reply({}, never, send))
    for step in steps:
        await settle()
        await step()
    await asyncio.wait_for(replying, 10)
    return sent


def end_of_the_engine(core, how):
    """The code that everyone hears."""
    if how == "drain":
        core.cut_off("the engine is shutting down", "draining", 2.0)
        return "draining"
    core.lose("RuntimeError: secret")
    return "engine_gone"


@pytest.mark.parametrize("how", ["drain", "lost core"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_ends_with_the_engine_is_worth_sending_again(how, stream):
    """503 with Retry-After, also for a stream that has not begun; not a word of what broke inside."""
    b = Bench()
    codes = []

    async def end():
        codes.append(end_of_the_engine(b.core, how))

    start, body = await answered(b.reply(stream=stream), end)
    assert start["status"] == 503
    assert int(dict(start["headers"])[b"retry-after"]) >= 1
    assert [json.loads(body["body"])["error"]["code"]] == codes
    assert b"secret" not in body["body"]


@pytest.mark.parametrize("how", ["drain", "lost core"])
async def test_a_stream_that_ends_with_the_engine_gets_an_event_with_the_same_code(how):
    b = Bench()
    codes = []

    async def begin():
        await b.report(Started("a", 0), TokenOut("a", ord("x")))

    async def end():
        codes.append(end_of_the_engine(b.core, how))

    *_, last = await answered(b.reply(), begin, end)
    error = json.loads(last["body"].removeprefix(b"data: "))["error"]
    assert ([error["code"]], error["type"]) == (codes, "server_error")
    assert b"secret" not in last["body"]


async def test_what_an_exception_said_is_for_the_log_and_not_for_the_client(caplog):
    """The client gets the id that leads to the line of the log."""
    b = Bench()

    async def fail():
        await b.report(Finished("a", FinishReason.ERROR, "RuntimeError: secret"))

    start, body = await answered(b.reply(stream=False), fail)
    assert start["status"] == 500
    message = json.loads(body["body"])["error"]["message"]
    assert message == "the engine failed to compute this request (request id a)"
    assert 'request-failed id=a reason=error error="RuntimeError: secret"' in caplog.text
