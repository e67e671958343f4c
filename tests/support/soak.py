"""Random traffic against a running engine, limits that change all the time, and books that must balance.

`soak` drives any engine for a while and returns `Findings`: what was counted, and what was wrong. The
script of `bench/` gives it the real model for half an hour, a test gives it a toy for seconds. Knows the
engine by its two ports and its processes only.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import msgspec

from headway_engine.protocol import (
    CAPACITY_PATH,
    HEALTH_PATH,
    LIMITS_PATH,
    METRICS_PATH,
    BatchingMode,
    Capacity,
    Limits,
    Metric,
)
from headway_engine.protocol import Outcome as Ending
from support.client import Outcome, send
from support.engine_server import Engine, resident_bytes, samples_of
from support.traffic import EMBEDDINGS, MODEL_NAME, Ask, Law

ZERO_AT_REST = (Metric.IN_FLIGHT, Metric.RUNNING, Metric.WAITING, Metric.QUEUED_TOKENS, Metric.KV_USED_BLOCKS)
"""Used blocks are all blocks less the free ones, cached or blank: 0 says that none is lost."""
REST_TIMEOUT_S = 300.0
SCRAPE_EVERY_S = 1.0
MOST_COMPLAINTS = 50
CERTAIN_MARGIN = 0.01
"""Nats. In float32 the rounding of one batch shape or another moves a log-probability by about 1e-4."""

LEAK_BYTES_PER_SEQUENCE = 2048
LEAK_FLOOR_BYTES = 8 << 20
"""The bound of growth. Whoever keeps a sequence keeps its token ids and text: 2 KiB at least for the mean
prompt here. The floor is what allocators are seen to wander without any leak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how hard."""

    seconds: float
    law: Law
    least_requests: int = 0  # with fewer it goes on: a busy machine may hardly begin in the time
    clients: int = 16
    mean_pause_s: float = 1.5  # of a client between two requests
    flip_every_s: float = 1.0
    rest_every_s: float = 300.0  # everybody stops, and the gauges must be 0
    probe_every_s: float = 2.0
    probes: tuple[str, ...] = ("The capital of France is", "a b c d e f")
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory of one process, by seconds since the start and sequences arrived until then."""

    at_s: float
    sequences: int
    bytes: int


