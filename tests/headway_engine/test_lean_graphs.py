"""Recorded decode steps: which sizes, what is in the static memory, and what if recording ends early."""

import logging
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.lean.graphs import (
    Bucket,
    DecodeGraphs,
    DecodeInputs,
    DecodeRows,
    EagerRecorder,
    buckets,
    row_sizes,
    width_sizes,
)

CPU = torch.device("cpu")
SCRATCH = 99
SIZE = 4


def test_row_sizes_cover_and_pad_little() -> None:
    """From one to the most, doubling while a step costs the same whatever its rows, by halves after that."""
    assert row_sizes(1) == [1]
    assert row_sizes(8) == [1, 2, 4, 8]
    assert row_sizes(10) == [1, 2, 4, 8, 10]
    assert row_sizes(256) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for most in range(1, 300):
        sizes = row_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(b < 1.6 * a for a, b in pairwise(sizes) if a >= 16)


def test_width_sizes_end_at_the_widest() -> None:
    """Powers of two from 16."""
    assert width_sizes(7) == [7]
    assert width_sizes(16) == [16]
    assert width_sizes(100) == [16, 32, 64, 100]


def test_the_largest_is_recorded_first_and_then_the_smallest() -> None:
    """Its memory serves the others; small steps gain most, if time runs out."""
    found = buckets(4, 32, by_width=True)
    assert found[0] == Bucket(4, 32)
    assert found[1:] == [Bucket(1, 16), Bucket(1, 32), Bucket(2, 16), Bucket(2, 32), Bucket(4, 16)]
    assert buckets(4, 32, by_width=False) == [Bucket(4, 32), Bucket(1, 32), Bucket(2, 32)]
    assert max(b.rows * b.blocks for b in buckets(64, 512, by_width=True, most_cells=1000)) <= 1000
    assert buckets(4, 32, by_width=True, most_cells=3) == []


def read(inputs: DecodeInputs, bucket: Bucket) -> DecodeRows:
    return inputs.read(bucket)


tables = st.lists(st.integers(0, 90), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 500), st.integers(0, 23), tables), min_size=1, max_size=4),
        min_size=1,
        max_size=6,
    ),
    whole_width=st.booleans(),
    bucket=st.sampled_from([Bucket(4, 6), Bucket(5, 6)]),
)
def test_the_static_memory_says_what_the_step_is(
    steps: list[list[tuple[int, int, list[int]]]], whole_width: bool, bucket: Bucket
) -> None:
    """Whatever steps came before: rows, tables as far as they are read, and padding that touches no one's
    block."""
    inputs = DecodeInputs(5, 6, SIZE, SCRATCH, CPU)
    for step in steps:
        rows = [(token, min(place, len(table) * SIZE - 1), table) for token, place, table in step]
        inputs.fill(rows, bucket, whole_width)
        found = read(inputs, bucket)
        assert found.ids.tolist() == [t for t, _, _ in rows] + [0] * (bucket.rows - len(rows))
        for row, (_, place, table) in enumerate(rows):
            used = place // SIZE + 1
            line = found.decodes.tables[row].tolist()
            assert line[:used] == table[:used]
            if whole_width:
                assert set(line[used:]) <= {table[0]}, "what is no number in another sequence stays there"
            assert found.row_blocks[row] == table[used - 1]
            assert found.row_offsets[row] == place % SIZE
            assert found.decodes.contexts[row] == place + 1
            assert found.positions[row] == place
        for row in range(len(rows), bucket.rows):
            assert found.row_blocks[row] == SCRATCH
            assert found.decodes.contexts[row] == 1
            assert found.decodes.tables[row, 0] == SCRATCH


def test_tables_lie_where_they_lay() -> None:
    """A recorded graph reads the same addresses for ever."""
    inputs = DecodeInputs(4, 6, SIZE, SCRATCH, CPU)
    bucket = Bucket(4, 6)
    before = inputs.read(bucket).decodes.tables.data_ptr()
    inputs.fill([(7, 5, [3, 4])], bucket, whole_width=True)
    assert inputs.read(bucket).decodes.tables.data_ptr() == before


def echo(rows: DecodeRows) -> torch.Tensor:
    """A forward pass whose logits are the row's numbers: token, position, context, block."""
    numbers = (rows.ids, rows.positions, rows.decodes.contexts.long(), rows.row_blocks)
    return torch.stack(numbers, dim=1).float()


def graphs(most_rows: int = 8, width: int = 6) -> DecodeGraphs:
    inputs = DecodeInputs(most_rows, width, SIZE, SCRATCH, CPU)
    return DecodeGraphs(inputs, echo, torch.zeros(most_rows, 4), whole_width=False)


def test_a_step_is_replayed_in_the_smallest_size_that_holds_it() -> None:
    """And only its own rows come back."""
    seen: list[Bucket] = []

    class Noting:
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            number = len(seen_sizes)
            seen_sizes.append(wanted[number])
            work()

            def replay() -> None:
                seen.append(wanted[number])
                work()

            return replay

    wanted = buckets(8, 6, by_width=False)
    seen_sizes: list[Bucket] = []
    steps = graphs()
    steps.record(Noting(), wanted)
    assert steps.recorded == 4
    found = steps.replay([(5, 0, [1]), (6, 9, [2, 3, 4]), (7, 3, [5])])
    assert found is not None
    assert found.tolist() == [[5, 0, 1, 1], [6, 9, 10, 4], [7, 3, 4, 5]]
    steps.replay([(5, 0, [1])])
    assert seen == [Bucket(4, 6), Bucket(1, 6)]


def test_what_no_recorded_size_holds_is_left_to_others() -> None:
    """Too many rows, or too long."""
    steps = graphs()
    steps.record(EagerRecorder(), [Bucket(2, 2)])
    assert steps.replay([(5, 0, [1])] * 3) is None
    assert steps.replay([(5, 8, [1, 2, 3])]) is None
    assert steps.replay([(5, 7, [1, 2])]) is not None


def test_recording_ends_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    """What is there by then is used; progress and the end are said."""
    times = iter(range(0, 1000, 4))
    steps = graphs()
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        steps.record(
            EagerRecorder(), buckets(8, 6, by_width=False), limit_s=10.0, clock=lambda: float(next(times))
        )
    assert steps.recorded == 2
    assert "recording-decode-graphs recorded=1 of=4" in caplog.text
    assert 'decode-graphs recorded=2 of=4 seconds=16.0 why="not more than 10 s' in caplog.text
    assert steps.replay([(5, 0, [1])] * 8) is not None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("operation not permitted when stream is capturing"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_recording_that_fails_leaves_what_was_recorded(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A device out of memory, a kernel that cannot be recorded: steps are computed without."""

    class Failing:
        def __init__(self) -> None:
            self.left = 1

        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            self.left -= 1
            if self.left < 0:
                raise error
            work()
            return work

    steps = graphs()
    with caplog.at_level(logging.WARNING, logger="headway_engine"):
        steps.record(Failing(), buckets(8, 6, by_width=False))
    assert steps.recorded == 1
    assert "decode-graphs recorded=1 of=4" in caplog.text
    assert f"{type(error).__name__}: {error}" in caplog.text
