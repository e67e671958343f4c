"""When a batch leaves: the truth table, first of the rule alone, then of the scheduler that follows it."""

import pytest

from headway_engine.protocol import BatchingMode, Limits
from headway_engine.window import Waiting, leaves_at_s
from support.engine_builders import Drive, a_capacity, a_request, some_limits

STATIC, DYNAMIC, CONTINUOUS = BatchingMode.STATIC, BatchingMode.DYNAMIC, BatchingMode.CONTINUOUS
EVERY_MODE = pytest.mark.parametrize("mode", list(BatchingMode))
BATCH_MODES = pytest.mark.parametrize("mode", [STATIC, DYNAMIC])


def limits(mode: BatchingMode, window_ms: int = 50, **changes: int) -> Limits:
    return some_limits(mode=mode, window_ms=window_ms, **({"max_batch_sequences": 4} | changes))


@pytest.mark.parametrize(
    ("mode", "window_ms", "requests", "prompt_tokens", "urgent", "last", "held"),
    [
        (STATIC, 50, 3, 30, False, False, True),
        (DYNAMIC, 50, 3, 30, False, False, True),
        (CONTINUOUS, 50, 3, 30, False, False, True),
        (STATIC, 0, 1, 1, False, False, False),  # window 0 never waits
        (DYNAMIC, 0, 1, 1, False, False, False),
        (CONTINUOUS, 0, 1, 1, False, False, False),
        (STATIC, 50, 4, 30, False, False, False),  # full: the number of sequences
        (DYNAMIC, 50, 4, 30, False, False, False),
        (CONTINUOUS, 50, 4, 30, False, False, False),
        (STATIC, 50, 3, 256, False, False, True),  # full: the tokens of a step, except in Static
        (DYNAMIC, 50, 3, 256, False, False, False),
        (CONTINUOUS, 50, 3, 256, False, False, False),
        (STATIC, 50, 1, 1, True, False, True),  # urgent: only where others can still join later
        (DYNAMIC, 50, 1, 1, True, False, True),
        (CONTINUOUS, 50, 1, 1, True, False, False),
        (STATIC, 50, 1, 1, False, True, False),  # draining: nobody else can come
        (DYNAMIC, 50, 1, 1, False, True, False),
        (CONTINUOUS, 50, 1, 1, False, True, False),
    ],
)
def test_the_truth_table(
    mode: BatchingMode,
    window_ms: int,
    requests: int,
    prompt_tokens: int,
    urgent: bool,
    last: bool,
    held: bool,
) -> None:
    waiting = Waiting(
        requests=requests, prompt_tokens=prompt_tokens, oldest_arrival_s=10.0, urgent=urgent, last=last
    )
    leaves = leaves_at_s(limits(mode, window_ms), waiting)
    if held:
        assert leaves == pytest.approx(10.05, abs=1e-5)
    else:
        assert leaves < 10.0


@EVERY_MODE
def test_an_idle_engine_holds_the_first_request_for_the_window_and_says_for_how_long(
    mode: BatchingMode,
) -> None:
    drive = Drive(limits=limits(mode))
    drive.submit(a_request("a"))
    assert drive.step() is None
    assert drive.scheduler.wait_s(drive.now_s) == pytest.approx(0.05, abs=1e-5)
    drive.now_s = 0.02
    assert drive.step() is None
    assert drive.scheduler.wait_s(drive.now_s) == pytest.approx(0.03, abs=1e-5)
    drive.wait()
    assert drive.step() is not None


@EVERY_MODE
def test_the_window_counts_from_the_oldest_and_not_from_the_last_arrival(mode: BatchingMode) -> None:
    drive = Drive(limits=limits(mode))
    drive.submit(a_request("a"))
    drive.now_s = 0.04
    drive.submit(a_request("b"))
    assert drive.step() is None
    drive.now_s = 0.051
    step = drive.step()
    assert step is not None
    assert {c.sequence.id for c in step.chunks} == {"a", "b"}


@EVERY_MODE
def test_a_full_batch_leaves_at_once(mode: BatchingMode) -> None:
    drive = Drive(limits=limits(mode))
    drive.submit(*(a_request(f"r{i}") for i in range(4)))
    step = drive.step()
    assert step is not None
    assert len(step.chunks) == 4


@EVERY_MODE
def test_window_zero_never_waits(mode: BatchingMode) -> None:
    drive = Drive(limits=limits(mode, window_ms=0))
    drive.submit(a_request("a"))
    assert drive.step() is not None


