"""Builders of samples, observations and step statistics for tests of the tuner and of status."""

import random
from collections.abc import Iterable
from typing import Any

from headway_engine.protocol import Capacity, Limits, latency_buckets
from headway_engine.stepcost import StepCost, StepStatistics
from headway_operator.metrics import Histogram, Observation
from headway_operator.resource import Batching, Percentile, Slo, Target, Tuning

COST = StepCost(base_s=0.007, per_prefill_token_s=33e-6, per_decode_s=10e-6, per_kv_token_s=45e-9)
CAPACITY = Capacity(
    max_batch_tokens=8192,
    max_batch_sequences=256,
    kv_blocks=20_000,
    block_tokens=16,
    max_model_tokens=16_384,
)


def a_slo(ttft_ms: int = 0, itl_ms: int = 0, e2e_ms: int = 0) -> Slo:
    """Targets at p95; 0 for none."""

    def target(ms: int) -> Target | None:
        return Target(ms / 1000, Percentile.P95) if ms else None

    return Slo(ttft=target(ttft_ms), itl=target(itl_ms), e2e=target(e2e_ms))


def a_histogram(values: Iterable[float], objective_ms: int = 0) -> Histogram:
    """What an engine would export after observing these latencies."""
    seen = list(values)
    bounds = (*latency_buckets(objective_ms), float("inf"))
    return Histogram(tuple((le, sum(1 for v in seen if v <= le)) for le in bounds), sum(seen))


def statistics_of(
    cost: StepCost,
    *,
    steps: int,
    prefill: Iterable[int] = (0, 512),
    decode: Iterable[int] = (8, 12, 16),
    kv_per_sequence: int = 800,
    noise: float = 0.02,
    seed: int = 1,
) -> StepStatistics:
    """Sums over steps at these working points, timed by `cost` with a little noise."""
    chance = random.Random(seed)
    prefills, decodes = list(prefill), list(decode)
    sums = StepStatistics()
    for _ in range(steps):
        p, d = chance.choice(prefills), chance.choice(decodes)
        k = round(d * kv_per_sequence * chance.uniform(0.7, 1.3))
        sums = sums.add(p, d, k, cost.seconds(p, d, k) * chance.uniform(1 - noise, 1 + noise))
    return sums


def an_observation(**values: Any) -> Observation:
    """Ten seconds of one busy pod; any field can be set."""
    defaults: dict[str, Any] = {
        "scraped": 1,
        "pods": 1,
        "elapsed_s": 10.0,
        "arrivals": 40.0,
        "finished": 40.0,
        "aborted": 0.0,
        "rejected": 0.0,
        "failed": 0.0,
        "prompt_tokens": 40 * 500.0,
        "output_tokens": 40 * 100.0,
        "prefix_hit_tokens": 0.0,
        "preemptions": 0.0,
        "running": 12.0,
        "waiting": 0.0,
        "queued_tokens": 0.0,
        "kv_used_ratio": 0.4,
    }
    return Observation(**{**defaults, **values})


def limits(**values: Any) -> Limits:
    return Limits(**values)


def batching(**values: Any) -> Batching:
    return Batching(**values)


def tuning(**values: Any) -> Tuning:
    return Tuning(**values)
