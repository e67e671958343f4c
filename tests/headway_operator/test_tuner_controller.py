"""Decisions: named situations, each a few observations and what must come of them."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec.structs import replace as with_values

from headway_engine.protocol import BatchingMode, Capacity, Limits, check_limits
from headway_engine.stepcost import StepCost
from headway_operator.metrics import Observation
from headway_operator.resource import Batching, Bound, Bounds, OnMetricsLoss, Slo, Tuning, TuningMode
from headway_operator.tuner.controller import Decision, State, Verdict, decide
from headway_operator.tuner.memory import Feasibility, Memory
from support.observations import CAPACITY, COST, a_histogram, a_slo, an_observation, statistics_of

SLO = a_slo(ttft_ms=1000, itl_ms=30)
SPEC = Batching(max_batch_tokens=2048)


def times(cost: StepCost, factor: float) -> StepCost:
    return StepCost(**{f: factor * getattr(cost, f) for f in cost.__struct_fields__})


def an_interval(
    *,
    budget: int = 2048,
    cost: StepCost = COST,
    gap_s: float | None = None,
    itl_s: float | None = None,
    ttft_s: float = 0.2,
    itl_ms: int = 30,
    ttft_ms: int = 1000,
    seed: int = 1,
    decode: tuple[int, ...] = (8, 12, 16),
    **values: Any,
) -> Observation:
    """Ten busy seconds under a budget, with steps that are full or decode only.

    Every gap is `gap_s` (default: a decode step), but a tenth of them is `itl_s` where given.
    """
    full = max(1, budget - 16)
    statistics = statistics_of(cost, steps=300, prefill=(0, full), decode=decode, seed=seed)
    usual_s = cost.seconds(0, 12, 9600) if gap_s is None else gap_s
    gaps = [usual_s] * 2700 + [usual_s if itl_s is None else itl_s] * 300
    return an_observation(
        statistics=statistics,
        itl=a_histogram(gaps, itl_ms),
        ttft=a_histogram([ttft_s] * 120, ttft_ms),
        arrivals=values.pop("arrivals", 120.0),
        finished=120.0,
        **values,
    )


@dataclass
class Case:
    """A tuner with a clock, so that a situation is a list of intervals."""

    slo: Slo = SLO
    tuning: Tuning = field(default_factory=Tuning)
    batching: Batching = SPEC
    capacity: Capacity = CAPACITY
    memory: Memory = field(default_factory=Memory)
    now_s: float = 1_000.0
    in_force: Limits | None = None

    def see(self, observation: Observation | None) -> Decision:
        self.now_s += 10
        decision = decide(
            self.slo,
            self.tuning,
            self.batching,
            self.capacity,
            self.in_force or self.batching.limits(),
            self.memory,
            observation,
            self.now_s,
        )
        check_limits(decision.limits, self.capacity)
        self.memory, self.in_force = decision.memory, decision.limits
        return decision

    def settle(self, **values: Any) -> Decision:
        """Intervals until nothing moves any more."""
        for seed in range(12):
            assert self.in_force is None or self.in_force.max_batch_tokens > 0
            budget = (self.in_force or self.batching.limits()).max_batch_tokens
            decision = self.see(an_interval(budget=budget, seed=seed, **values))
            if not decision.changes and seed > 2:
                return decision
        raise AssertionError("it does not settle")


def test_the_budget_is_what_the_itl_target_leaves_for_prompt_tokens() -> None:
    """7 ms + 33 us a token + the load of a dozen sequences, in 30 ms less 10 %: about 580 tokens."""
    case = Case()
    case.settle()
    assert case.in_force is not None
    load = 12.9 * (COST.per_decode_s + 800 * COST.per_kv_token_s)
    expected = (0.027 - 0.007 - load) / 33e-6 + 12.9
    assert case.in_force.max_batch_tokens == pytest.approx(expected, rel=0.08)


def test_the_queue_cap_is_what_can_be_computed_inside_the_ttft_target() -> None:
    case = Case()
    case.settle()
    assert case.in_force is not None
    rate = 560 / 0.027
    assert case.in_force.max_queued_tokens == pytest.approx(0.85 * (1 - 2 * 0.027) * rate, rel=0.25)


def test_every_change_explains_itself_with_numbers() -> None:
    decision = Case().see(an_interval())
    assert decision.verdict is Verdict.SHRINK
    words = {change.parameter: change.why for change in decision.changes}
    assert re.match(
        r"ITL binds \(one step of x0\.4 to x1\.5 at a time\)\. Step = 7(\.\d)? ms \+ 3[23] us x prefill",
        words["maxBatchTokens"],
    )
    assert "for 13 sequences; target 30 ms less 10 %" in words["maxBatchTokens"]
    assert "prompt tokens/s can be computed, and the target is 1 s" in words["maxQueuedTokens"]
    assert decision.reason.startswith("maxBatchTokens 2048 -> ")


def test_one_interval_moves_no_further_than_the_model_can_be_believed() -> None:
    shrink = Case(batching=Batching(max_batch_tokens=8192)).see(an_interval(budget=8192))
    assert 0.38 * 8192 <= shrink.limits.max_batch_tokens <= 0.42 * 8192
    grow = Case(batching=Batching(max_batch_tokens=200)).see(an_interval(budget=200))
    assert grow.verdict is Verdict.GROW
    assert 1.3 * 200 <= grow.limits.max_batch_tokens <= 1.5 * 200


def test_a_small_difference_is_noise_and_not_worth_a_change() -> None:
    case = Case()
    case.settle()
    for seed in range(20, 30):
        budget = case.in_force.max_batch_tokens if case.in_force else 0
        assert not case.see(an_interval(budget=budget, seed=seed)).changes


def test_a_budget_that_no_step_uses_does_not_grow() -> None:
    """Steps carry 60 prompt tokens: what 2,000 of them would take is anybody's guess."""
    case = Case(batching=Batching(max_batch_tokens=256, max_batch_sequences=128, max_queued_tokens=13_000))
    light = an_interval(budget=76)
    decision = case.see(light)
    assert decision.limits.max_batch_tokens == 256
    assert "too few prompt tokens" in decision.reason


