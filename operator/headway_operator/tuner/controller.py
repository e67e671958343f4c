"""Observation to Decision: which limits should be in force now, and why.

Pure: time is an argument and the next memory is part of the answer. Knows nothing of pods, HTTP or
Kubernetes.
"""

from dataclasses import dataclass, replace

import msgspec

from headway_engine.protocol import Capacity, Limits
from headway_operator.metrics import Observation
from headway_operator.resource import Batching, OnMetricsLoss, Slo, Tuning, TuningMode
from headway_operator.tuner.adopt import adopt, fit_in, merge, same_tunables
from headway_operator.tuner.decision import Change, Decision, State, Verdict, differences
from headway_operator.tuner.evidence import gather
from headway_operator.tuner.explain import explain, standing
from headway_operator.tuner.feasibility import assess, settle
from headway_operator.tuner.learn import (
    Interval,
    is_sparse,
    judged,
    knows_steps,
    learn,
    requests_in_window,
    traffic_needed,
)
from headway_operator.tuner.memory import Feasibility, Memory, Trial
from headway_operator.tuner.quantiles import Judgement
from headway_operator.tuner.solve import solve
from headway_operator.tuner.wishes import pressed_by, regretted, take, unasked

__all__ = ["Change", "Decision", "State", "Verdict", "decide"]


def decide(
    slo: Slo,
    tuning: Tuning,
    batching: Batching,
    capacity: Capacity,
    current: Limits,
    memory: Memory,
    observation: Observation | None,
    now_s: float,
) -> Decision:
    """The limits that should be in force from now on.

    `current` is what the engines report, `capacity` what one of them reserved. `observation` is None
    when no pod could be scraped, which is not the same as no traffic.
    """
    decision = _decide(slo, tuning, batching, capacity, current, memory, observation, now_s)
    return replace(decision, at_s=now_s)


def _decide(
    slo: Slo,
    tuning: Tuning,
    batching: Batching,
    capacity: Capacity,
    current: Limits,
    memory: Memory,
    observation: Observation | None,
    now_s: float,
) -> Decision:
    # 1. Take over what the user edited.
    memory, edits, free = adopt(slo, tuning, batching, capacity, memory)
    if tuning.mode is TuningMode.OFF:
        return _untuned(memory, batching, capacity, edits, State.OFF, "tuning.mode is Off")
    if slo.ttft is None and slo.itl is None:
        why = "the resource has neither slo.ttft nor slo.itl: there is nothing to tune for"
        return _untuned(memory, batching, capacity, edits, State.NO_TARGET, why)
    acting = tuning.mode is TuningMode.AUTO
    # 2. Learn from what happened, or count that nothing was seen.
    interval = Interval()
    if observation is None and not free:
        return _blind(memory, batching, capacity, tuning, edits, acting, now_s)
    if observation is not None:
        settled = not acting or same_tunables(current, _tuned(memory))
        memory, interval = learn(memory, observation, slo, current, now_s, settled=settled)
    # 3. Undo a change that made things worse.
    if acting and observation is not None:
        memory, reverted = _watch_trial(memory, slo, interval, now_s)
        if reverted:
            return _finish(slo, tuning, batching, capacity, memory, observation, interval, reverted, now_s)
    # 4. Work out what the model asks for, and move there.
    held = _reason_to_hold(memory, observation)
    if held is not None:
        memory = unasked(memory)
        outcome = _Outcome(Verdict.EDIT if edits else Verdict.HOLD, held[0], held[1], edits)
    else:
        memory, outcome = _move(slo, tuning, batching, capacity, memory, edits, interval, now_s, free=free)
    return _finish(slo, tuning, batching, capacity, memory, observation, interval, outcome, now_s)


FREEZE_S = 300.0
MISSES_TO_FALL_BACK = 10
MISSES_TO_GO_STATIC = 3
TRIAL_INTERVALS = 2
SAME_LOAD = 1.25


@dataclass(frozen=True, slots=True)
class _Outcome:
    verdict: Verdict
    state: State
    reason: str
    changes: tuple[Change, ...] = ()
    predicted_s: float | None = None


def _tuned(memory: Memory) -> Limits:
    assert memory.tuned is not None, "adopt comes first"
    return memory.tuned


