"""The scheduler: what a step holds, who is let in, who gives way, and how requests end."""

from collections.abc import Callable

import pytest

from headway_engine.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT
from headway_engine.preemption import MAX_PREEMPTIONS, SKIP_WINDOW
from headway_engine.protocol import BatchingMode, Capacity, Limits
from headway_engine.sequence import (
    FinishReason,
    Pooling,
    Rejected,
    RejectReason,
    SampledToken,
    Sequence,
    Status,
    Step,
)
from headway_engine.tenants import Tenant, TenantPolicy
from support.engine_builders import Drive, a_capacity, a_prompt, a_request, expected_output, some_limits


def shape(step: Step | None) -> list[tuple[str, int, int]]:
    """(id, start, length) of a step's chunks."""
    return [(c.sequence.id, c.start, c.length) for c in step.chunks] if step else []


def a_drive(capacity: Capacity | None = None, tenants: TenantPolicy | None = None, **limits: int) -> Drive:
    capacity = capacity or a_capacity()
    return Drive(capacity, some_limits(capacity, **limits), tenants=tenants)


# What a step holds.


def test_nothing_to_do_is_no_step_and_no_time_to_wait_for() -> None:
    drive = a_drive()
    assert drive.step() is None
    assert drive.scheduler.wait_s(0.0) is None


def test_a_prompt_is_computed_and_then_decoded_token_by_token() -> None:
    drive = a_drive()
    drive.submit(a_request("a", 8, max_tokens=3))
    assert [shape(drive.step()) for _ in range(3)] == [[("a", 0, 8)], [("a", 8, 1)], [("a", 9, 1)]]
    assert drive.step() is None
    assert drive.ended == {"a": FinishReason.LENGTH}
    drive.assert_all_ended_right()


def test_decodes_come_first_then_prompts_under_way_then_newcomers() -> None:
    drive = a_drive(max_batch_tokens=32, prefill_chunk_tokens=8)
    drive.submit(a_request("old", 4), a_request("long", 20))
    drive.step()
    drive.submit(a_request("new", 4))
    assert shape(drive.step()) == [("old", 4, 1), ("long", 8, 8), ("new", 0, 4)]


def test_a_prompt_that_began_before_does_not_take_the_tokens_of_decodes() -> None:
    """The chunk is raised to the whole step while a prompt is under way."""
    drive = a_drive(max_batch_tokens=8, prefill_chunk_tokens=4)
    drive.submit(a_request("long", 60), a_request("short", 4))
    drive.step()
    drive.scheduler.set_limits(some_limits(max_batch_tokens=8, prefill_chunk_tokens=8))
    assert shape(drive.step()) == [("short", 4, 1), ("long", 4, 7)]


def test_a_prompt_is_cut_to_the_chunk_when_others_are_there() -> None:
    drive = a_drive(prefill_chunk_tokens=8)
    drive.submit(a_request("a", 20), a_request("b", 3))
    assert shape(drive.step()) == [("a", 0, 8), ("b", 0, 3)]


def test_a_lone_request_is_cut_only_by_the_step() -> None:
    drive = a_drive(max_batch_tokens=64, prefill_chunk_tokens=8)
    drive.submit(a_request("a", 100))
    assert shape(drive.step()) == [("a", 0, 64)]
    drive.submit(a_request("b", 3))
    assert shape(drive.step()) == [("a", 64, 8), ("b", 0, 3)]


def test_the_last_newcomer_takes_what_is_left_of_the_step() -> None:
    drive = a_drive(max_batch_tokens=32)
    drive.submit(a_request("a", 20), a_request("b", 20), a_request("c", 20))
    assert shape(drive.step()) == [("a", 0, 20), ("b", 0, 12)]


def test_only_the_chunk_that_reaches_the_end_samples() -> None:
    drive = a_drive(max_batch_tokens=32)
    drive.submit(a_request("a", 40))
    step = drive.step()
    assert step is not None
    assert [c.samples for c in step.chunks] == [False]
    step = drive.step()
    assert step is not None
    assert [c.samples for c in step.chunks] == [True]


def test_the_table_covers_the_chunk_before_the_step_is_handed_out() -> None:
    drive = a_drive()
    drive.submit(a_request("a", 7, max_tokens=9))
    while (step := drive.plan()) is not None:
        for chunk in step.chunks:
            assert len(chunk.sequence.block_table) * 4 >= chunk.start + chunk.length
        drive.commit(step)


