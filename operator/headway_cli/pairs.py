"""Two settings compared in pairs, close together in time: fair on a machine whose speed changes.

Pure: medians, and a sign test that says when a difference may be chance. Knows nothing of what was measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CHANCE = 0.05
"""So often may chance alone bring as many pairs to one side before a difference is called one."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same thing measured under either setting, one right after the other. Seconds."""

    bad_s: float
    tuned_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the pairs came to."""

    pairs: int
    better: int  # pairs in which the tuned setting was quicker
    bad_s: float  # medians
    tuned_s: float
    times: float  # median of the pairs' ratios: above 1, the tuned setting is quicker

    @property
    def is_better(self) -> bool:
        return at_least(self.better, self.pairs) <= CHANCE

    @property
    def is_worse(self) -> bool:
        return at_least(self.pairs - self.better, self.pairs) <= CHANCE


def compare(pairs: Sequence[Pair]) -> Comparison:
    """Medians over at least one pair. The ratio is taken inside each pair: there the machine was the same."""
    return Comparison(
        pairs=len(pairs),
        better=sum(pair.tuned_s < pair.bad_s for pair in pairs),
        bad_s=median(pair.bad_s for pair in pairs),
        tuned_s=median(pair.tuned_s for pair in pairs),
        times=median(pair.bad_s / max(pair.tuned_s, 1e-9) for pair in pairs),
    )


def at_least(wins: int, of: int) -> float:
    """How likely a fair coin shows so many heads or more."""
    return sum(math.comb(of, k) for k in range(wins, of + 1)) / float(2**of)
