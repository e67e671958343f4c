"""A `Fleet` of engines in memory: each pod of a FakeCluster is one, and starts as a real one would.

A new engine reads limits and objectives from the ConfigMap at the moment it is first asked, counts
generations, and can hang, crash, refuse, or serve traffic at a given cost per step.
"""

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headway_engine.protocol import (
    Capacity,
    InvalidLimits,
    Limits,
    Metric,
    Objectives,
    Outcome,
    check_limits,
    latency_buckets,
)
from headway_engine.stepcost import StepCost, StepStatistics
from headway_operator.fleet import FleetError, PodRef, Unreachable
from headway_operator.metrics import Computing, Histogram, Sample
from support.fake_cluster import FakeCluster

CAPACITY = Capacity(
    max_batch_tokens=8192, max_batch_sequences=256, kv_blocks=4096, block_tokens=16, max_model_tokens=8192
)
COST = StepCost(base_s=0.005, per_prefill_token_s=1e-4, per_decode_s=1e-4, per_kv_token_s=1e-8)


@dataclass
class Engine:
    """One pod's engine."""

    key: str
    limits: Limits
    objectives: Objectives
    start_time_s: float = 1.0
    statistics: StepStatistics = field(default_factory=StepStatistics)
    requests: int = 0
    lost: bool = False  # answers nothing, at once
    hangs: bool = False  # answers nothing, after the fleet's patience
    refuses: bool = False  # answers scrapes, takes nothing
    puts: int = 0
    computing: Computing | None = None

    def serve(self, requests: int) -> None:
        """Traffic: each request is one step of prefill beside eight decodes."""
        self.requests += requests
        for n in range(requests):
            p, d = 400 + n % 7 * 50, 4 + n % 5
            self.statistics = self.statistics.add(p, d, d * 600, COST.seconds(p, d, d * 600))

    def restart(self, limits: Limits) -> None:
        """The process starts again: counters at 0, limits of its file."""
        self.limits, self.start_time_s = limits, self.start_time_s + 1
        self.statistics, self.requests = StepStatistics(), 0

    def sample(self) -> Sample:
        def histogram(value_s: float, objective_ms: int) -> Histogram:
            bounds = (*latency_buckets(objective_ms), float("inf"))
            return Histogram(
                tuple((le, self.requests if value_s <= le else 0) for le in bounds), value_s * self.requests
            )

        return Sample(
            start_time_s=self.start_time_s,
            limits=self.limits,
            capacity=CAPACITY,
            objectives=self.objectives,
            statistics=self.statistics,
            computing=self.computing,
            histograms={
                Metric.TTFT: histogram(0.2, self.objectives.ttft_ms),
                Metric.ITL: histogram(0.02, self.objectives.itl_ms),
            },
            counters={
                Metric.ARRIVED: float(self.requests),
                Metric.OUTPUT_TOKENS: 20.0 * self.requests,
                Metric.STEPS: self.statistics.n,
            },
            outcomes={Outcome.FINISHED: float(self.requests)},
            gauges={Metric.RUNNING: 0.0, Metric.WAITING: 0.0},
        )


@dataclass
class FakeFleet:
    """Engines by pod name."""

    cluster: FakeCluster
    timeout_s: float = 3.0
    engines: dict[str, Engine] = field(default_factory=dict)
    scrapes: int = 0

    def __getitem__(self, pod: str) -> Engine:
        return self._engine(pod)

    async def scrape(self, pods: Sequence[PodRef]) -> dict[str, Sample | Unreachable]:
        self.scrapes += 1
        found = await asyncio.gather(*(self._scrape_one(pod) for pod in pods))
        return {pod.name: sample for pod, sample in zip(pods, found, strict=True)}

    async def set_limits(self, pod: PodRef, key: str, limits: Limits) -> Limits:
        engine = await self._for_put(pod, key)
        try:
            check_limits(limits, CAPACITY)
        except InvalidLimits as error:
            raise FleetError(pod.name, error.message, error.field) from error
        if not engine.limits.same_values(limits):
            engine.limits = msgspec.structs.replace(limits, generation=engine.limits.generation + 1)
        return engine.limits

    async def set_objectives(self, pod: PodRef, key: str, objectives: Objectives) -> Objectives:
        engine = await self._for_put(pod, key)
        engine.objectives = objectives
        return objectives

    async def close(self) -> None:
        return

    async def _scrape_one(self, pod: PodRef) -> Sample | Unreachable:
        engine = self._engine(pod.name)
        if engine.hangs:
            await asyncio.sleep(self.timeout_s)
            return Unreachable(f"no answer in {self.timeout_s:g} s")
        return Unreachable("connection refused") if engine.lost else engine.sample()

    async def _for_put(self, pod: PodRef, key: str) -> Engine:
        engine = self._engine(pod.name)
        engine.puts += 1
        if engine.hangs:
            await asyncio.sleep(self.timeout_s)
        if engine.hangs or engine.lost or engine.refuses:
            raise FleetError(pod.name, "it does not take it")
        if key != engine.key:
            raise FleetError(pod.name, "401: wrong key")
        return engine

    def _engine(self, pod: str) -> Engine:
        """The engine of a pod; started on first use, with what its volumes and variables hold then."""
        if pod not in self.engines:
            body = self.cluster.peek("Pod", pod)
            assert body is not None, f"no pod {pod}"
            name = body["metadata"]["labels"]["headway.dev/inference-deployment"]
            data = (self.cluster.peek("ConfigMap", f"{name}-limits") or {})["data"]
            secret = (self.cluster.peek("Secret", f"{name}-control-key") or {})["data"]["key"]
            self.engines[pod] = Engine(
                key=base64.b64decode(secret).decode(),
                limits=msgspec.convert(json.loads(data["limits.json"]), Limits),
                objectives=msgspec.convert(json.loads(data["objectives.json"]), Objectives),
            )
        return self.engines[pod]
