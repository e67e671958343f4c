"""What the engine counts: reports and arrivals in, Prometheus families out.

Lives in the front end, because a request's clock starts when its HTTP request arrives. It knows nothing
of who reads the numbers, and never reads the time itself.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from headway_engine.messages import Gauges, Ready, StepReport
from headway_engine.protocol import (
    BatchingMode,
    Capacity,
    Limits,
    Metric,
    Objectives,
    Outcome,
    latency_buckets,
)
from headway_engine.sequence import (
    Event,
    Finished,
    FinishReason,
    Preempted,
    Request,
    RequestId,
    Started,
    TokenOut,
)
from headway_engine.stepcost import StepStatistics

STEP_TOKEN_BUCKETS: tuple[float, ...] = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
    2048,
    4096,
    8192,
    16384,
    32768,
)
STEP_SEQUENCE_BUCKETS: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

OUTCOMES: dict[FinishReason, Outcome] = {
    FinishReason.STOP: Outcome.FINISHED,
    FinishReason.LENGTH: Outcome.FINISHED,
    FinishReason.ABORT: Outcome.ABORTED,
    FinishReason.ERROR: Outcome.FAILED,
    FinishReason.TIMEOUT: Outcome.REJECTED,  # it waited and never ran
}


MAX_TENANT_SERIES = 64
"""Tenants with a series of their own where none are declared; those that come later share one."""
OTHER_TENANTS = "(others)"


class Histogram:
    """Counts per bucket and a sum. prometheus-client's own walks the buckets one by one under a lock,
    which at one observation per token would cost more than sending the token."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count), as the exposition wants them."""
        total = 0
        out = []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out


@dataclass(slots=True)
class _TenantTokens:
    """What one tenant has had."""

    prompt: int = 0
    output: int = 0


@dataclass(slots=True)
class Journey:
    """What is known of a sequence, in flight or over. Times are time.monotonic() seconds; 0: not yet."""

    arrival_s: float
    prompt_tokens: int
    tenant: "_TenantTokens"
    started_s: float = 0.0  # its first step began
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    tokens: int = 0
    cached_tokens: int = 0
    preempted_s: tuple[float, ...] = ()
    generates: bool = True  # False: a vector is asked for
    kept: bool = False  # having waited too long is no end: it is handed over again
    outcome: Outcome | None = None


