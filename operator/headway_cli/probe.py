"""How fast this machine is, measured from outside in seconds; and the traffic and targets that suit it.

`measure` asks; `suit` is pure. The sums are those of one step: T = d + b * P, with d the time of a step
that only decodes and b the time of one prompt token. Knows nothing of terminals.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from statistics import median

import aiohttp

from headway_cli import client, prompts
from headway_cli.client import Answer, Ending, Endpoint
from headway_cli.errors import Failed
from headway_cli.openloop import CHAT_FRAME_TOKENS
from headway_cli.pairs import Pair

STREAMS = 6
STREAM_TOKENS = 20
PREFILLS = 3

PREFILL_SHARE = 0.33
"""Share of the machine's prefill speed that the demo's traffic asks for: busy, and feasible even where the
machine slows down by half meanwhile, as shared ones do."""
TARGET_STEPS = 4.0
"""The ITL target in decode steps: room for prompt chunks, and none for whole prompts."""
LONG_PROMPT_TARGETS = 4.0
"""What it takes to prefill a long prompt of the demo, in ITL targets: too much for one step."""
PAIRS = 5
"""The fewest of which all must agree before chance is ruled out (1 in 32)."""
STALL_STREAM_TOKENS = 24
STALL_AFTER_PIECES = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """What one probe found."""

    prefill_tokens_per_s: float
    decode_step_s: float  # with `streams` sequences
    streams: int = STREAMS

    @property
    def decode_tokens_per_s(self) -> float:
        return self.streams / self.decode_step_s


@dataclass(frozen=True, slots=True)
class Suited:
    """Traffic and targets for a machine."""

    max_prompt_tokens: int
    max_output_tokens: int
    requests_per_s: float
    ttft_ms: int
    itl_ms: int
    fitting_tokens: int  # prompt tokens per step that the ITL target leaves room for
    prefill_tokens_per_s: float  # the speed that all this was chosen for


async def measure(endpoint: Endpoint, chance: Random, prompt_tokens: int) -> Speed:
    """A few seconds of closed-loop probing on an idle endpoint. Raises Failed when it does not answer."""
    async with aiohttp.ClientSession() as session:

        async def one(tokens: int, output: int) -> Answer:
            text = prompts.prompt(max(1, tokens - CHAT_FRAME_TOKENS), chance)
            answer = await client.ask(session, endpoint, text, output, exact_length=True, timeout_s=120)
            if answer.ending is not Ending.FINISHED:
                raise Failed(f"the probe got {answer.http_status or 'no answer'}: {answer.error}")
            return answer

        await one(40, 2)  # first requests pay for what is made once
        prefills = [await one(prompt_tokens, 1) for _ in range(PREFILLS)]
        streams = await asyncio.gather(*(one(50, STREAM_TOKENS) for _ in range(STREAMS)))
    speed = max(a.prompt_tokens / a.e2e_s for a in prefills)
    # The first gaps of a stream still see the prompts of the others.
    gaps = [gap for a in streams for gap in a.gaps_s[len(a.gaps_s) // 2 :]]
    if not gaps:
        raise Failed("the probe's answers came in one piece: nothing to measure a decode step by")
    return Speed(prefill_tokens_per_s=speed, decode_step_s=median(gaps))


async def stall(endpoint: Endpoint, chance: Random, prompt_tokens: int) -> float:
    """Seconds of the longest pause of a stream while a long prompt is read beside it. Raises Failed."""
    pieces: asyncio.Queue[str] = asyncio.Queue()
    text = prompts.prompt(max(1, prompt_tokens - CHAT_FRAME_TOKENS), chance)
    short = prompts.prompt(20, chance)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        stream = group.create_task(
            client.ask(
                session,
                endpoint,
                short,
                STALL_STREAM_TOKENS,
                exact_length=True,
                timeout_s=120,
                on_text=pieces,
            )
        )
        for _ in range(STALL_AFTER_PIECES):
            getting = group.create_task(pieces.get())
            await asyncio.wait({getting, stream}, return_when=asyncio.FIRST_COMPLETED)
            getting.cancel()
        beside = group.create_task(client.ask(session, endpoint, text, 1, exact_length=True, timeout_s=120))
    for answer in (stream.result(), beside.result()):
        if answer.ending is not Ending.FINISHED:
            raise Failed(f"the probe got {answer.http_status or 'no answer'}: {answer.error}")
    gaps = stream.result().gaps_s[STALL_AFTER_PIECES - 1 :]
    if not gaps:
        raise Failed("the probe's answers came in one piece: there is no pause to measure")
    return max(gaps)


async def paired(
    endpoint: Endpoint,
    chance: Random,
    prompt_tokens: int,
    switch: Callable[[bool], Awaitable[None]],
    stop: asyncio.Event,
) -> list[Pair]:
    """PAIRS stalls under bad and under tuned limits; `switch(True)` puts the tuned ones in force.

    Each pair begins with what the last one ended with: half of the switches, and drift cancels out.
    """
    found: list[Pair] = []
    for number in range(PAIRS):
        seconds: dict[bool, float] = {}
        for tuned in (False, True) if number % 2 == 0 else (True, False):
            if stop.is_set():
                return found
            await switch(tuned)
            seconds[tuned] = await stall(endpoint, chance, prompt_tokens)
        found.append(Pair(bad_s=seconds[False], tuned_s=seconds[True]))
    return found


def suit(speed: Speed, *, context: int, mean_prompt_share: float, max_sequences: int) -> Suited:
    """Targets that good limits meet and a huge token budget does not, and the traffic to show it.

    `mean_prompt_share` is the mean prompt over the longest one of the trace to be played.
    """
    b = 1 / speed.prefill_tokens_per_s
    d = speed.decode_step_s
    itl_s = TARGET_STEPS * d
    long_prompt = max(32, min(context // 2, round(LONG_PROMPT_TARGETS * itl_s / b)))
    fitting = (0.9 * itl_s - d) / b
    step_s = d + b * fitting
    # A long prompt takes so many steps; three times that leaves room for those before it in the queue.
    ttft_s = 3 * max(1.0, long_prompt / fitting) * step_s
    rate = PREFILL_SHARE * speed.prefill_tokens_per_s / (mean_prompt_share * long_prompt)
    # Little's law: as many sequences decode at once as were measured, and no more than half of what may.
    output = min(speed.streams, 0.5 * max_sequences) / (rate * step_s)
    return Suited(
        max_prompt_tokens=long_prompt,
        max_output_tokens=int(min(context // 4, 256, max(32, 2 * output))),
        requests_per_s=rate,
        ttft_ms=_round_up(ttft_s * 1000, 100),
        itl_ms=_round_up(itl_s * 1000, 10),
        fitting_tokens=round(fitting),
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
    )


def _round_up(value: float, grid: int) -> int:
    return grid * math.ceil(value / grid)
