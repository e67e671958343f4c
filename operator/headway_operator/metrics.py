"""Exposition text of an engine pod to a Sample; two sets of Samples to an Observation.

A signal that a pod does not export is absent, never 0. Percentiles do not average over pods but
histograms add, so everything here is differences and sums. Knows nothing of HTTP, targets or decisions.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from headway_engine.protocol import BatchingMode, Capacity, Limits, Metric, Objectives, Outcome
from headway_engine.stepcost import StepStatistics


class MetricsError(ValueError):
    """The text is not an exposition of a Headway engine."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts per upper boundary, ascending; the last boundary is infinity."""

    buckets: tuple[tuple[float, int], ...]
    sum: float

    @property
    def count(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def boundaries(self) -> tuple[float, ...]:
        return tuple(boundary for boundary, _ in self.buckets)

    def minus(self, earlier: "Histogram") -> "Histogram":
        """What was added since `earlier`.

        Other boundaries or a fallen count mean that the engine restarted the histogram: all of it is new.
        """
        if self.boundaries != earlier.boundaries:
            return self
        buckets = tuple((le, n - m) for (le, n), (_, m) in zip(self.buckets, earlier.buckets, strict=True))
        if any(n < 0 for _, n in buckets):
            return self
        return Histogram(buckets=buckets, sum=max(0.0, self.sum - earlier.sum))

    def plus(self, other: "Histogram") -> "Histogram":
        """Both together, at the boundaries they share (cumulative counts stay exact there)."""
        theirs = dict(other.buckets)
        return Histogram(
            buckets=tuple((le, n + theirs[le]) for le, n in self.buckets if le in theirs),
            sum=self.sum + other.sum,
        )


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes the model in a pod, and the better ways that its check at start left for it."""

    way: str  # "fused on amx"
    left: tuple[tuple[str, str], ...] = ()  # ways, and in a word why


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of one pod."""

    start_time_s: float | None = None
    limits: Limits | None = None
    capacity: Capacity | None = None
    objectives: Objectives | None = None
    statistics: StepStatistics | None = None
    computing: Computing | None = None
    histograms: Mapping[Metric, Histogram] = field(default_factory=dict)
    counters: Mapping[Metric, float] = field(default_factory=dict)
    outcomes: Mapping[Outcome, float] = field(default_factory=dict)
    gauges: Mapping[Metric, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What happened between two scrapes, over the pods that both of them saw and that did not restart.

    Counts are differences summed over pods, gauges are sums at the later scrape (`kv_used_ratio`: the
    fullest pod). None: no compared pod exports the signal.
    """

    scraped: int
    """Pods that answered the later scrape."""
    pods: int
    """Pods that could be compared."""
    elapsed_s: float
    dropped: tuple[str, ...] = ()
    """Pods that restarted in between."""
    statistics: StepStatistics | None = None
    ttft: Histogram | None = None
    itl: Histogram | None = None
    tpot: Histogram | None = None
    e2e: Histogram | None = None
    queue: Histogram | None = None
    arrivals: float | None = None
    finished: float | None = None
    aborted: float | None = None
    rejected: float | None = None
    failed: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    prefix_hit_tokens: float | None = None
    preemptions: float | None = None
    running: float | None = None
    waiting: float | None = None
    queued_tokens: float | None = None
    kv_used_ratio: float | None = None


_HISTOGRAMS = (Metric.TTFT, Metric.ITL, Metric.TPOT, Metric.E2E, Metric.QUEUE, Metric.STEP_SECONDS)
_COUNTERS = (
    Metric.ARRIVED,
    Metric.PROMPT_TOKENS,
    Metric.OUTPUT_TOKENS,
    Metric.PREFIX_HIT_TOKENS,
    Metric.PREEMPTIONS,
    Metric.STEPS,
)
_GAUGES = (
    Metric.RUNNING,
    Metric.WAITING,
    Metric.QUEUED_TOKENS,
    Metric.KV_USED_BLOCKS,
    Metric.KV_USED_RATIO,
    Metric.DRAINING,
)
_PREFIX = "headway_"
_T = TypeVar("_T", bound=msgspec.Struct)


def parse(text: str) -> Sample:
    """The Sample that an exposition text holds; raises MetricsError when it is none of an engine's."""
    return read(text_string_to_metric_families(text))


def read(families: Iterable[Family]) -> Sample:
    """The same from families of metrics, where an engine and its reader share a process."""
    series = _Series()
    try:
        for family in families:
            for sample in family.samples:
                if sample.name.startswith(_PREFIX) and not math.isnan(sample.value):
                    series.add(sample.name, sample.labels, sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsError(f"not an exposition text: {error}") from error
    if not series.values:
        raise MetricsError(f"no series whose name starts with {_PREFIX}")
    histograms = {m: h for m in _HISTOGRAMS if (h := series.histogram(m)) is not None}
    return Sample(
        start_time_s=series.total(Metric.START_TIME),
        limits=_limits(series),
        capacity=_convert(Capacity, _whole(series.by_label(Metric.CAPACITY, "parameter"))),
        objectives=_objectives(series),
        statistics=_statistics(series),
        computing=_computing(series),
        histograms=histograms,
        counters={m: v for m in _COUNTERS if (v := series.total(m)) is not None},
        outcomes={
            Outcome(k): v
            for k, v in series.by_label(Metric.OUTCOME, "outcome").items()
            if k in Outcome._value2member_map_
        },
        gauges={m: v for m in _GAUGES if (v := series.total(m)) is not None},
    )


class _Series:
    """Samples by name, while they are being read."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[Mapping[str, str], float]]] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        self.values.setdefault(name, []).append((labels, value))

    def total(self, name: str) -> float | None:
        """Sum over all labels (tenants, for one)."""
        found = self.values.get(name)
        return None if found is None else sum(value for _, value in found)

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """Of each series of that name, in the order of the text."""
        return [labels for labels, _ in self.values.get(name, ())]

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums per value of one label."""
        sums: dict[str, float] = {}
        for labels, value in self.values.get(name, ()):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def histogram(self, name: str) -> Histogram | None:
        """The histogram, or None where it is absent or does not hold together."""
        counts: dict[float, float] = {}
        for le, value in self.by_label(f"{name}_bucket", "le").items():
            try:
                counts[float(le)] = value
            except ValueError:
                return None
        if math.inf not in counts:
            return None
        buckets = tuple((le, round(counts[le])) for le in sorted(counts))
        if any(later < earlier for (_, earlier), (_, later) in itertools.pairwise(buckets)):
            return None
        return Histogram(buckets=buckets, sum=self.total(f"{name}_sum") or 0.0)


def _convert(type_: type[_T], values: Mapping[str, object]) -> _T | None:
    """The struct, or None where a field is missing: half a set of limits is none."""
    known = {name: values[name] for name in type_.__struct_fields__ if name in values}
    required = len(type_.__struct_fields__)
    try:
        return msgspec.convert(known, type_) if len(known) == required else None
    except msgspec.ValidationError:
        return None


def _whole(values: Mapping[str, float]) -> dict[str, object]:
    return {name: round(value) for name, value in values.items() if math.isfinite(value)}


def _limits(series: _Series) -> Limits | None:
    """Numbers are gauges; the mode is its position in BatchingMode."""
    values = _whole(series.by_label(Metric.LIMIT, "parameter"))
    generation = series.total(Metric.LIMITS_GENERATION)
    if generation is not None:
        values["generation"] = round(generation)
    modes = tuple(BatchingMode)
    mode = values.get("mode")
    if isinstance(mode, int) and 0 <= mode < len(modes):
        values["mode"] = modes[mode].value
    return _convert(Limits, values)


def _objectives(series: _Series) -> Objectives | None:
    """Targets in whole milliseconds; a target that the engine does not have is 0 or absent."""
    found = series.by_label(Metric.OBJECTIVE, "objective")
    if Metric.OBJECTIVE not in series.values:
        return None
    return Objectives(**{f"{name}_ms": round(found.get(name, 0.0) * 1000) for name in ("ttft", "itl", "e2e")})


def _computing(series: _Series) -> Computing | None:
    way = next(iter(series.labels(Metric.RUNNER)), None)
    if way is None:
        return None
    left = ((one.get("path", ""), one.get("reason", "")) for one in series.labels(Metric.FALLBACK))
    return Computing(f"{way.get('runner', '')} on {way.get('kernels', '')}", tuple(left))


def _statistics(series: _Series) -> StepStatistics | None:
    values: dict[str, object] = dict(series.by_label(Metric.STEP_STATISTIC, "term"))
    return _convert(StepStatistics, values)


def observe(before: Mapping[str, Sample], after: Mapping[str, Sample], elapsed_s: float) -> Observation:
    """What happened between two scrapes, `elapsed_s` apart.

    A pod whose start time changed or whose counters fell is left out: part of what it did is lost.
    A histogram that alone started again (new objectives) counts from its restart.
    """
    same = {name for name in before.keys() & after.keys() if not _restarted(before[name], after[name])}
    pairs = [(before[name], after[name]) for name in sorted(same)]
    counters = {m: _added((a.counters.get(m), b.counters.get(m)) for a, b in pairs) for m in _COUNTERS}
    outcomes = {o: _added((a.outcomes.get(o), b.outcomes.get(o)) for a, b in pairs) for o in Outcome}
    gauges = {metric: _sum(now.gauges.get(metric) for _, now in pairs) for metric in _GAUGES}
    used = [now.gauges[Metric.KV_USED_RATIO] for _, now in pairs if Metric.KV_USED_RATIO in now.gauges]
    return Observation(
        scraped=len(after),
        pods=len(pairs),
        elapsed_s=elapsed_s,
        dropped=tuple(sorted((before.keys() & after.keys()) - same)),
        statistics=_statistics_added(pairs),
        ttft=_histogram_added(pairs, Metric.TTFT),
        itl=_histogram_added(pairs, Metric.ITL),
        tpot=_histogram_added(pairs, Metric.TPOT),
        e2e=_histogram_added(pairs, Metric.E2E),
        queue=_histogram_added(pairs, Metric.QUEUE),
        arrivals=counters[Metric.ARRIVED],
        finished=outcomes[Outcome.FINISHED],
        aborted=outcomes[Outcome.ABORTED],
        rejected=outcomes[Outcome.REJECTED],
        failed=outcomes[Outcome.FAILED],
        prompt_tokens=counters[Metric.PROMPT_TOKENS],
        output_tokens=counters[Metric.OUTPUT_TOKENS],
        prefix_hit_tokens=counters[Metric.PREFIX_HIT_TOKENS],
        preemptions=counters[Metric.PREEMPTIONS],
        running=gauges[Metric.RUNNING],
        waiting=gauges[Metric.WAITING],
        queued_tokens=gauges[Metric.QUEUED_TOKENS],
        kv_used_ratio=max(used) if used else None,
    )


_Pair = tuple[Sample, Sample]


def _restarted(before: Sample, after: Sample) -> bool:
    if before.start_time_s != after.start_time_s:
        return True
    fell = any(after.counters[m] < v for m, v in before.counters.items() if m in after.counters)
    fell = fell or any(after.outcomes[o] < v for o, v in before.outcomes.items() if o in after.outcomes)
    steps_fell = (
        before.statistics is not None
        and after.statistics is not None
        and after.statistics.n < before.statistics.n
    )
    return fell or steps_fell


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _added(readings: Iterable[tuple[float | None, float | None]]) -> float | None:
    """The sum of differences of one counter over the pods that export it.

    A labelled series appears with its first event, so one that is new counts from 0.
    """
    return _sum(None if after is None else after - (before or 0.0) for before, after in readings)


def _histogram_added(pairs: Iterable[_Pair], metric: Metric) -> Histogram | None:
    total: Histogram | None = None
    for before, after in pairs:
        now = after.histograms.get(metric)
        if now is None:
            continue
        earlier = before.histograms.get(metric)
        added = now if earlier is None else now.minus(earlier)
        total = added if total is None else total.plus(added)
    return total


def _statistics_added(pairs: Iterable[_Pair]) -> StepStatistics | None:
    total: StepStatistics | None = None
    for before, after in pairs:
        if before.statistics is None or after.statistics is None:
            continue
        added = after.statistics.minus(before.statistics)
        total = added if total is None else total.plus(added)
    return total
