"""On a machine whose speed jumps the tuner stays calm, and answers what really breaks as fast as ever.

`restless` is the tuner that takes every wish of the model beyond a fixed hysteresis.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway_operator.resource import Slo, Target
from headway_operator.tuner import calm
from headway_operator.tuner.calm import GROW, SHRINK
from headway_operator.tuner.learn import Interval
from headway_operator.tuner.memory import from_status, to_status
from headway_operator.tuner.wishes import pressed_by
from support.restless import Restless, jumps

HOUR = 360
FROM_THE_START = 12
"""Ticks in which it finds its place; not counted."""
ALTERNATING = [0.7, 1.3] * 30
RANDOM = [1.3, 0.7, 1.0, 1.0, 1.3, 0.7, 1.3, 1.3, 0.7, 0.7, 1.0, 1.3, 0.7, 1.0, 0.7, 1.3, 0.7, 0.7, 1.3, 1.0]


@contextmanager
def restless() -> Iterator[None]:
    """Every wish is taken at once."""
    with patch.object(calm, "weigh", lambda course, wish, now_s: (wish.next, course)):
        yield


def an_hour(factors: list[float], rate: float = 1.0) -> Restless:
    plant = Restless(jumps(factors), rate=lambda now_s: rate)
    plant.run(HOUR)
    return plant


def moves(plant: Restless) -> int:
    return plant.moves(FROM_THE_START).total()


def test_jumps_of_speed_moved_limits_hundreds_of_times_an_hour_and_no_longer_do() -> None:
    with restless():
        before = an_hour(RANDOM)
    after = an_hour(RANDOM)
    assert moves(before) > 150
    assert before.turns(FROM_THE_START) > 50
    assert moves(after) < moves(before) / 4
    assert after.turns(FROM_THE_START) < before.turns(FROM_THE_START) / 2
    assert after.attainment(FROM_THE_START) >= before.attainment(FROM_THE_START) - 0.01


@settings(deadline=None, max_examples=8)
@example(factors=ALTERNATING, rate=1.0)
@example(factors=[0.7] * 10 + [1.3] * 10, rate=1.0)
@given(factors=st.lists(st.floats(0.7, 1.3), min_size=2, max_size=60), rate=st.floats(0.5, 1.1))
def test_whatever_the_pattern_of_jumps_moves_are_few_and_no_request_pays_for_it(
    factors: list[float], rate: float
) -> None:
    after = an_hour(factors, rate)
    with restless():
        before = an_hour(factors, rate)
    assert moves(after) <= 60
    assert after.attainment(FROM_THE_START) >= before.attainment(FROM_THE_START) - 0.02


def recovery(plant: Restless, since: int) -> tuple[int, int]:
    """Ticks until the first move after `since`, and until ITL is kept again three times in a row."""
    first = next(i for i, d in enumerate(plant.decisions[since:]) if d.changes)
    kept = [plant.itl_misses(i) <= 0.05 for i in range(since, len(plant.decisions))]
    return first, next(i for i in range(len(kept) - 2) if all(kept[i : i + 3]))


@pytest.mark.parametrize("after_jumps", [False, True], ids=["on a quiet machine", "on a restless one"])
def test_an_engine_that_becomes_twice_as_slow_is_answered_as_fast_as_ever(after_jumps: bool) -> None:
    """For good, and at a load at which this breaks the ITL target: in the same tick as without calm."""

    def run() -> Restless:
        usual = jumps(RANDOM) if after_jumps else (lambda now_s: 1.0)
        plant = Restless(lambda now_s: usual(now_s) if now_s < 1800 else 2.2)
        plant.run(220)
        return plant

    with restless():
        before = recovery(run(), 180)
    after_plant = run()
    after = recovery(after_plant, 180)
    assert after_plant.itl_misses(180) > 0.05, "it hurts before it is answered"
    assert after[0] == 0
    assert after[1] <= before[1]


@pytest.mark.parametrize("after_jumps", [False, True], ids=["on a quiet machine", "on a restless one"])
def test_a_step_of_load_is_answered_as_fast_as_ever(after_jumps: bool) -> None:
    def run() -> Restless:
        usual = jumps(RANDOM) if after_jumps else (lambda now_s: 1.0)
        plant = Restless(usual, rate=lambda now_s: 0.4 if now_s < 1800 else 1.2)
        plant.run(240)
        return plant

    with restless():
        before = run()
    after = run()
    assert recovery(after, 180)[1] <= recovery(before, 180)[1]
    assert after.attainment(180) >= before.attainment(180) - 0.02


def test_a_machine_that_is_faster_for_good_is_followed_within_minutes() -> None:
    """Calm is not deaf: after half an hour of jumps, ten minutes of patience are the most."""
    plant = Restless(lambda now_s: jumps(RANDOM)(now_s) if now_s < 1800 else 0.4)
    plant.run(180)
    before = plant.limits.max_batch_tokens
    plant.run(80)
    assert plant.limits.max_batch_tokens > 1.5 * before


def test_what_was_learnt_about_calm_survives_a_restart_of_the_controller() -> None:
    plant = Restless(jumps(RANDOM))
    plant.run(120)
    kept = from_status(to_status(plant.memory))
    assert kept.fresh_because == ""
    assert set(kept.courses) == set(plant.memory.courses)
    for name, course in plant.memory.courses.items():
        assert kept.courses[name].band == pytest.approx(course.band, rel=1e-4)
        assert kept.courses[name].direction == course.direction


@pytest.mark.parametrize(
    ("interval", "pressed"),
    [
        (Interval(ttft_s=0.9, itl_s=0.1), set()),
        (Interval(ttft_s=1.1, itl_s=0.1), {("max_queued_tokens", SHRINK), ("max_batch_tokens", GROW)}),
        (
            Interval(ttft_s=0.9, itl_s=0.1, refused=0.1),
            {("max_queued_tokens", GROW), ("max_batch_tokens", GROW)},
        ),
        (
            Interval(ttft_s=1.1, itl_s=0.3),
            {("max_queued_tokens", SHRINK), ("max_batch_tokens", SHRINK), ("max_batch_sequences", SHRINK)},
        ),
    ],
)
def test_what_is_missed_says_which_way_to_go_at_once(
    interval: Interval, pressed: set[tuple[str, int]]
) -> None:
    """Who waits or is refused is helped by a larger budget, as long as no gap is late."""
    slo = Slo(ttft=Target(1.0), itl=Target(0.2))
    assert set(pressed_by(slo, interval, (), least_bad=False, room_helps=True)) == pressed
