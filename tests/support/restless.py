"""A machine whose speed jumps, in closed form: what an interval would show, without running one.

Prompts queue as in M/M/1 with as much room as the queue cap gives; a step costs what the linear model says
times the speed of the moment. Cheap enough for hours of it in a property. Knows no scheduler.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headway_engine.protocol import Capacity, Limits
from headway_engine.stepcost import StepCost, StepStatistics
from headway_operator.metrics import Observation
from headway_operator.resource import Batching, Slo, Tuning
from headway_operator.tuner.controller import Decision, decide
from headway_operator.tuner.evidence import attainment
from headway_operator.tuner.memory import Memory
from support.observations import a_histogram, a_slo, an_observation

CPU_COST = StepCost(base_s=0.020, per_prefill_token_s=0.9e-3, per_decode_s=2e-3, per_kv_token_s=1e-6)
CPU_CAPACITY = Capacity(
    max_batch_tokens=2048, max_batch_sequences=32, kv_blocks=1000, block_tokens=16, max_model_tokens=2048
)
CPU_SPEC = Batching(
    max_batch_tokens=512,
    max_batch_sequences=32,
    prefill_chunk_tokens=512,
    capacity_max_batch_tokens=2048,
    capacity_max_batch_sequences=32,
)
PROMPT, ANSWER = 350, 60
INTERVAL_S = 10.0
SAMPLED_STEPS = 40


@dataclass
class Restless:
    """One pod and its tuner. `slowness` is the factor on step times at a time, `rate` requests a second."""

    slowness: Callable[[float], float]
    rate: Callable[[float], float] = lambda now_s: 1.0
    slo: Slo = field(default_factory=lambda: a_slo(ttft_ms=3000, itl_ms=150))
    seed: int = 1
    memory: Memory = field(default_factory=Memory)
    now_s: float = 0.0
    limits: Limits = field(default_factory=CPU_SPEC.limits)
    decisions: list[Decision] = field(default_factory=list)
    seen: list[Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def run(self, ticks: int) -> list[Decision]:
        return [self.tick() for _ in range(ticks)]

    def tick(self) -> Decision:
        observation = self._interval()
        self.now_s += INTERVAL_S
        decision = decide(
            self.slo,
            Tuning(interval_s=INTERVAL_S),
            CPU_SPEC,
            CPU_CAPACITY,
            self.limits,
            self.memory,
            observation,
            self.now_s,
        )
        self.memory, self.limits = decision.memory, decision.limits
        self.seen.append(observation)
        self.decisions.append(decision)
        return decision

    def moves(self, since: int = 0) -> Counter[str]:
        """Changes by parameter, from this tick on."""
        return Counter(c.parameter for d in self.decisions[since:] for c in d.changes)

    def turns(self, since: int = 0) -> int:
        """Changes that went the other way than the one before of the same parameter."""
        last: dict[str, bool] = {}
        found = 0
        for change in (c for d in self.decisions[since:] for c in d.changes):
            up = change.new > change.old
            found += last.get(change.parameter, up) != up
            last[change.parameter] = up
        return found

    def attainment(self, since: int = 0) -> float:
        """Share of what was offered that met every target."""
        met = offered = 0.0
        for seen in self.seen[since:]:
            share, of = attainment(self.slo, seen)
            met += (share or 0.0) * (of or 0.0)
            offered += of or 0.0
        return met / max(1.0, offered)

    def itl_misses(self, tick: int) -> float:
        """Share of gaps over the target in one interval."""
        histogram = self.seen[tick].itl
        assert histogram is not None
        assert self.slo.itl is not None
        inside = max(n for le, n in histogram.buckets if le <= self.slo.itl.target_s * 1.000001)
        return 1 - inside / histogram.count

    def _interval(self) -> Observation:
        chance, limits = self._chance, self.limits
        slow = self.slowness(self.now_s)
        arrivals = self.rate(self.now_s) * INTERVAL_S * chance.uniform(0.8, 1.2)
        kv = PROMPT + ANSWER / 2
        # Sequences that decode at once, by Little's law around the mean step; a few rounds settle it.
        decode, step_s = 1.0, 0.05
        for _ in range(8):
            decode = min(max(1.0, arrivals / INTERVAL_S * ANSWER * step_s), limits.max_batch_sequences)
            chunk = max(1.0, limits.max_batch_tokens - decode)
            full_s = slow * CPU_COST.seconds(chunk, decode, decode * kv)
            light_s = slow * CPU_COST.seconds(0, decode, decode * kv)
            busy = min(1.0, arrivals / INTERVAL_S * PROMPT / chunk * full_s)
            step_s = INTERVAL_S / (busy * INTERVAL_S / full_s + (1 - busy) * INTERVAL_S / light_s)
        prompt_s = PROMPT / chunk * full_s
        load = arrivals / INTERVAL_S * prompt_s
        room = max(1, round(limits.max_queued_tokens / PROMPT))
        shares = [load**j for j in range(room + 1)]
        refused = arrivals * shares[-1] / sum(shares)
        share_full = busy / full_s / (busy / full_s + (1 - busy) / light_s)
        statistics, gaps = self._steps(chunk, decode, kv, share_full, slow, INTERVAL_S / step_s)
        served = max(1.0, arrivals - refused)
        first = [
            (j + chance.uniform(0.3, 1.0)) * prompt_s for j in chance.choices(range(room), shares[:-1], k=60)
        ]
        return an_observation(
            elapsed_s=INTERVAL_S,
            arrivals=arrivals,
            finished=served,
            rejected=refused,
            prompt_tokens=served * PROMPT,
            output_tokens=served * ANSWER,
            running=decode,
            statistics=statistics,
            itl=a_histogram(gaps, 150),
            tpot=a_histogram([sum(gaps) / len(gaps)] * max(1, round(served)), 150),
            ttft=a_histogram(first[: max(1, round(served))], 3000),
        )

    def _steps(
        self, chunk: float, decode: float, kv: float, share_full: float, slow: float, steps: float
    ) -> tuple[StepStatistics, list[float]]:
        """Sums over a sample of the steps, scaled to all of them; and the gaps that decoders saw."""
        chance, sums, gaps = self._chance, StepStatistics(), []
        for _ in range(SAMPLED_STEPS):
            prefill = chunk if chance.random() < share_full else 0.0
            sequences = max(1, round(decode * chance.uniform(0.6, 1.4)))
            seconds = (
                slow * CPU_COST.seconds(prefill, sequences, sequences * kv) * chance.lognormvariate(0, 0.05)
            )
            sums = sums.add(round(prefill), sequences, round(sequences * kv), seconds)
            gaps += [seconds] * sequences
        scale = steps / SAMPLED_STEPS
        return StepStatistics(**{f: scale * getattr(sums, f) for f in sums.__struct_fields__}), gaps


def jumps(factors: list[float], walk_seed: int = 0, every_s: float = 60.0) -> Callable[[float], float]:
    """These factors in turn, each for a while, on top of a slow random walk within 10 %."""
    chance, walk = random.Random(walk_seed), [0.0]
    for _ in range(len(factors)):
        walk.append(max(-0.1, min(0.1, walk[-1] + chance.gauss(0, 0.01))))

    def slowness(now_s: float) -> float:
        at = math.floor(now_s / every_s) % len(factors)
        return factors[at] * (1 + walk[at])

    return slowness
