"""A whole controller around a FakeCluster and a FakeFleet: what the queue would do, on a clock of its own."""

import functools
import json
from dataclasses import dataclass, field
from typing import Any

from headway_operator.cluster import ClusterError, Manifest
from headway_operator.manifests import Images
from headway_operator.reconcile import Reconciler
from headway_operator.schema import admit
from support.fake_cluster import FakeCluster
from support.fake_fleet import FakeFleet
from support.resources import a_body

KIND = ("headway.dev/v1alpha1", "InferenceDeployment")


@functools.cache
def _admitted(name: str, spec: str) -> Manifest:
    """The body as the API server stores it; validation is slow and the same specs come again and again."""
    return admit(a_body(name, spec=json.loads(spec)))


@dataclass
class Clock:
    """Both clocks, moved by the test."""

    now_s: float = 1_800_000_000.0

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s


@dataclass
class Heard:
    """Reports, as counted by the controller's metrics."""

    verdicts: list[str] = field(default_factory=list)
    scrapes: int = 0
    refusals: int = 0
    status_writes: int = 0
    reads: list[int] = field(default_factory=list)

    def read(self, key: tuple[str, str], uid: str, generation: int) -> None:
        self.reads.append(generation)

    def scraped(self) -> None:
        self.scrapes += 1

    def decided(self, verdict: str) -> None:
        self.verdicts.append(verdict)

    def limits_not_taken(self) -> None:
        self.refusals += 1

    def status_written(self) -> None:
        self.status_writes += 1


class Randomness:
    """Bytes that never repeat, so that a key made twice would be noticed."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, count: int) -> bytes:
        self.asked += 1
        return bytes([self.asked]) * count


@dataclass
class World:
    """One resource called `chat` and everything around it."""

    cluster: FakeCluster = field(default_factory=FakeCluster)
    clock: Clock = field(default_factory=Clock)
    heard: Heard = field(default_factory=Heard)
    randomness: Randomness = field(default_factory=Randomness)
    name: str = "chat"

    def __post_init__(self) -> None:
        self.fleet = FakeFleet(self.cluster)
        self.start_controller()

    def start_controller(self) -> None:
        """A new process: nothing is remembered."""
        self.reconciler = Reconciler(
            self.cluster,
            self.fleet,
            images=Images(engine="example.invalid/headway-engine:1"),
            clock=self.clock,
            randomness=self.randomness,
            reports=self.heard,
        )

    def create(self, spec: dict[str, Any] | None = None, name: str = "chat") -> Manifest:
        return self.cluster.put(_admitted(name, json.dumps(spec)))

    def edit(self, spec: dict[str, Any], name: str = "chat") -> Manifest:
        """`kubectl apply` of the resource with another spec."""
        return self.cluster.put(_admitted(name, json.dumps(spec)))

    async def change(self, name: str = "chat") -> float | None:
        """Something was reported about the resource."""
        return (await self.reconciler.reconcile("default", name)).after_s

    async def tick(self, seconds: float = 10.0, name: str = "chat") -> float | None:
        """The next timer tick."""
        self.clock.now_s += seconds
        return (await self.reconciler.reconcile("default", name, tick_only=True)).after_s

    async def settle(self) -> None:
        """Up and running: pods ready, first ticks done."""
        await self.change()
        self.cluster.run_deployments()
        await self.change()
        for _ in range(3):
            await self.tick()

    async def persist(self, tries: int = 10) -> int:
        """What the queue does after an error: again, until it works. Returns how often it did not."""
        failures = 0
        while True:
            try:
                await self.change()
            except ClusterError:
                failures += 1
                assert failures < tries
            else:
                return failures

    @property
    def pods(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.cluster.all("Pod")]

    @property
    def status(self) -> dict[str, Any]:
        body = self.cluster.peek(KIND[1], self.name)
        assert body is not None
        return dict(body.get("status") or {})

    def condition(self, type_: str) -> dict[str, Any]:
        found = [c for c in self.status.get("conditions", []) if c["type"] == type_]
        assert found, f"no condition {type_} in {self.status.get('conditions')}"
        return dict(found[0])