def test_measured_gaps_may_only_tighten_the_model() -> None:
    case = Case()
    held = case.settle()
    assert held.memory.kappa == 1.0
    budget = held.limits.max_batch_tokens
    slow = case.see(an_interval(budget=budget, itl_s=0.036))
    assert slow.memory.kappa > 1.1
    assert slow.limits.max_batch_tokens < budget
    assert "times as long as modelled" in slow.reason
    for _ in range(20):
        relaxed = case.see(an_interval(budget=case.in_force.max_batch_tokens if case.in_force else 0))
    assert relaxed.memory.kappa == pytest.approx(1.0, abs=0.01)
    assert relaxed.memory.kappa >= 1.0


def test_late_first_tokens_shrink_the_queue_and_early_ones_let_it_grow_slowly() -> None:
    case = Case()
    case.settle()
    scale = case.memory.queue_scale
    case.see(an_interval(budget=600, ttft_s=1.4))
    assert case.memory.queue_scale == pytest.approx(0.85 * scale)
    case.see(an_interval(budget=600, ttft_s=0.1))
    assert case.memory.queue_scale == pytest.approx(0.85 * 1.03 * scale)


@pytest.mark.parametrize(
    ("bounds", "expected", "named"),
    [
        (Bounds(max_batch_tokens=Bound(min=1500)), 1500, "tuning.bounds.maxBatchTokens.min binds"),
        (Bounds(max_batch_tokens=Bound(max=300)), 300, "tuning.bounds.maxBatchTokens.max binds"),
    ],
)
def test_the_users_bounds_clamp_and_are_named(bounds: Bounds, expected: int, named: str) -> None:
    case = Case(tuning=Tuning(bounds=bounds))
    reasons = []
    for seed in range(6):
        decision = case.see(an_interval(budget=(case.in_force or SPEC.limits()).max_batch_tokens, seed=seed))
        reasons += [c.why for c in decision.changes if c.parameter == "maxBatchTokens"]
    assert decision.limits.max_batch_tokens == expected
    assert any(named in why for why in reasons)


