"""What a replay came to: attainment, goodput and percentiles, as a value that prints and serialises.

Attainment is the share of OFFERED requests that met every target: a request that was rejected, failed or
never finished is a miss. Percentiles cover accepted requests only and therefore stand beside attainment,
never alone: shedding load makes them look good. Knows nothing of HTTP and terminals.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway_cli.client import Answer, Ending
from headway_operator.resource import Slo, Target

SEND_LAG_SHARE = 0.05
"""Share of the TTFT target that the p99 send lag may reach before the client itself is the bottleneck."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request of a replay: when it was due, how late it was sent, and what became of it."""

    due_s: float
    send_lag_s: float
    answer: Answer


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a set of times in seconds, with their number."""

    count: int
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """The summary of one replay."""

    duration_s: float
    offered: int
    finished: int
    rejected: int
    failed: int
    met_slo: int
    attainment: float  # 0..1, of the offered
    goodput_rps: float  # requests that met every target, per second
    output_tokens_per_s: float
    ttft: Spread | None
    itl: Spread | None  # over all gaps of all finished requests
    e2e: Spread | None
    missed_ttft: int  # of the finished
    missed_itl: int
    missed_e2e: int
    gaps_over: float | None  # share of all gaps over the ITL target; None without target or gaps
    send_lag: Spread | None
    client_too_slow: bool
    errors: tuple[tuple[str, int], ...]  # the commonest error texts


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of a sorted, non-empty sequence does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Iterable[float]) -> Spread | None:
    """Percentiles, None where there is nothing to tell."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(len(ordered), *(percentile(ordered, share) for share in (0.50, 0.95, 0.99)))


def meets_ttft(answer: Answer, target: Target | None) -> bool:
    """The first token came in time."""
    return target is None or (answer.ttft_s is not None and answer.ttft_s <= target.target_s)


def meets_itl(answer: Answer, target: Target | None) -> bool:
    """No more of this request's gaps exceed the target than its percentile allows (p95: one in twenty).

    One always may: of a few gaps, a percentile says nothing.
    """
    if target is None or not answer.gaps_s:
        return True
    over = sum(gap > target.target_s for gap in answer.gaps_s)
    return over <= max(1.0, target.percentile.miss_share * len(answer.gaps_s) + 1e-9)


def meets_e2e(answer: Answer, target: Target | None) -> bool:
    """The last token came in time."""
    return target is None or answer.e2e_s <= target.target_s


def meets(answer: Answer, slo: Slo) -> bool:
    """Finished, and inside every target."""
    return (
        answer.ending is Ending.FINISHED
        and meets_ttft(answer, slo.ttft)
        and meets_itl(answer, slo.itl)
        and meets_e2e(answer, slo.e2e)
    )


def summarise(records: Sequence[Record], slo: Slo, duration_s: float) -> Report:
    """All records of a replay against the targets. `duration_s` is what rates are divided by."""
    answers = [r.answer for r in records]
    finished = [a for a in answers if a.ending is Ending.FINISHED]
    met = sum(meets(a, slo) for a in finished)
    lag = spread(r.send_lag_s for r in records)
    causes: dict[str, int] = {}
    for answer in answers:
        if answer.ending is not Ending.FINISHED:
            cause = f"{answer.http_status or 'no answer'}: {answer.error[:120]}"
            causes[cause] = causes.get(cause, 0) + 1
    return Report(
        duration_s=duration_s,
        offered=len(records),
        finished=len(finished),
        rejected=sum(a.ending is Ending.REJECTED for a in answers),
        failed=sum(a.ending is Ending.FAILED for a in answers),
        met_slo=met,
        attainment=met / len(records) if records else 0.0,
        goodput_rps=met / duration_s if duration_s > 0 else 0.0,
        output_tokens_per_s=sum(a.output_tokens for a in answers) / duration_s if duration_s > 0 else 0.0,
        ttft=spread(a.ttft_s for a in finished if a.ttft_s is not None),
        itl=spread(gap for a in finished for gap in a.gaps_s),
        e2e=spread(a.e2e_s for a in finished),
        missed_ttft=sum(not meets_ttft(a, slo.ttft) for a in finished),
        missed_itl=sum(not meets_itl(a, slo.itl) for a in finished),
        missed_e2e=sum(not meets_e2e(a, slo.e2e) for a in finished),
        gaps_over=_gaps_over(finished, slo.itl),
        send_lag=lag,
        client_too_slow=bool(lag and slo.ttft and lag.p99_s > SEND_LAG_SHARE * slo.ttft.target_s),
        errors=tuple(sorted(causes.items(), key=lambda item: -item[1])[:5]),
    )


def _gaps_over(finished: Sequence[Answer], target: Target | None) -> float | None:
    gaps = [gap for a in finished for gap in a.gaps_s]
    if target is None or not gaps:
        return None
    return sum(gap > target.target_s for gap in gaps) / len(gaps)


def as_json(report: Report, records: Sequence[Record] = ()) -> dict[str, Any]:
    """The report and, where given, every request, as plain JSON values with the units in the names."""
    return {
        "summary": asdict(report),
        "requests": [
            {
                "due_s": round(r.due_s, 6),
                "send_lag_s": round(r.send_lag_s, 6),
                "ending": r.answer.ending.value,
                "http_status": r.answer.http_status,
                "ttft_s": r.answer.ttft_s,
                "e2e_s": r.answer.e2e_s,
                "gaps_s": [round(g, 6) for g in r.answer.gaps_s],
                "prompt_tokens": r.answer.prompt_tokens,
                "output_tokens": r.answer.output_tokens,
                "error": r.answer.error,
            }
            for r in records
        ],
    }
