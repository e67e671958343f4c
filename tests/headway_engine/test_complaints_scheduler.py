"""What users of other engines complain about, as situations of ours. Rows: the engine survey, part C."""

from itertools import pairwise
from statistics import quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine import preemption
from headway_engine.protocol import BatchingMode
from headway_engine.sequence import FinishReason, Rejected, RejectReason, Step
from headway_engine.stepcost import StepCost
from headway_engine.tenants import TenantPolicy
from support.engine_builders import Drive, a_capacity, a_prompt, a_request, expected_output, some_limits

COST = StepCost(base_s=0.005, per_prefill_token_s=0.001, per_decode_s=0.0001, per_kv_token_s=0.0)


def modelled(step: Step) -> float:
    """A step's time by the linear model: prompts cost, so interference shows."""
    return COST.seconds(step.prefill_tokens, step.decode_sequences, step.kv_tokens)


def with_decoders(count: int, max_tokens: int = 60, **limits: int) -> Drive:
    """So many short requests that decode already, on a large cache."""
    capacity = a_capacity(kv_blocks=2000, max_model_tokens=4096)
    drive = Drive(capacity, some_limits(capacity, **limits), cost=modelled, prefix_caching=False)
    drive.submit(*(a_request(f"d{i}", 4, max_tokens=max_tokens) for i in range(count)))
    drive.step()
    return drive


def test_a_long_prompt_costs_decoders_one_chunk_a_step_and_no_more() -> None:
    """Row 1: a prompt of 32 chunks while eight others decode."""
    chunk = 16
    drive = with_decoders(8, max_batch_tokens=64, prefill_chunk_tokens=chunk)
    drive.submit(a_request("long", 32 * chunk))
    drive.run()
    worst = max(drive.widest_gap_s(f"d{i}") for i in range(8))
    assert worst <= COST.seconds(chunk, 8, 0) * 1.001
    drive.assert_all_ended_right()


def test_without_chunks_the_same_prompt_stops_everyone() -> None:
    """Row 1, the other way round: the test above can fail."""
    drive = with_decoders(8, max_batch_tokens=256, prefill_chunk_tokens=256)
    drive.submit(a_request("long", 512))
    drive.run()
    assert max(drive.widest_gap_s(f"d{i}") for i in range(8)) > COST.seconds(200, 8, 0)


def rise_of_p95_s(chunk: int, longest: int = 1024) -> float:
    """How much the 95th percentile of the gaps of 16 decoders rises while a prompt as long as the model
    allows is computed in chunks of this size."""
    capacity = a_capacity(kv_blocks=2000, max_model_tokens=longest, max_batch_tokens=longest + 16)
    drive = Drive(
        capacity, some_limits(capacity, prefill_chunk_tokens=chunk), cost=modelled, prefix_caching=False
    )
    drive.submit(*(a_request(f"d{i}", 4, max_tokens=longest) for i in range(16)))
    for _ in range(50):
        drive.step()
    arrived_s = drive.now_s
    drive.submit(a_request("long", longest - 1, max_tokens=1))
    while "long" not in drive.ended:
        drive.step()
    gaps = [(b, b - a) for i in range(16) for a, b in pairwise(drive.token_s[f"d{i}"])]
    before = [gap for at_s, gap in gaps if at_s <= arrived_s]
    during = [gap for at_s, gap in gaps if at_s > arrived_s]
    assert len(drive.output["d0"]) < longest - 4, "they decode to the end of the prefill"
    return quantiles(during, n=20, method="inclusive")[18] - quantiles(before, n=20, method="inclusive")[18]


@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_the_longest_prompt_raises_p95_of_sixteen_decoders_by_one_chunk_at_most(chunk: int) -> None:
    """Row 1, as it is promised: the rise is no more than a step that computes one chunk alone."""
    assert 0 < rise_of_p95_s(chunk) <= COST.seconds(chunk, 0, 0)


def test_without_chunks_the_longest_prompt_raises_it_by_many() -> None:
    """The other way round: bench/interference.py shows the same with the real model."""
    assert rise_of_p95_s(chunk=1040) > 10 * COST.seconds(64, 0, 0)


