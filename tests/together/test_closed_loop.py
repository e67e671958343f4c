"""The real scheduler, telemetry, metrics and tuner in one loop on a virtual clock.

The engine is `support.sim_engine`: its step costs simulated time of a form that the tuner does not know
(a knee, noise, stalls). The traffic is synthetic: Poisson arrivals, lognormal lengths.
"""

import pytest

from headway_engine.protocol import Capacity, check_limits
from headway_operator.resource import Batching, Bound, Bounds, Tuning, TuningMode
from headway_operator.tuner.controller import State, Verdict
from headway_operator.tuner.memory import Feasibility, from_status, to_status
from headway_operator.tuner.quantiles import exceedances
from support.observations import CAPACITY, a_slo
from support.sim_engine import Arrival, Plant, Tick, TrueCost, poisson

SLO = a_slo(ttft_ms=1000, itl_ms=30)
TOO_LARGE = Batching(max_batch_tokens=8192, prefill_chunk_tokens=8192)
TOO_SMALL = Batching(max_batch_tokens=64, max_batch_sequences=64, prefill_chunk_tokens=64)


def itl_misses(tick: Tick, target_s: float = 0.030) -> float:
    """Share of gaps over the target in one interval."""
    assert tick.observation.itl is not None
    seen = exceedances(tick.observation.itl, target_s)
    return seen.high / max(1.0, seen.samples)


def ttft_misses(tick: Tick, target_s: float = 1.0) -> float:
    assert tick.observation.ttft is not None
    seen = exceedances(tick.observation.ttft, target_s)
    return seen.high / max(1.0, seen.samples)


def changes(ticks: list[Tick], parameter: str = "maxBatchTokens") -> int:
    return sum(any(c.parameter == parameter for c in tick.decision.changes) for tick in ticks)


def busy_plant(
    batching: Batching = TOO_LARGE, *, rate: float = 22, seconds: float = 400, **more: object
) -> Plant:
    plant = Plant(SLO, batching, CAPACITY, TrueCost(), **more)  # type: ignore[arg-type]
    plant.offer(poisson(rate, seconds=seconds))
    return plant


def test_far_too_large_a_budget_breaks_itl_and_is_brought_under_the_target_in_three_intervals() -> None:
    plant = busy_plant(TOO_LARGE, rate=25)
    first = plant.run(3)
    assert max(itl_misses(tick) for tick in first) > 0.05, "the start is bad enough to be a test"
    rest = plant.run(7)
    assert all(itl_misses(tick) <= 0.05 for tick in rest)
    assert all(ttft_misses(tick) <= 0.05 for tick in rest)
    assert first[0].decision.verdict is Verdict.SHRINK
    assert "ITL binds" in first[0].decision.reason


def test_far_too_small_a_budget_grows_until_what_arrives_is_served_inside_the_targets() -> None:
    plant = busy_plant(TOO_SMALL, rate=22)
    ticks = plant.run(9)
    assert ticks[0].decision.verdict is Verdict.GROW
    budgets = [tick.limits.max_batch_tokens for tick in ticks]
    assert budgets[3] > 2 * budgets[0]
    assert all(itl_misses(tick) <= 0.05 for tick in ticks)
    assert all(ttft_misses(tick) <= 0.05 for tick in ticks[4:])


def test_it_settles_and_then_leaves_well_alone() -> None:
    """Churn: at most 30 changes an hour in steady load, so about one in two minutes; and small ones."""
    plant = busy_plant(TOO_LARGE)
    plant.run(6)
    settled = plant.run(24)
    assert changes(settled) <= 2
    budgets = [tick.limits.max_batch_tokens for tick in settled]
    assert max(budgets) <= 1.25 * min(budgets)


def test_after_a_step_in_load_it_comes_back_under_the_targets() -> None:
    plant = Plant(SLO, TOO_LARGE, CAPACITY, TrueCost())
    plant.offer(poisson(6, seconds=200))
    plant.run(5)
    plant.offer(poisson(18, seconds=150, start_s=plant.now_s, seed=3))
    after = plant.run(8)
    assert all(itl_misses(tick) <= 0.05 for tick in after[3:])
    assert all(ttft_misses(tick) <= 0.05 for tick in after[3:])