def _untuned(
    memory: Memory,
    batching: Batching,
    capacity: Capacity,
    edits: tuple[Change, ...],
    state: State,
    why: str,
) -> Decision:
    """The limits of the spec, as they stand there."""
    base = fit_in(batching.limits(), capacity)
    return Decision(
        limits=base,
        verdict=Verdict.EDIT if edits else Verdict.HOLD,
        state=state,
        reason=why,
        memory=msgspec.structs.replace(memory, tuned=base, trial=None),
        changes=edits,
    )


def _blind(
    memory: Memory,
    batching: Batching,
    capacity: Capacity,
    tuning: Tuning,
    edits: tuple[Change, ...],
    acting: bool,
    now_s: float,
) -> Decision:
    """No pod could be scraped: hold, and after a while go back to what is known to be good."""
    missed = memory.missed + 1
    memory = msgspec.structs.replace(memory, missed=missed)
    tuned, base = _tuned(memory), fit_in(batching.limits(), capacity)
    verdict, changes = (Verdict.EDIT if edits else Verdict.HOLD), edits
    reason = f"no engine could be scraped {missed} {'time' if missed == 1 else 'times'} in a row: limits stay"
    if tuning.on_metrics_loss is OnMetricsLoss.STATIC and missed >= MISSES_TO_GO_STATIC:
        target, where = base, "the limits of the spec are in force until one answers (onMetricsLoss: Static)"
    elif missed >= MISSES_TO_FALL_BACK and memory.good is not None:
        target, where = (
            fit_in(merge(base, memory.good), capacity),
            "the last limits known to be good are in force",
        )
    else:
        target, where = tuned, ""
    if where and acting:
        reason = f"no engine could be scraped {missed} times in a row: {where}"
        moved = differences(tuned, target, lambda _: reason)
        if moved:
            verdict, changes = Verdict.FALL_BACK, (*edits, *moved)
            memory = msgspec.structs.replace(memory, tuned=target, trial=None, changed_at_s=now_s)
    return Decision(
        limits=_tuned(memory) if acting else base,
        verdict=verdict,
        state=State.METRICS_LOST,
        reason=reason,
        memory=memory,
        changes=changes,
        feasibility=memory.feasibility,
    )


def _violated(memory: Memory, slo: Slo) -> tuple[str, ...]:
    found = (("ITL", memory.itl, slo.itl), ("TTFT", memory.ttft, slo.ttft))
    since_s = memory.changed_at_s
    return tuple(
        name for name, windows, target in found if judged(windows, target, since_s)[0] is Judgement.VIOLATED
    )


def _watch_trial(
    memory: Memory, slo: Slo, interval: Interval, now_s: float
) -> tuple[Memory, _Outcome | None]:
    """Undo the last growth when a target broke that held before, under the same load and engine speed.

    The model said that it would hold, so the model is wrong there: growth stays off for five minutes.
    """
    trial = memory.trial
    if trial is None:
        return memory, None
    broken = [name for name in _violated(memory, slo) if name not in trial.violated_before]
    load = memory.load
    same_load = (
        load.arrivals_per_s <= SAME_LOAD * trial.arrivals_per_s
        and load.decode_sequences <= SAME_LOAD * trial.decode_sequences + 1
    )
    if broken and trial.grew and same_load and not interval.speed_changed:
        before = merge(_tuned(memory), trial.before)
        reason = (
            f"{' and '.join(broken)} broke after the last change, at the same load and engine speed: back to "
            f"what it was, and no growth for {FREEZE_S / 60:.0f} min"
        )
        changes = differences(_tuned(memory), before, lambda _: "the last change is undone")
        memory = msgspec.structs.replace(
            memory,
            tuned=before,
            trial=None,
            no_growth_until_s=now_s + FREEZE_S,
            courses=regretted(memory.courses, _tuned(memory), before, now_s),
            changed_at_s=now_s,
        )
        return memory, _Outcome(Verdict.REVERT, State.ACTIVE, reason, changes)
    over = trial.intervals + 1 >= TRIAL_INTERVALS
    trial_next = None if over else msgspec.structs.replace(trial, intervals=trial.intervals + 1)
    return msgspec.structs.replace(memory, trial=trial_next), None


