"""The numbers behind a decision, for status, events, logs and replay. Judges, and decides nothing."""

from dataclasses import dataclass, replace

from headway_engine.stepcost import StepCost
from headway_operator.metrics import Observation
from headway_operator.resource import Slo, Target
from headway_operator.tuner.feasibility import Assessment
from headway_operator.tuner.learn import Interval
from headway_operator.tuner.memory import Memory, Window
from headway_operator.tuner.quantiles import Exceedances, Judgement, exceedances, judge


@dataclass(frozen=True, slots=True)
class TargetEvidence:
    """How one target stands: counts since the last change, the percentile itself of the last interval."""

    target_s: float
    percentile: str
    judgement: Judgement
    seen: Exceedances
    window_s: float
    value_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The numbers behind a decision. None: not known."""

    ttft: TargetEvidence | None = None
    itl: TargetEvidence | None = None
    e2e: TargetEvidence | None = None
    cost: StepCost | None = None
    model_error: float | None = None  # last interval's mean step time against the model, as a share
    steps: float = 0.0
    predicted_step_s: float | None = None
    attainment: float | None = None  # share of offered requests that met every target, last interval
    offered: float | None = None  # requests behind that share
    window_s: float = 0.0
    offered_per_s: float | None = None
    finished_per_s: float | None = None
    refused_per_s: float | None = None
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    capacity_per_s: float | None = None  # requests a second that the deployment can serve inside the targets
    replicas_needed: int | None = None
    best_ttft_s: float | None = None
    best_itl_s: float | None = None
    measured_ttft_s: float | None = None  # at the target's percentile, or p95, in the last interval
    measured_itl_s: float | None = None
    measured_e2e_s: float | None = None


def gather(
    slo: Slo,
    memory: Memory,
    seen: Observation | None,
    interval: Interval,
    found: Assessment,
    predicted_s: float | None,
    now_s: float,
) -> Evidence:
    """All of it, from the memory after the decision and the interval before it."""
    evidence = Evidence(
        ttft=_target(slo.ttft, memory.ttft, memory.refused, interval.ttft_s, now_s),
        itl=_target(slo.itl, memory.itl, (), interval.itl_s, now_s),
        e2e=_target(slo.e2e, memory.e2e, memory.refused, interval.e2e_s, now_s),
        cost=memory.cost,
        steps=memory.sums.n,
        model_error=interval.speed_error,
        predicted_step_s=predicted_s,
        capacity_per_s=found.capacity_per_s,
        replicas_needed=found.replicas_needed,
        best_ttft_s=found.best_ttft_s,
        best_itl_s=found.best_itl_s,
        measured_ttft_s=interval.ttft_s,
        measured_itl_s=interval.itl_s,
        measured_e2e_s=interval.e2e_s,
    )
    if seen is None or seen.elapsed_s <= 0:
        return evidence
    share, judged = attainment(slo, seen)
    return replace(
        evidence,
        attainment=share,
        offered=judged,
        window_s=seen.elapsed_s,
        offered_per_s=_rate(seen.arrivals, seen),
        finished_per_s=_rate(seen.finished, seen),
        refused_per_s=_rate(_sum(seen.rejected, seen.failed), seen),
        output_tokens_per_s=_rate(seen.output_tokens, seen),
        prompt_tokens_per_s=_rate(seen.prompt_tokens, seen),
    )


def _target(
    target: Target | None,
    windows: tuple[Window, ...],
    refused: tuple[Window, ...],
    value_s: float | None,
    now_s: float,
) -> TargetEvidence | None:
    """One target over the windows kept; requests refused in the same time are misses of it."""
    if target is None:
        return None
    since_s = windows[0].at_s if windows else now_s
    seen = Exceedances()
    for window in (*windows, *(w for w in refused if w.at_s >= since_s)):
        seen = seen.plus(window.exceedances)
    verdict = judge(seen, target.percentile.miss_share)
    return TargetEvidence(
        target.target_s, target.percentile.value, verdict, seen, max(0.0, now_s - since_s), value_s
    )


def attainment(slo: Slo, seen: Observation) -> tuple[float | None, float | None]:
    """Share of offered requests that met every target, at most, and how many it is a share of.

    Histograms do not tell which request missed what, so the worst target counts; refused requests are
    misses. ITL is judged by the request's mean gap, the only per-request figure there is of it. A request is
    counted where its fate is known, which may be long after the interval in which it arrived.
    """
    refused = _sum(seen.rejected, seen.failed) or 0.0
    judged = ((seen.ttft, slo.ttft), (seen.tpot, slo.itl), (seen.e2e, slo.e2e))
    shares = []
    served = 0.0
    for histogram, target in judged:
        if histogram is not None and target is not None and histogram.count > 0:
            shares.append(1 - exceedances(histogram, target.target_s).high / histogram.count)
            served = histogram.count
    if not shares:
        return (0.0, refused) if refused > 0 else (None, None)
    return min(shares) * served / (served + refused), served + refused


def _sum(*values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _rate(count: float | None, seen: Observation) -> float | None:
    return None if count is None else count / seen.elapsed_s
