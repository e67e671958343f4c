"""One Observation into the Memory: step cost, load, correction factors, counts about the targets.

Learns from steps, of which there are hundreds an interval, and corrects with requests, of which there
may be few. Decides nothing.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from headway_engine.protocol import Limits
from headway_operator.metrics import Histogram, Observation
from headway_operator.resource import Slo, Target
from headway_operator.tuner import model
from headway_operator.tuner.memory import Load, Memory, Traffic, Window
from headway_operator.tuner.quantiles import (
    Exceedances,
    Judgement,
    exceedances,
    judge,
    quantile,
)

FORGET_PER_10_S = 0.9
FORGET_FAST = 0.3
FORGET_MOST = 0.05
SPEED_CHANGE = 0.12
"""A mean step time this far from the model means that the model is of another engine, or another regime."""
STEPS_TO_TRUST = 50

WINDOW_S = 300.0
WINDOW_ENOUGH = 100
"""Samples after which older counts are no longer looked at."""
WINDOW_PARTS = 12
ENOUGH_TRAFFIC = 20
"""Requests in five minutes below which feedback from requests is frozen."""
ENOUGH_AGAIN = round(ENOUGH_TRAFFIC + 2 * ENOUGH_TRAFFIC**0.5)
"""And from which it goes on: further up than chance alone carries a count of that size."""

KAPPA_MAX = 1.3
KAPPA_MAX_VIOLATED = 2.0
KAPPA_RISE, KAPPA_FALL = 0.6, 0.3
GAPS_FOR_KAPPA = 100
NEAR_TARGET = 0.8
"""Share of a target above which the engine places boundaries densely."""
QUEUE_SCALE_MIN, QUEUE_SCALE_MAX = 0.4, 1.1
REQUESTS_FOR_QUEUE_SCALE = 20
LARGEST_OVERHEAD = 0.5
"""Time between steps as a share of a step beyond which it is something else: preemption, a paused pod."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What one interval showed, beside what is remembered of it."""

    speed_error: float | None = None
    """Mean step time against the model as it was before, as a share; None without enough steps."""
    speed_changed: bool = False
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    queue_s: float | None = None
    refused: float = 0.0
    """Share of what arrived that was rejected or failed."""


def learn(
    memory: Memory, seen: Observation, slo: Slo, current: Limits, now_s: float, *, settled: bool
) -> tuple[Memory, Interval]:
    """The memory with one interval more in it.

    `current` is what was in force during the interval; `settled` says that every pod had it.
    """
    memory, error, changed = _learn_steps(memory, seen, current.max_batch_tokens)
    interval = Interval(
        speed_error=error,
        speed_changed=changed,
        ttft_s=_quantile(seen.ttft, slo.ttft),
        itl_s=_quantile(seen.itl, slo.itl),
        e2e_s=_quantile(seen.e2e, slo.e2e),
        queue_s=_quantile(seen.queue, slo.ttft),
        refused=_refused(seen) / max(seen.arrivals or 0.0, _refused(seen), 1.0),
    )
    memory = _learn_load(memory, seen)
    memory = _learn_overhead(memory, seen)
    memory = _count(memory, seen, slo, now_s)
    memory = replace(memory, seen_at_s=now_s, missed=0)
    memory = replace(memory, sparse=is_sparse(memory), knows_steps=knows_steps(memory))
    if settled and not is_sparse(memory):
        memory = _correct_step(memory, seen, slo, current, interval)
        memory = _correct_queue(memory, seen, slo, interval)
    return memory, interval


def is_sparse(memory: Memory) -> bool:
    """Too few requests in the last five minutes for their latencies to say anything."""
    return requests_in_window(memory) < traffic_needed(memory)


def traffic_needed(memory: Memory) -> int:
    """Requests in five minutes that are enough: more where they were too few before."""
    return ENOUGH_AGAIN if memory.sparse else ENOUGH_TRAFFIC


def requests_in_window(memory: Memory) -> float:
    """Requests in five minutes; extrapolated while less time was observed."""
    seconds = sum(part.seconds for part in memory.traffic)
    return sum(part.requests for part in memory.traffic) * WINDOW_S / seconds if seconds > 0 else 0.0


def refusals(memory: Memory) -> Exceedances:
    """Rejected and failed requests among the latest that are enough to judge by, five minutes at most."""
    total = Exceedances()
    for part in reversed(memory.traffic):
        if total.samples >= WINDOW_ENOUGH:
            break
        total = total.plus(Exceedances(max(part.requests, part.refused), part.refused, part.refused))
    return total


def knows_steps(memory: Memory) -> bool:
    """Whether the model has seen enough prefilling to be asked what a prompt token costs."""
    s = memory.sums
    # What was known is not unknown because some of it was forgotten since.
    least = 0.5 if memory.knows_steps else 1.0
    # (sum P)^2 / sum P^2 is the number of equal prefill steps that would weigh the same.
    return memory.cost is not None and s.n >= 20 * least and s.pp > 0 and s.p * s.p / s.pp >= 3 * least