def test_a_second_step_before_the_first_is_committed_is_an_error() -> None:
    drive = a_drive()
    drive.submit(a_request("a"))
    step = drive.plan()
    assert step is not None
    with pytest.raises(RuntimeError, match="commit the last step"):
        drive.scheduler.next_step(0.0)
    drive.commit(step)
    with pytest.raises(ValueError, match="not the step that is under way"):
        drive.scheduler.commit(step, {}, 0.0)


# Who is let in.


@pytest.mark.parametrize(
    ("prompt", "capacity", "words"),
    [
        (255, a_capacity(), ""),
        (256, a_capacity(), "the model's limit is 256"),
        (25_600, a_capacity(), "the model's limit is 256"),
        (39, a_capacity(kv_blocks=10), ""),
        (40, a_capacity(kv_blocks=10), "the KV cache holds 40"),
        (0, a_capacity(), "no tokens"),
    ],
)
def test_what_can_never_fit_is_refused_at_the_door(prompt: int, capacity: Capacity, words: str) -> None:
    drive = a_drive(capacity)
    answer = drive.admit(a_request("a", prompt))
    if not words:
        assert isinstance(answer, Sequence)
        drive.run()
        drive.assert_all_ended_right()
    else:
        assert isinstance(answer, Rejected)
        assert answer.reason is RejectReason.TOO_LONG
        assert words in answer.message


def test_a_full_queue_refuses_and_names_the_limit() -> None:
    drive = a_drive(max_queued_requests=2, max_batch_sequences=1)
    drive.submit(a_request("a"), a_request("b"), a_request("c"), a_request("d"))
    assert drive.rejected.keys() == {"d"}, "one goes to the free slot, two wait"
    assert drive.rejected["d"].reason is RejectReason.QUEUE_FULL
    assert "max_queued_requests is 2" in drive.rejected["d"].message


@pytest.mark.parametrize(
    ("mode", "rejected"), [(BatchingMode.CONTINUOUS, set()), (BatchingMode.STATIC, {"d"})]
)
def test_what_a_free_slot_takes_at_the_next_step_is_not_queued(
    mode: BatchingMode, rejected: set[str]
) -> None:
    """Two choices of one request fit an idle engine that queues one; a batch under way has no free slot."""
    drive = a_drive(max_queued_requests=1, max_batch_sequences=4, mode=mode)
    drive.submit(a_request("a"), a_request("b"))
    drive.step()
    drive.submit(a_request("c"), a_request("d"))
    assert drive.rejected.keys() == rejected


def test_a_queue_of_no_requests_takes_what_a_free_slot_takes_at_once() -> None:
    drive = a_drive(max_queued_requests=0, max_batch_sequences=2)
    for id in ("a", "b"):
        drive.submit(a_request(id))
        drive.step()
    drive.submit(a_request("c"))
    assert drive.rejected.keys() == {"c"}


@pytest.mark.parametrize(
    ("queued", "newcomer", "admitted"),
    [(None, 100, True), (10, 10, True), (10, 11, False), (20, 1, False), (1, 20, False)],
)
def test_the_token_cap_counts_the_newcomer_but_never_refuses_a_single_one(
    queued: int | None, newcomer: int, admitted: bool
) -> None:
    drive = a_drive(max_queued_tokens=20)
    if queued:
        drive.submit(a_request("queued", queued))
    drive.submit(a_request("new", newcomer))
    assert ("new" in drive.requests) is admitted
    assert admitted or "max_queued_tokens is 20" in drive.rejected["new"].message


def test_prompts_under_way_count_as_queued_until_they_are_computed() -> None:
    """They stand before a newcomer just as waiting ones do, so the cap bounds the time to its first token."""
    drive = a_drive(max_batch_tokens=32, max_queued_tokens=60)
    drive.submit(a_request("a", 50))
    assert drive.scheduler.queued_tokens == 50
    drive.step()
    assert (drive.scheduler.waiting, drive.scheduler.queued_tokens) == (0, 18)
    drive.submit(a_request("b", 43), a_request("c", 42))
    assert drive.rejected.keys() == {"b"}
    drive.run()
    assert drive.scheduler.queued_tokens == 0


def test_a_tenants_cap_on_requests_is_about_those_that_wait() -> None:
    """Free slots take them all at the next step: nobody waits."""
    drive = a_drive(tenants=TenantPolicy(tenants={"a": Tenant(max_queued_requests=1)}), max_batch_sequences=4)
    drive.submit(*(a_request(f"a{i}", 8, tenant="a") for i in range(6)))
    assert drive.rejected.keys() == {"a4", "a5"}


