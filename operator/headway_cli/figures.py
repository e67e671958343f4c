"""Figures of the last seconds, read from the pods as the controller reads them.

`Meter` keeps a few scrapes and compares the newest with the oldest. Knows nothing of terminals.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from headway_engine.protocol import Limits
from headway_operator.metrics import Histogram, Observation, Sample, observe
from headway_operator.tuner.quantiles import quantile


@dataclass(frozen=True, slots=True)
class Figures:
    """What the engines did lately, all pods together. None: nothing to tell yet."""

    window_s: float = 0.0
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    running: int = 0
    waiting: int = 0
    kv_used_ratio: float | None = None
    rejected: int = 0
    limits: Limits | None = None  # of the first pod; `mixed` when others differ
    mixed: bool = False
    pods: int = 0


class Meter:
    """Sliding window over scrapes. `window_s` is how far back figures reach."""

    def __init__(self, window_s: float = 15.0) -> None:
        self._window_s = window_s
        self._scrapes: deque[tuple[float, Mapping[str, Sample]]] = deque()

    def add(self, at_s: float, samples: Mapping[str, Sample]) -> Figures:
        """Take one scrape of all pods that answered; figures up to it."""
        self._scrapes.append((at_s, samples))
        while len(self._scrapes) > 2 and self._scrapes[1][0] <= at_s - self._window_s:
            self._scrapes.popleft()
        then_s, before = self._scrapes[0]
        observation = observe(before, samples, max(at_s - then_s, 1e-3))
        return figures(observation, samples)


def figures(observation: Observation, samples: Mapping[str, Sample]) -> Figures:
    """An Observation as the figures people look at."""
    limits = [sample.limits for _, sample in sorted(samples.items()) if sample.limits is not None]
    elapsed_s = observation.elapsed_s

    def per_s(count: float | None) -> float | None:
        return None if count is None else count / elapsed_s

    return Figures(
        window_s=elapsed_s,
        ttft_p95_s=_p95(observation.ttft),
        itl_p95_s=_p95(observation.itl),
        output_tokens_per_s=per_s(observation.output_tokens),
        prompt_tokens_per_s=per_s(observation.prompt_tokens),
        requests_per_s=per_s(observation.arrivals),
        running=round(observation.running or 0),
        waiting=round(observation.waiting or 0),
        kv_used_ratio=observation.kv_used_ratio,
        rejected=round((observation.rejected or 0) + (observation.failed or 0)),
        limits=limits[0] if limits else None,
        mixed=any(not one.same_values(limits[0]) for one in limits),
        pods=len(samples),
    )


def _p95(histogram: Histogram | None) -> float | None:
    return None if histogram is None else quantile(histogram, 0.95)
