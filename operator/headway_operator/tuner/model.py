"""The step-time model: T(P, D, K) = a + b P + c D + d K, fitted to sufficient statistics.

Exact weighted least squares with forgetting, a ridge towards the last fit, and coefficients that are
never negative. Knows nothing of targets, limits or where the statistics come from.
"""

import itertools
import math
from dataclasses import dataclass

from headway_engine.stepcost import StepCost, StepStatistics

RIDGE = 0.02
FIRST_RIDGE = 1e-6
"""With no fit to lean on the ridge only has to keep the equations solvable."""

_Vector = tuple[float, float, float, float]
_Matrix = tuple[_Vector, _Vector, _Vector, _Vector]


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model and how well it explains the steps it was fitted to."""

    cost: StepCost
    steps: float
    """Steps behind it, after forgetting."""
    deviation_s: float
    """Standard deviation of a step about the model."""
    covariance: _Matrix
    """Of the coefficients, in units of the deviation squared."""

    def uncertainty_s(self, prefill_tokens: float, decode_sequences: float, kv_tokens: float) -> float:
        """Standard error of the predicted mean step time at this point."""
        x = (1.0, prefill_tokens, decode_sequences, kv_tokens)
        spread = sum(x[i] * self.covariance[i][j] * x[j] for i in range(4) for j in range(4))
        return self.deviation_s * math.sqrt(max(0.0, spread))


def forget(sums: StepStatistics, factor: float) -> StepStatistics:
    """All sums times `factor`: older steps count for less."""
    return StepStatistics(**{f: getattr(sums, f) * factor for f in sums.__struct_fields__})


def gram(s: StepStatistics) -> _Matrix:
    """The matrix of sums of x x' for x = (1, P, D, K)."""
    return (
        (s.n, s.p, s.d, s.k),
        (s.p, s.pp, s.pd, s.pk),
        (s.d, s.pd, s.dd, s.dk),
        (s.k, s.pk, s.dk, s.kk),
    )


def coefficients(cost: StepCost) -> _Vector:
    return (cost.base_s, cost.per_prefill_token_s, cost.per_decode_s, cost.per_kv_token_s)


def fit(sums: StepStatistics, prior: StepCost | None) -> Fit | None:
    """The non-negative ridge fit, or None where there are too few steps to speak of.

    Minimises |y - Xw|^2 + (w - prior)' L (w - prior) with L a share of X'X's diagonal, so that a
    direction in which the steps do not vary stays where it was.
    """
    if sums.n < 8 or sums.y <= 0:
        return None
    matrix = gram(sums)
    ridge = FIRST_RIDGE if prior is None else RIDGE
    lean = coefficients(prior) if prior is not None else (0.0, 0.0, 0.0, 0.0)
    # A feature that no step had leaves its coefficient entirely to the last fit.
    penalties = [ridge * matrix[i][i] if matrix[i][i] > 0 else 1.0 for i in range(4)]
    left = [[matrix[i][j] + (penalties[i] if i == j else 0.0) for j in range(4)] for i in range(4)]
    target = (sums.y, sums.py, sums.dy, sums.ky)
    right = [target[i] + penalties[i] * lean[i] for i in range(4)]
    best = _non_negative(left, right)
    residual = _residual(sums, matrix, best)
    return Fit(
        cost=StepCost(
            base_s=best[0], per_prefill_token_s=best[1], per_decode_s=best[2], per_kv_token_s=best[3]
        ),
        steps=sums.n,
        deviation_s=math.sqrt(max(0.0, residual) / max(1.0, sums.n - 4)),
        covariance=_inverse(left),
    )


def relative_error(cost: StepCost, sums: StepStatistics) -> float | None:
    """How much longer the steps took than the model says, as a share; None without steps."""
    predicted = (
        cost.base_s * sums.n
        + cost.per_prefill_token_s * sums.p
        + cost.per_decode_s * sums.d
        + cost.per_kv_token_s * sums.k
    )
    return (sums.y - predicted) / predicted if predicted > 0 else None


def _residual(s: StepStatistics, matrix: _Matrix, w: _Vector) -> float:
    target = (s.y, s.py, s.dy, s.ky)
    linear = sum(w[i] * target[i] for i in range(4))
    square = sum(w[i] * matrix[i][j] * w[j] for i in range(4) for j in range(4))
    return s.yy - 2 * linear + square


def _non_negative(left: list[list[float]], right: list[float]) -> _Vector:
    """The best non-negative solution: all sixteen choices of which coefficients are free are tried.

    Slow in general, exact always, and with four unknowns a few microseconds.
    """
    best: tuple[float, _Vector] = (0.0, (0.0, 0.0, 0.0, 0.0))
    for free in itertools.chain.from_iterable(itertools.combinations(range(4), r) for r in range(1, 5)):
        solved = _solve([[left[i][j] for j in free] for i in free], [right[i] for i in free])
        if solved is None or min(solved) < 0:
            continue
        w = [0.0, 0.0, 0.0, 0.0]
        for i, value in zip(free, solved, strict=True):
            w[i] = value
        # At a solution of the restricted equations the objective is a constant - w'right.
        gain = sum(w[i] * right[i] for i in range(4))
        if gain > best[0]:
            best = (gain, (w[0], w[1], w[2], w[3]))
    return best[1]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss with scaling and pivoting; None when the matrix is singular to working precision."""
    n = len(right)
    scale = [math.sqrt(matrix[i][i]) if matrix[i][i] > 0 else 0.0 for i in range(n)]
    if min(scale) == 0.0:
        return None
    rows = [
        [matrix[i][j] / (scale[i] * scale[j]) for j in range(n)] + [right[i] / scale[i]] for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        if abs(rows[pivot][i]) < 1e-11:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(n):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [rows[i][n] / rows[i][i] / scale[i] for i in range(n)]


def _inverse(matrix: list[list[float]]) -> _Matrix:
    """Column by column; a direction without data gets no variance (nothing was learnt about it)."""
    alive = [i for i in range(4) if matrix[i][i] > 0]
    inner = [[matrix[i][j] for j in alive] for i in alive]
    inverse = [[0.0] * 4 for _ in range(4)]
    for column, j in enumerate(alive):
        solved = _solve(inner, [1.0 if r == column else 0.0 for r in range(len(alive))])
        if solved is None:
            continue
        for row, i in enumerate(alive):
            inverse[i][j] = solved[row]
    a, b, c, d = ((r[0], r[1], r[2], r[3]) for r in inverse)
    return (a, b, c, d)