class Telemetry:
    """All counters of one engine. Arrived = the sum of outcomes + those in flight, at every moment."""

    def __init__(self, objectives: Objectives, *, start_time_s: float, tenants: Iterable[str] = ()) -> None:
        self.start_time_s = start_time_s  # Unix time
        self.limits: Limits | None = None
        self.capacity: Capacity | None = None
        self.ready: Ready | None = None  # what the core said when it was
        self.draining = False
        self.arrived_total = 0
        self.outcomes_total = dict.fromkeys(Outcome, 0)
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0
        self.steps_total = 0
        self._gauges = Gauges()
        self._open: dict[RequestId, Journey] = {}
        self._tenants = {name: _TenantTokens() for name in tenants}
        self._most_tenants = len(self._tenants) or MAX_TENANT_SERIES
        self._steps = {
            Metric.STEP_SECONDS: Histogram(latency_buckets(objectives.itl_ms)),
            Metric.STEP_TOKENS: Histogram(STEP_TOKEN_BUCKETS),
            Metric.STEP_SEQUENCES: Histogram(STEP_SEQUENCE_BUCKETS),
        }
        self.set_objectives(objectives)

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._open)

    def set_objectives(self, objectives: Objectives) -> None:
        """Place the boundaries. Latency histograms start again from zero: counts can't be re-sorted."""
        self.objectives = objectives
        self._latency = {
            Metric.TTFT: Histogram(latency_buckets(objectives.ttft_ms)),
            Metric.ITL: Histogram(latency_buckets(objectives.itl_ms)),
            Metric.TPOT: Histogram(latency_buckets(objectives.itl_ms)),
            Metric.E2E: Histogram(latency_buckets(objectives.e2e_ms)),
            Metric.QUEUE: Histogram(latency_buckets(objectives.ttft_ms)),
            Metric.EMBEDDING: Histogram(latency_buckets(0)),
        }

    def arrived(self, request: Request, *, kept: bool = False) -> Journey:
        """A request was taken in; exactly one `ended`, or one Finished event, follows. What is returned is
        kept up to date until then. `kept`: of a call that goes in portions, which may go more than once."""
        self.arrived_total += 1
        tenant = self._tenant(request.tenant)
        generates = request.pooling is None
        journey = Journey(request.arrival_s, len(request.prompt), tenant, generates=generates, kept=kept)
        self._open[request.id] = journey
        return journey

    def handed_over(self, request: Request) -> None:
        """The core has it from now on. Of a large call, its latency begins here."""
        self._open[request.id].arrival_s = request.arrival_s

    def _tenant(self, name: str) -> _TenantTokens:
        """The tenant's counters. Names come from clients, so only those declared get a series of their own,
        or so many of those that come where none is."""
        if name not in self._tenants and len(self._tenants) >= self._most_tenants:
            name = OTHER_TENANTS
        return self._tenants.setdefault(name, _TenantTokens())

    def turned_away(self, count: int = 1) -> None:
        """Requests refused at the door: they arrive and end at once."""
        self.arrived_total += count
        self.outcomes_total[Outcome.REJECTED] += count

    def ended(self, id: RequestId, outcome: Outcome, now_s: float) -> None:
        """A request is over. A second end (cancelled here, then reported by the core) changes nothing."""
        clock = self._open.pop(id, None)
        if clock is None:
            return
        clock.ended_s, clock.outcome = now_s, outcome
        self.outcomes_total[outcome] += 1
        if outcome is Outcome.FINISHED and not clock.generates:
            # Objectives are about generation: vectors, which are quick, would hide its misses.
            self._latency[Metric.EMBEDDING].observe(now_s - clock.arrival_s)
        elif outcome is Outcome.FINISHED:
            self._latency[Metric.E2E].observe(now_s - clock.arrival_s)
            if clock.tokens > 1:
                self._latency[Metric.TPOT].observe((clock.last_s - clock.first_s) / (clock.tokens - 1))

    def record(self, report: StepReport, now_s: float) -> None:
        """Count one report of the core. `now_s` is when the front end had it: what a client waits for
        includes the way from the core, so the latencies do too."""
        self._gauges = report.gauges
        if report.step_tokens:
            self.steps_total += 1
            self._steps[Metric.STEP_SECONDS].observe(report.step_seconds)
            self._steps[Metric.STEP_TOKENS].observe(report.step_tokens)
            self._steps[Metric.STEP_SEQUENCES].observe(report.step_sequences)
        for event in report.events:
            self._record_event(event, now_s, report.step_seconds)

    def refused(self, id: RequestId, gauges: Gauges, now_s: float) -> None:
        """The scheduler refused a request that had arrived."""
        self.note(gauges)
        self.ended(id, Outcome.REJECTED, now_s)

    def note(self, gauges: Gauges) -> None:
        """The core's state now, with no step."""
        self._gauges = gauges

    def core_gone(self) -> None:
        """Nothing runs and nothing waits any more."""
        self._gauges = Gauges(
            prefix_hit_tokens_total=self._gauges.prefix_hit_tokens_total,
            preemptions_total=self._gauges.preemptions_total,
            statistics=self._gauges.statistics,
        )

    def _record_event(self, event: Event, now_s: float, step_seconds: float) -> None:
        clock = self._open.get(event.id)
        if clock is None:  # cancelled here while the core still worked on it
            return
        match event:
            case TokenOut():
                self.output_tokens_total += 1
                clock.tenant.output += 1
                clock.tokens += 1
                if clock.tokens == 1:
                    clock.first_s = now_s
                    self._latency[Metric.TTFT].observe(now_s - clock.arrival_s)
                else:
                    self._latency[Metric.ITL].observe(now_s - clock.last_s)
                clock.last_s = now_s
            case Started(cached_prompt_tokens=cached, at_s=at_s):
                clock.cached_tokens = cached
                # Without a time: known at the end of its first step; the queue ended when that step began.
                clock.started_s = at_s or now_s - step_seconds
                self.prompt_tokens_total += clock.prompt_tokens
                clock.tenant.prompt += clock.prompt_tokens
                self._latency[Metric.QUEUE].observe(max(0.0, clock.started_s - clock.arrival_s))
            case Preempted():
                clock.preempted_s = (*clock.preempted_s, now_s)
            case Finished(reason=FinishReason.TIMEOUT) if clock.kept:
                pass
            case Finished(reason=reason):
                self.ended(event.id, OUTCOMES[reason], now_s)

    def families(self) -> Iterator[Family]:
        """Everything, as prometheus-client families. Names come from `protocol.Metric` only."""
        g = self._gauges
        histograms = {**self._latency, **self._steps}
        for metric, histogram in histograms.items():
            yield HistogramMetricFamily(
                metric, HELP[metric], buckets=histogram.buckets(), sum_value=histogram.sum
            )
        counters: dict[Metric, float] = {
            Metric.ARRIVED: self.arrived_total,
            Metric.PROMPT_TOKENS: self.prompt_tokens_total,
            Metric.OUTPUT_TOKENS: self.output_tokens_total,
            Metric.PREFIX_HIT_TOKENS: g.prefix_hit_tokens_total,
            Metric.PREEMPTIONS: g.preemptions_total,
            Metric.STEPS: self.steps_total,
        }
        for metric, value in counters.items():
            yield CounterMetricFamily(metric, HELP[metric], value=value)
        yield _labelled(
            CounterMetricFamily(Metric.OUTCOME, HELP[Metric.OUTCOME], labels=["outcome"]), self.outcomes_total
        )
        tenants = CounterMetricFamily(
            Metric.TENANT_TOKENS, HELP[Metric.TENANT_TOKENS], labels=["tenant", "kind"]
        )
        for name, tokens in self._tenants.items():
            tenants.add_metric([name, "prompt"], tokens.prompt)
            tenants.add_metric([name, "output"], tokens.output)
        yield tenants
        yield _labelled(
            CounterMetricFamily(Metric.STEP_STATISTIC, HELP[Metric.STEP_STATISTIC], labels=["term"]),
            {term: getattr(g.statistics, term) for term in StepStatistics.__struct_fields__},
        )
        gauges: dict[Metric, float] = {
            Metric.IN_FLIGHT: self.in_flight,
            Metric.RUNNING: g.running,
            Metric.WAITING: g.waiting,
            Metric.QUEUED_TOKENS: g.queued_tokens,
            Metric.KV_USED_BLOCKS: g.kv_used_blocks,
            Metric.KV_USED_RATIO: g.kv_used_blocks / self.capacity.kv_blocks if self.capacity else 0.0,
            Metric.START_TIME: self.start_time_s,
            Metric.DRAINING: float(self.draining),
        }
        if self.limits is not None:
            gauges[Metric.LIMITS_GENERATION] = self.limits.generation
        for metric, value in gauges.items():
            yield GaugeMetricFamily(metric, HELP[metric], value=value)
        if self.limits is not None:
            numbers = {name: getattr(self.limits, name) for name in Limits.__struct_fields__}
            numbers = {name: value for name, value in numbers.items() if name != "generation"}
            numbers["mode"] = list(BatchingMode).index(self.limits.mode)  # a gauge is a number
            yield _labelled(
                GaugeMetricFamily(Metric.LIMIT, HELP[Metric.LIMIT], labels=["parameter"]), numbers
            )
        if self.ready is not None:
            yield from _computing(self.ready)
        if self.capacity is not None:
            reserved = {name: getattr(self.capacity, name) for name in Capacity.__struct_fields__}
            yield _labelled(
                GaugeMetricFamily(Metric.CAPACITY, HELP[Metric.CAPACITY], labels=["parameter"]), reserved
            )
        targets = {
            "ttft": self.objectives.ttft_ms,
            "itl": self.objectives.itl_ms,
            "e2e": self.objectives.e2e_ms,
        }
        yield _labelled(
            GaugeMetricFamily(Metric.OBJECTIVE, HELP[Metric.OBJECTIVE], labels=["objective"]),
            {name: ms / 1000 for name, ms in targets.items() if ms},
        )

    def exposition(self) -> bytes:
        """The text of /metrics."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self))
        return generate_latest(registry)


_Labelled = TypeVar("_Labelled", CounterMetricFamily, GaugeMetricFamily)


class _Collector(Collector):
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Family]:
        return self._telemetry.families()


def _computing(ready: Ready) -> Iterator[Family]:
    """What computes the model, and what does not because the check at start found it wrong."""
    info = GaugeMetricFamily(Metric.RUNNER, HELP[Metric.RUNNER], labels=["runner", "kernels"])
    info.add_metric([ready.runner.partition(",")[0], ready.kernels], 1)
    yield info
    fallbacks = GaugeMetricFamily(Metric.FALLBACK, HELP[Metric.FALLBACK], labels=["path", "reason"])
    # A path may have been left twice, of weights in blocks and of plain ones: a series stands there once.
    for path, reason in dict.fromkeys((one.path, one.reason) for one in ready.fallbacks):
        fallbacks.add_metric([path, reason], 1)
    yield fallbacks


def _labelled(family: _Labelled, values: Mapping[Any, float]) -> _Labelled:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


HELP: dict[Metric, str] = {
    Metric.TTFT: "From the arrival of the HTTP request to its first token, queueing included.",
    Metric.ITL: "Gap between two tokens of one request.",
    Metric.TPOT: "Mean gap between tokens over one finished request.",
    Metric.E2E: "From arrival to the last token, of finished requests.",
    Metric.EMBEDDING: "From the moment an input of an embeddings call is handed to the core to its vector.",
    Metric.QUEUE: "From arrival to the first step that had the request in it.",
    Metric.STEP_SECONDS: "Time of one step.",
    Metric.STEP_TOKENS: "Tokens computed in one step.",
    Metric.STEP_SEQUENCES: "Sequences in one step.",
    Metric.ARRIVED: "Sequences asked for (a request with n=2 is two).",
    Metric.OUTCOME: "Sequences that ended, by how.",
    Metric.PROMPT_TOKENS: "Prompt tokens of the sequences that started.",
    Metric.OUTPUT_TOKENS: "Tokens generated for clients.",
    Metric.TENANT_TOKENS: "Prompt tokens started and tokens generated, by tenant.",
    Metric.PREFIX_HIT_TOKENS: "Prompt tokens found in the prefix cache.",
    Metric.PREEMPTIONS: "Sequences put back into the queue for lack of blocks.",
    Metric.STEPS: "Steps run.",
    Metric.STEP_STATISTIC: "Running sums for the least-squares fit of step time; warm-up steps left out.",
    Metric.IN_FLIGHT: "Sequences that have arrived and not ended: arrived less the sum of outcomes, always.",
    Metric.RUNNING: "Sequences in the running batch.",
    Metric.WAITING: "Sequences in the queue.",
    Metric.QUEUED_TOKENS: "Prompt tokens in the queue.",
    Metric.KV_USED_BLOCKS: "KV blocks in use by sequences.",
    Metric.KV_USED_RATIO: "KV blocks in use over all blocks.",
    Metric.LIMIT: "Limits in force.",
    Metric.LIMITS_GENERATION: "Generation of the limits in force.",
    Metric.CAPACITY: "What was reserved at start.",
    Metric.OBJECTIVE: "Latency objectives that histogram boundaries are placed at.",
    Metric.START_TIME: "Unix time of the start.",
    Metric.DRAINING: "1 while the engine refuses newcomers on its way out.",
    Metric.RUNNER: "What computes the model: the runner, and its kernels (an instruction set, or torch).",
    Metric.FALLBACK: "1 for each better way of computing the model that was left at start, by why.",
}
