"""Scored prompts of many calls at once: one bound for all of them, and each prompt scored once."""

import asyncio
import json

from headway_engine import openai
from headway_engine.bodies import MAX_SCORES
from headway_engine.generation import Choice
from headway_engine.messages import Submit
from headway_engine.protocol import Outcome
from headway_engine.reply import Reply
from headway_engine.score_room import MOST_IN_FLIGHT, ScoreRoom
from headway_engine.sequence import (
    Finished,
    FinishReason,
    PromptOut,
    Request,
    SamplingParams,
    Started,
    TokenLogprob,
    TokenOut,
)
from support.core_line import Bench, decode, never, settle

PROMPT = (65, 66, 67)
SCORES = (TokenLogprob(-1.0), TokenLogprob(-2.0))


class Scored:
    """A call for the log-probabilities of PROMPT (one for each token) on its way."""

    def __init__(self, bench, room, id, n=1, max_tokens=1):
        self.sends = []
        body = {"prompt": "ABC", "echo": True, "logprobs": 0, "n": n, "max_tokens": max_tokens}
        call = openai.parse_completion(json.dumps(body).encode())
        choices = [
            Choice(i, PROMPT, decode, lambda t: (decode([t]), bytes([t])), scored=True) for i in range(n)
        ]
        requests = [
            Request(id=f"{id}{i}", prompt=PROMPT, sampling=SamplingParams(max_tokens=9), arrival_s=100.0)
            for i in range(n if max_tokens else 1)
        ]
        reply = Reply(bench.core, call, requests, choices, model_name="m", room=room)
        self.task = asyncio.ensure_future(reply({}, never, self.send))

    async def send(self, message):
        self.sends.append(message)

    async def answer(self):
        await asyncio.wait_for(self.task, 10)
        return self.sends[0]["status"], json.loads(self.sends[1]["body"])


def ended(id):
    return (
        Started(id, 0),
        PromptOut(id, SCORES),
        TokenOut(id, 68, TokenLogprob(-3.0)),
        Finished(id, FinishReason.LENGTH),
    )


def test_two_of_the_largest_calls_fit():
    """And a call that is alone always does: its own bound is the smaller one."""
    room = ScoreRoom()
    assert room.take(MAX_SCORES)
    assert room.take(MAX_SCORES)
    assert not room.take(1)
    assert room.take(0), "whoever scores nothing needs no room"
    room.give_back(MAX_SCORES)
    assert room.take(1)
    assert room.most == MOST_IN_FLIGHT
    assert ScoreRoom(most=5).take(6)


async def test_a_scored_call_that_finds_no_room_is_a_429_before_anything_is_computed():
    """With a time to come back; and it is let in once another call has been answered."""
    b, room = Bench(), ScoreRoom(most=5)
    first = Scored(b, room, "a")
    await settle()
    status, body = await Scored(b, room, "b").answer()
    assert (status, body["error"]["code"], body["error"]["param"]) == (429, "scores_full", "logprobs")
    assert [m.request.id for m in b.line.sent if isinstance(m, Submit)] == ["a0"]
    assert b.telemetry.outcomes_total[Outcome.REJECTED] == 1
    await b.report(*ended("a0"))
    assert (await first.answer())[0] == 200
    again = Scored(b, room, "c")
    await settle()
    await b.report(*ended("c0"))
    assert (await again.answer())[0] == 200
    assert room.taken == 0
    assert b.telemetry.arrived_total == sum(b.telemetry.outcomes_total.values()) == 3


async def test_room_comes_back_whatever_ends_a_call():
    """A failure, and the loss of the core."""
    b, room = Bench(), ScoreRoom()
    failed = Scored(b, room, "a")
    lost = Scored(b, room, "b")
    await settle()
    assert room.taken == 6
    await b.report(Finished("a0", FinishReason.ERROR, "x"))
    assert (await failed.answer())[0] == 500
    b.core.lose("crashed")
    assert (await lost.answer())[0] == 503
    assert room.taken == 0


async def test_samples_share_the_scores_of_the_first_even_when_they_are_ahead_of_it():
    """The second has ended before its prompt's values come; its own output follows them."""
    b = Bench()
    call = Scored(b, ScoreRoom(), "a", n=2)
    await settle()
    await b.report(
        Started("a1", 0), TokenOut("a1", 69, TokenLogprob(-4.0)), Finished("a1", FinishReason.LENGTH)
    )
    await settle()
    assert call.sends == []
    await b.report(*ended("a0"))
    status, body = await call.answer()
    assert status == 200
    assert [c["text"] for c in body["choices"]] == ["ABCD", "ABCE"]
    assert [c["logprobs"]["token_logprobs"] for c in body["choices"]] == [
        [None, -1.0, -2.0, -3.0],
        [None, -1.0, -2.0, -4.0],
    ]
    assert [c["logprobs"]["text_offset"] for c in body["choices"]] == [[0, 1, 2, 3]] * 2


async def test_samples_that_generate_nothing_are_one_request():
    """All are the same."""
    b = Bench()
    call = Scored(b, ScoreRoom(), "a", n=3, max_tokens=0)
    await settle()
    await b.report(Started("a0", 0), PromptOut("a0", SCORES), Finished("a0", FinishReason.LENGTH))
    status, body = await call.answer()
    assert status == 200
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [c["logprobs"]["token_logprobs"] for c in body["choices"]] == [[None, -1.0, -2.0]] * 3
    assert body["usage"]["prompt_tokens"] == 3