@dataclass(slots=True)
class Findings:
    """What a soak saw."""

    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    sequences: Counter[str] = field(default_factory=Counter)  # by the client's outcome
    scrapes: int = 0
    flips: int = 0
    refused_flips: int = 0
    rests: int = 0
    probes: int = 0
    unanswered_probes: int = 0
    certain_probe_tokens: int = 0
    embeddings: int = 0  # calls that were answered whole
    vectors: int = 0  # in them
    samples: dict[str, float] = field(default_factory=dict)
    resident: dict[str, list[Resident]] = field(default_factory=dict)  # by process
    complaints: list[str] = field(default_factory=list)
    complaints_total: int = 0

    def complain(self, what: str) -> None:
        self.complaints_total += 1
        if len(self.complaints) < MOST_COMPLAINTS:
            self.complaints.append(what)

    def note(self, outcome: Outcome, ask: Ask) -> None:
        self.outcomes[outcome.word] += 1
        self.sequences[outcome.word] += ask.sequences
        if ask.path == EMBEDDINGS and outcome.word == "200":
            self.embeddings += 1
            self.vectors += ask.sequences
        if outcome.complaint:
            self.complain(outcome.complaint)

    def judge_growth(self) -> None:
        """Complain of each process that grew by more than its bound."""
        for process in self.resident:
            growth, bound = self.growth(process)
            if growth > bound:
                self.complain(f"the {process} grew by {growth:.0f} bytes, bound {bound:.0f}")

    def growth(self, process: str) -> tuple[float, float]:
        """Growth of a process over the last two thirds of the run, by Theil and Sen's slope, and its bound;
        bytes."""
        points = self.resident[process]
        points = points[len(points) // 3 :]
        span_s = points[-1].at_s - points[0].at_s
        sequences = points[-1].sequences - points[0].sequences
        return _slope(points) * span_s, max(LEAK_FLOOR_BYTES, LEAK_BYTES_PER_SEQUENCE * sequences)


async def soak(engine: Engine, plan: Plan) -> Findings:
    """Run the plan. What is wrong is in the findings; raises only when the engine cannot be spoken to."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as http:
        run = _Soak(engine, plan, http)
        await run.run()
        return run.findings


class _Soak:
    """One run."""

    def __init__(self, engine: Engine, plan: Plan, http: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.plan = plan
        self.http = http
        self.findings = Findings()
        self._processes = {"front end": engine.process.pid, "core": engine.core_pid}
        self._started_s = time.monotonic()
        self._last: dict[str, float] = {}
        self._capacity: Capacity

    async def run(self) -> None:
        plan = self.plan
        self._capacity = msgspec.json.decode((await self._get(CAPACITY_PATH))[1], type=Capacity)
        expected = [said for prompt in plan.probes if (said := await self._said(prompt))]
        self.findings.certain_probe_tokens = sum(said.certain for said in expected)
        flip, probe = self._flipper(), self._prober(expected)
        self._started_s = time.monotonic()
        until_s = self._started_s + plan.seconds
        for leg in itertools.count():
            now_s = time.monotonic()
            late = now_s >= until_s
            if late and self.findings.outcomes.total() >= plan.least_requests:
                break
            leg_ends_s = now_s + plan.rest_every_s if late else min(until_s, now_s + plan.rest_every_s)
            clients = [
                self._client(random.Random(f"{plan.seed} {leg} {i}"), leg_ends_s) for i in range(plan.clients)
            ]
            over = asyncio.Event()
            watchers = [
                asyncio.create_task(work)
                for work in (
                    self._every(SCRAPE_EVERY_S, over, self._scrape),
                    self._every(plan.flip_every_s, over, flip),
                    self._every(plan.probe_every_s, over, probe),
                )
            ]
            await asyncio.gather(*clients)
            over.set()
            await asyncio.gather(*watchers)
            await self._rest()
        self.findings.seconds = time.monotonic() - self._started_s

    async def _client(self, chance: random.Random, until_s: float) -> None:
        """Ask, wait a little, ask again."""
        while time.monotonic() < until_s:
            ask = self.plan.law.draw(chance)
            self.findings.note(await send(self.http, self.engine.url, ask), ask)
            await asyncio.sleep(chance.expovariate(1 / self.plan.mean_pause_s))

    async def _every(self, seconds: float, over: asyncio.Event, work: Callable[[], Awaitable[None]]) -> None:
        while not over.is_set():
            await work()
            try:
                async with asyncio.timeout(seconds):
                    await over.wait()
            except TimeoutError:
                continue

    # What is looked at.

    async def _scrape(self) -> None:
        """Books balance in every scrape, counters never fall, and health is green."""
        samples = samples_of((await self._get(METRICS_PATH))[1])
        f = self.findings
        f.scrapes += 1
        arrived = samples[Metric.ARRIVED]
        ended = {ending: samples[f'{Metric.OUTCOME}{{outcome="{ending}"}}'] for ending in Ending}
        if arrived != sum(ended.values()) + samples[Metric.IN_FLIGHT]:
            f.complain(f"{arrived} arrived, {ended}, {samples[Metric.IN_FLIGHT]} in flight")
        fallen = [k for k, v in self._last.items() if "_total" in k and samples.get(k, 0) < v]
        if fallen:
            f.complain(f"counters fell: {fallen}")
        self._last = f.samples = samples
        status, body = await self._get(HEALTH_PATH)
        if status != 200:
            f.complain(f"/healthz says {status}: {body!r}")
        at_s = time.monotonic() - self._started_s
        for name, pid in self._processes.items():
            f.resident.setdefault(name, []).append(Resident(at_s, int(arrived), resident_bytes(pid)))

    async def _rest(self) -> None:
        """Nobody asks any more: soon all gauges are 0, and what clients saw is what was counted."""
        f, plan = self.findings, self.plan
        await self._put(the_most(self._capacity))
        deadline_s = time.monotonic() + REST_TIMEOUT_S
        while True:
            await self._scrape()
            busy = {gauge: f.samples[gauge] for gauge in ZERO_AT_REST if f.samples[gauge]}
            if not busy:
                break
            if time.monotonic() > deadline_s:
                f.complain(f"at rest, and still {busy}")
                return
            await asyncio.sleep(0.2)
        f.rests += 1
        counted = {ending: f.samples[f'{Metric.OUTCOME}{{outcome="{ending}"}}'] for ending in Ending}
        whole = sum(f.sequences[word] for word in ("200", "paused, read whole", "stalled, read whole"))
        unsure = sum(f.sequences[word] for word in ("left", "cut off"))
        own = f.probes + len(plan.probes)
        if not whole + f.probes <= counted[Ending.FINISHED] <= whole + unsure + own:
            f.complain(f"clients had {whole} whole answers and {unsure} half ones; counted: {counted}")
        if counted[Ending.REJECTED] < f.outcomes["429"]:
            f.complain(f"clients had {f.outcomes['429']} refusals; counted: {counted}")
        if counted[Ending.FAILED]:
            f.complain(f"requests failed: {counted}")

    # What is done to the engine.

    def _flipper(self) -> Callable[[], Awaitable[None]]:
        chance = random.Random(self.plan.seed)

        async def flip() -> None:
            limits = any_limits(chance, self._capacity)
            if chance.random() < 0.1:
                await self._put_wrong(limits)
            else:
                await self._put(limits)

        return flip

    async def _put(self, limits: Limits) -> None:
        status, body = await self._put_body(limits)
        self.findings.flips += 1
        if status != 200 or not msgspec.json.decode(body, type=Limits).same_values(limits):
            self.findings.complain(f"asked for {limits}, answer {status} {body!r}")

    async def _put_wrong(self, limits: Limits) -> None:
        """One field above capacity: refused, and nothing of the rest is in force."""
        _, before = await self._get(LIMITS_PATH)
        too_many = self._capacity.max_batch_tokens + 1
        status, body = await self._put_body(msgspec.structs.replace(limits, max_batch_tokens=too_many))
        _, after = await self._get(LIMITS_PATH)
        self.findings.refused_flips += 1
        if status != 422 or after != before:
            self.findings.complain(f"wrong limits: {status} {body!r}; before {before}, after {after}")

    async def _put_body(self, limits: Limits) -> tuple[int, bytes]:
        url = self.engine.management_url + LIMITS_PATH
        async with self.http.put(url, data=msgspec.json.encode(limits), headers=self._key()) as answer:
            return answer.status, await answer.read()

    def _prober(self, expected: list["_Said"]) -> Callable[[], Awaitable[None]]:
        """Greedy answers are those of the idle engine as far as they were certain, whoever is served too."""
        turns = 0

        async def probe() -> None:
            nonlocal turns
            wanted = expected[turns % len(expected)]
            turns += 1
            said = await self._said(wanted.prompt)
            if said is None:
                self.findings.unanswered_probes += 1
                return
            self.findings.probes += 1
            certain = wanted.certain
            if said.tokens[:certain] != wanted.tokens[:certain]:
                self.findings.complain(f"{said} instead of {wanted}")

        return probe

    async def _said(self, prompt: str) -> "_Said | None":
        """A greedy answer; None when the queue is full."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 2}
        url = f"{self.engine.url}/v1/completions"
        async with self.http.post(url, json=body) as answer:
            if answer.status == 429:
                return None
            said = (await answer.json())["choices"][0]["logprobs"]
        margins = [abs(max(top.values()) - min(top.values())) for top in said["top_logprobs"]]
        return _Said(prompt, tuple(said["tokens"]), tuple(margins))

    async def _get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.engine.management_url + path, headers=self._key()) as answer:
            return answer.status, await answer.text()

    def _key(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.engine.key}"}