def test_every_decoder_gets_a_token_in_every_step_that_reads_a_prompt() -> None:
    """Row 2."""
    drive = with_decoders(8, max_batch_tokens=32, prefill_chunk_tokens=8)
    drive.submit(a_request("long", 200))
    while drive.scheduler._roster.sequences["long"].output_len == 0:
        step = drive.step()
        assert step is not None
        assert (step.decode_sequences, step.prefill_tokens > 0) == (8, True)


def test_an_endless_stream_of_prompts_does_not_stop_decoding() -> None:
    """Row 4: two prompts arrive before every step; the decoder gets on in every step all the same."""
    drive = with_decoders(1, max_tokens=50, max_batch_tokens=32, prefill_chunk_tokens=16)
    for turn in range(49):
        drive.submit(*(a_request(f"p{turn}.{k}", 24, max_tokens=1) for k in range(2)))
        drive.step()
    assert drive.ended["d0"] is FinishReason.LENGTH


def test_short_prompts_behind_a_long_one_get_their_first_token_within_two_steps() -> None:
    """Row 5."""
    drive = with_decoders(0, max_batch_tokens=64, prefill_chunk_tokens=16)
    drive.submit(a_request("long", 320), *(a_request(f"s{i}", 4) for i in range(10)))
    drive.step()
    drive.step()
    assert all(drive.output[f"s{i}"] for i in range(10))


def a_crowd_before_a_big_one() -> Drive:
    """Cache of 20 blocks, half of it taken; a big request that needs 15 stands first in the queue."""
    capacity = a_capacity(kv_blocks=20)
    drive = Drive(capacity, some_limits(capacity), prefix_caching=False)
    drive.submit(a_request("runs", 36, max_tokens=4))
    drive.step()
    drive.submit(a_request("big", 60, max_tokens=2))
    return drive


def test_small_requests_pass_a_big_one_that_does_not_fit() -> None:
    """Row 7, first half: the head of the queue does not hold up those who would fit."""
    drive = a_crowd_before_a_big_one()
    drive.submit(*(a_request(f"small{i}", 4, max_tokens=2) for i in range(3)))
    drive.step()
    assert {"small0", "small1", "small2"} <= drive.started_s.keys()
    assert "big" not in drive.started_s