def test_capacity_is_a_bound_too() -> None:
    small = replace_capacity(max_batch_tokens=256, max_batch_sequences=32)
    case = Case(capacity=small, batching=Batching(max_batch_tokens=8192, max_batch_sequences=128))
    decision = case.see(an_interval(budget=256))
    assert decision.limits.max_batch_tokens == 256
    assert decision.limits.max_batch_sequences == 32


def replace_capacity(**values: int) -> Capacity:
    return with_values(CAPACITY, **values)


def test_a_budget_below_the_sequences_takes_the_sequences_with_it() -> None:
    """A step holds no more sequences than tokens, so both must move together."""
    slow = StepCost(base_s=0.010, per_prefill_token_s=4e-4, per_decode_s=1e-4, per_kv_token_s=1e-8)
    case = Case(batching=Batching(max_batch_tokens=256, max_batch_sequences=128))
    case.settle(cost=slow)
    assert case.in_force is not None
    assert case.in_force.max_batch_tokens < 128
    assert case.in_force.max_batch_sequences <= case.in_force.max_batch_tokens


def test_without_an_itl_target_a_step_may_take_a_quarter_of_the_ttft_target() -> None:
    case = Case(slo=a_slo(ttft_ms=400))
    decision = case.settle(ttft_ms=400, ttft_s=0.1, itl_ms=0)
    expected = (0.09 - 0.007) / 33e-6
    assert decision.limits.max_batch_tokens == pytest.approx(expected, rel=0.3)
    assert "25% of the TTFT target" in decision.reason


def test_without_any_target_it_holds_and_says_why() -> None:
    for slo in (a_slo(), a_slo(e2e_ms=5000)):
        decision = Case(slo=slo).see(an_interval())
        assert decision.state is State.NO_TARGET
        assert decision.limits.same_values(SPEC.limits())
        assert "neither slo.ttft nor slo.itl" in decision.reason


def test_off_is_the_spec_and_nothing_else() -> None:
    case = Case()
    case.settle()
    case.tuning = Tuning(mode=TuningMode.OFF)
    decision = case.see(an_interval())
    assert decision.state is State.OFF
    assert decision.limits.same_values(SPEC.limits())


def test_recommend_decides_the_same_and_leaves_the_spec_in_force() -> None:
    auto, advice = Case(), Case(tuning=Tuning(mode=TuningMode.RECOMMEND))
    for seed in range(4):
        applied = auto.see(an_interval(seed=seed))
        advised = advice.see(an_interval(seed=seed))
    assert advised.limits.same_values(SPEC.limits())
    assert advised.recommended is not None
    assert advised.recommended.max_batch_tokens == pytest.approx(applied.limits.max_batch_tokens, rel=0.35)


# Edits.


def test_an_edited_limit_is_in_force_at_once_and_the_others_stay_tuned() -> None:
    case = Case()
    queue = case.settle().limits.max_queued_tokens
    case.batching = replace(SPEC, max_batch_tokens=777, window_ms=5)
    decision = case.see(None)
    assert decision.verdict is Verdict.EDIT
    assert decision.limits.max_batch_tokens == 777
    assert decision.limits.window_ms == 5
    assert decision.limits.max_queued_tokens == queue
    assert [change.parameter for change in decision.changes] == ["maxBatchTokens"]


def test_what_the_tuner_does_not_move_follows_the_spec() -> None:
    case = Case()
    tuned = case.settle().limits
    case.batching = replace(SPEC, mode=BatchingMode.DYNAMIC, max_queued_requests=5, queue_timeout_ms=1)
    limits = case.see(None).limits
    assert (limits.mode, limits.max_queued_requests, limits.queue_timeout_ms) == (BatchingMode.DYNAMIC, 5, 1)
    assert limits.max_batch_tokens == tuned.max_batch_tokens


def test_a_new_target_is_solved_at_once_from_the_stored_model() -> None:
    case = Case()
    case.settle()
    case.slo = a_slo(ttft_ms=1000, itl_ms=200)
    decision = case.see(None)
    assert decision.verdict is Verdict.GROW
    assert decision.limits.max_batch_tokens > 900, "as far as steps have been seen to be used"
    case.slo = a_slo(ttft_ms=1000, itl_ms=12)
    decision = case.see(None)
    assert decision.limits.max_batch_tokens < 200, "no trust region for an edit"


