"""Judging percentile targets by counts."""

import math
import random
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_operator.metrics import Histogram
from headway_operator.tuner.quantiles import (
    Exceedances,
    Judgement,
    exceedances,
    fewest_misses_for_violated,
    judge,
    most_misses_for_met,
    quantile,
)
from support.observations import a_histogram

MISS_SHARE = 0.05


@pytest.mark.parametrize(
    ("n", "met", "violated"),
    [(30, -1, 5), (59, 0, 7), (100, 1, 10), (200, 4, 16), (500, 16, 34), (1000, 38, 63), (2000, 83, 117)],
)
def test_the_tables_of_the_binomial_at_p95(n: int, met: int, violated: int) -> None:
    assert most_misses_for_met(n, MISS_SHARE) == met
    assert fewest_misses_for_violated(n, MISS_SHARE) == violated


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 60), percent=st.integers(1, 50))
def test_the_tables_against_exact_fractions(n: int, percent: int) -> None:
    """The slow, obvious version: sums of exact fractions."""
    p = Fraction(percent, 100)
    at_most = list(accumulate(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)))
    met = max((m for m in range(n + 1) if at_most[m] <= Fraction(1, 20)), default=-1)
    violated = min((m for m in range(1, n + 1) if 1 - at_most[m - 1] <= Fraction(1, 20)), default=n + 1)
    assert most_misses_for_met(n, percent / 100) == met
    assert fewest_misses_for_violated(n, percent / 100) == violated


def test_a_verdict_is_wrong_in_at_most_one_of_twenty() -> None:
    """At a true miss share of exactly 5 % either verdict is an error."""
    chance = random.Random(5)
    verdicts = [
        judge(Exceedances(200, m, m), MISS_SHARE)
        for m in (sum(chance.random() < MISS_SHARE for _ in range(200)) for _ in range(400))
    ]
    assert verdicts.count(Judgement.MET) <= 0.07 * 400
    assert verdicts.count(Judgement.VIOLATED) <= 0.07 * 400


@pytest.mark.parametrize(
    ("samples", "misses", "verdict"),
    [
        (0, 0, Judgement.UNDECIDED),
        (58, 0, Judgement.UNDECIDED),
        (59, 0, Judgement.MET),
        (59, 1, Judgement.UNDECIDED),
        (29, 29, Judgement.UNDECIDED),
        (30, 5, Judgement.VIOLATED),
        (100, 5, Judgement.UNDECIDED),
        (1_000_000, 10_000, Judgement.MET),
        (1_000_000, 90_000, Judgement.VIOLATED),
    ],
)
def test_verdicts(samples: int, misses: int, verdict: Judgement) -> None:
    assert judge(Exceedances(samples, misses, misses), MISS_SHARE) is verdict


def test_where_no_boundary_is_on_the_target_a_verdict_needs_both_ends_of_the_doubt() -> None:
    assert judge(Exceedances(200, 0, 40), MISS_SHARE) is Judgement.UNDECIDED
    assert judge(Exceedances(200, 30, 40), MISS_SHARE) is Judgement.VIOLATED
    assert judge(Exceedances(200, 0, 2), MISS_SHARE) is Judgement.MET


def test_a_boundary_on_the_target_makes_the_count_exact() -> None:
    histogram = a_histogram([0.010, 0.0299, 0.030, 0.0301, 0.2], objective_ms=30)
    assert exceedances(histogram, 0.030) == Exceedances(5, 2, 2)


def test_a_target_between_boundaries_is_counted_from_both_sides() -> None:
    histogram = a_histogram([0.041, 0.044, 0.049, 0.2])
    assert exceedances(histogram, 0.045) == Exceedances(4, 1, 4)


def test_a_target_above_every_boundary_leaves_all_in_doubt() -> None:
    histogram = Histogram(((1.0, 3), (math.inf, 5)), 20.0)
    assert exceedances(histogram, 50.0) == Exceedances(5, 0, 2)


latencies = st.lists(st.floats(0.0005, 700), min_size=1, max_size=60)


@settings(deadline=None, max_examples=40)
@given(values=latencies, target_ms=st.integers(1, 60_000))
def test_exact_counts_equal_counting_the_values(values: list[float], target_ms: int) -> None:
    seen = exceedances(a_histogram(values, target_ms), target_ms / 1000)
    assert seen.low == seen.high == sum(1 for v in values if v > target_ms / 1000)


@settings(deadline=None, max_examples=40)
@given(values=latencies, share=st.floats(0.01, 0.99))
def test_an_interpolated_quantile_lies_in_the_bucket_of_the_true_one(
    values: list[float], share: float
) -> None:
    histogram = a_histogram(values)
    true = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    found = quantile(histogram, share)
    edges = [0.0, *histogram.boundaries]
    upper = next(le for le in histogram.boundaries if true <= le)
    lower = edges[edges.index(upper) - 1]
    assert found is not None
    assert lower <= found <= upper


def test_an_empty_histogram_has_no_quantile() -> None:
    assert quantile(a_histogram([]), 0.95) is None
