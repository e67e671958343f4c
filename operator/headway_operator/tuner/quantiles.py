"""Judging a percentile target by counting: how many of n requests took longer than it allows.

The number of misses among n independent requests is binomial, so the tables need no assumption about
the shape of latencies (Hahn and Meeker; arXiv 2402.19109). Knows nothing of limits or engines.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from headway_operator.metrics import Histogram

CONFIDENCE = 0.95
FEWEST_FOR_VIOLATED = 30
"""A verdict from fewer would be moved by one burst."""
LARGEST_COUNT = 20_000
"""Beyond this many samples the shares decide; counts are scaled down to it."""


class Judgement(StrEnum):
    """MET and VIOLATED hold with 95 % confidence; on UNDECIDED nobody may act."""

    MET = "Met"
    VIOLATED = "Violated"
    UNDECIDED = "Undecided"


@dataclass(frozen=True, slots=True)
class Exceedances:
    """Samples, and how many exceeded the target: at least `low`, at most `high`.

    The two are equal when a histogram boundary sits on the target.
    """

    samples: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def plus(self, other: "Exceedances") -> "Exceedances":
        return Exceedances(self.samples + other.samples, self.low + other.low, self.high + other.high)

    def scaled(self, factor: float) -> "Exceedances":
        return Exceedances(self.samples * factor, self.low * factor, self.high * factor)


def exceedances(histogram: Histogram, target_s: float) -> Exceedances:
    """How many observations were above `target_s`."""
    below = max((n for le, n in histogram.buckets if le <= target_s * (1 + 1e-9)), default=0)
    at_or_above = [n for le, n in histogram.buckets if le >= target_s * (1 - 1e-9)]
    surely_below = at_or_above[0] if at_or_above else histogram.count
    return Exceedances(histogram.count, histogram.count - surely_below, histogram.count - below)


def judge(seen: Exceedances, miss_share: float) -> Judgement:
    """Whether at most `miss_share` of all requests exceed the target, at 95 % confidence."""
    scale = min(1.0, LARGEST_COUNT / seen.samples) if seen.samples > 0 else 1.0
    n = math.floor(seen.samples * scale + 1e-9)
    if n >= FEWEST_FOR_VIOLATED and seen.low * scale >= fewest_misses_for_violated(n, miss_share) - 1e-9:
        return Judgement.VIOLATED
    if seen.high * scale <= most_misses_for_met(n, miss_share) + 1e-9:
        return Judgement.MET
    return Judgement.UNDECIDED


@lru_cache(maxsize=4096)
def most_misses_for_met(n: int, miss_share: float, confidence: float = CONFIDENCE) -> int:
    """The largest count so small that a true share of `miss_share` would rarely show it; -1: none is."""
    total = 0.0
    for misses in range(n + 1):
        total += _binomial(n, misses, miss_share)
        if total > 1 - confidence:
            return misses - 1
    return n


@lru_cache(maxsize=4096)
def fewest_misses_for_violated(n: int, miss_share: float, confidence: float = CONFIDENCE) -> int:
    """The smallest count so large that a true share of `miss_share` would rarely show it; n + 1: none is."""
    total = 0.0
    for misses in range(n + 1):
        # P(at least `misses`) = 1 - P(fewer), and `total` is the latter here.
        if 1 - total <= 1 - confidence:
            return misses
        total += _binomial(n, misses, miss_share)
    return n + 1


def _binomial(n: int, k: int, p: float) -> float:
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log + k * math.log(p) + (n - k) * math.log1p(-p))


def quantile(histogram: Histogram, share: float) -> float | None:
    """The latency under which `share` of the observations lie, in seconds, by interpolation.

    For display and for the correction factor; targets are judged by counts. None when empty. In the
    open last bucket the answer is its lower edge.
    """
    if histogram.count == 0:
        return None
    rank = share * histogram.count
    lower, before = 0.0, 0
    for le, n in histogram.buckets:
        if n >= rank and n > before:
            if math.isinf(le):
                return lower
            return lower + (le - lower) * (rank - before) / (n - before)
        lower, before = le, n
    return lower
