"""The front end's hold on the core: limits, stalls, losses."""

import asyncio

import pytest

from headway_engine.core_client import CoreGone, Phase
from headway_engine.mailbox import Mailbox
from headway_engine.messages import Died, Drain, Gauges, LimitsApplied, SetLimits, StepReport
from headway_engine.protocol import Limits, Outcome
from headway_engine.sequence import (
    Finished,
    FinishReason,
    RejectReason,
    Request,
    SamplingParams,
    Started,
    TokenOut,
)
from support.core_line import Bench, never, request, settle


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


async def test_clients_that_give_up_do_not_make_a_hung_core_look_idle():
    """Each gives up before the stall limit and the next comes later; the clock runs from the first."""
    b = Bench()
    for _ in range(3):
        reply = asyncio.ensure_future(b.reply()({}, never, lambda m: settle()))
        await settle()
        b.now_s += 20.0
        reply.cancel()
        await settle()
        assert b.core.in_flight == 0
        b.now_s += 5.0
    assert b.core.stalled_s() == 75.0
    await b.report()
    assert b.core.stalled_s() == 0.0, "the core has caught up"


async def test_a_drain_does_not_cut_a_call_in_two_whose_grammar_is_prepared():
    """Its samples are admitted one by one; the core hears of the drain when all have begun."""
    b = Bench()
    held = SamplingParams(max_tokens=4, grammar="x")
    pair = [Request(id=i, prompt=(1,), sampling=held, arrival_s=100.0, call="c") for i in "ab"]
    b.core.submit(pair, Mailbox())
    b.core.drain()
    await b.report(Started("a", 0))
    assert Drain() not in b.line.sent
    await b.report(Started("b", 0))
    assert b.line.sent[-1] == Drain()
    b.core.drain()
    assert b.line.sent.count(Drain()) == 1


async def test_who_comes_in_a_drain_is_refused_here():
    """The core may not know of it yet."""
    b = Bench()
    box = Mailbox()
    b.core.drain()
    b.core.submit([request()], box)
    (news,) = await box.take()
    assert (news.id, news.reason) == ("a", RejectReason.DRAINING)
    assert b.telemetry.outcomes_total[Outcome.REJECTED] == b.telemetry.arrived_total == 1
    assert b.core.in_flight == 0
    await asyncio.wait_for(b.core.idle(), 10)


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


async def test_a_storm_of_preemptions_is_two_lines_of_the_log(caplog):
    """One when it begins and one when it is over, however many sequences give way in between."""
    b = Bench()
    caplog.set_level("INFO", "headway.front")
    for total in (1, 20, 40, 40):
        await b.core._take(StepReport(at_s=0.0, gauges=Gauges(preemptions_total=total, running=7)))
        b.now_s += 1.0
    b.now_s += 60.0
    await b.core._take(StepReport(at_s=0.0, gauges=Gauges(preemptions_total=40)))
    began, over = [record.getMessage() for record in caplog.records]
    assert began.startswith("preemption-storm storm=False->True preemptions=19 ")
    assert "running=7" in began
    assert over.startswith("preemption-storm storm=True->False preemptions=39 ")
