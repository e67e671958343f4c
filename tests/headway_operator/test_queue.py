"""The work queue: order, dedupe, back-off and resync, on a clock that tests move."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_operator.queue import BackOff, Cause, Key, Schedule, WorkQueue
from support.virtual_loop import run_virtually

A: Key = ("default", "a")
B: Key = ("default", "b")


def test_the_key_that_waits_longest_goes_first() -> None:
    """First come, first served."""
    schedule = Schedule()
    schedule.add(A, Cause.TICK, 0.0, after_s=2.0)
    schedule.add(B, Cause.TICK, 0.0, after_s=1.0)
    assert schedule.take(0.5) is None
    assert schedule.next_due_s() == 1.0
    assert schedule.take(3.0) == (B, Cause.TICK)
    assert schedule.take(3.0) == (A, Cause.TICK)


def test_an_edit_does_not_queue_behind_ticks() -> None:
    """A thousand resources may be due for their tick: the one that a user edited is next."""
    schedule = Schedule()
    for n in range(1000):
        schedule.add(("ns", str(n)), Cause.TICK, 0.0)
    schedule.add(A, Cause.CHANGE, 5.0)
    assert schedule.take(5.0) == (A, Cause.CHANGE)


def test_many_changes_before_the_work_are_one_piece_of_work() -> None:
    """Dedupe: level-based work needs to run once after the last change."""
    schedule = Schedule()
    for _ in range(100):
        schedule.add(A, Cause.CHANGE, 0.0)
    assert schedule.take(0.0) == (A, Cause.CHANGE)
    schedule.done(A, Cause.CHANGE, 0.1, after_s=10.0, chance=0.5)
    assert schedule.take(0.1) is None


def test_a_key_in_work_is_not_handed_out_again_but_its_change_is_not_lost() -> None:
    """One worker per key; a change during the work means once more after it."""
    schedule = Schedule()
    schedule.add(A, Cause.TICK, 0.0)
    schedule.take(0.0)
    schedule.add(A, Cause.CHANGE, 1.0)
    assert schedule.take(1.0) is None
    assert schedule.next_due_s() is None
    schedule.done(A, Cause.TICK, 2.0, after_s=10.0, chance=0.5)
    assert schedule.take(2.0) == (A, Cause.CHANGE)


def test_a_change_brings_a_waiting_tick_forward_and_wins() -> None:
    """The user's edit does not wait for the timer."""
    schedule = Schedule()
    schedule.add(A, Cause.TICK, 0.0, after_s=10.0)
    schedule.add(A, Cause.CHANGE, 1.0)
    assert schedule.take(1.0) == (A, Cause.CHANGE)


def test_failures_back_off_with_jitter_and_success_forgets_them() -> None:
    """Delays double to a ceiling; chance takes away up to half."""
    schedule = Schedule(back_off=BackOff(first_s=1.0, factor=2.0, most_s=4.0))
    delays = [schedule.failed(A, 0.0, chance=1.0) for _ in range(4)]
    assert delays == [1.0, 2.0, 4.0, 4.0]
    assert BackOff(first_s=1.0).delay_s(1, chance=0.0) == 0.5
    schedule.take(10.0)
    schedule.done(A, Cause.CHANGE, 10.0, after_s=1.0, chance=0.5)
    assert schedule.failed(A, 10.0, chance=1.0) == 1.0


def test_a_server_that_asks_for_patience_gets_it() -> None:
    """Retry-After beats a shorter back-off."""
    assert Schedule().failed(A, 0.0, chance=0.0, at_least_s=7.0) == 7.0


def test_a_failure_is_retried_as_a_change_even_from_a_tick() -> None:
    """What a failed run left undone is unknown, so the next one looks at everything."""
    schedule = Schedule()
    schedule.add(A, Cause.TICK, 0.0)
    schedule.take(0.0)
    schedule.failed(A, 0.0, chance=1.0)
    assert schedule.take(60.0) == (A, Cause.CHANGE)


def test_ticks_turn_into_a_full_look_at_the_resync_period() -> None:
    """Every 5 minutes or so a tick is a CHANGE, though nothing was reported."""
    schedule = Schedule(resync_s=300.0)
    schedule.add(A, Cause.CHANGE, 0.0)
    now_s, causes = 0.0, []
    while now_s < 650.0:
        key, cause = schedule.take(now_s) or (A, None)
        assert cause is not None
        causes.append((now_s, cause))
        schedule.done(key, cause, now_s, after_s=10.0, chance=0.5)
        now_s = schedule.next_due_s() or 0.0
    assert [at for at, cause in causes if cause is Cause.CHANGE] == [0.0, 300.0, 600.0]


def test_a_key_that_is_gone_is_forgotten() -> None:
    """Nothing remains of it: no timer, no failures."""
    schedule = Schedule()
    schedule.add(A, Cause.CHANGE, 0.0)
    schedule.take(0.0)
    schedule.done(A, Cause.CHANGE, 0.0, after_s=None, chance=0.5)
    assert schedule.next_due_s() is None
    assert schedule == Schedule(_order=schedule._order)


