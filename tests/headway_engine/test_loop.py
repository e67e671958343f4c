"""The engine core in-process: a real scheduler, a toy runner, a clock that only moves when told."""

import queue
import threading
import time

import msgspec
import pytest

from headway_engine.loop import PROBE_ID, Loop
from headway_engine.messages import (
    Abort,
    Died,
    Drain,
    LimitsApplied,
    Refused,
    SetLimits,
    StepReport,
    Stop,
    Submit,
)
from headway_engine.protocol import BatchingMode, Capacity, Limits
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import (
    Finished,
    FinishReason,
    RejectReason,
    Request,
    SampledToken,
    SamplingParams,
    Started,
    TokenOut,
)

CAPACITY = Capacity(
    max_batch_tokens=64, max_batch_sequences=8, kv_blocks=32, block_tokens=4, max_model_tokens=64
)
LIMITS = Limits(max_batch_tokens=32, max_batch_sequences=4, prefill_chunk_tokens=16, max_queued_requests=8)
POISON = 666


class Bench:
    """A loop on a bench: everything it reports is in `reports`."""

    def __init__(self, limits=LIMITS, warm_up_steps=0, run=None, prepare=None):
        self.now_s = 0.0
        self.reports = []
        self.steps = []
        self.broken = False
        self.scheduler = Scheduler(CAPACITY, limits)
        self.loop = Loop(
            self.scheduler,
            run or self.run,
            self.reports.append,
            limits=limits,
            prepare=prepare,
            clock=lambda: self.now_s,
            warm_up_steps=warm_up_steps,
        )

    def run(self, step):
        self.steps.append(step)
        self.now_s += 0.010
        if self.broken or any(POISON in c.sequence.request.prompt for c in step.chunks):
            raise RuntimeError("out of luck")
        return {c.sequence.id: SampledToken(7) for c in step.chunks if c.samples}

    def submit(self, id="a", prompt=(1, 2, 3), max_tokens=4, grammar="", **changes):
        sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar)
        self.loop.post(
            Submit(Request(id=id, prompt=tuple(prompt), sampling=sampling, arrival_s=self.now_s, **changes))
        )

    def turn(self, times=1):
        return [self.loop.turn() for _ in range(times)][-1]

    def events(self, id="a"):
        reports = [r for r in self.reports if isinstance(r, StepReport)]
        return [e for r in reports for e in r.events if e.id == id]

    def of_type(self, type):
        return [r for r in self.reports if isinstance(r, type)]


def test_a_request_goes_from_started_to_its_last_token():
    """One step for the prompt and a token, three more for the rest; one report each."""
    b = Bench()
    b.submit()
    b.turn(4)
    assert b.events() == [
        Started("a", 0),
        *[TokenOut("a", 7)] * 4,
        Finished("a", FinishReason.LENGTH),
    ]
    assert [r.step_tokens for r in b.reports] == [3, 1, 1, 1]
    assert b.reports[-1].gauges.running == 0
    assert b.reports[-1].gauges.kv_used_blocks == 0


def test_a_report_tells_what_its_step_cost():
    """Seconds come from the clock that the loop was given."""
    b = Bench()
    b.submit()
    b.turn()
    assert b.reports[0].step_seconds == pytest.approx(0.010)
    assert b.reports[0].at_s == pytest.approx(0.010)


def test_statistics_grow_by_each_step_after_the_warm_up():
    """The first steps measure caches that fill, not the work."""
    b = Bench(warm_up_steps=2)
    b.submit()
    b.turn(4)
    statistics = b.reports[-1].gauges.statistics
    assert (statistics.n, statistics.d, statistics.p) == (2, 2, 0)
    assert statistics.y == pytest.approx(0.020)


def test_gauges_fall_at_once_when_the_last_request_is_aborted():
    """Row C.8 70: without a report outside of steps, they would stay up for ever."""
    b = Bench()
    b.submit(max_tokens=50)
    b.turn(2)
    assert b.reports[-1].gauges.running == 1
    b.loop.post(Abort("a"))
    b.turn()
    last = b.reports[-1]
    assert (last.step_tokens, last.gauges.running, last.gauges.kv_used_blocks) == (0, 0, 0)
    assert b.events()[-1] == Finished("a", FinishReason.ABORT)


