"""A storm of preemptions is told of twice: when it begins and when it is over."""

from hypothesis import given
from hypothesis import strategies as st

from headway_engine.storms import MANY, WITHIN_S, Began, Over, Storms


def test_few_preemptions_are_no_storm():
    """One a second fills no window of ten; it may go on for ever."""
    storms = Storms()
    assert [storms.note(n, n * (WITHIN_S / (MANY - 2))) for n in range(100)] == [None] * 100


def test_a_storm_is_told_of_when_it_begins_and_when_it_is_over():
    """With how many there were, and for how long."""
    storms = Storms()
    said = [storms.note(n, 100.0 + n * 0.1) for n in range(1, 31)]
    assert [s for s in said if s] == [Began(MANY, 100.0 + MANY * 0.1 - 100.1)]
    assert storms.note(30, 103.0 + WITHIN_S - 0.1) is None
    over = storms.note(30, 103.0 + WITHIN_S)
    assert isinstance(over, Over)
    assert (over.preemptions, round(over.seconds, 6)) == (30, 2.9)
    assert storms.note(30, 200.0) is None


def test_one_step_that_preempts_many_is_a_storm():
    """They come with one report."""
    storms = Storms()
    storms.note(3, 0.0)
    began = storms.note(40, 1.0)
    assert isinstance(began, Began)
    assert began.preemptions == 37


@given(st.lists(st.tuples(st.integers(0, 15), st.floats(0, 30)), max_size=60))
def test_storms_begin_and_end_in_turns_and_count_no_more_than_there_were(reports):
    """Whatever the totals and the times."""
    storms, total, now_s, last = Storms(), 0, 0.0, Over(0, 0.0)
    for more, pause_s in reports:
        total, now_s = total + more, now_s + pause_s
        said = storms.note(total, now_s)
        if said is None:
            continue
        assert type(said) is not type(last)
        assert MANY <= said.preemptions <= total
        assert 0 <= said.seconds <= now_s
        last = said
    assert storms.raging is isinstance(last, Began)