def judged(
    windows: tuple[Window, ...], target: Target | None, since_s: float = 0.0
) -> tuple[Judgement, Exceedances]:
    """The verdict on one target over the windows after `since_s`."""
    total = Exceedances()
    for window in windows:
        if window.at_s > since_s:
            total = total.plus(window.exceedances)
    if target is None:
        return Judgement.UNDECIDED, total
    return judge(total, target.percentile.miss_share), total


def _refused(seen: Observation) -> float:
    return (seen.rejected or 0.0) + (seen.failed or 0.0)


def _quantile(histogram: Histogram | None, target: Target | None) -> float | None:
    share = 1 - target.percentile.miss_share if target is not None else 0.95
    return quantile(histogram, share) if histogram is not None else None


def _learn_steps(memory: Memory, seen: Observation, budget: int) -> tuple[Memory, float | None, bool]:
    added = seen.statistics
    if added is None or added.n < 1 or added.y <= 0:
        return memory, None, False
    error = None
    if memory.cost is not None and memory.sums.n >= STEPS_TO_TRUST and added.n >= 20:
        error = model.relative_error(memory.cost, added)
    changed = error is not None and abs(error) > SPEED_CHANGE
    forget_fast = 2 if changed else memory.forget_fast
    factor = FORGET_PER_10_S ** (seen.elapsed_s / 10)
    if forget_fast > 0:
        factor = min(factor, FORGET_FAST)
    if budget < memory.sums_budget:
        # A linear model is good near where it was fitted, and larger steps pull at it by their square.
        factor = min(factor, max(FORGET_MOST, (budget / memory.sums_budget) ** 2))
    sums = model.forget(memory.sums, factor).plus(added)
    fitted = model.fit(sums, memory.cost)
    memory = replace(
        memory,
        sums=sums,
        sums_budget=budget,
        cost=fitted.cost if fitted is not None else memory.cost,
        forget_fast=max(0, forget_fast - 1),
    )
    return memory, error, changed


def _learn_load(memory: Memory, seen: Observation) -> Memory:
    old = memory.load
    first = memory.seen_at_s == 0
    observed_s = sum(part.seconds for part in memory.traffic)
    quick: float = 1 - 0.6 ** (seen.elapsed_s / 10)
    # A plain mean until there is more to forget: the first interval must not weigh as much as ten later ones.
    slow: float = max(1 - 0.9 ** (seen.elapsed_s / 10), seen.elapsed_s / (observed_s + seen.elapsed_s))

    def high(before: float, now: float) -> float:
        """Rises count at once, falls slowly."""
        return max(now, before + quick * (now - before))

    def mean(before: float, now: float) -> float:
        return now if first or before == 0 else before + slow * (now - before)

    statistics = seen.statistics
    decode, kv, prefill = 0.0, old.kv_tokens_per_sequence, 0.0
    if statistics is not None and statistics.n > 0:
        prefill = statistics.p / seen.elapsed_s
        if statistics.d > 0:
            # Weighted by sequences: what a decoding sequence sees beside it, not what a step holds.
            decode = statistics.dd / statistics.d
            kv = statistics.k / statistics.d
    arrivals = (seen.arrivals or 0.0) / seen.elapsed_s
    refused = _refused(seen) / seen.elapsed_s
    return replace(
        memory,
        load=Load(
            decode_sequences=high(old.decode_sequences, decode),
            kv_tokens_per_sequence=mean(old.kv_tokens_per_sequence, kv),
            arrivals_per_s=high(old.arrivals_per_s, arrivals),
            accepted_per_s=mean(old.accepted_per_s, max(0.0, arrivals - refused)),
            refused_per_s=mean(old.refused_per_s, refused),
            prefill_tokens_per_s=mean(old.prefill_tokens_per_s, prefill),
            output_tokens_per_s=mean(old.output_tokens_per_s, (seen.output_tokens or 0.0) / seen.elapsed_s),
            pods=max(1, seen.pods),
        ),
    )


def _learn_overhead(memory: Memory, seen: Observation) -> Memory:
    """Time between steps: the mean gap between tokens less the mean step that a decoding sequence was in."""
    s = seen.statistics
    if seen.itl is None or seen.itl.count < GAPS_FOR_KAPPA or s is None or s.d <= 0:
        return memory
    step_s = s.dy / s.d
    overhead_s = min(max(0.0, seen.itl.sum / seen.itl.count - step_s), LARGEST_OVERHEAD * step_s)
    if memory.overhead_s == 0:
        return replace(memory, overhead_s=overhead_s)
    return replace(memory, overhead_s=memory.overhead_s + 0.4 * (overhead_s - memory.overhead_s))


def _count(memory: Memory, seen: Observation, slo: Slo, now_s: float) -> Memory:
    requests = max(seen.arrivals or 0.0, seen.finished or 0.0)
    refused = _refused(seen)
    return replace(
        memory,
        ttft=_window(memory.ttft, _exceeded(seen.ttft, slo.ttft), now_s, memory.changed_at_s),
        itl=_window(memory.itl, _gaps_exceeded(seen, slo.itl), now_s, memory.changed_at_s),
        e2e=_window(memory.e2e, _exceeded(seen.e2e, slo.e2e), now_s, memory.changed_at_s),
        refused=_window(memory.refused, Exceedances(refused, refused, refused), now_s, 0.0, forever=True),
        traffic=_traffic(memory.traffic, Traffic(now_s, requests, seen.elapsed_s, refused)),
    )