@pytest.mark.parametrize(
    ("tenant", "words"),
    [
        (Tenant(max_queued_requests=1), "requests of tenant 'a' are waiting and its limit is 1"),
        (Tenant(max_queued_tokens=15), "the tenant's limit is 15"),
    ],
)
def test_a_tenants_own_cap_refuses_it_and_nobody_else(tenant: Tenant, words: str) -> None:
    drive = a_drive(tenants=TenantPolicy(tenants={"a": tenant}), max_batch_sequences=1)
    drive.submit(*(a_request(f"{t}{i}", 8, tenant=t) for t in "ab" for i in range(2)))
    assert drive.rejected.keys() == {"a1"}
    assert words in drive.rejected["a1"].message


def test_a_draining_engine_refuses_newcomers_and_finishes_the_others() -> None:
    drive = a_drive(max_batch_sequences=1)
    drive.submit(a_request("runs"), a_request("waits"))
    drive.step()
    drive.scheduler.drain()
    drive.submit(a_request("late"))
    assert drive.rejected["late"].reason is RejectReason.DRAINING
    drive.run()
    assert drive.ended == {"runs": FinishReason.LENGTH, "waits": FinishReason.LENGTH}


def test_a_known_id_is_an_error_and_not_a_second_sequence() -> None:
    drive = a_drive()
    drive.submit(a_request("a"))
    with pytest.raises(ValueError, match="known already"):
        drive.scheduler.admit(a_request("a"), 0.0)
    drive.run()
    drive.submit(a_request("a"))  # after the end it is free again


def test_a_newcomer_waits_until_its_whole_prompt_fits_beside_a_spare_block() -> None:
    drive = a_drive(a_capacity(kv_blocks=8))
    drive.submit(a_request("a", 15, max_tokens=5), a_request("b", 16))  # 4 blocks each, and one spare
    assert {c.sequence.id for c in (drive.step() or pytest.fail("no step")).chunks} == {"a"}
    drive.run()
    assert drive.started_s["b"] >= drive.token_s["a"][-1]


# Prefix cache.


def test_a_prefix_hit_is_reported_once_and_exactly() -> None:
    drive = a_drive()
    prompt = a_prompt(18)
    drive.submit(a_request("first", prompt))
    drive.run()
    drive.submit(a_request("second", (*prompt, 1, 2)))
    step = drive.step()
    assert shape(step) == [("second", 16, 4)]
    assert drive.cached == {"first": 0, "second": 16}
    assert drive.scheduler.prefix_hit_tokens_total == 16


def test_a_tenant_is_charged_for_what_is_computed_and_not_for_prefix_hits() -> None:
    drive = a_drive()
    prompt = a_prompt(18)
    drive.submit(a_request("keeps the class", 4, max_tokens=50, tenant="x"), a_request("first", prompt))
    drive.step()
    queue = drive.scheduler._roster.queue
    before = queue.counter(0, "")
    drive.abort("first")
    drive.submit(a_request("second", (*prompt, 1, 2), max_tokens=1))
    drive.step()
    assert queue.counter(0, "") - before == PROMPT_WEIGHT * 4 + OUTPUT_WEIGHT


def test_a_preempted_sequence_reports_the_hits_of_its_first_admission_only() -> None:
    capacity = a_capacity(kv_blocks=9)
    drive = a_drive(capacity)
    drive.submit(a_request("a", 8, max_tokens=20), a_request("b", 8, max_tokens=20))
    drive.run()
    assert drive.scheduler.preemptions_total > 0
    assert drive.cached == {"a": 0, "b": 0}
    assert drive.scheduler.prefix_hit_tokens_total == 0
    drive.assert_all_ended_right()


# How requests end.


def stop_at(position: int, prompt: int = 8) -> tuple[int, ...]:
    """The token that the made-up model says at a position of its output."""
    return (expected_output(a_request("a", prompt, max_tokens=position + 1), 256)[position],)


def test_a_stop_token_ends_with_stop_and_is_part_of_the_output() -> None:
    drive = a_drive()
    drive.submit(a_request("a", 8, max_tokens=9, stop_token_ids=stop_at(3)))
    drive.run()
    assert drive.ended == {"a": FinishReason.STOP}
    assert len(drive.output["a"]) == 4


