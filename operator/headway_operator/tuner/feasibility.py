"""Whether any setting can keep the promise, and if none can, whether more replicas would.

Below the engine's floor no replica helps: one request alone is too slow. Out of capacity they do.
Knows nothing of limits in force or of how replicas are added.
"""

import math
from dataclasses import dataclass

from msgspec.structs import replace

from headway_engine.protocol import Capacity, Limits
from headway_operator.resource import Bounds, Slo, Target
from headway_operator.tuner.learn import Interval, judged, knows_steps, refusals
from headway_operator.tuner.memory import Feasibility, Memory
from headway_operator.tuner.quantiles import Exceedances, Judgement, judge
from headway_operator.tuner.solve import (
    MARGIN,
    SMALLEST_PREFILL,
    Point,
    Solution,
    alone_s,
    point,
    slots,
    slots_per_s,
    step_target_s,
    tokens_per_s,
    work_s,
)
from headway_operator.tuner.words import per_second, span

UTILISATION = 0.75
"""Share of its capacity that a replica is planned for: near 1 the queue, and with it TTFT, has no bound."""
TICKS_TO_FLAG = {
    Feasibility.BELOW_ENGINE_FLOOR: 2,
    Feasibility.CAPACITY_LIMITED: 3,
    Feasibility.FEASIBLE: 2,
    Feasibility.UNKNOWN: 3,
}
CAPACITY_IS_BACK_AFTER_S = 180.0
"""For so long no look may find too little capacity. Near the edge looks differ, and a verdict that comes and
goes 30 times an hour is no verdict."""
QUEUE_IS_SHORT = 0.2
"""Share of the TTFT target under which the wait in the queue is not what makes it long."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """What was found. Rates are of all pods together; None: not known."""

    verdict: Feasibility
    reason: str
    capacity_per_s: float | None = None
    replicas_needed: int | None = None
    best_ttft_s: float | None = None
    best_itl_s: float | None = None


def assess(
    slo: Slo,
    bounds: Bounds,
    capacity: Capacity,
    limits: Limits,
    memory: Memory,
    solution: Solution | None,
    interval: Interval,
) -> Assessment:
    """The verdict of this moment, without memory of earlier ones (see `settle`)."""
    at = point(memory)
    if at is None or solution is None or not knows_steps(memory):
        return Assessment(Feasibility.UNKNOWN, "what a step costs is not known yet")
    served_per_s = capacity_per_s(slo, bounds, capacity, limits, memory, at)
    load = memory.load
    offered_per_s = load.accepted_per_s + load.refused_per_s
    needed = None
    if served_per_s is not None and served_per_s > 0:
        needed = max(1, math.ceil(offered_per_s / (UTILISATION * served_per_s) - 1e-9))
    total_per_s = None if served_per_s is None else UTILISATION * served_per_s * load.pods
    floor = _below_floor(slo, memory, solution, at, interval)
    if floor is not None:
        return Assessment(
            Feasibility.BELOW_ENGINE_FLOOR,
            floor.reason,
            total_per_s,
            needed,
            floor.best_ttft_s,
            floor.best_itl_s,
        )
    short = _short_of_capacity(slo, memory, solution, at, served_per_s, offered_per_s)
    if short is not None:
        needed = max(needed or 0, load.pods + 1, short.replicas)
        words = f"{short.reason}: {needed} replicas are needed, there {_are(load.pods)}"
        return Assessment(Feasibility.CAPACITY_LIMITED, words, total_per_s, needed)
    return Assessment(Feasibility.FEASIBLE, "a setting that meets the targets exists", total_per_s, needed)


def settle(memory: Memory, found: Assessment, now_s: float) -> Memory:
    """The memory after this finding: a verdict changes only when it is found several times in a row, and from
    too little capacity to enough only after a while of that."""
    if found.verdict is memory.feasibility:
        return replace(memory, suspected=found.verdict, suspected_ticks=0)
    if found.verdict is not memory.suspected:
        memory = replace(memory, suspected_ticks=0, suspected_since_s=now_s)
    ticks = memory.suspected_ticks + 1
    match memory.feasibility, found.verdict:
        case Feasibility.UNKNOWN, Feasibility.FEASIBLE:
            sure = True
        case Feasibility.CAPACITY_LIMITED, Feasibility.FEASIBLE:
            long_enough = now_s - memory.suspected_since_s >= CAPACITY_IS_BACK_AFTER_S
            sure = long_enough and ticks >= TICKS_TO_FLAG[found.verdict]
        case _:
            sure = ticks >= TICKS_TO_FLAG[found.verdict]
    if sure:
        return replace(memory, feasibility=found.verdict, suspected=found.verdict, suspected_ticks=0)
    return replace(memory, suspected=found.verdict, suspected_ticks=ticks)


def capacity_per_s(
    slo: Slo, bounds: Bounds, capacity: Capacity, limits: Limits, memory: Memory, at: Point
) -> float | None:
    """Requests a second of the present kind that one pod can serve when fully used, inside the targets.

    The least of three rates. Steps as long as the ITL target allows, T, spend a of it on themselves, and
    r T w = T - a is left for requests with work w each (`solve.work_s`): r = (1 - a/T) / w. Slots, by their
    limit or by memory, and tokens a step, by bounds or by what is reserved, may be fewer than such steps
    need; steps are shorter then, and more of them are base cost (`solve.slots_per_s`, `solve.tokens_per_s`).
    """
    target_s = step_target_s(slo)
    load = memory.load
    if target_s is None or load.prompt_tokens <= 0 or load.output_tokens <= 0:
        return None
    step_s = (1 - MARGIN) * target_s / memory.kappa
    base_s, each_s = at.seconds(0, 0), work_s(at, load)
    if step_s <= base_s or each_s <= 0:
        return 0.0
    most = slots(capacity, limits.max_batch_sequences, at)
    # Not the budget in force: it stays small while nobody needs more.
    tokens = min(capacity.max_batch_tokens, bounds.max_batch_tokens.max or capacity.max_batch_tokens)
    room = max(limits.max_batch_tokens - at.decode_sequences, SMALLEST_PREFILL)
    return min(
        (1 - base_s / step_s) / each_s,
        slots_per_s(at, load, most, min(limits.prefill_chunk_tokens, room)),
        tokens_per_s(at, load, tokens),
    )


@dataclass(frozen=True, slots=True)
class _Floor:
    reason: str
    best_ttft_s: float | None = None
    best_itl_s: float | None = None


def _below_floor(
    slo: Slo, memory: Memory, solution: Solution, at: Point, interval: Interval
) -> _Floor | None:
    if slo.itl is not None and judged(memory.itl, slo.itl)[0] is not Judgement.MET:
        floor_s = alone_s(at)
        if floor_s > slo.itl.target_s:
            return _Floor(
                f"one request alone, with the smallest useful step, takes {span(floor_s)} per token; the ITL "
                f"target is {span(slo.itl.target_s)}. More replicas do not help: only a faster engine or a "
                "smaller model does",
                best_itl_s=floor_s,
            )
    if slo.ttft is not None and judged(memory.ttft, slo.ttft)[0] is not Judgement.MET:
        prompt = memory.load.prompt_tokens
        prefill = max(SMALLEST_PREFILL, solution.max_batch_tokens.value - at.decode_sequences)
        chunk = min(prefill, solution.prefill_chunk_tokens.value)
        first_s = math.ceil(prompt / chunk) * at.seconds(min(chunk, max(prompt, 1.0)), 1.0)
        if prompt > 0 and first_s > slo.ttft.target_s:
            return _Floor(
                f"a mean prompt of {prompt:.0f} tokens alone takes {span(first_s)}; the TTFT target is "
                f"{span(slo.ttft.target_s)}. More replicas do not help",
                best_ttft_s=first_s,
            )
        if at.decode_sequences < 2 and judged(memory.ttft, slo.ttft)[0] is Judgement.VIOLATED:
            return _alone_and_late(slo.ttft, interval)
    return None


def _alone_and_late(target: Target, interval: Interval) -> _Floor | None:
    """Late first tokens that no queue explains."""
    queue_s, ttft_s = interval.queue_s, interval.ttft_s
    if queue_s is None or ttft_s is None or ttft_s <= target.target_s:
        return None
    if queue_s >= QUEUE_IS_SHORT * target.target_s:
        return None
    return _Floor(
        f"requests wait only {span(queue_s)} before they run and still take {span(ttft_s)} to the first "
        f"token; the TTFT target is {span(target.target_s)}. More replicas do not help",
        best_ttft_s=ttft_s,
    )


@dataclass(frozen=True, slots=True)
class _Short:
    reason: str
    replicas: int = 0


def _short_of_capacity(
    slo: Slo, memory: Memory, solution: Solution, at: Point, served_per_s: float | None, offered_per_s: float
) -> _Short | None:
    load = memory.load
    crowded = at.decode_sequences > 1 and solution.prefill_tokens < SMALLEST_PREFILL
    if slo.itl is not None and crowded and at.per_sequence_s > 0:
        room_s = solution.step_allowed_s - at.seconds(SMALLEST_PREFILL, 0)
        fit = max(1.0, room_s / at.per_sequence_s)
        if judged(memory.itl, slo.itl)[0] is not Judgement.MET:
            return _Short(
                f"{at.decode_sequences:.0f} sequences decode at once in a pod and {fit:.0f} fit in the ITL "
                f"target of {span(slo.itl.target_s)}",
                math.ceil(load.pods * at.decode_sequences / fit),
            )
    if not served_per_s or offered_per_s <= 0:
        return None
    full_per_s = served_per_s * load.pods
    refused = refusals(memory)
    if offered_per_s > UTILISATION * full_per_s and _misses_too_many(slo, memory, refused):
        share = refused.low / refused.samples if refused.samples > 0 else 0.0
        return _Short(
            f"{per_second(offered_per_s)} arrive, {per_second(UTILISATION * full_per_s)} can be served "
            "inside the targets" + (f" ({100 * share:.0f} % are refused)" if share > 0.005 else "")
        )
    return None


def _misses_too_many(slo: Slo, memory: Memory, refused: Exceedances) -> bool:
    """By counts, as latencies are judged: a share of a handful is chance.

    Who is refused got no first token in time either, so late and refused requests are counted together.
    """
    misses = min(t.percentile.miss_share for t in (slo.ttft, slo.itl) if t is not None)
    if judge(refused, misses) is Judgement.VIOLATED:
        return True
    late = judged(memory.ttft, slo.ttft)[1]
    if slo.ttft is None or late.samples <= 0:
        return False
    served = max(0.0, refused.samples - refused.low)
    together = late.scaled(served / late.samples).plus(Exceedances(refused.low, refused.low, refused.low))
    return judge(together, slo.ttft.percentile.miss_share) is Judgement.VIOLATED


def _are(pods: int) -> str:
    return "is 1" if pods == 1 else f"are {pods}"
