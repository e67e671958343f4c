"""Who gives way, and for how long one may be passed over."""

import pytest

from headway_engine.preemption import (
    MAX_PREEMPTIONS,
    SKIP_ADMISSIONS,
    SKIP_AGE_S,
    Patience,
    choose_displaced,
    choose_victim,
)
from headway_engine.sequence import Sequence
from support.engine_builders import a_request


def runner(id: str, computed: int, priority: int = 0, order: int = 0, preemptions: int = 0) -> Sequence:
    request = a_request(id, 4, priority=priority)
    return Sequence(request, list(request.prompt), computed=computed, order=order, preemptions=preemptions)


WORN = MAX_PREEMPTIONS


@pytest.mark.parametrize(
    ("running", "victim"),
    [
        ([runner("a", 9), runner("b", 4), runner("c", 7)], "b"),
        ([runner("a", 9), runner("b", 4, priority=1), runner("c", 7)], "c"),
        ([runner("a", 9), runner("b", 90, priority=-1), runner("c", 7)], "b"),
        ([runner("a", 5), runner("b", 9), runner("c", 9)], "a"),
        ([runner("a", 5, order=1), runner("b", 5, order=3), runner("c", 5, order=2)], "b"),
        ([runner("a", 9), runner("b", 1, preemptions=WORN), runner("c", 7)], "c"),
        ([runner("a", 9, order=1, preemptions=WORN), runner("b", 1, order=2, preemptions=WORN)], "b"),
        ([runner("a", 1, order=1, preemptions=WORN), runner("b", 9, order=2, preemptions=WORN)], "b"),
        ([runner("a", 9), runner("b", 1, priority=2), runner("c", 1, priority=3)], "a"),
        ([runner("a", 9)], "a"),
    ],
    ids=[
        "the cheapest",
        "nobody of a higher class",
        "the lowest class though it costs most",
        "the one that wants, when it is the cheapest",
        "of equals the newest",
        "not the one that had to so often",
        "of those that all had to so often the newest",
        "of those that all had to so often the newest, whatever it costs",
        "the one that wants, when all others are of a higher class",
        "the only one",
    ],
)
def test_the_one_that_gives_way_is(running: list[Sequence], victim: str) -> None:
    """`a` is always the one that wants a block."""
    assert choose_victim(running, running[0], lambda s: s.request.priority).id == victim


@pytest.mark.parametrize(
    ("running", "needed", "displaced"),
    [
        ([runner("a", 9), runner("b", 4), runner("c", 7)], 1, ["b"]),
        ([runner("a", 9), runner("b", 4), runner("c", 7)], 2, ["b", "c"]),
        ([runner("a", 9), runner("b", 4), runner("c", 7, priority=-1)], 2, ["c", "b"]),
        ([runner("a", 9), runner("b", 4, priority=5)], 1, ["a"]),
        ([runner("a", 9), runner("b", 4, priority=5)], 2, []),
        ([runner("a", 9), runner("b", 4, preemptions=WORN)], 1, ["a"]),
        ([runner("a", 9, preemptions=WORN)], 1, []),
    ],
    ids=[
        "the cheapest",
        "as many as are needed",
        "the lowest class first",
        "nobody of the same class",
        "nobody when it would not help",
        "nobody that had to so often",
        "nobody at all if all had to so often",
    ],
)
def test_a_newcomer_of_class_five_displaces(
    running: list[Sequence], needed: int, displaced: list[str]
) -> None:
    newcomer = runner("new", 0, priority=5)
    gone: list[Sequence] = []

    def enough_with(sequence: Sequence) -> bool:
        gone.append(sequence)
        return len(gone) >= needed

    chosen = choose_displaced(running, newcomer, lambda s: s.request.priority, enough_with)
    assert [s.id for s in chosen] == displaced


def test_one_that_does_not_fit_is_passed_until_its_age_limit() -> None:
    patience, big = Patience(), runner("big", 0)
    assert patience.may_pass(big, 100.0)
    assert patience.may_pass(big, 100.0 + SKIP_AGE_S - 0.01)
    assert not patience.may_pass(big, 100.0 + SKIP_AGE_S)


def test_one_that_does_not_fit_is_passed_by_so_many_and_no_more() -> None:
    patience, big = Patience(), runner("big", 0)
    assert patience.may_pass(big, 0.0)
    for _ in range(SKIP_ADMISSIONS):
        assert patience.may_pass(big, 0.0)
        patience.count_admission([big])
    assert not patience.may_pass(big, 0.0)


def test_patience_starts_anew_for_one_that_ran_or_left() -> None:
    patience, big = Patience(), runner("big", 0)
    patience.may_pass(big, 0.0)
    patience.forget(big)
    assert patience.may_pass(big, SKIP_AGE_S)


def test_a_preempted_one_is_never_passed() -> None:
    assert not Patience().may_pass(runner("again", 0, preemptions=1), 0.0)