def test_cancel_in_every_state_gives_all_blocks_back():
    """Row C.3 23: unknown, waiting, in mid-prefill, decoding, finished."""
    b = Bench(
        msgspec.structs.replace(LIMITS, max_batch_sequences=1, max_batch_tokens=8, prefill_chunk_tokens=8)
    )
    b.loop.post(Abort("nobody"))
    b.submit("prefill", range(1, 31), max_tokens=9)
    b.submit("waiting")
    b.turn()
    b.loop.post(Abort("waiting"))
    b.loop.post(Abort("prefill"))
    b.turn()
    assert b.scheduler.pool.used_blocks == 0
    b.submit("decoding", max_tokens=9)
    b.turn(3)
    b.loop.post(Abort("decoding"))
    b.loop.post(Abort("decoding"))
    b.turn()
    assert b.scheduler.pool.used_blocks == 0
    b.scheduler.check()
    for id in ("prefill", "waiting", "decoding"):
        assert [e for e in b.events(id) if isinstance(e, Finished)] == [Finished(id, FinishReason.ABORT)]


def test_a_refusal_is_reported_at_once_and_by_reason():
    """400, 429 and 503 are told apart by the scheduler's reason."""
    b = Bench(msgspec.structs.replace(LIMITS, max_queued_requests=0, max_batch_sequences=1))
    b.submit("long", range(1, 100))
    b.submit("first")
    b.submit("second")
    b.loop.post(Drain())
    b.submit("late")
    b.turn()
    assert {r.rejected.id: r.rejected.reason for r in b.of_type(Refused)} == {
        "long": RejectReason.TOO_LONG,
        "second": RejectReason.QUEUE_FULL,
        "late": RejectReason.DRAINING,
    }


def test_limits_are_answered_and_in_force_in_the_next_step():
    """DESIGN: effect by the next step; the answer is what is in force."""
    b = Bench()
    b.submit("a", range(1, 21), max_tokens=1)
    b.submit("b", range(1, 21), max_tokens=1)
    b.loop.post(SetLimits(5, msgspec.structs.replace(LIMITS, max_batch_tokens=8)))
    b.turn()
    assert b.of_type(LimitsApplied) == [
        LimitsApplied(5, msgspec.structs.replace(LIMITS, max_batch_tokens=8, generation=1))
    ]
    assert b.steps[0].tokens == 8


def test_lowering_the_sequence_cap_under_load_kills_nobody():
    """Rows C.9 83 and 86: the running count falls to the cap as requests end; raising it lets others in."""
    b = Bench()
    for id in "abcdef":
        b.submit(id, max_tokens=4)
    b.turn()
    assert b.scheduler.running == 4
    b.loop.post(SetLimits(1, msgspec.structs.replace(LIMITS, max_batch_sequences=1)))
    running = []
    for _ in range(14):
        b.turn()
        running.append(b.scheduler.running)
    assert max(running[4:]) == 1
    b.loop.post(SetLimits(2, LIMITS))
    b.turn(8)
    for id in "abcdef":
        assert b.events(id)[-1] == Finished(id, FinishReason.LENGTH)


def test_a_request_that_poisons_the_batch_fails_alone():
    """Row C.6 61: its neighbours complete after a single retry."""
    b = Bench()
    b.submit("good")
    b.submit("bad", (1, POISON))
    b.submit("fine")
    b.turn(4)
    assert b.events("bad") == [Finished("bad", FinishReason.ERROR, "RuntimeError: out of luck")]
    for id in ("good", "fine"):
        assert [e for e in b.events(id) if isinstance(e, TokenOut)] == [TokenOut(id, 7)] * 4
        assert b.events(id)[-1] == Finished(id, FinishReason.LENGTH)
    assert b.scheduler.pool.used_blocks == 0
    assert not b.of_type(Died)


class BlamingError(Exception):
    """What a runner raises that knows who is to blame, or what it lacked."""

    def __init__(self, *ids, out_of_memory=False):
        super().__init__("no luck")
        self.sequence_ids = ids
        self.out_of_memory = out_of_memory


def test_a_step_that_names_its_culprit_is_repeated_once_without_it():
    """One more step for the others, and not one for each."""
    sizes = []

    def run(step):
        sizes.append(len(step.chunks))
        if any(c.sequence.id == "bad" for c in step.chunks):
            raise BlamingError("bad")
        return {c.sequence.id: SampledToken(7) for c in step.chunks if c.samples}

    b = Bench(run=run)
    for id in ("a", "bad", "c"):
        b.submit(id, max_tokens=1)
    b.turn()
    assert sizes == [3, 2]
    assert b.events("bad")[-1].reason is FinishReason.ERROR
    assert b.events("a")[-1] == b.events("a")[-1].__class__("a", FinishReason.LENGTH)