def test_when_the_engine_slows_by_a_third_it_learns_so_and_comes_back() -> None:
    cost = TrueCost()
    plant = Plant(SLO, TOO_LARGE, CAPACITY, cost)
    plant.offer(poisson(18, seconds=400))
    before = plant.run(7)[-1]
    cost.slower = 1.3
    after = plant.run(8)
    assert itl_misses(after[0]) > 0.05, "the slowdown hurts before it is answered"
    assert all(itl_misses(tick) <= 0.05 for tick in after[3:])
    assert after[-1].limits.max_batch_tokens < before.limits.max_batch_tokens


def test_overload_is_answered_by_refusing_so_that_the_accepted_stay_inside_the_target() -> None:
    plant = busy_plant(TOO_LARGE, rate=60, seconds=120)
    ticks = plant.run(9)
    last = ticks[5:]
    assert all(itl_misses(tick) <= 0.05 for tick in last)
    assert all(ttft_misses(tick) <= 0.05 for tick in last)
    assert all((tick.observation.rejected or 0) > 0 for tick in last)
    decision = ticks[-1].decision
    assert decision.feasibility is Feasibility.CAPACITY_LIMITED
    assert decision.evidence.replicas_needed is not None
    assert decision.evidence.replicas_needed >= 2
    assert "replicas are needed" in decision.feasibility_reason


def test_two_replicas_carry_what_one_could_not() -> None:
    """The number that the overloaded deployment was told is enough."""
    plant = Plant(SLO, TOO_LARGE, CAPACITY, TrueCost(), pods=2)
    plant.offer(poisson(45, seconds=120))
    ticks = plant.run(8)
    assert all(itl_misses(tick) <= 0.05 for tick in ticks[4:])
    assert all(not tick.observation.rejected for tick in ticks[4:])
    assert ticks[-1].decision.feasibility is Feasibility.FEASIBLE


def test_an_itl_target_below_the_engines_floor_is_flagged_with_what_is_possible() -> None:
    """A lone request's step takes 7 ms whatever the limits; the target is 6 ms."""
    plant = Plant(a_slo(ttft_ms=1000, itl_ms=6), TOO_LARGE, CAPACITY, TrueCost())
    plant.offer(poisson(15, seconds=200))
    ticks = plant.run(10)
    assert ticks[2].decision.feasibility is Feasibility.BELOW_ENGINE_FLOOR
    last = ticks[-1].decision
    assert last.feasibility is Feasibility.BELOW_ENGINE_FLOOR
    assert last.evidence.best_itl_s == pytest.approx(0.007, rel=0.15)
    assert "replicas do not help" in last.feasibility_reason
    assert all(ttft_misses(tick) <= 0.05 for tick in ticks), "what cannot be had does not ruin the rest"


def test_a_feasible_promise_is_never_called_infeasible() -> None:
    for batching in (TOO_LARGE, TOO_SMALL):
        ticks = busy_plant(batching, rate=15, seconds=100).run(10)
        found = {tick.decision.feasibility for tick in ticks}
        assert found <= {Feasibility.FEASIBLE, Feasibility.UNKNOWN}


def test_without_any_traffic_nothing_moves() -> None:
    plant = Plant(SLO, TOO_LARGE, CAPACITY, TrueCost())
    ticks = plant.run(5)
    assert all(tick.decision.verdict is Verdict.HOLD for tick in ticks)
    assert plant.limits.same_values(TOO_LARGE.limits())
    assert ticks[-1].decision.reason == "no traffic: limits stay"


def test_a_lull_does_not_undo_what_was_learnt() -> None:
    plant = busy_plant(TOO_LARGE, seconds=35)
    plant.run(9)  # the last two see the end of it
    tuned = plant.limits
    lull = plant.run(80)
    assert all(not tick.decision.changes for tick in lull)
    assert plant.limits.same_values(tuned)
    plant.offer(poisson(22, seconds=50, start_s=plant.now_s))
    assert all(itl_misses(tick) <= 0.05 for tick in plant.run(4))


def test_sparse_traffic_freezes_the_feedback_and_says_so() -> None:
    plant = Plant(SLO, TOO_LARGE, CAPACITY, TrueCost())
    plant.offer(Arrival(5 + 30 * i, 400, 40) for i in range(20))
    ticks = plant.run(30)
    assert all(not tick.decision.changes for tick in ticks)
    last = ticks[-1].decision
    assert last.state is State.INSUFFICIENT_TRAFFIC
    assert last.memory.kappa == 1.0
    assert last.memory.queue_scale == 1.0


