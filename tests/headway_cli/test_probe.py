"""Targets and traffic follow from the measured speed, and suit it."""

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_cli import probe
from headway_cli.client import Endpoint
from headway_cli.errors import Failed
from headway_cli.probe import Speed
from support.openai_fake import fake_endpoint

speeds = st.builds(
    Speed,
    prefill_tokens_per_s=st.floats(20, 200_000),
    decode_step_s=st.floats(0.001, 1.0),
)


@given(speeds, st.sampled_from([512, 2048, 8192]), st.floats(0.1, 0.6), st.integers(4, 256))
def test_targets_are_feasible_and_broken_by_a_whole_prompt(
    speed: Speed, context: int, mean_share: float, sequences: int
) -> None:
    """With the chunk that fits, a step stays inside the ITL target; a long prompt in one step does not.

    (Unless the context is too short for a prompt that long.)
    """
    suited = probe.suit(speed, context=context, mean_prompt_share=mean_share, max_sequences=sequences)
    b, d = 1 / speed.prefill_tokens_per_s, speed.decode_step_s
    assert d + b * (suited.fitting_tokens - 1) <= suited.itl_ms / 1000
    if suited.max_prompt_tokens < context // 2:
        assert d + b * suited.max_prompt_tokens > 1.2 * suited.itl_ms / 1000 or suited.itl_ms <= 20
    assert suited.max_prompt_tokens + suited.max_output_tokens <= context
    assert suited.ttft_ms / 1000 >= suited.max_prompt_tokens * b
    demand = suited.requests_per_s * mean_share * suited.max_prompt_tokens
    assert demand == pytest.approx(probe.PREFILL_SHARE * speed.prefill_tokens_per_s)


async def test_measuring_gives_the_speed_of_an_endpoint() -> None:
    """Positive, finite, from real answers; the fake waits 5 ms between tokens."""
    async with fake_endpoint(gap_s=0.005) as fake:
        speed = await probe.measure(Endpoint(fake.url, "fake"), Random(1), 200)
        assert len(fake.bodies) == 1 + probe.PREFILLS + probe.STREAMS
    assert speed.decode_step_s >= 0.004
    assert speed.prefill_tokens_per_s > 0
    assert speed.decode_tokens_per_s == pytest.approx(probe.STREAMS / speed.decode_step_s)


async def test_an_endpoint_that_refuses_ends_the_measurement_with_its_words() -> None:
    """Rather than with a division by zero."""
    async with fake_endpoint(refuse_after=0) as fake:
        with pytest.raises(Failed, match=r"429.*the queue is full"):
            await probe.measure(Endpoint(fake.url, "fake"), Random(1), 200)


async def test_pairs_take_turns_and_begin_with_what_the_last_one_ended_with() -> None:
    """Bad, tuned, tuned, bad, ...: each pair has one of both, and drift cancels out."""
    switched: list[bool] = []

    async def switch(tuned: bool) -> None:
        switched.append(tuned)
        fake.gap_s = 0.001 if tuned else 0.03

    async with fake_endpoint() as fake:
        found = await probe.paired(Endpoint(fake.url, "fake"), Random(1), 200, switch, asyncio.Event())
    assert switched == [False, True, True, False, False, True, True, False, False, True]
    assert len(found) == probe.PAIRS
    assert all(pair.bad_s >= 0.02 for pair in found)


async def test_pairs_end_when_the_user_has_seen_enough() -> None:
    stop = asyncio.Event()

    async def switch(tuned: bool) -> None:
        if tuned:
            stop.set()

    async with fake_endpoint(gap_s=0.001) as fake:
        found = await probe.paired(Endpoint(fake.url, "fake"), Random(1), 200, switch, stop)
    assert len(found) == 1


async def test_a_stall_that_cannot_be_measured_is_said() -> None:
    async with fake_endpoint(refuse_after=1, gap_s=0.001) as fake:
        with pytest.raises(Failed, match="the queue is full"):
            await probe.stall(Endpoint(fake.url, "fake"), Random(1), 200)