def test_only_the_first_retry_wipes_blocks_again():
    """A later one would wipe what the first has written."""
    wiped = []

    def run(step):
        wiped.append(step.wiped)
        if len(step.chunks) > 1:
            raise RuntimeError("out of luck")
        return {c.sequence.id: SampledToken(7) for c in step.chunks if c.samples}

    b = Bench(run=run)
    for id in ("a", "b"):
        b.submit(id, (1, 2, 3, 4, 5), max_tokens=9)
    b.turn()
    wiped.clear()
    lost = b.scheduler.running
    assert lost == 2
    b.scheduler.lose([0])
    b.turn()
    assert wiped[0]
    assert wiped == [wiped[0], wiped[0], ()]


def test_a_second_culprit_takes_nobody_along():
    """It shows itself only when the first is gone: a grammar fails before logits are looked at, say."""

    def run(step):
        here = [c.sequence.id for c in step.chunks]
        for culprit in ("bad", "worse"):
            if culprit in here:
                raise BlamingError(culprit)
        return {c.sequence.id: SampledToken(7) for c in step.chunks if c.samples}

    b = Bench(run=run)
    for id in ("a", "worse", "bad", "c"):
        b.submit(id, max_tokens=1)
    b.turn()
    ends = {id: b.events(id)[-1].reason for id in ("a", "bad", "worse", "c")}
    assert ends == {
        "a": FinishReason.LENGTH,
        "bad": FinishReason.ERROR,
        "worse": FinishReason.ERROR,
        "c": FinishReason.LENGTH,
    }


def test_a_step_that_runs_out_of_memory_lowers_the_token_budget_once():
    """Its requests are tried one by one; the new limit is reported, with a new generation."""

    def run(step):
        if step.tokens > 12:
            raise BlamingError(out_of_memory=True)
        return {c.sequence.id: SampledToken(7) for c in step.chunks if c.samples}

    b = Bench(run=run)
    for id in ("a", "b"):
        b.submit(id, range(1, 11), max_tokens=1)
    b.turn()
    assert b.of_type(LimitsApplied) == [
        LimitsApplied(0, msgspec.structs.replace(LIMITS, max_batch_tokens=10, generation=1))
    ]
    for id in ("a", "b"):
        assert b.events(id)[-1] == Finished(id, FinishReason.LENGTH)


def test_a_poisoned_request_that_is_repeated_for_ever_does_not_end_the_core():
    """Suspicion leads to a probe, and the probe succeeds."""
    b = Bench()
    for number in range(12):
        b.submit(f"bad{number}", (POISON,))
        assert b.turn()
    assert not b.of_type(Died)
    b.submit("good")
    b.turn(6)
    assert b.events("good")[-1] == Finished("good", FinishReason.LENGTH)


def test_a_core_whose_every_step_fails_gives_up_with_words():
    """Row C.8: a device error turns health red and the pod restarts."""
    b = Bench()
    b.broken = True
    going_on = True
    for number in range(6):
        b.submit(f"r{number}")
        going_on = going_on and b.turn()
    assert not going_on
    assert "out of luck" in b.of_type(Died)[0].message
    assert b.events(PROBE_ID)[-1].reason is FinishReason.ERROR


def test_a_request_that_waits_longer_than_the_queue_timeout_ends_as_timed_out():
    """It never ran: the client hears 429, the batch goes on."""
    b = Bench(msgspec.structs.replace(LIMITS, max_batch_sequences=1, queue_timeout_ms=25))
    b.submit("a", max_tokens=9)
    b.submit("b")
    b.turn(5)
    (end,) = b.events("b")
    assert end.reason is FinishReason.TIMEOUT
    assert len(b.events("a")) == 6


def test_stop_leaves_the_loop_before_the_next_step():
    """Nothing after Stop is looked at."""
    b = Bench()
    b.submit()
    b.loop.post(Stop())
    assert b.turn() is False
    assert b.steps == []