def test_a_stop_token_in_the_last_place_is_stop_and_not_length() -> None:
    drive = a_drive()
    drive.submit(a_request("a", 8, max_tokens=4, stop_token_ids=stop_at(3)))
    drive.run()
    assert drive.ended == {"a": FinishReason.STOP}


@pytest.mark.parametrize(
    ("capacity", "output"), [(a_capacity(max_model_tokens=20), 12), (a_capacity(kv_blocks=4), 8)]
)
def test_the_model_and_the_cache_bound_the_output(capacity: Capacity, output: int) -> None:
    drive = a_drive(capacity)
    drive.submit(a_request("a", 8, max_tokens=1000))
    drive.run()
    assert drive.ended == {"a": FinishReason.LENGTH}
    assert len(drive.output["a"]) == output


def test_no_output_asked_for_ends_when_the_prompt_is_computed() -> None:
    drive = a_drive()
    drive.submit(a_request("a", 8, max_tokens=0))
    step = drive.scheduler.next_step(0.0)
    assert step is not None
    assert not step.chunks[0].samples
    drive.note(drive.scheduler.commit(step, {}, 0.0))
    assert (drive.ended, drive.output) == ({"a": FinishReason.LENGTH}, {"a": []})


# Vectors.


@pytest.mark.parametrize("pooling", list(Pooling))
def test_a_vector_ends_its_request_when_the_prompt_is_computed(pooling: Pooling) -> None:
    """In chunks, beside a sequence that decodes; no token comes of it."""
    drive = a_drive(prefill_chunk_tokens=4)
    drive.submit(a_request("w", 3, max_tokens=4), a_request("v", 10, pooling=pooling))
    shapes = [shape(drive.step()) for _ in range(4)]
    assert shapes[:3] == [
        [("w", 0, 3), ("v", 0, 4)],
        [("w", 3, 1), ("v", 4, 4)],
        [("w", 4, 1), ("v", 8, 2)],
    ]
    assert drive.ended == {"v": FinishReason.STOP, "w": FinishReason.LENGTH}
    drive.assert_all_ended_right()


def test_only_a_mean_does_without_prefix_hits_and_it_fills_the_cache_too() -> None:
    """What a hit covers has no hidden states; the last token is always computed."""
    prompt = a_prompt(17)
    for first in Pooling:
        drive = a_drive()
        drive.submit(a_request("first", prompt, pooling=first))
        drive.run()
        drive.submit(a_request("mean", prompt, pooling=Pooling.MEAN))
        drive.run()
        drive.submit(a_request("last", prompt, pooling=Pooling.LAST), a_request("text", prompt))
        drive.run()
        assert drive.cached == {"first": 0, "mean": 0, "last": 16, "text": 16}
        drive.assert_all_ended_right()


def test_a_mean_that_gave_way_is_computed_from_its_first_token_again() -> None:
    """Its own blocks are in the cache by then, and are not taken."""
    drive = a_drive(a_capacity(kv_blocks=8), tenants=TenantPolicy(), prefill_chunk_tokens=8)
    drive.submit(a_request("mean", 24, pooling=Pooling.MEAN, priority=0), a_request("x", 1, max_tokens=1))
    drive.step()
    drive.submit(a_request("urgent", 16, priority=5, max_tokens=1))
    drive.run()
    assert drive.scheduler.preemptions_total == 1
    starts = [c.start for step in drive.steps for c in step.chunks if c.sequence.id == "mean"]
    assert starts.count(0) == 2
    drive.assert_all_ended_right()


def test_a_prompt_for_a_vector_may_fill_the_whole_context() -> None:
    """Nothing follows it."""
    drive = a_drive(a_capacity(max_model_tokens=32))
    drive.submit(a_request("fits", 32, pooling=Pooling.LAST), a_request("not", 33, pooling=Pooling.LAST))
    drive.run()
    assert drive.ended == {"fits": FinishReason.STOP}
    assert drive.rejected["not"].reason is RejectReason.TOO_LONG
    assert drive.rejected["not"].message == "the prompt has 33 tokens; the model's limit is 32"


def test_a_tenant_is_charged_for_the_prompt_of_a_vector_and_for_no_output() -> None:
    drive = a_drive()
    drive.submit(a_request("keeps the class", 4, max_tokens=50, tenant="x"), a_request("first", 3))
    drive.step()
    queue = drive.scheduler._roster.queue
    before = queue.counter(0, "")
    drive.abort("first")
    drive.submit(a_request("v", 10, pooling=Pooling.MEAN))
    drive.step()
    assert queue.counter(0, "") - before == PROMPT_WEIGHT * 10


