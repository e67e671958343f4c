"""Whole messages over a real socket pair, and the news that the other end is gone."""

import asyncio
import threading

import pytest

from headway_engine.channel import ChannelClosed, CoreEnd, FrontEnd, pair
from headway_engine.messages import Abort, Drain, Gauges, Loading, Ready, SetLimits, StepReport, Stop, Submit
from headway_engine.protocol import Capacity, Limits
from headway_engine.sequence import (
    Finished,
    FinishReason,
    Request,
    SamplingParams,
    Started,
    TokenLogprob,
    TokenOut,
)

COMMANDS = [
    Submit(
        Request(
            id="a",
            prompt=tuple(range(100_000)),
            sampling=SamplingParams(max_tokens=5, seed=(1 << 63) - 1, logit_bias=((3, -1.5),)),
            arrival_s=1.25,
            tenant="t",
        )
    ),
    Abort("a"),
    SetLimits(3, Limits(window_ms=4)),
    Drain(),
    Stop(),
]
REPORTS = [
    Loading("weights"),
    Ready(
        capacity=Capacity(
            max_batch_tokens=1, max_batch_sequences=1, kv_blocks=1, block_tokens=1, max_model_tokens=1
        ),
        limits=Limits(),
        model="m",
        device="cpu",
        dtype="float32",
        runner="r",
        stop_token_ids=(1, 2),
    ),
    StepReport(
        at_s=2.5,
        events=(
            Started("a", 3),
            *(TokenOut("a", n, TokenLogprob(-0.5, ((n, -0.5),))) for n in range(50_000)),
            Finished("a", FinishReason.STOP),
        ),
        gauges=Gauges(running=1),
    ),
]


async def test_every_message_arrives_as_it_was_sent():
    """Both directions, also messages larger than the socket's buffer."""
    ours, theirs = pair()
    front, core = await FrontEnd.open(ours), CoreEnd(theirs)
    received = []

    def core_side():
        received.extend(core.receive() for _ in COMMANDS)
        for report in REPORTS:
            core.send(report)

    thread = threading.Thread(target=core_side)
    thread.start()
    for command in COMMANDS:
        front.send(command)
    reports = [await asyncio.wait_for(front.receive(), 30) for _ in REPORTS]
    await asyncio.to_thread(thread.join, 30)
    front.close()
    theirs.close()
    assert received == COMMANDS
    assert reports == REPORTS


async def test_each_end_learns_that_the_other_is_gone():
    """Also in the middle of a message."""
    ours, theirs = pair()
    front = await FrontEnd.open(ours)
    theirs.sendall(b"\xff\x00\x00\x00half a mess")
    theirs.close()
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(front.receive(), 30)
    front.close()
    ours, theirs = pair()
    ours.close()
    core = CoreEnd(theirs)
    with pytest.raises(ChannelClosed):
        core.receive()
    with pytest.raises(ChannelClosed):
        core.send(Loading("x"))
    theirs.close()