@dataclass(frozen=True, slots=True)
class _Said:
    """A greedy answer, and at each token how much likelier it was than the next best, in nats."""

    prompt: str
    tokens: tuple[str, ...]
    margins: tuple[float, ...]

    @property
    def certain(self) -> int:
        """Tokens before the first that another shape of the batch could round to another one."""
        doubtful = (i for i, margin in enumerate(self.margins) if margin < CERTAIN_MARGIN)
        return next(doubtful, len(self.tokens))


def the_most(capacity: Capacity) -> Limits:
    """Limits at capacity, and nobody is refused."""
    return Limits(
        max_batch_sequences=capacity.max_batch_sequences,
        max_batch_tokens=capacity.max_batch_tokens,
        prefill_chunk_tokens=capacity.max_batch_tokens,
        queue_timeout_ms=0,
    )


def any_limits(chance: random.Random, capacity: Capacity) -> Limits:
    """Any limits below capacity: all modes, windows, tiny and full budgets."""
    sequences = chance.choice([1, 4, 16, capacity.max_batch_sequences])
    tokens = chance.choice([sequences, 64, 256, capacity.max_batch_tokens])
    return Limits(
        mode=chance.choice([BatchingMode.CONTINUOUS, *BatchingMode]),
        window_ms=chance.choice([0, 0, 20, 200]),
        max_batch_sequences=sequences,
        max_batch_tokens=max(sequences, min(tokens, capacity.max_batch_tokens)),
        prefill_chunk_tokens=chance.choice([8, 64, min(256, capacity.max_batch_tokens)]),
        max_queued_requests=chance.choice([8, 200, 200]),
        max_queued_tokens=chance.choice([4_000, 50_000]),
        queue_timeout_ms=chance.choice([0, 10_000, 30_000]),
    )


def _slope(points: list[Resident]) -> float:
    """Median of the slopes of pairs, bytes a second: a few large steps do not move it (Sen, 1968). Pairs of
    medians of thirtieths, so that there are few."""
    size = max(1, len(points) // 30)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    centres = [(statistics.median(p.at_s for p in g), statistics.median(p.bytes for p in g)) for g in groups]
    return statistics.median(
        (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(centres, 2)
    )