def test_lateness_counts_only_what_waits() -> None:
    """A stalled queue shows as lateness; a long piece of work shows as a long run."""
    schedule = Schedule()
    schedule.add(A, Cause.CHANGE, 0.0)
    schedule.add(B, Cause.CHANGE, 0.0)
    schedule.take(0.0)
    assert schedule.late_s(30.0) == 30.0
    assert schedule.longest_run_s(30.0) == 30.0
    assert schedule.depth(30.0) == 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 3), st.sampled_from(Cause), st.floats(0, 20)),
            st.tuples(st.just("take")),
            st.tuples(st.just("done"), st.integers(0, 3), st.floats(0, 20)),
            st.tuples(st.just("failed"), st.integers(0, 3), st.floats(0, 1)),
        ),
        max_size=60,
    )
)
def test_no_change_is_ever_lost_and_no_key_runs_twice(steps: list[tuple[object, ...]]) -> None:
    """After any history, every change that was reported is followed by a run that starts after it."""
    schedule = Schedule()
    now_s = 0.0
    running: dict[Key, Cause] = {}
    owed: set[Key] = set()

    def finish(key: Key) -> None:
        schedule.done(key, running.pop(key), now_s, 5.0, 0.5)

    for step in steps:
        now_s += 1.0
        match step:
            case ("add", int(n), Cause() as cause, float(after_s)):
                key = ("ns", str(n))
                schedule.add(key, cause, now_s, after_s)
                if cause is Cause.CHANGE:
                    owed.add(key)
            case ("take",):
                taken = schedule.take(now_s)
                if taken:
                    assert taken[0] not in running
                    running[taken[0]] = taken[1]
                    if taken[1] is Cause.CHANGE:
                        owed.discard(taken[0])
            case ("done", int(n), float()) if ("ns", str(n)) in running:
                finish(("ns", str(n)))
            case ("failed", int(n), float(chance)) if ("ns", str(n)) in running:
                del running[("ns", str(n))]
                schedule.failed(("ns", str(n)), now_s, chance)
                owed.add(("ns", str(n)))
    for key in list(running):
        finish(key)
    while (due_s := schedule.next_due_s()) is not None and due_s <= now_s + 120.0 and owed:
        taken = schedule.take(max(now_s, due_s))
        assert taken is not None
        if taken[1] is Cause.CHANGE:
            owed.discard(taken[0])
        schedule.done(taken[0], taken[1], max(now_s, due_s), None, 0.5)
    assert owed == set()


def with_queue(
    test: Callable[[WorkQueue], Awaitable[None]],
    work: Callable[[Key, Cause], Awaitable[float | None]],
    **options: object,
) -> None:
    """Run a test against a running queue on a virtual clock."""

    async def main() -> None:
        queue = WorkQueue(work, chance=lambda: 1.0, **options)  # type: ignore[arg-type]
        running = asyncio.create_task(queue.run())
        try:
            await test(queue)
        finally:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    run_virtually(main())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_one_slow_key_does_not_delay_the_others() -> None:
    """A hangs for ever in one place; B runs every second all the same."""
    runs: list[tuple[Key, float]] = []

    async def work(key: Key, cause: Cause) -> float | None:
        runs.append((key, now()))
        if key == A:
            await asyncio.Event().wait()
        return 1.0

    async def test(queue: WorkQueue) -> None:
        queue.add(A)
        queue.add(B)
        await asyncio.sleep(5.5)
        assert [at for key, at in runs if key == B] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert queue.longest_run_s == 5.5

    with_queue(test, work, workers=2)


def test_work_that_never_ends_is_ended_and_tried_again() -> None:
    """The limit turns a hang into a failure with a back-off."""
    starts: list[float] = []
    failures: list[Exception | None] = []

    async def work(key: Key, cause: Cause) -> float | None:
        starts.append(now())
        await asyncio.Event().wait()
        return None

    async def test(queue: WorkQueue) -> None:
        queue.add(A)
        await asyncio.sleep(25)
        assert starts == pytest.approx([0.0, 10.2, 20.6])
        assert [type(failure) for failure in failures] == [TimeoutError, TimeoutError]

    with_queue(
        test, work, work_timeout_s=10.0, finished=lambda key, seconds, failure: failures.append(failure)
    )


def test_no_more_workers_than_allowed() -> None:
    """A thousand keys at once are worked on in groups, and all are."""
    at_once = 0
    most = 0
    seen: set[Key] = set()

    async def work(key: Key, cause: Cause) -> float | None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(1)
        at_once -= 1
        seen.add(key)
        return None

    async def test(queue: WorkQueue) -> None:
        for n in range(1000):
            queue.add(("ns", str(n)))
        await asyncio.sleep(101)
        assert most == 10
        assert len(seen) == 1000

    with_queue(test, work, workers=10)


def test_an_error_of_any_sort_stops_nothing_and_patience_is_asked() -> None:
    """The failed key comes back after the time its error asked for."""
    starts: list[float] = []

    async def work(key: Key, cause: Cause) -> float | None:
        starts.append(now())
        if len(starts) < 3:
            raise KeyError("bug")
        return None

    async def test(queue: WorkQueue) -> None:
        queue.add(A)
        await asyncio.sleep(60)
        assert starts == [0.0, 5.0, 10.0]
        assert queue.depth == 0

    with_queue(test, work, patience=lambda error: 5.0 if isinstance(error, KeyError) else 0.0)


def test_stopping_cancels_and_waits_for_the_work() -> None:
    """After run() ends nothing of it goes on in the background."""
    ended: list[str] = []

    async def work(key: Key, cause: Cause) -> float | None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)
            ended.append("cleaned up")
        return None

    async def main() -> None:
        queue = WorkQueue(work, chance=lambda: 0.5)
        running = asyncio.create_task(queue.run())
        queue.add(A)
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert ended == ["cleaned up"]

    run_virtually(main())