# Trials.


def grown() -> Case:
    """A case whose budget has just grown, at a met target."""
    case = Case(batching=Batching(max_batch_tokens=300))
    case.see(an_interval(budget=300))
    assert case.memory.trial is not None
    assert case.memory.trial.grew
    return case


def test_growth_that_breaks_the_target_unforeseen_is_undone_and_not_tried_again_for_five_minutes() -> None:
    case = grown()
    budget = case.in_force.max_batch_tokens if case.in_force else 0
    broken = case.see(an_interval(budget=budget, itl_s=0.050))
    assert broken.verdict is Verdict.REVERT
    assert broken.limits.max_batch_tokens == 300
    assert "ITL broke after the last change" in broken.reason
    for _ in range(29):
        later = case.see(an_interval(budget=300))
        assert later.limits.max_batch_tokens <= 300
    grew = [case.see(an_interval(budget=300)).limits.max_batch_tokens > 300 for _ in range(12)]
    assert any(grew)


def test_growth_is_not_blamed_for_more_load() -> None:
    case = grown()
    budget = case.in_force.max_batch_tokens if case.in_force else 0
    decision = case.see(an_interval(budget=budget, itl_s=0.050, arrivals=400.0))
    assert decision.verdict is not Verdict.REVERT


def test_growth_is_not_blamed_for_a_slower_engine() -> None:
    case = grown()
    budget = case.in_force.max_batch_tokens if case.in_force else 0
    decision = case.see(an_interval(budget=budget, cost=times(COST, 1.5), itl_s=0.050))
    assert decision.verdict is not Verdict.REVERT


def test_what_was_broken_before_the_change_is_no_reason_to_undo_it() -> None:
    case = Case(batching=Batching(max_batch_tokens=300))
    case.see(an_interval(budget=300, ttft_s=3.0))
    assert case.memory.trial is not None
    case.see(an_interval(budget=448, ttft_s=3.0))
    assert case.memory.no_growth_until_s == 0.0


# Blindness and quiet.


def test_a_failed_scrape_holds_everything() -> None:
    case = Case()
    before = case.settle().limits
    for missed in range(1, 10):
        decision = case.see(None)
        assert decision.state is State.METRICS_LOST
        assert decision.limits == before
        assert f"{missed} time" in decision.reason
    assert case.memory.missed == 9


def test_ten_failed_scrapes_return_to_the_last_limits_known_to_be_good() -> None:
    case = Case()
    good = case.settle().limits
    assert case.memory.good is not None
    case.memory = with_values(case.memory, tuned=with_values(good, max_batch_tokens=3000))
    decisions = [case.see(None) for _ in range(11)]
    assert decisions[8].limits.max_batch_tokens == 3000
    assert decisions[9].verdict is Verdict.FALL_BACK
    assert decisions[9].limits.max_batch_tokens == good.max_batch_tokens
    assert not decisions[10].changes


def test_on_metrics_loss_static_returns_to_the_spec_after_three() -> None:
    case = Case(tuning=Tuning(on_metrics_loss=OnMetricsLoss.STATIC))
    case.settle()
    decisions = [case.see(None) for _ in range(3)]
    assert decisions[1].limits.max_batch_tokens < 2048
    assert decisions[2].verdict is Verdict.FALL_BACK
    assert decisions[2].limits.same_values(SPEC.limits())


def test_the_first_reading_has_nothing_to_compare_with_and_is_no_loss() -> None:
    decision = Case().see(Observation(scraped=1, pods=0, elapsed_s=10))
    assert decision.state is State.LEARNING
    assert decision.memory.missed == 0
    assert not decision.changes


def test_no_traffic_is_load_zero_and_nothing_moves() -> None:
    case = Case()
    tuned = case.settle()
    quiet = an_observation(arrivals=0.0, finished=0.0, prompt_tokens=0.0, output_tokens=0.0, running=0.0)
    for _ in range(40):
        decision = case.see(quiet)
        assert not decision.changes
    assert decision.state is State.INSUFFICIENT_TRAFFIC
    assert decision.reason == "no traffic: limits stay"
    assert decision.memory.missed == 0
    assert decision.memory.cost == tuned.memory.cost, "what was learnt stays"