def test_a_vector_that_is_missing_ends_its_request_with_an_error() -> None:
    """A runner that forgets one fails that one and no other."""
    drive = a_drive()
    drive.submit(a_request("v", 5, pooling=Pooling.LAST), a_request("w", 5, max_tokens=1))
    step = drive.plan()
    assert step is not None
    drive.note(drive.scheduler.commit(step, {"w": SampledToken(7)}, 1.0))
    assert drive.ended == {"v": FinishReason.ERROR, "w": FinishReason.LENGTH}
    assert "no vector" in drive.messages["v"]


def test_a_failed_step_ends_its_sequences_and_only_those() -> None:
    drive = a_drive(max_batch_sequences=2)
    drive.submit(a_request("a"), a_request("b"), a_request("c"))
    step = drive.plan()
    assert step is not None
    drive.fail(step, "out of memory")
    assert drive.ended == {"a": FinishReason.ERROR, "b": FinishReason.ERROR}
    assert drive.messages["a"] == "out of memory"
    assert drive.scheduler.pool.used_blocks == 0
    drive.run()
    drive.assert_all_ended_right()


def test_a_missing_token_ends_that_sequence_with_an_error_and_spares_its_neighbour() -> None:
    drive = a_drive()
    drive.submit(a_request("poisoned"), a_request("fine", max_tokens=2))
    step = drive.plan()
    assert step is not None
    fine = step.chunks[1].sequence
    token = expected_output(fine.request, 256)[0]
    drive.note(drive.scheduler.commit(step, {"fine": SampledToken(token)}, 0.01))
    assert drive.ended == {"poisoned": FinishReason.ERROR}
    drive.run()
    drive.assert_all_ended_right()


def test_waiting_too_long_is_a_timeout_but_never_for_what_has_run() -> None:
    capacity = a_capacity(kv_blocks=8)
    drive = a_drive(capacity, queue_timeout_ms=100, max_batch_sequences=2)
    drive.submit(a_request("a", 8, max_tokens=20), a_request("b", 8, max_tokens=20), a_request("c"))
    drive.run()
    assert drive.scheduler.preemptions_total > 0
    assert drive.ended == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH, "c": FinishReason.TIMEOUT}
    assert "0.1 s" in drive.messages["c"]
    assert "c" not in drive.started_s


def test_a_call_that_has_begun_does_not_time_out_in_part() -> None:
    """Four samples, room for one: the last waits three times the timeout, for its answer has begun."""
    drive = a_drive(queue_timeout_ms=100, max_batch_sequences=1)
    drive.submit(*(a_request(f"r{i}", 8, max_tokens=10, call="one") for i in range(4)))
    drive.submit(a_request("other"))
    drive.run()
    assert drive.ended == {f"r{i}": FinishReason.LENGTH for i in range(4)} | {"other": FinishReason.TIMEOUT}
    drive.assert_all_ended_right()


def test_a_call_that_has_not_begun_times_out_whole() -> None:
    drive = a_drive(queue_timeout_ms=100, max_batch_sequences=1)
    drive.submit(a_request("long", max_tokens=50))
    drive.step()
    drive.submit(*(a_request(f"r{i}", call="one") for i in range(3)))
    drive.run()
    timed_out = {id for id, reason in drive.ended.items() if reason is FinishReason.TIMEOUT}
    assert timed_out == {"r0", "r1", "r2"}


def test_a_sibling_that_comes_after_the_first_has_begun_waits_for_it() -> None:
    """The front end hands sequences over one by one, and a step may begin in between."""
    drive = a_drive(queue_timeout_ms=100, max_batch_sequences=1)
    drive.submit(a_request("first", max_tokens=30, call="one"))
    drive.step()
    drive.submit(a_request("second", call="one"))
    drive.run()
    assert drive.ended == {"first": FinishReason.LENGTH, "second": FinishReason.LENGTH}


def test_a_timeout_of_zero_is_none() -> None:
    drive = a_drive(queue_timeout_ms=0, max_batch_sequences=1)
    drive.submit(a_request("a"), a_request("b"))
    drive.step()
    drive.now_s = 1e6
    drive.run()
    assert drive.ended == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}


# Who gives way.


def test_the_one_that_is_cheapest_to_redo_gives_way() -> None:
    drive = a_drive(a_capacity(kv_blocks=10))
    drive.submit(a_request("long", 20, max_tokens=12), a_request("short", 8, max_tokens=20))
    drive.run()
    assert drive.scheduler.preemptions_total > 0
    assert drive.token_s["long"][-1] < drive.token_s["short"][-1]
    assert drive.widest_gap_s("long") == pytest.approx(0.01)
    drive.assert_all_ended_right()