def _reason_to_hold(memory: Memory, observation: Observation | None) -> tuple[State, str] | None:
    """Why the model may not be acted upon yet; None when it may."""
    if observation is not None and observation.pods == 0:
        return State.LEARNING, "first reading of the engines: there is nothing to compare it with yet"
    if observation is not None and is_sparse(memory):
        per_5_min = requests_in_window(memory)
        if per_5_min < 0.5:
            return State.INSUFFICIENT_TRAFFIC, "no traffic: limits stay"
        needed = traffic_needed(memory)
        return (
            State.INSUFFICIENT_TRAFFIC,
            f"{per_5_min:.0f} requests in five minutes are too few to judge by ({needed} needed): "
            "limits stay",
        )
    if not knows_steps(memory):
        return State.LEARNING, "too few steps with prompt tokens seen to know what one costs"
    if observation is not None and (observation.statistics is None or observation.statistics.n < 1):
        return State.ACTIVE, "no step ran since the last look: limits stay"
    return None


def _move(
    slo: Slo,
    tuning: Tuning,
    batching: Batching,
    capacity: Capacity,
    memory: Memory,
    edits: tuple[Change, ...],
    interval: Interval,
    now_s: float,
    *,
    free: bool,
) -> tuple[Memory, _Outcome]:
    """Go where the model points, if it is far enough from here to be worth a change."""
    state = State.ACTIVE if tuning.mode is TuningMode.AUTO else State.ADVISORY
    start = _tuned(memory)
    solution = solve(slo, tuning, batching, capacity, start, memory, free=free)
    assert solution is not None, "there is a model and a target"
    frozen = now_s < memory.no_growth_until_s
    broken = _violated(memory, slo)
    pressed = pressed_by(
        slo,
        interval,
        broken,
        least_bad=solution.least_bad,
        room_helps=memory.feasibility is not Feasibility.CAPACITY_LIMITED,
    )
    memory, values = take(memory, solution, start, pressed, now_s, frozen=frozen, free=free)
    wanted = msgspec.structs.replace(start, **values)
    words = explain(slo, memory, solution, start, wanted)
    changes = differences(start, wanted, lambda name: words[name])
    if not changes:
        verdict = Verdict.EDIT if edits else Verdict.HOLD
        return memory, _Outcome(
            verdict, state, standing(slo, memory, solution, frozen), edits, solution.predicted_s
        )
    grew = wanted.max_batch_tokens > start.max_batch_tokens or (
        wanted.max_batch_tokens == start.max_batch_tokens
        and wanted.max_queued_tokens > start.max_queued_tokens
    )
    memory = msgspec.structs.replace(
        memory,
        tuned=wanted,
        trial=Trial(
            at_s=now_s,
            before=start,
            grew=grew,
            arrivals_per_s=memory.load.arrivals_per_s,
            decode_sequences=memory.load.decode_sequences,
            violated_before=broken,
        ),
        changed_at_s=now_s,
    )
    reason = "; ".join(f"{c.parameter} {c.old} -> {c.new}: {c.why}" for c in changes)
    verdict = Verdict.GROW if grew else Verdict.SHRINK
    return memory, _Outcome(verdict, state, reason, (*edits, *changes), solution.predicted_s)


def _finish(
    slo: Slo,
    tuning: Tuning,
    batching: Batching,
    capacity: Capacity,
    memory: Memory,
    observation: Observation | None,
    interval: Interval,
    outcome: _Outcome,
    now_s: float,
) -> Decision:
    """Everything that goes with an outcome: what is known good, feasibility, the numbers."""
    tuned = _tuned(memory)
    solution = solve(slo, tuning, batching, capacity, tuned, memory, free=False)
    found = assess(slo, tuning.bounds, capacity, tuned, memory, solution, interval)
    if observation is not None and outcome.state is not State.INSUFFICIENT_TRAFFIC:
        memory = settle(memory, found, now_s)
    evidence = gather(slo, memory, observation, interval, found, outcome.predicted_s, now_s)
    judgements = [t.judgement for t in (evidence.ttft, evidence.itl) if t is not None]
    if not outcome.changes and judgements and all(j is Judgement.MET for j in judgements):
        memory = msgspec.structs.replace(memory, good=tuned, good_at_s=now_s)
    acting = tuning.mode is TuningMode.AUTO
    base = fit_in(batching.limits(), capacity)
    agreed = found.verdict is memory.feasibility
    return Decision(
        limits=tuned if acting else base,
        verdict=outcome.verdict,
        state=outcome.state,
        reason=outcome.reason,
        memory=memory,
        changes=outcome.changes,
        recommended=None if acting or same_tunables(tuned, base) else tuned,
        feasibility=memory.feasibility,
        feasibility_reason=found.reason if agreed else "",
        evidence=evidence,
    )