def test_it_never_leaves_the_users_bounds_nor_capacity() -> None:
    bounds = Bounds(max_batch_tokens=Bound(min=1024, max=4096), max_queued_tokens=Bound(max=9000))
    plant = Plant(
        SLO,
        Batching(max_batch_tokens=4096),
        CAPACITY,
        TrueCost(),
        tuning=Tuning(interval_s=5.0, bounds=bounds),
    )
    plant.offer(poisson(22, seconds=200))
    ticks = plant.run(8)
    for tick in ticks:
        check_limits(tick.decision.limits, CAPACITY)
        assert 1024 <= tick.decision.limits.max_batch_tokens <= 4096
        if tick is not ticks[0]:
            assert tick.limits.max_queued_tokens <= 9000
    named = [c.why for tick in ticks for c in tick.decision.changes if c.parameter == "maxBatchTokens"]
    assert "tuning.bounds.maxBatchTokens.min binds" in named[-1]


def test_recommend_says_the_same_and_touches_nothing() -> None:
    plant = busy_plant(TOO_LARGE, tuning=Tuning(interval_s=5.0, mode=TuningMode.RECOMMEND))
    ticks = plant.run(6)
    assert all(tick.limits.same_values(TOO_LARGE.limits()) for tick in ticks)
    recommended = ticks[-1].decision.recommended
    assert recommended is not None
    auto = busy_plant(TOO_LARGE)
    auto.run(6)
    assert recommended.max_batch_tokens == pytest.approx(auto.limits.max_batch_tokens, rel=0.35)


def test_a_restarted_controller_goes_on_where_the_other_stopped() -> None:
    kept, restarted = busy_plant(seconds=150), busy_plant(seconds=150)
    kept.run(5)
    restarted.run(5)
    restarted.restart_controller()
    assert restarted.memory == from_status(to_status(kept.memory))
    for one, other in zip(kept.run(5), restarted.run(5), strict=True):
        assert one.decision.limits.max_batch_tokens == other.decision.limits.max_batch_tokens
        assert one.decision.verdict is other.decision.verdict


def test_a_tighter_target_is_met_at_the_next_interval_without_creeping_there() -> None:
    """An edit of the targets is solved at once from the stored model, outside the trust region."""
    plant = busy_plant(TOO_LARGE, seconds=200)
    plant.run(6)
    plant.change_slo(a_slo(ttft_ms=1000, itl_ms=18))
    edited = plant.tick()
    assert edited.decision.changes
    assert all(itl_misses(tick, 0.018) <= 0.06 for tick in plant.run(4))


def test_a_slow_engine_with_a_tiny_budget_is_tuned_on_a_fine_grid() -> None:
    """A CPU engine: 20 ms + 0.9 ms a token. The right budget is near a hundred tokens."""
    capacity = Capacity(
        max_batch_tokens=2048,
        max_batch_sequences=32,
        kv_blocks=1000,
        block_tokens=16,
        max_model_tokens=2048,
    )
    batching = Batching(
        max_batch_tokens=2048,
        max_batch_sequences=32,
        prefill_chunk_tokens=2048,
        capacity_max_batch_tokens=2048,
        capacity_max_batch_sequences=32,
    )
    cost = TrueCost(per_token_s=0.9e-3, floor_s=0.0, base_s=0.02, noise=0.15)
    plant = Plant(a_slo(ttft_ms=3000, itl_ms=150), batching, capacity, cost)
    plant.offer(poisson(1.4, seconds=400, prompt_tokens=350, output_tokens=60))
    ticks = plant.run(25)
    assert max(itl_misses(tick, 0.150) for tick in ticks[:4]) > 0.05
    settled = ticks[6:]
    missed = sum(itl_misses(tick, 0.150) for tick in settled) / len(settled)
    assert missed <= 0.05
    assert all(70 <= tick.limits.max_batch_tokens <= 140 for tick in settled)


def test_another_interval_gives_the_same_place() -> None:
    """Learning goes by time and not by looks: more of them settle at about the same budget."""
    slow, quick = busy_plant(seconds=70), busy_plant(seconds=70, tuning=Tuning(interval_s=2.0))
    slow.run(7)
    quick.run(18)
    assert quick.limits.max_batch_tokens == pytest.approx(slow.limits.max_batch_tokens, rel=0.3)
    assert changes(quick.ticks[9:]) <= 5