@pytest.mark.parametrize("limit", ["age", "number"])
def test_the_big_one_is_admitted_though_small_ones_keep_coming(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 7, second half: after its age limit, or when enough have passed it, nobody passes any more."""
    if limit == "age":
        monkeypatch.setattr(preemption, "SKIP_ADMISSIONS", 10**9)
    else:
        monkeypatch.setattr(preemption, "SKIP_AGE_S", 1e9)
    drive = a_crowd_before_a_big_one()
    turns = 0
    while "big" not in drive.started_s:
        for k in range(2):
            drive.submit(a_request(f"small{turns}.{k}", 8, max_tokens=6))
        drive.step()
        turns += 1
        assert turns < 400
    passed = sum(1 for id, at in drive.started_s.items() if id.startswith("small"))
    if limit == "age":
        assert drive.now_s <= preemption.SKIP_AGE_S + 0.5
    else:
        assert passed <= preemption.SKIP_ADMISSIONS + 2


def test_a_prompt_larger_than_the_cache_is_refused_at_once_and_blocks_nobody() -> None:
    """Row 8: inside the model's length, but more than the cache will ever hold."""
    capacity = a_capacity(kv_blocks=8)
    drive = Drive(capacity, some_limits(capacity))
    answer = drive.admit(a_request("never", 100))
    assert isinstance(answer, Rejected)
    assert (answer.reason, "the KV cache holds 32" in answer.message) == (RejectReason.TOO_LONG, True)
    drive.submit(a_request("fine"))
    drive.run()
    drive.assert_all_ended_right()


@pytest.mark.parametrize("mode", list(BatchingMode))
def test_prompts_and_decodes_both_get_on_in_every_mode(mode: BatchingMode) -> None:
    """Row 10: in steps with both kinds of work at hand, both advance."""
    capacity = a_capacity()
    drive = Drive(capacity, some_limits(capacity, mode=mode, max_batch_tokens=16, prefill_chunk_tokens=8))
    drive.submit(a_request("short", 4, max_tokens=12), a_request("long", 60, max_tokens=2))
    drive.step()
    for _ in range(5):
        step = drive.step()
        assert step is not None
        assert step.decode_sequences == 1
        assert step.prefill_tokens > 0


def test_a_preempted_request_goes_on_before_newer_ones_of_its_class() -> None:
    """Row 13."""
    drive = Drive(a_capacity(kv_blocks=8), some_limits(a_capacity(kv_blocks=8)))
    drive.submit(a_request("a", 8, max_tokens=20), a_request("b", 8, max_tokens=20))
    while drive.scheduler.preemptions_total == 0:
        drive.step()
    drive.submit(*(a_request(f"new{i}", 3, max_tokens=2) for i in range(5)))
    preempted = next(s for s in drive.scheduler._roster.sequences.values() if s.preemptions)
    while preempted.computed == 0:
        assert not any(id.startswith("new") for id in drive.started_s)
        drive.step()
    assert min(drive.started_s.get(f"new{i}", 1e9) for i in range(5)) >= drive.now_s
    drive.run()
    drive.assert_all_ended_right()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 25), st.integers(-2, 2), st.integers(0, 12)),
        min_size=2,
        max_size=14,
    ),
    st.integers(5, 10),
)
def test_priorities_on_a_tiny_cache_break_nothing(
    arrivals: list[tuple[int, int, int, int]], blocks: int
) -> None:
    """Row 14: victims that are in the step already, at any priority; blocks are checked after each call."""
    capacity = a_capacity(kv_blocks=blocks, max_batch_tokens=16, max_batch_sequences=8)
    drive = Drive(capacity, some_limits(capacity, prefill_chunk_tokens=6))
    for number, (prompt, output, priority, pause) in enumerate(arrivals):
        drive.submit(a_request(f"r{number}", prompt, max_tokens=output, priority=priority))
        for _ in range(pause):
            drive.step()
    drive.run()
    drive.assert_all_ended_right()


def test_a_tenant_that_comes_back_from_idleness_does_not_take_over() -> None:
    """Row 16: while the one rested the other was served alone; from now on they share."""
    drive = Drive(a_capacity(kv_blocks=400), some_limits(max_batch_sequences=4), prefix_caching=False)
    drive.submit(*(a_request(f"busy{i}", 10, max_tokens=4, tenant="busy") for i in range(100)))
    for _ in range(60):
        drive.step()
    drive.submit(*(a_request(f"back{i}", 10, max_tokens=4, tenant="back") for i in range(100)))
    before = len(drive.started_s)
    while len(drive.started_s) < before + 40:
        drive.step()
    started = list(drive.started_s)[before:]
    assert 17 <= sum(id.startswith("back") for id in started) <= 23


STATES = [
    "waiting",
    "in a step for the first time",
    "in mid-prefill",
    "decoding",
    "preempted",
    "ended",
    "unknown",
]


@pytest.mark.parametrize("state", STATES)
def test_a_request_can_be_aborted_in_every_state(state: str) -> None:
    """Row 23: the blocks are free when abort returns, there is one Finished, and the neighbour goes on."""
    capacity = a_capacity(kv_blocks=12)
    drive = Drive(capacity, some_limits(capacity, max_batch_tokens=32, prefill_chunk_tokens=8))
    drive.submit(a_request("other", 18, max_tokens=25))
    drive.step()
    target = a_request("target", 12, max_tokens=4 if state == "ended" else 20)
    if state != "unknown":
        drive.submit(target)
    step: Step | None = None
    held = drive.scheduler.pool.used_blocks
    match state:
        case "in a step for the first time":
            step = drive.plan()
        case "in mid-prefill":
            drive.step()
            step = drive.plan()
        case "decoding":
            while len(drive.output["target"]) < 3:
                drive.step()
        case "preempted":
            while drive.scheduler._roster.sequences["target"].preemptions == 0:
                drive.step()
        case "ended":
            while "target" not in drive.ended:
                drive.step()
    if state in {"in a step for the first time", "in mid-prefill", "decoding"}:
        assert drive.scheduler.pool.used_blocks > held
    drive.abort("target")
    others = drive.scheduler._roster.sequences["other"]
    assert drive.scheduler.pool.used_blocks == len(others.block_table)
    if step is not None:
        drive.commit(step)
    drive.run()
    expected = {"unknown": None, "ended": FinishReason.LENGTH}.get(state, FinishReason.ABORT)
    assert drive.ended.get("target") is expected
    drive.assert_all_ended_right()


