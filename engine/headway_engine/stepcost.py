"""What a step costs: sufficient statistics of step time, and the linear model fitted to them.

Each step adds its features x = (1, P, D, K) and its time y to fifteen running sums: P prefill tokens,
D decoding sequences, K KV tokens read by decodes. The sums only grow, so two readings of them give an
exact least-squares problem for the steps in between, whatever the scrape period (docs/architecture.md,
"data path c"). This module knows nothing of who reads the sums.
"""

import msgspec


class StepStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Running sums over steps: the ten products of x, the four of x and y, and y squared.

    Field names spell the product: `pd` is the sum of P*D, `py` of P*y. `n` is the number of steps.
    """

    n: float = 0.0
    p: float = 0.0
    d: float = 0.0
    k: float = 0.0
    pp: float = 0.0
    pd: float = 0.0
    pk: float = 0.0
    dd: float = 0.0
    dk: float = 0.0
    kk: float = 0.0
    y: float = 0.0
    py: float = 0.0
    dy: float = 0.0
    ky: float = 0.0
    yy: float = 0.0

    def add(
        self, prefill_tokens: int, decode_sequences: int, kv_tokens: int, seconds: float
    ) -> "StepStatistics":
        """The sums with one more step in them."""
        p, d, k, y = float(prefill_tokens), float(decode_sequences), float(kv_tokens), seconds
        return StepStatistics(
            n=self.n + 1, p=self.p + p, d=self.d + d, k=self.k + k,
            pp=self.pp + p * p, pd=self.pd + p * d, pk=self.pk + p * k,
            dd=self.dd + d * d, dk=self.dk + d * k, kk=self.kk + k * k,
            y=self.y + y, py=self.py + p * y, dy=self.dy + d * y, ky=self.ky + k * y, yy=self.yy + y * y,
        )  # fmt: skip

    def minus(self, earlier: "StepStatistics") -> "StepStatistics":
        """The sums over the steps since `earlier`."""
        return StepStatistics(**{f: getattr(self, f) - getattr(earlier, f) for f in self.__struct_fields__})

    def plus(self, other: "StepStatistics") -> "StepStatistics":
        """The sums over both sets of steps (of two pods, say)."""
        return StepStatistics(**{f: getattr(self, f) + getattr(other, f) for f in self.__struct_fields__})


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """T(P, D, K) = base + per_prefill_token*P + per_decode*D + per_kv_token*K, in seconds."""

    base_s: float
    per_prefill_token_s: float
    per_decode_s: float
    per_kv_token_s: float

    def seconds(self, prefill_tokens: float, decode_sequences: float, kv_tokens: float) -> float:
        """Predicted time of one step."""
        return (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_decode_s * decode_sequences
            + self.per_kv_token_s * kv_tokens
        )
