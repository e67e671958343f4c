"""The tuner's memory and its way through the status."""

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway_engine.protocol import BatchingMode, Limits
from headway_operator.tuner.calm import Course
from headway_operator.tuner.decision import TUNABLES
from headway_operator.tuner.memory import (
    MAX_STATE_BYTES,
    Feasibility,
    Load,
    Memory,
    Traffic,
    Trial,
    Window,
    from_status,
    to_status,
)
from support.observations import COST, statistics_of

numbers = st.floats(0, 1e12, allow_nan=False)
windows = st.lists(st.builds(Window, numbers, numbers, numbers, numbers), max_size=12).map(tuple)
limits = st.builds(
    Limits,
    mode=st.sampled_from(BatchingMode),
    max_batch_tokens=st.integers(1, 10**6),
    max_queued_tokens=st.integers(0, 10**9),
)
trials = st.builds(
    Trial,
    at_s=numbers,
    before=limits,
    grew=st.booleans(),
    arrivals_per_s=numbers,
    decode_sequences=numbers,
)
courses = st.builds(
    Course,
    seen_at_s=numbers,
    mean=st.floats(0, 21),
    variance=st.floats(0, 9),
    direction=st.integers(-1, 1),
    moved_at_s=numbers,
    patience_s=st.floats(0, 600),
    asked=st.integers(-1, 1),
    asked_at_s=numbers,
    nearest=st.integers(0, 10**9),
)
memories = st.builds(
    Memory,
    base=st.none() | limits,
    tuned=st.none() | limits,
    objective=st.integers(0, 2**32 - 1),
    sums=st.just(statistics_of(COST, steps=50)),
    cost=st.none() | st.just(COST),
    kappa=st.floats(1, 2),
    queue_scale=st.floats(0.4, 1.1),
    load=st.builds(Load, decode_sequences=numbers, arrivals_per_s=numbers, pods=st.integers(1, 99)),
    ttft=windows,
    itl=windows,
    e2e=windows,
    refused=windows,
    traffic=st.lists(st.builds(Traffic, numbers, numbers, numbers), max_size=13).map(tuple),
    good=st.none() | limits,
    trial=st.none() | trials,
    courses=st.dictionaries(st.sampled_from(list(TUNABLES)), courses),
    missed=st.integers(0, 1000),
    feasibility=st.sampled_from(Feasibility),
)


def test_a_memory_comes_back_as_it_went() -> None:
    memory = Memory(
        base=Limits(),
        tuned=Limits(max_batch_tokens=640),
        sums=statistics_of(COST, steps=100),
        cost=COST,
        kappa=1.07,
        itl=(Window(1_790_000_000.0, 300, 4, 4),),
        trial=Trial(at_s=5.0, before=Limits(), grew=True, arrivals_per_s=2.5, decode_sequences=3.0),
        feasibility=Feasibility.CAPACITY_LIMITED,
    )
    text = to_status(memory)
    back = from_status(text)
    assert to_status(back) == text
    assert back.tuned == memory.tuned
    assert back.trial == memory.trial
    assert back.itl == memory.itl
    assert back.sums.pp == pytest.approx(memory.sums.pp, rel=1e-6)


def test_a_fresh_memory_is_nearly_nothing() -> None:
    assert to_status(Memory()) == '{"version":1}'
    assert from_status(to_status(Memory())) == Memory()


@settings(deadline=None, max_examples=60)
@given(memory=memories)
@example(memory=Memory(queue_scale=1.000000001))
def test_it_always_fits_and_is_stable_after_one_way_through(memory: Memory) -> None:
    text = to_status(memory)
    assert len(text.encode()) <= MAX_STATE_BYTES
    back = from_status(text)
    assert back.fresh_because == ""
    assert to_status(back) == text
    assert back.tuned == memory.tuned
    assert back.good == memory.good


@pytest.mark.parametrize(
    ("value", "because"),
    [
        (None, "no state in the status yet"),
        ("", "no state in the status yet"),
        ({"version": 1}, "not text"),
        ("{", "cannot be read"),
        ("[1,2]", "cannot be read"),
        ('{"version":2}', "has version 2"),
        ("{}", "has version None"),
        ('{"version":1,"kappa":"much"}', "cannot be read"),
        ('{"version":1,"tuned":{"max_batch_tokens":-1,"colour":3}}', "cannot be read"),
        ('{"version":1,"kappa":0}', "no decision leaves behind"),
        ('{"version":1,"queue_scale":-1}', "no decision leaves behind"),
    ],
)
def test_what_cannot_be_read_is_a_fresh_start_with_a_reason(value: object, because: str) -> None:
    memory = from_status(value)
    assert because in memory.fresh_because
    assert msgspec.structs.replace(memory, fresh_because="") == Memory()


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=80))
def test_no_text_breaks_it(text: str) -> None:
    assert isinstance(from_status(text), Memory)