@pytest.mark.parametrize("min_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("trouble", ["none", "prefix hit", "preemption"])
def test_min_tokens_counts_output_only_and_is_exact(min_tokens: int, trouble: str) -> None:
    """Row 40: a stop token is obeyed from the min_tokens-th token of output on, whatever happened before."""
    prompt = a_prompt(12, seed=5)
    plain = expected_output(a_request("r", prompt, max_tokens=30), 256)
    request = a_request("r", prompt, max_tokens=20, min_tokens=min_tokens, stop_token_ids=tuple(plain[:4]))
    blocks = 9 if trouble == "preemption" else 64
    drive = Drive(a_capacity(kv_blocks=blocks), some_limits(a_capacity(kv_blocks=blocks)))
    if trouble == "prefix hit":
        drive.submit(a_request("before", prompt))
        drive.run()
    if trouble == "preemption":
        drive.submit(a_request("hog", 18, max_tokens=17, priority=1))
        drive.step()
    drive.submit(request)
    drive.run()
    if trouble == "prefix hit":
        assert drive.cached["r"] == 8
    assert drive.output["r"] == expected_output(request, 256)
    assert len(drive.output["r"]) >= min_tokens


def overcommitted_trace(drive: Drive) -> Drive:
    """Twenty requests whose prompts fill a cache that has room for two."""
    drive.submit(*(a_request(f"r{i}", 28, max_tokens=6) for i in range(20)))
    return drive.run()


def test_admission_by_whole_prompts_does_not_thrash() -> None:
    """Row 62: the cache has room for two whole requests, so two run at a time and nothing is redone."""
    capacity = a_capacity(kv_blocks=18)
    limits = some_limits(capacity, max_batch_tokens=32, prefill_chunk_tokens=4)
    whole = overcommitted_trace(Drive(capacity, limits, prefix_caching=False))
    whole.assert_all_ended_right()
    assert whole.scheduler.preemptions_total == 0


def test_a_request_is_not_preempted_again_and_again() -> None:
    """Row 62: everybody's cap holds within a class, and the trace ends."""
    capacity = a_capacity(kv_blocks=10, max_batch_sequences=8)
    drive = Drive(capacity, some_limits(capacity), prefix_caching=False)
    worst = 0
    drive.submit(*(a_request(f"r{i}", 4, max_tokens=30) for i in range(12)))
    while drive.scheduler.running or drive.scheduler.waiting:
        drive.step()
        worst = max([worst, *(s.preemptions for s in drive.scheduler._roster.sequences.values())])
    drive.assert_all_ended_right()
    assert 0 < worst <= preemption.MAX_PREEMPTIONS + 1


def test_the_victim_is_the_cheapest_and_not_the_newest() -> None:
    """Row 64: the newest has 24 tokens computed, an older one 9; the older one gives way."""
    capacity = a_capacity(kv_blocks=16)
    drive = Drive(capacity, some_limits(capacity), prefix_caching=False)
    drive.submit(a_request("first", 22, max_tokens=30), a_request("cheap", 6, max_tokens=30))
    drive.step()
    drive.submit(a_request("newest", 24, max_tokens=30))
    while drive.scheduler.preemptions_total == 0:
        drive.step()
    assert drive.scheduler._roster.sequences["cheap"].preemptions == 1
    drive.run()
    drive.assert_all_ended_right()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_outputs_with_the_prefix_cache_equal_those_without(data: st.DataObject) -> None:
    """Row 65: shared beginnings, cancels, tiny caches. The drive checks that hits hold the right tokens."""
    capacity = a_capacity(kv_blocks=data.draw(st.integers(8, 20)), block_tokens=data.draw(st.integers(1, 4)))
    arrivals = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 14), st.integers(1, 4), st.integers(1, 8), st.integers(0, 3), st.booleans()
            ),
            min_size=2,
            max_size=12,
        )
    )
    shared = a_prompt(14, seed=9)
    outputs = []
    for prefix_caching in (True, False):
        drive = Drive(capacity, some_limits(capacity, prefill_chunk_tokens=5), prefix_caching=prefix_caching)
        cancelled = set()
        for number, (common, own, output, pause, cancel) in enumerate(arrivals):
            prompt = (*shared[:common], *a_prompt(own, seed=number % 3))
            drive.submit(a_request(f"r{number}", prompt, max_tokens=output))
            for _ in range(pause):
                drive.step()
            if cancel:
                drive.abort(f"r{number}")
                cancelled.add(f"r{number}")
        drive.run()
        drive.assert_all_ended_right()
        outputs.append({id: out for id, out in drive.output.items() if id not in cancelled})
    assert outputs[0] == outputs[1]


