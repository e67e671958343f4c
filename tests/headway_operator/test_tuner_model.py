"""The step-time fit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.stepcost import StepCost, StepStatistics
from headway_operator.tuner.model import coefficients, fit, forget, relative_error
from support.observations import COST, statistics_of

costs = st.builds(
    StepCost,
    base_s=st.floats(1e-4, 5e-2),
    per_prefill_token_s=st.floats(1e-6, 2e-3),
    per_decode_s=st.floats(1e-6, 2e-3),
    per_kv_token_s=st.floats(1e-9, 1e-6),
)
VARIED = {"prefill": (0, 16, 64, 200, 512), "decode": (1, 4, 9, 30)}


@settings(deadline=None, max_examples=25)
@given(cost=costs, seed=st.integers(0, 100))
def test_steps_without_noise_give_their_cost_back(cost: StepCost, seed: int) -> None:
    typical = cost.seconds(200, 9, 7000)
    found = fit(statistics_of(cost, steps=300, noise=0.0, seed=seed, **VARIED), None)
    assert found is not None
    for p, d, k in ((0, 1, 800), (512, 9, 7000), (100, 30, 25_000)):
        expected = cost.seconds(p, d, k)
        assert found.cost.seconds(p, d, k) == pytest.approx(expected, rel=1e-3, abs=1e-3 * typical)


@settings(deadline=None, max_examples=25)
@given(cost=costs, noise=st.floats(0, 0.3), seed=st.integers(0, 100))
def test_no_coefficient_is_ever_negative(cost: StepCost, noise: float, seed: int) -> None:
    found = fit(statistics_of(cost, steps=40, noise=noise, seed=seed), None)
    assert found is not None
    assert min(coefficients(found.cost)) >= 0


def test_a_slope_that_the_data_call_negative_is_left_out_and_the_rest_fitted_again() -> None:
    sums = StepStatistics()
    for p, d in ((0, 1), (100, 5), (200, 10), (300, 20)) * 10:
        sums = sums.add(p, d, 0, 0.010 + 1e-5 * p - 1e-4 * d)
    found = fit(sums, None)
    assert found is not None
    assert found.cost.per_decode_s == 0
    mean = sums.y / sums.n
    assert found.cost.seconds(sums.p / sums.n, sums.d / sums.n, 0) == pytest.approx(mean, rel=1e-6)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 50), at=st.tuples(*[st.floats(0.5, 2.0)] * 4))
def test_it_is_the_best_non_negative_model_there_is(seed: int, at: tuple[float, float, float, float]) -> None:
    """Against random others: none has a smaller sum of squares."""
    sums = statistics_of(COST, steps=60, noise=0.3, seed=seed)
    found = fit(sums, None)
    assert found is not None

    def loss(w: tuple[float, ...]) -> float:
        a, b, c, d = w
        square = (
            a * a * sums.n + b * b * sums.pp + c * c * sums.dd + d * d * sums.kk
            + 2 * (a * b * sums.p + a * c * sums.d + a * d * sums.k)
            + 2 * (b * c * sums.pd + b * d * sums.pk + c * d * sums.dk)
        )  # fmt: skip
        return square - 2 * (a * sums.y + b * sums.py + c * sums.dy + d * sums.ky)

    best = coefficients(found.cost)
    other = tuple(w * factor for w, factor in zip(coefficients(COST), at, strict=True))
    assert loss(best) <= loss(other) + 1e-6 * sums.yy


def test_a_feature_that_no_step_had_keeps_its_coefficient() -> None:
    """An hour of decoding alone does not make prompt tokens free."""
    sums = statistics_of(COST, steps=200, prefill=(0,))
    found = fit(sums, COST)
    assert found is not None
    assert found.cost.per_prefill_token_s == COST.per_prefill_token_s


def test_a_direction_without_variation_stays_near_the_last_fit() -> None:
    """With always the same decodes, base and decode cost cannot be told apart: the split stays."""
    found = fit(statistics_of(COST, steps=200, decode=(8,), kv_per_sequence=800), COST)
    assert found is not None
    assert found.cost.base_s == pytest.approx(COST.base_s, rel=0.3)
    assert found.cost.per_decode_s == pytest.approx(COST.per_decode_s, rel=0.5)


def test_too_few_steps_are_no_model() -> None:
    assert fit(StepStatistics(), None) is None
    assert fit(statistics_of(COST, steps=7), None) is None


def test_noise_shows_as_deviation_and_more_steps_as_certainty() -> None:
    few = fit(statistics_of(COST, steps=30, noise=0.2), None)
    many = fit(statistics_of(COST, steps=3000, noise=0.2), None)
    assert few is not None
    assert many is not None
    assert many.uncertainty_s(512, 12, 9600) < few.uncertainty_s(512, 12, 9600)
    assert many.deviation_s == pytest.approx(0.2 / 3**0.5 * 0.018, rel=0.5)


def test_forgetting_lets_new_steps_win() -> None:
    slow = StepCost(base_s=0.014, per_prefill_token_s=66e-6, per_decode_s=20e-6, per_kv_token_s=90e-9)
    sums, cost = statistics_of(COST, steps=1000), COST
    for interval in range(5):
        sums = forget(sums, 0.5).plus(statistics_of(slow, steps=300, seed=interval))
        found = fit(sums, cost)
        assert found is not None
        cost = found.cost
    assert cost.seconds(512, 12, 9600) == pytest.approx(slow.seconds(512, 12, 9600), rel=0.05)


def test_the_relative_error_is_how_much_longer_steps_took_than_the_model_says() -> None:
    slower = StepCost(**{f: 1.3 * getattr(COST, f) for f in COST.__struct_fields__})
    error = relative_error(COST, statistics_of(slower, steps=500, noise=0.0))
    assert error == pytest.approx(0.3, abs=1e-6)
    assert relative_error(COST, StepStatistics()) is None