def test_sparse_traffic_freezes_feedback_but_the_model_learns_on() -> None:
    case = Case()
    sparse = an_interval(arrivals=0.4, itl_s=0.08, ttft_s=4.0)
    sparse = replace(sparse, arrivals=0.4, finished=0.4)
    for _ in range(5):
        decision = case.see(sparse)
        assert not decision.changes
    assert decision.state is State.INSUFFICIENT_TRAFFIC
    assert "too few to judge by" in decision.reason
    assert (decision.memory.kappa, decision.memory.queue_scale) == (1.0, 1.0)
    assert decision.memory.cost is not None


def test_decoding_alone_says_nothing_about_the_price_of_a_prompt_token() -> None:
    statistics = statistics_of(COST, steps=300, prefill=(0,))
    decision = Case().see(an_observation(statistics=statistics, arrivals=100.0))
    assert decision.state is State.LEARNING
    assert not decision.changes


def test_an_engine_without_step_statistics_is_left_alone() -> None:
    decision = Case().see(an_observation(ttft=a_histogram([0.1] * 100, 1000)))
    assert decision.state is State.LEARNING
    assert not decision.changes


# Feasibility.


def test_an_itl_target_under_the_lone_step_is_below_the_floor_and_replicas_do_not_help() -> None:
    case = Case(slo=a_slo(ttft_ms=1000, itl_ms=6))
    for seed in range(3):
        decision = case.see(an_interval(itl_ms=6, gap_s=0.0085, seed=seed))
    assert decision.feasibility is Feasibility.BELOW_ENGINE_FLOOR
    assert decision.evidence.best_itl_s == pytest.approx(0.0076, rel=0.05)
    assert "takes 7.6 ms per token; the ITL target is 6 ms" in decision.feasibility_reason


def test_a_floor_that_measurement_contradicts_is_not_claimed() -> None:
    """The model says 7.6 ms; but the gaps that clients saw were met."""
    case = Case(slo=a_slo(ttft_ms=1000, itl_ms=7))
    for seed in range(4):
        decision = case.see(an_interval(itl_ms=7, gap_s=0.006, seed=seed))
    assert decision.feasibility is not Feasibility.BELOW_ENGINE_FLOOR


def test_a_ttft_target_shorter_than_a_mean_prompt_is_below_the_floor() -> None:
    case = Case(slo=a_slo(ttft_ms=20, itl_ms=30))
    for seed in range(4):
        decision = case.see(an_interval(ttft_ms=20, ttft_s=0.3, seed=seed, arrivals=120.0))
    assert decision.feasibility is Feasibility.BELOW_ENGINE_FLOOR
    assert decision.evidence.best_ttft_s is not None
    assert decision.evidence.best_ttft_s > 0.02


def test_more_requests_than_fit_is_a_matter_of_replicas() -> None:
    case = Case()
    for seed in range(8):
        budget = (case.in_force or SPEC.limits()).max_batch_tokens
        decision = case.see(
            an_interval(budget=budget, seed=seed, arrivals=800.0, rejected=300.0, output_tokens=50_000.0)
        )
    assert decision.feasibility is Feasibility.CAPACITY_LIMITED
    assert decision.evidence.replicas_needed is not None
    assert decision.evidence.replicas_needed > 1
    assert "refused" in decision.feasibility_reason


def test_one_bad_interval_flags_nothing() -> None:
    case = Case()
    case.settle()
    decision = case.see(an_interval(budget=600, arrivals=800.0, rejected=300.0))
    assert decision.feasibility is Feasibility.FEASIBLE


def test_the_engine_counts_as_changed_when_steps_leave_the_model() -> None:
    """Half again as slow: three intervals later the model has it."""
    case = Case()
    case.settle()
    slow = times(COST, 1.5)
    for seed in (50, 51, 52):
        case.see(an_interval(budget=600, cost=slow, seed=seed))
    assert case.memory.cost is not None
    assert case.memory.cost.seconds(500, 12, 9600) == pytest.approx(slow.seconds(500, 12, 9600), rel=0.05)
