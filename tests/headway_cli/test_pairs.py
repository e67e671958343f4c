"""Pairs compare fairly while the machine's speed changes, and say when they show nothing."""

from random import Random

import pytest

from headway_cli.pairs import Pair, at_least, compare


def on_a_noisy_host(bad_s: float, tuned_s: float, seed: int, pairs: int = 5) -> list[Pair]:
    """Each pair at a speed of its own, half to twice the usual, and a few percent of noise inside it."""
    chance = Random(seed)
    found = []
    for _ in range(pairs):
        speed = chance.uniform(0.5, 2.0)
        noise = [chance.uniform(0.95, 1.05) for _ in range(2)]
        found.append(Pair(bad_s * speed * noise[0], tuned_s * speed * noise[1]))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_a_difference_shows_whatever_the_host_does_between_pairs(seed: int) -> None:
    """The ratio of the medians would be off by the host's factor; the median of the ratios is not."""
    found = compare(on_a_noisy_host(0.4, 0.2, seed))
    assert found.is_better
    assert not found.is_worse
    assert found.times == pytest.approx(2.0, rel=0.12)


def test_no_difference_is_rarely_called_one() -> None:
    """Two sides of 1 in 32 each."""
    called = [
        found
        for found in (compare(on_a_noisy_host(0.3, 0.3, seed)) for seed in range(200))
        if found.is_better or found.is_worse
    ]
    assert len(called) <= 25


def test_what_is_worse_is_called_so() -> None:
    assert compare(on_a_noisy_host(0.2, 0.4, 1)).is_worse


def test_four_of_five_may_be_chance() -> None:
    assert at_least(5, 5) == 1 / 32
    pairs = [Pair(2, 1)] * 4 + [Pair(1, 2)]
    assert not compare(pairs).is_better
    assert compare(pairs).better == 4