def test_a_lower_class_gives_way_though_it_costs_more() -> None:
    drive = a_drive(a_capacity(kv_blocks=10))
    drive.submit(a_request("low", 20, max_tokens=12, priority=-1), a_request("high", 8, max_tokens=20))
    drive.run()
    assert drive.widest_gap_s("high") == pytest.approx(0.01)
    drive.assert_all_ended_right()


def test_the_one_that_wants_a_block_gives_way_itself_when_it_is_the_lowest() -> None:
    drive = a_drive(a_capacity(kv_blocks=10))
    drive.submit(a_request("high", 20, max_tokens=19, priority=1), a_request("low", 15, max_tokens=20))
    step = None
    while drive.scheduler.preemptions_total == 0:
        step = drive.step()
    assert [id for id, _, _ in shape(step)] == ["high"]
    assert drive.scheduler._roster.sequences["low"].status is Status.WAITING
    drive.run()
    drive.assert_all_ended_right()


def test_a_low_newcomer_never_displaces_a_high_runner() -> None:
    """Whatever the low ones want, the high one decodes in every step."""
    drive = a_drive(a_capacity(kv_blocks=12))
    drive.submit(a_request("high", 4, max_tokens=30, priority=5))
    for i in range(6):
        drive.submit(a_request(f"low{i}", 8, max_tokens=30))
    drive.run()
    assert drive.widest_gap_s("high") == pytest.approx(0.01)
    drive.assert_all_ended_right()


def test_a_step_that_preempts_admits_nobody() -> None:
    drive = a_drive(a_capacity(kv_blocks=8))
    drive.submit(a_request("a", 12, max_tokens=18), a_request("b", 10, max_tokens=18))
    drive.step()
    drive.submit(*(a_request(f"c{i}", 2) for i in range(4)))
    started = 0
    while drive.scheduler.preemptions_total == 0:
        started = len(drive.started_s)
        drive.step()
    assert len(drive.started_s) == started


def test_a_step_that_preempts_admits_nobody_of_a_higher_class_either() -> None:
    """The newcomer comes just before the step that preempts, and is in the one after."""

    def drive_to(turns: int) -> Drive:
        drive = a_drive(a_capacity(kv_blocks=8))
        drive.submit(a_request("a", 12, max_tokens=18), a_request("b", 10, max_tokens=18))
        for _ in range(turns):
            drive.step()
        return drive

    turns = 0
    while drive_to(turns + 1).scheduler.preemptions_total == 0:
        turns += 1
    drive = drive_to(turns)
    drive.submit(a_request("high", 2, priority=1))
    assert "high" not in {id for id, _, _ in shape(drive.step())}
    assert drive.scheduler.preemptions_total == 1
    assert "high" in {id for id, _, _ in shape(drive.step())}


@pytest.mark.parametrize(("passed", "admitted"), [(SKIP_WINDOW, True), (SKIP_WINDOW + 1, False)])
def test_so_many_that_do_not_fit_are_passed_in_a_step_and_no_more(passed: int, admitted: bool) -> None:
    capacity = a_capacity(kv_blocks=16)
    drive = Drive(capacity, some_limits(capacity), prefix_caching=False)
    drive.submit(a_request("runs", 32, max_tokens=2))
    drive.step()
    drive.submit(*(a_request(f"big{i}", 40) for i in range(passed)), a_request("small", 4))
    drive.step()
    assert ("small" in drive.started_s) is admitted


def test_a_sequence_that_was_planned_and_then_preempted_is_not_in_the_step() -> None:
    """The victim stood before the one that needed its block, and its share of the step is given back."""
    drive = a_drive(a_capacity(kv_blocks=6))
    drive.submit(a_request("victim", 4, max_tokens=20), a_request("wants", 11, max_tokens=8))
    while drive.scheduler.preemptions_total == 0:
        assert not drive.preempted
        step = drive.step()
        assert step is not None
    assert drive.preempted == {"victim": 1}, "told with the step"
    assert shape(step)[0][0] == "wants"
    assert len(step.chunks) == 1
    drive.run()
    drive.assert_all_ended_right()


