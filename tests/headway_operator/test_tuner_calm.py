"""A wish is worth a move beyond its scatter; turning back takes patience; a missed target does not wait."""

from itertools import pairwise

import pytest

from headway_operator.tuner import calm
from headway_operator.tuner.calm import Course, Wish


def seen(*answers: float, every_s: float = 10.0) -> Course:
    """The course after these answers of the model."""
    course = Course()
    for number, answer in enumerate(answers):
        course = calm.look(course, answer, 1000 + every_s * number)
    return course


def test_steady_answers_leave_no_band_and_scattered_ones_a_wide_one() -> None:
    """The band is measured: of answers that differ by a factor of 1.4 about it is nearly that factor."""
    assert seen(*[500.0] * 40).band == 0.0
    assert seen(*[500.0, 700.0] * 60).band == pytest.approx(1.645 * 0.168, rel=0.1)


def test_a_wish_inside_the_scatter_is_none_and_one_beyond_it_is_taken() -> None:
    course = seen(*[500.0, 700.0] * 30)
    assert calm.weigh(course, Wish(600, 700, 700), 2000)[0] == 600
    assert calm.weigh(course, Wish(300, 700, 450), 2000)[0] == 450


def test_a_missed_target_is_answered_inside_the_scatter_and_against_all_patience() -> None:
    course = seen(*[500.0, 700.0] * 30)
    for now_s, (a, b) in zip(range(2000, 2400, 40), [(600, 500), (500, 600)] * 5, strict=True):
        value, course = calm.weigh(course, Wish(a, b, b, urgent=True), now_s)
        assert value == b


def test_the_first_turn_is_free_and_each_further_one_takes_twice_the_patience() -> None:
    """Until MOST_PATIENCE_S; so that a change that lasts is followed after ten minutes at most."""
    course = Course()
    waits, now_s, at = [], 1000.0, 100
    for _ in range(14):
        goal = 200 if at == 100 else 100
        asked_s = now_s
        while True:
            value, course = calm.weigh(course, Wish(at, goal, goal), now_s)
            if value == goal:
                break
            now_s += 10
        waits.append(now_s - asked_s)
        at = goal
    assert waits[:3] == [0, 0, 30]
    assert all(later >= earlier for earlier, later in pairwise(waits))
    assert 300 <= waits[-1] <= calm.MOST_PATIENCE_S


def test_a_wish_that_breaks_off_starts_anew_and_one_that_lasts_goes_no_further_than_its_least() -> None:
    course = Course(direction=-1, moved_at_s=1000, patience_s=100)
    _, course = calm.weigh(course, Wish(100, 180, 180), 1010)
    _, course = calm.weigh(course, Wish(100, 100, 100), 1080)  # asks for nothing
    value, course = calm.weigh(course, Wish(100, 150, 150), 1120)
    assert value == 100
    _, course = calm.weigh(course, Wish(100, 130, 130), 1150)
    value, course = calm.weigh(course, Wish(100, 180, 180), 1230)
    assert value == 130


def test_time_without_turns_forgives() -> None:
    course = Course(direction=-1, moved_at_s=1000, patience_s=600)
    assert course.patience_at(1000 + 2 * calm.FORGIVEN_BY_HALF_S) == 150