def _traffic(parts: tuple[Traffic, ...], now: Traffic) -> tuple[Traffic, ...]:
    """The parts of the last five minutes, with one interval more."""
    kept = [part for part in parts if now.at_s - part.at_s <= WINDOW_S]
    if not kept or kept[-1].seconds + now.seconds > WINDOW_S / WINDOW_PARTS:
        return (*kept, now)
    last = kept.pop()
    requests, refused = last.requests + now.requests, last.refused + now.refused
    return (*kept, Traffic(last.at_s, requests, last.seconds + now.seconds, refused))


def _exceeded(histogram: Histogram | None, target: Target | None) -> Exceedances | None:
    if histogram is None or target is None:
        return None
    return exceedances(histogram, target.target_s)


def _gaps_exceeded(seen: Observation, target: Target | None) -> Exceedances | None:
    """Gaps count as one for all sequences of a step: they are the same gap, seen many times."""
    found = _exceeded(seen.itl, target)
    if found is None or found.samples == 0:
        return found
    s = seen.statistics
    shared = s.dd / s.d if s is not None and s.d > 0 else 1.0
    return found.scaled(1 / max(1.0, shared))


def _window(
    windows: tuple[Window, ...],
    added: Exceedances | None,
    now_s: float,
    changed_at_s: float,
    *,
    forever: bool = False,
) -> tuple[Window, ...]:
    """The windows with `added` at their end, no older than five minutes and no more than are needed.

    Counts from before the last change of limits stay apart from those after it.
    """
    if added is None:
        return ()
    parts = list(windows)
    if added.samples > 0:
        recent = parts and now_s - parts[-1].at_s < WINDOW_S / WINDOW_PARTS
        if recent and parts[-1].at_s > changed_at_s and parts[-1].samples < WINDOW_ENOUGH:
            last = parts.pop()
            total = last.exceedances.plus(added)
            parts.append(Window(last.at_s, total.samples, total.low, total.high))
        else:
            parts.append(Window(now_s, added.samples, added.low, added.high))
    kept: list[Window] = []
    samples = 0.0
    for window in reversed(parts):
        if now_s - window.at_s > WINDOW_S or (samples >= WINDOW_ENOUGH and not forever):
            break
        kept.append(window)
        samples += window.samples
    return tuple(reversed(kept))


def _correct_step(memory: Memory, seen: Observation, slo: Slo, current: Limits, interval: Interval) -> Memory:
    """Kappa: how much longer the target's percentile is than the largest step that the model allows.

    One-sided: measurements may only tighten the model. A factor that also loosens chases noise.
    """
    if slo.itl is None or memory.cost is None or interval.itl_s is None or seen.itl is None:
        return memory
    if seen.itl.count < GAPS_FOR_KAPPA:
        return memory
    decode = memory.load.decode_sequences
    prefill = max(0.0, current.max_batch_tokens - decode)
    predicted_s = memory.cost.seconds(prefill, decode, decode * memory.load.kv_tokens_per_sequence)
    predicted_s += memory.overhead_s
    if predicted_s <= 0:
        return memory
    violated = judged(memory.itl, slo.itl, memory.changed_at_s)[0] is Judgement.VIOLATED
    ceiling = KAPPA_MAX_VIOLATED if violated else max(KAPPA_MAX, memory.kappa)
    # Well under the target there is nothing to tighten, and the histogram too coarse to learn from.
    near = interval.itl_s > NEAR_TARGET * slo.itl.target_s
    ratio = min(max(interval.itl_s / predicted_s, 1.0), ceiling) if near else 1.0
    # Rising is a matter of safety and goes by looks; falling goes by time, however often we look.
    gain: float = KAPPA_RISE if ratio > memory.kappa else 1 - (1 - KAPPA_FALL) ** (seen.elapsed_s / 10)
    return replace(memory, kappa=max(1.0, memory.kappa * (ratio / memory.kappa) ** gain))


def _correct_queue(memory: Memory, seen: Observation, slo: Slo, interval: Interval) -> Memory:
    """The queue scale: down quickly when the accepted wait too long, up slowly when they do not."""
    if slo.ttft is None or interval.ttft_s is None or seen.ttft is None:
        return memory
    if seen.ttft.count < REQUESTS_FOR_QUEUE_SCALE:
        return memory
    scale = memory.queue_scale
    if interval.ttft_s > 0.95 * slo.ttft.target_s:
        scale *= 0.85 ** (seen.elapsed_s / 10)
    elif interval.ttft_s < 0.8 * slo.ttft.target_s:
        scale *= 1.03 ** (seen.elapsed_s / 10)
    return replace(memory, queue_scale=min(max(scale, QUEUE_SCALE_MIN), QUEUE_SCALE_MAX))