def test_a_command_wakes_an_idle_loop():
    """In a thread, with the real clock: nothing polls, and nothing has to."""
    done = queue.SimpleQueue()

    def run(step):
        return {c.sequence.id: SampledToken(7) for c in step.chunks if c.samples}

    loop = Loop(Scheduler(CAPACITY, LIMITS), run, done.put, limits=LIMITS)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        sampling = SamplingParams(max_tokens=1)
        loop.post(Submit(Request(id="a", prompt=(1,), sampling=sampling, arrival_s=time.monotonic())))
        report = done.get(timeout=30)
        assert [type(e) for e in report.events] == [Started, TokenOut, Finished]
    finally:
        loop.post(Stop())
        thread.join(30)
    assert not thread.is_alive()


def test_the_mode_can_change_live():
    """The loop passes on whatever limits hold; the scheduler does the rest."""
    b = Bench()
    b.loop.post(SetLimits(1, msgspec.structs.replace(LIMITS, mode=BatchingMode.STATIC)))
    b.submit()
    b.turn(5)
    assert b.loop.limits.mode is BatchingMode.STATIC


# Preparation.


class SlowPreparation:
    """Prepares nothing before it is let; every request that it was given is in `given`."""

    def __init__(self):
        self.given = []
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def __call__(self, request):
        self.given.append(request.id)
        self.begun.release()
        assert self.go_on.acquire(timeout=30)
        if request.sampling.grammar == "bad":
            raise RuntimeError("no grammar was ever like this")


def preparing(*ids, grammar="g"):
    """A bench that has these requests, the first of them in the preparing thread."""
    slow = SlowPreparation()
    b = Bench(prepare=slow)
    for id in ids:
        b.submit(id, grammar=grammar)
    b.turn()
    assert slow.begun.acquire(timeout=30)
    return b, slow


def test_a_request_under_preparation_holds_nobody_up():
    """Submits, cancels and limits that come later overtake it; it runs once it is prepared."""
    b, slow = preparing("slow")
    b.submit("b")
    b.submit("c")
    b.submit("d")
    b.loop.post(Abort("d"))
    b.loop.post(SetLimits(1, msgspec.structs.replace(LIMITS, max_batch_tokens=16)))
    b.turn()
    assert [c.sequence.id for c in b.steps[0].chunks] == ["b", "c"]
    assert b.events("d") == [Finished("d", FinishReason.ABORT)]
    assert [r.ticket for r in b.of_type(LimitsApplied)] == [1]
    b.turn(9)
    assert b.events("slow") == []
    slow.go_on.release()
    assert b.loop.turn(30.0)  # the end of the preparation wakes an idle loop
    b.turn(9)
    assert [type(e) for e in b.events("slow")] == [Started, *[TokenOut] * 4, Finished]


def test_a_request_that_is_aborted_while_it_is_prepared_never_runs():
    """Its end is reported at once; one that still waits for its turn is not even prepared."""
    b, slow = preparing("a", "b", "c")
    b.loop.post(Abort("a"))
    b.loop.post(Abort("b"))
    b.turn()
    for id in ("a", "b"):
        assert b.events(id) == [Finished(id, FinishReason.ABORT)]
    slow.go_on.release(2)
    while not b.events("c"):
        assert b.loop.turn(30.0)
    b.turn(9)
    assert slow.given == ["a", "c"]
    assert {c.sequence.id for step in b.steps for c in step.chunks} == {"c"}
    assert [len(b.events(id)) for id in ("a", "b")] == [1, 1]
    assert b.scheduler.pool.used_blocks == 0


def test_a_drain_refuses_what_is_under_preparation_at_once():
    """Nobody waits for a step that never comes, and the late end of the work changes nothing."""
    b, slow = preparing("a", "b")
    b.loop.post(Drain())
    b.turn()
    refused = [r.rejected for r in b.of_type(Refused)]
    assert [(r.id, r.reason) for r in refused] == [(id, RejectReason.DRAINING) for id in ("a", "b")]
    slow.go_on.release(2)
    b.loop.turn(30.0)
    assert len(b.of_type(Refused)) == 2
    assert b.steps == []


def test_a_preparation_that_fails_fails_its_request_alone():
    """The thread lives on for the next request."""
    b, slow = preparing("a", grammar="bad")
    b.submit("b", grammar="good")
    slow.go_on.release(2)
    while not b.events("b"):
        assert b.loop.turn(30.0)
    (end,) = b.events("a")
    assert end.reason is FinishReason.ERROR
    assert "no grammar was ever like this" in end.message


def test_stop_does_not_wait_for_a_preparation():
    b, slow = preparing("a")
    b.loop.post(Stop())
    assert b.turn() is False
    slow.go_on.release()
