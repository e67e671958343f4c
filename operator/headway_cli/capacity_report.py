"""What a simulation came to: attainment, latencies, goodput, refusals, cost and the tuner's moves, as values.

Attainment is the share of OFFERED requests that met every target, by the definitions of `report`: a refused
request is a miss. Percentiles cover finished requests only. Knows nothing of how it is printed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway_cli.report import Spread, percentile, spread
from headway_cli.simulated_engine import Fate, Journey
from headway_cli.simulation import Outcome
from headway_engine.protocol import Limits
from headway_operator.resource import Slo, Target
from headway_operator.tuner.memory import Feasibility


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFigures:
    """One latency: its percentiles, its target, and the share that kept it.

    `kept` is of the offered requests for TTFT and e2e, of all gaps for ITL; None without a target or without
    anything to judge.
    """

    name: str
    spread: Spread | None
    target_s: float | None
    percentile: str | None
    kept: float | None
    met: bool | None  # the share is as large as the percentile asks


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Requests that were refused or failed for one reason, with the words that one of them was told."""

    why: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One parameter that the tuner moved (or, in Recommend, would have)."""

    at_s: float
    parameter: str
    old: int
    new: int
    why: str
    reason: str  # of the decision it was part of


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One look of the tuner: what it saw in the interval before, and what was in force in it."""

    at_s: float
    replicas: int
    replicas_needed: int | None
    offered_per_s: float | None
    refused_per_s: float | None
    output_tokens_per_s: float | None
    attainment: float | None
    ttft_s: float | None  # at the target's percentile, or p95
    itl_s: float | None
    max_batch_tokens: int
    max_batch_sequences: int
    prefill_chunk_tokens: int
    max_queued_tokens: int
    feasibility: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the replicas cost. An accelerator is a whole replica where the resource asks for none."""

    accelerators: int  # all replicas together
    accelerator_hours: float
    total: float
    per_million_output_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tuner found: the last time that it said no, or else its last word.

    `share` is of its ticks that said the same; `replicas_needed` is the most that it asked for.
    """

    feasibility: str
    reason: str
    share: float
    replicas_needed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The whole answer."""

    name: str
    replicas: int
    duration_s: float
    offered: int
    finished: int
    refused: int
    met_slo: int
    attainment: float  # 0..1, of the offered
    goodput_rps: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    utilisation: float  # share of the replicas' time in which a step ran
    steps: int
    preemptions: int
    prefix_hit_tokens: int
    targets: tuple[TargetFigures, ...]
    meets: bool  # every target that there is, with no more refused than one of them allows
    refusals: tuple[Refusals, ...]
    moves: tuple[Move, ...]
    ticks: tuple[Moment, ...]
    verdict: Verdict
    limits: Limits  # at the end
    cost: Cost | None


_INFEASIBLE = (Feasibility.BELOW_ENGINE_FLOOR, Feasibility.CAPACITY_LIMITED)


def figures(outcome: Outcome, *, price_per_hour: float | None = None) -> Figures:
    """The outcome against the resource's targets. The price is that of one accelerator for an hour."""
    resource, journeys = outcome.setup.resource, outcome.journeys
    slo = resource.slo
    finished = [j for j in journeys if j.fate is Fate.FINISHED]
    met = sum(_meets(j, slo) for j in finished)
    offered, duration_s = len(journeys), outcome.ended_s
    output_tokens = sum(j.tokens for j in journeys)
    targets = _targets(outcome, finished)

    def per_s(count: float) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return Figures(
        name=resource.name,
        replicas=outcome.setup.replicas,
        duration_s=duration_s,
        offered=offered,
        finished=len(finished),
        refused=offered - len(finished),
        met_slo=met,
        attainment=met / offered if offered else 0.0,
        goodput_rps=per_s(met),
        output_tokens_per_s=per_s(output_tokens),
        prompt_tokens_per_s=per_s(sum(j.arrival.prompt_tokens for j in finished)),
        utilisation=per_s(outcome.busy_s) / outcome.setup.replicas,
        steps=outcome.steps,
        preemptions=outcome.preemptions,
        prefix_hit_tokens=outcome.prefix_hit_tokens,
        targets=targets,
        meets=_enough_served(slo, offered, len(finished))
        and all(target.met for target in targets if target.target_s is not None),
        refusals=_refusals(journeys),
        moves=tuple(_moves(outcome)),
        ticks=tuple(_moments(outcome)),
        verdict=_verdict(outcome),
        limits=outcome.limits,
        cost=None if price_per_hour is None else _cost(outcome, price_per_hour, output_tokens),
    )


def _enough_served(slo: Slo, offered: int, finished: int) -> bool:
    """Gaps between tokens are those of the accepted alone: refusing everybody would keep an ITL target."""
    allowed = [t.percentile.miss_share for t in (slo.ttft, slo.itl, slo.e2e) if t is not None]
    return offered - finished <= max(allowed, default=1.0) * offered + 1e-9


def _meets(journey: Journey, slo: Slo) -> bool:
    """As `report.meets` judges an answer; of a request's gaps one may always be late."""
    return (
        (slo.ttft is None or (journey.ttft_s is not None and _within(journey.ttft_s, slo.ttft)))
        and (slo.itl is None or journey.gaps_over <= _gaps_allowed(journey.tokens - 1, slo.itl))
        and (slo.e2e is None or _within(journey.e2e_s, slo.e2e))
    )


def _gaps_allowed(gaps: int, target: Target) -> float:
    return max(1.0, target.percentile.miss_share * gaps + 1e-9)