@EVERY_MODE
def test_a_batch_stays_open_until_the_moment_it_starts(mode: BatchingMode) -> None:
    """The window is over, but the engine has not asked yet: whoever comes now is still in."""
    drive = Drive(limits=limits(mode))
    drive.submit(a_request("a"))
    drive.now_s = 5.0
    drive.submit(a_request("b"))
    step = drive.step()
    assert step is not None
    assert {c.sequence.id for c in step.chunks} == {"a", "b"}


def test_a_request_that_could_join_a_running_batch_is_never_held() -> None:
    drive = Drive(limits=limits(CONTINUOUS, window_ms=1000))
    drive.submit(*(a_request(f"r{i}", max_tokens=2 if i else 50) for i in range(4)))
    drive.step()
    drive.step()
    drive.submit(a_request("late"))
    step = drive.step()
    assert step is not None
    assert "late" in {c.sequence.id for c in step.chunks}


@BATCH_MODES
def test_a_batch_that_runs_to_its_end_lets_nobody_in_and_the_next_takes_all_that_came_meanwhile(
    mode: BatchingMode,
) -> None:
    """Those who came while the engine was busy are one batch, and not one batch each."""
    drive = Drive(limits=limits(mode, window_ms=10))
    drive.submit(*(a_request(f"a{i}", max_tokens=20) for i in range(4)))
    drive.step()
    for i in range(3):
        drive.submit(a_request(f"b{i}"))
        drive.step()
    while drive.scheduler.running:
        step = drive.step()
        assert step is not None
        assert {c.sequence.id[0] for c in step.chunks} == {"a"}
    step = drive.step()
    assert step is not None
    assert [c.sequence.id for c in step.chunks] == ["b0", "b1", "b2"]


@BATCH_MODES
def test_a_batch_larger_than_a_step_is_still_one_batch(mode: BatchingMode) -> None:
    drive = Drive(limits=limits(mode, window_ms=0, max_batch_tokens=10, prefill_chunk_tokens=10))
    drive.submit(*(a_request(f"a{i}", 8, max_tokens=2) for i in range(4)))
    drive.step()
    assert drive.scheduler.running == 4
    drive.submit(a_request("late"))
    drive.run()
    last_of_batch = max(drive.token_s[f"a{i}"][-1] for i in range(4))
    assert drive.started_s["late"] > last_of_batch
    drive.assert_all_ended_right()


@BATCH_MODES
def test_a_preempted_member_comes_back_into_its_own_batch(mode: BatchingMode) -> None:
    capacity = a_capacity(kv_blocks=8)
    drive = Drive(capacity, some_limits(capacity, mode=mode, window_ms=0, max_batch_sequences=2))
    drive.submit(a_request("a0", 8, max_tokens=16), a_request("a1", 8, max_tokens=16), a_request("b", 4))
    drive.run()
    assert drive.scheduler.preemptions_total > 0
    assert drive.started_s["b"] > max(drive.token_s["a0"][-1], drive.token_s["a1"][-1])
    drive.assert_all_ended_right()


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) for a in BatchingMode for b in BatchingMode if a is not b]
)
def test_a_change_of_mode_under_load_loses_nobody(before: BatchingMode, after: BatchingMode) -> None:
    drive = Drive(limits=limits(before, window_ms=5))
    drive.submit(*(a_request(f"a{i}", max_tokens=10) for i in range(6)))
    for _ in range(3):
        drive.step()
    drive.scheduler.set_limits(limits(after, window_ms=5))
    drive.submit(*(a_request(f"b{i}", max_tokens=10) for i in range(6)))
    drive.run()
    drive.assert_all_ended_right()


def test_draining_ends_the_wait() -> None:
    drive = Drive(limits=limits(DYNAMIC, window_ms=1000))
    drive.submit(a_request("a"))
    assert drive.step() is None
    drive.scheduler.drain()
    assert drive.step() is not None


def test_a_window_longer_than_the_queue_timeout_ends_in_a_timeout_at_the_named_time() -> None:
    drive = Drive(limits=limits(DYNAMIC, window_ms=1000, queue_timeout_ms=200))
    drive.submit(a_request("a"))
    assert drive.step() is None
    assert drive.scheduler.wait_s(drive.now_s) == pytest.approx(0.2)
    drive.run()
    assert drive.ended == {"a": "timeout"}