def test_no_hit_across_salts() -> None:
    """Row 67: a tenant cannot learn by timing what another has asked."""
    drive = Drive()
    prompt = a_prompt(32)
    for number, salt in enumerate(["gold", "batch", "gold"]):
        drive.submit(a_request(f"r{number}", prompt, tenant=salt, cache_salt=salt))
        drive.run()
    assert drive.cached == {"r0": 0, "r1": 0, "r2": 28}


def test_lowering_the_cap_under_load_kills_nobody_and_raising_it_admits_in_the_next_step() -> None:
    """Row 83."""
    drive = Drive(limits=some_limits(max_batch_sequences=16))
    drive.submit(*(a_request(f"r{i}", 4, max_tokens=4 + i) for i in range(24)))
    drive.step()
    assert drive.scheduler.running == 16
    drive.scheduler.set_limits(some_limits(max_batch_sequences=4, generation=7))
    assert drive.scheduler.limits.generation == 7
    counts = []
    while drive.scheduler.running > 4:
        counts.append(drive.scheduler.running)
        drive.step()
    assert counts == sorted(counts, reverse=True)
    assert set(drive.ended.values()) == {FinishReason.LENGTH}
    drive.scheduler.set_limits(some_limits(max_batch_sequences=16, generation=8))
    drive.step()
    assert drive.scheduler.waiting == 0
    drive.run()
    drive.assert_all_ended_right()


def test_requests_that_come_while_the_engine_is_busy_are_one_batch() -> None:
    """Row 85: the batch is not closed when the first of them comes. The truth table is in test_window."""
    drive = Drive(limits=some_limits(mode=BatchingMode.DYNAMIC, window_ms=20, max_batch_sequences=4))
    drive.submit(*(a_request(f"a{i}", max_tokens=10) for i in range(4)))
    for i in range(4):
        drive.step()
        drive.submit(a_request(f"b{i}", max_tokens=2))
    drive.run()
    assert len({drive.started_s[f"b{i}"] for i in range(4)}) == 1


def test_no_class_starves_under_an_endless_stream_of_higher_ones() -> None:
    """Beside rows 4 and 13: one low request among high ones that would keep the engine busy for ever."""
    drive = Drive(
        limits=some_limits(max_batch_sequences=2, queue_timeout_ms=0), tenants=TenantPolicy(ageing_s=1.0)
    )
    drive.submit(a_request("low", 8, priority=-10))
    turns = 0
    while "low" not in drive.ended:
        drive.submit(a_request(f"high{turns}", 8, max_tokens=4, priority=10))
        drive.step()
        turns += 1
        assert turns < 300