def _within(seconds: float, target: Target) -> bool:
    # The clock is a sum of floats: on target to a microsecond is in time.
    return seconds <= target.target_s + 1e-6


def _targets(outcome: Outcome, finished: Sequence[Journey]) -> tuple[TargetFigures, ...]:
    slo, offered = outcome.setup.resource.slo, len(outcome.journeys)
    ttfts = [j.ttft_s for j in finished if j.ttft_s is not None]
    e2es = [j.e2e_s for j in finished]

    def whole(name: str, values: list[float], target: Target | None) -> TargetFigures:
        kept = sum(_within(v, target) for v in values) / offered if target and offered else None
        return _target(name, spread(values), target, kept)

    return (
        whole("TTFT", ttfts, slo.ttft),
        _target("ITL", _gap_spread(outcome.gaps_us), slo.itl, _gaps_kept(outcome.gaps_us, slo.itl)),
        whole("e2e", e2es, slo.e2e),
    )


def _target(name: str, seen: Spread | None, target: Target | None, kept: float | None) -> TargetFigures:
    if target is None:
        return TargetFigures(name=name, spread=seen, target_s=None, percentile=None, kept=None, met=None)
    met = kept is None or kept >= 1 - target.percentile.miss_share - 1e-9
    return TargetFigures(
        name=name,
        spread=seen,
        target_s=target.target_s,
        percentile=target.percentile.value,
        kept=kept,
        met=met,
    )


def _gaps_kept(gaps_us: Counter[int], target: Target | None) -> float | None:
    total = gaps_us.total()
    if target is None or not total:
        return None
    return sum(n for gap_us, n in gaps_us.items() if _within(gap_us / 1e6, target)) / total


def _gap_spread(gaps_us: Counter[int]) -> Spread | None:
    """As `report.spread`, over values that are counted and not listed."""
    total = gaps_us.total()
    if not total:
        return None
    ordered = sorted(gaps_us)
    ends: list[int] = []
    for gap_us in ordered:
        ends.append((ends[-1] if ends else 0) + gaps_us[gap_us])

    def at(share: float) -> float:
        rank = percentile(range(1, total + 1), share)
        return next(gap for gap, end in zip(ordered, ends, strict=True) if end >= rank) / 1e6

    return Spread(total, at(0.50), at(0.95), at(0.99))


def _refusals(journeys: Iterable[Journey]) -> tuple[Refusals, ...]:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for journey in journeys:
        if journey.fate is not Fate.FINISHED:
            counts[journey.why] += 1
            examples.setdefault(journey.why, journey.message)
    ordered = sorted(counts, key=lambda why: (-counts[why], why))
    return tuple(Refusals(why=why, count=counts[why], example=examples[why]) for why in ordered)


def _moves(outcome: Outcome) -> Iterable[Move]:
    for tick in outcome.ticks:
        for change in tick.decision.changes:
            yield Move(
                at_s=tick.at_s,
                parameter=change.parameter,
                old=change.old,
                new=change.new,
                why=change.why,
                reason=tick.decision.reason,
            )


def _moments(outcome: Outcome) -> Iterable[Moment]:
    for tick in outcome.ticks:
        seen, limits = tick.decision.evidence, tick.limits
        yield Moment(
            at_s=tick.at_s,
            replicas=outcome.setup.replicas,
            replicas_needed=seen.replicas_needed,
            offered_per_s=seen.offered_per_s,
            refused_per_s=seen.refused_per_s,
            output_tokens_per_s=seen.output_tokens_per_s,
            attainment=seen.attainment,
            ttft_s=seen.measured_ttft_s,
            itl_s=seen.measured_itl_s,
            max_batch_tokens=limits.max_batch_tokens,
            max_batch_sequences=limits.max_batch_sequences,
            prefill_chunk_tokens=limits.prefill_chunk_tokens,
            max_queued_tokens=limits.max_queued_tokens,
            feasibility=tick.decision.feasibility.value,
        )


def _verdict(outcome: Outcome) -> Verdict:
    decisions = [tick.decision for tick in outcome.ticks]
    worded = [d for d in decisions if d.feasibility_reason]
    no = [d for d in worded if d.feasibility in _INFEASIBLE]
    chosen = (no or worded or decisions)[-1]
    needed = [n for d in decisions if (n := d.evidence.replicas_needed) is not None]
    return Verdict(
        feasibility=chosen.feasibility.value,
        reason=chosen.feasibility_reason or chosen.reason,
        share=sum(d.feasibility is chosen.feasibility for d in decisions) / len(decisions),
        replicas_needed=max(needed, default=None),
    )


def _cost(outcome: Outcome, price_per_hour: float, output_tokens: int) -> Cost:
    accelerators = outcome.setup.replicas * accelerators_per_replica(outcome.setup.resource.resources)
    hours = accelerators * outcome.ended_s / 3600
    total = hours * price_per_hour
    return Cost(
        accelerators=accelerators,
        accelerator_hours=hours,
        total=total,
        per_million_output_tokens=total / output_tokens * 1e6 if output_tokens else None,
    )


def accelerators_per_replica(resources: dict[str, object]) -> int:
    """GPUs that a pod asks for; 1 where it asks for none, so that the pod itself is what is paid for."""
    limits = resources.get("limits")
    wanted = limits.get("nvidia.com/gpu") if isinstance(limits, dict) else None
    try:
        return max(1, int(str(wanted))) if wanted is not None else 1
    except ValueError:
        return 1