def test_a_higher_class_takes_a_slot_of_a_lower_one_in_the_next_step() -> None:
    drive = a_drive(max_batch_sequences=2)
    drive.submit(a_request("low0", 8, max_tokens=30), a_request("low1", 12, max_tokens=30))
    drive.step()
    drive.submit(a_request("high", 8, priority=1))
    assert [id for id, _, _ in shape(drive.step())] == ["low1", "high"]
    drive.run()
    assert drive.scheduler.preemptions_total == 1
    drive.assert_all_ended_right()


def test_a_higher_class_takes_blocks_of_lower_ones_but_no_more_than_it_needs() -> None:
    drive = a_drive(a_capacity(kv_blocks=16))
    drive.submit(*(a_request(f"low{i}", 12, max_tokens=9) for i in range(4)))
    drive.step()
    drive.submit(a_request("high", 22, max_tokens=2, priority=1))
    assert "high" in {id for id, _, _ in shape(drive.step())}
    assert drive.scheduler.preemptions_total == 2
    drive.run()
    drive.assert_all_ended_right()


def test_a_prefix_that_runs_already_is_not_made_room_for_again() -> None:
    """24 of its 28 tokens are held by a peer, so one victim is enough for what is left."""
    drive = a_drive(a_capacity(kv_blocks=16))
    prompt = a_prompt(25)
    drive.submit(a_request("peer", prompt, max_tokens=7, priority=1))
    drive.step()
    drive.submit(*(a_request(f"low{i}", 14, max_tokens=2) for i in range(2)))
    drive.step()
    drive.submit(a_request("high", (*prompt[:24], 1, 2, 3), max_tokens=2, priority=1))
    drive.step()
    assert drive.scheduler.preemptions_total <= 1
    assert drive.cached["high"] == 24
    drive.run()
    drive.assert_all_ended_right()


def test_nobody_is_displaced_for_one_that_would_not_fit_all_the_same() -> None:
    drive = a_drive(a_capacity(kv_blocks=16))
    drive.submit(a_request("peer", 30, max_tokens=20, priority=1), a_request("low", 12, max_tokens=4))
    drive.step()
    drive.submit(a_request("high", 40, max_tokens=2, priority=1))
    drive.step()
    assert drive.scheduler.preemptions_total == 0


def test_equals_do_not_displace_each_other() -> None:
    drive = a_drive(max_batch_sequences=1)
    drive.submit(a_request("first", 8, max_tokens=30), a_request("second", 8))
    drive.run()
    assert drive.scheduler.preemptions_total == 0


def test_a_batch_that_runs_to_its_end_is_not_displaced() -> None:
    limits = some_limits(mode=BatchingMode.DYNAMIC, max_batch_sequences=1)
    drive = Drive(limits=limits)
    drive.submit(a_request("low", 8, max_tokens=9))
    drive.step()
    drive.submit(a_request("high", 8, priority=9))
    drive.run()
    assert drive.scheduler.preemptions_total == 0
    assert drive.started_s["high"] >= drive.token_s["low"][-1]


def test_a_low_class_under_a_stream_of_higher_ones_is_slowed_and_not_stopped() -> None:
    drive = a_drive(max_batch_sequences=1)
    drive.submit(a_request("low", 8, max_tokens=30))
    drive.step()
    turns = 0
    while "low" not in drive.ended:
        if turns % 5 == 0:
            drive.submit(a_request(f"high{turns}", 8, max_tokens=3, priority=1))
        drive.step()
        turns += 1
        assert turns < 200
    assert drive.scheduler.preemptions_total == MAX_PREEMPTIONS


def test_a_lowered_cap_drains_even_when_a_higher_class_waits() -> None:
    drive = a_drive()
    drive.submit(*(a_request(f"low{i}", 8, max_tokens=9) for i in range(4)))
    drive.step()
    drive.scheduler.set_limits(some_limits(max_batch_sequences=2))
    drive.submit(a_request("high", 8, priority=1))
    drive.step()
    assert (drive.scheduler.running, drive.scheduler.preemptions_total) == (4, 0)


def test_giving_one_up_ends_it_with_an_error_and_leaves_its_step_usable() -> None:
    drive = a_drive()
    drive.submit(a_request("poisoned"), a_request("fine"))
    step = drive.plan()
    assert step is not None
    drive.note(drive.scheduler.give_up("poisoned", "its logits are not numbers"))
    drive.commit(step)
    assert drive.ended == {"poisoned": FinishReason.ERROR}
    assert drive.messages["poisoned"] == "its logits are not numbers"
    assert drive.scheduler.give_up("poisoned", "again") == ()
    drive.run()
    drive.assert_all_ended_right()


