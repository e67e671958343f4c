"""Open loop: requests leave on time whatever the server does."""

import asyncio
from random import Random

from headway_cli import openloop, prompts
from headway_cli.client import Ending, Endpoint
from headway_cli.openloop import Planned
from headway_cli.traces import Arrival
from support.eventually import eventually
from support.openai_fake import fake_endpoint


async def test_a_slow_server_is_not_asked_less() -> None:
    """Twenty requests all arrive although none gets an answer before the last of them came."""
    planned = [Planned(n * 0.005, "hello", 1) for n in range(20)]
    async with fake_endpoint(hold_until=20) as fake:
        records = await openloop.replay(planned, Endpoint(fake.url, "fake"))
    assert [r.answer.ending for r in records] == [Ending.FINISHED] * 20
    assert sorted(r.due_s for r in records) == [p.at_s for p in planned]


async def test_requests_leave_in_order_and_none_early() -> None:
    """The lag is what they left late by; a negative one would be an early start."""
    planned = [Planned(0.1 * n, f"prompt {n}", 1) for n in range(4)]
    async with fake_endpoint() as fake:
        records = await openloop.replay(planned, Endpoint(fake.url, "fake"))
        sent = [b["messages"][0]["content"] for b in fake.bodies]
    assert sent == [p.prompt for p in planned]
    assert all(r.send_lag_s >= -0.001 for r in records)


async def test_stopping_sends_no_more_and_waits_for_what_runs() -> None:
    """The request that was sent is answered; the one for the far future never leaves."""
    stop = asyncio.Event()
    planned = [Planned(0.0, "now", 2), Planned(3600.0, "much later", 2)]
    async with fake_endpoint(hold_until=2) as fake:
        replaying = asyncio.create_task(openloop.replay(planned, Endpoint(fake.url, "fake"), stop=stop))
        await eventually(lambda: fake.bodies)
        stop.set()
        fake.hold_until = 1
        records = await replaying
        assert len(fake.bodies) == 1
    assert [r.answer.ending for r in records] == [Ending.FINISHED]


async def test_every_record_is_told_as_it_comes() -> None:
    """Refused ones too."""
    told: list[Ending] = []
    planned = [Planned(0.0, "hello", 1)] * 3
    async with fake_endpoint(refuse_after=2) as fake:
        endpoint = Endpoint(fake.url, "fake")
        await openloop.replay(planned, endpoint, on_record=lambda r: told.append(r.answer.ending))
    assert sorted(told) == [Ending.FINISHED, Ending.FINISHED, Ending.REJECTED]


def test_a_plan_has_prompts_of_the_traces_lengths() -> None:
    """Less what a chat template adds."""
    (one, tiny) = openloop.plan([Arrival(0.5, 400, 12), Arrival(1.0, 3, 0)], Random(1))
    assert (one.at_s, one.output_tokens) == (0.5, 12)
    assert abs(prompts.estimated_tokens(one.prompt) - (400 - openloop.CHAT_FRAME_TOKENS)) < 20
    assert tiny.prompt
    assert tiny.output_tokens == 1