def test_blocks_that_went_wrong_take_along_all_that_was_computed_from_them() -> None:
    """A chain of three: the second found a block of the first, the third one that the second made of it."""
    drive = a_drive()
    prompt = a_prompt(30, seed=7)
    drive.submit(a_request("first", prompt[:9], max_tokens=9), a_request("apart", 12, max_tokens=9))
    drive.step()
    drive.submit(a_request("second", prompt[:17], max_tokens=9))
    drive.step()
    drive.submit(a_request("third", (*prompt[:14], 1, 2, 3, 4), max_tokens=9))
    drive.step()
    tables = {id: list(s.block_table) for id, s in drive.scheduler._roster.running.items()}
    assert tables["second"][:2] == tables["first"][:2] == tables["third"][:2]
    assert tables["second"][2] == tables["third"][2] != tables["first"][2]
    step = drive.plan()
    assert step is not None
    drive.note(drive.scheduler.give_up("first", "its logits are not numbers"))
    drive.lose(tables["first"][1:2])
    drive.commit(step)
    assert drive.preempted == {"second": 1, "third": 1}
    wiped = drive.plan()
    assert wiped is not None
    assert wiped.wiped == tuple(sorted({*tables["second"][1:], *tables["third"][1:]}))
    drive.commit(wiped)
    after = drive.plan()
    assert after is not None
    assert after.wiped == ()
    drive.commit(after)
    drive.run()
    drive.assert_all_ended_right()
    ended = {id: reason for id, reason in drive.ended.items() if reason is not FinishReason.LENGTH}
    assert ended == {"first": FinishReason.ERROR}


# Live limits.


def test_lowering_the_sequences_drains_and_raising_admits_in_the_next_step() -> None:
    drive = a_drive()
    drive.submit(*(a_request(f"r{i}", 4, max_tokens=10 + i) for i in range(8)))
    drive.step()
    drive.scheduler.set_limits(some_limits(max_batch_sequences=2))
    drive.submit(a_request("late", 4))
    step = drive.step()
    assert step is not None
    assert len(step.chunks) == 8  # nobody is ended, nobody is paused
    while drive.scheduler.running > 2:
        drive.step()
        assert "late" not in drive.started_s
    drive.scheduler.set_limits(some_limits(max_batch_sequences=8))
    drive.step()
    assert "late" in drive.started_s
    drive.run()
    drive.assert_all_ended_right()


def test_more_decodes_than_tokens_in_a_step_take_turns() -> None:
    drive = a_drive()
    drive.submit(*(a_request(f"r{i}", 4, max_tokens=12) for i in range(7)))
    drive.step()
    drive.scheduler.set_limits(some_limits(max_batch_sequences=2, max_batch_tokens=2, prefill_chunk_tokens=2))
    for _ in range(14):
        drive.step()
    lengths = [len(output) for output in drive.output.values()]
    assert max(lengths) - min(lengths) <= 1
    drive.run()
    drive.assert_all_ended_right()


def test_a_prompt_under_way_gets_its_turn_among_too_many_decodes() -> None:
    drive = a_drive()
    drive.submit(*(a_request(f"r{i}", 4, max_tokens=60) for i in range(4)))
    drive.step()
    drive.scheduler.set_limits(some_limits(prefill_chunk_tokens=4))
    drive.submit(a_request("long", 24))
    drive.step()
    drive.scheduler.set_limits(some_limits(max_batch_sequences=2, max_batch_tokens=2, prefill_chunk_tokens=2))
    drive.run()
    assert drive.token_s["long"][0] < drive.token_s["r0"][-1]
    drive.assert_all_ended_right()


def whole(capacity: Capacity) -> Limits:
    return some_limits(capacity)


def tight(capacity: Capacity) -> Limits:
    return some_limits(capacity, max_batch_sequences=1, max_batch_tokens=1, prefill_chunk_tokens=1)


@pytest.mark.parametrize("flip", [(whole, tight), (tight, whole)])
def test_flipping_limits_every_step_changes_no_output(flip: tuple[Callable[[Capacity], Limits], ...]) -> None:
    drive = a_drive()
    drive.submit(*(a_request(f"r{i}", 3 + 5 * i, max_tokens=6) for i in range(5)))
    for turn in range(400):
        drive.scheduler.set_limits(flip[turn % 2](drive.capacity))
        drive.step()
    drive.run()
    drive.assert_all_ended_right()
