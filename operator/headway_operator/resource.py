"""The InferenceDeployment as frozen values, read from what the API server stored.

Bounds and rules between fields live in the CRD, which the API server enforces (and `schema` where there
is none), so `parse` only converts: a value that cannot be converted is named, never guessed. It knows
nothing of manifests, status or engines' flags.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headway_engine.protocol import BatchingMode, Capacity, Limits, Objectives
from headway_operator.reader import InvalidSpec as InvalidSpec
from headway_operator.reader import Problem as Problem
from headway_operator.reader import Reader
from headway_operator.reader import duration_ms as duration_ms
from headway_operator.tenancy import Tenancy, read_tenancy

GROUP = "headway.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceDeployment"
PLURAL = "inferencedeployments"


class TuningMode(StrEnum):
    """OFF computes nothing, RECOMMEND decides and publishes, AUTO also applies."""

    OFF = "Off"
    RECOMMEND = "Recommend"
    AUTO = "Auto"


class OnMetricsLoss(StrEnum):
    """What happens to the limits while no pod can be scraped."""

    HOLD = "Hold"
    STATIC = "Static"


class RolloutStrategy(StrEnum):
    """How pods are replaced. AUTO surges only where no accelerator is asked for."""

    AUTO = "Auto"
    ROLLING = "RollingUpdate"
    RECREATE = "Recreate"


class Percentile(StrEnum):
    """The percentile a target is judged at."""

    P50 = "p50"
    P90 = "p90"
    P95 = "p95"
    P99 = "p99"

    @property
    def miss_share(self) -> float:
        """Share of requests that may exceed the target: 0.05 for p95."""
        return 1 - int(self.value[1:]) / 100


@dataclass(frozen=True, slots=True)
class Target:
    """At most `miss_share` of requests may take longer than `target_s`."""

    target_s: float
    percentile: Percentile = Percentile.P95


@dataclass(frozen=True, slots=True)
class Slo:
    """The latency promise; None where the user made none."""

    ttft: Target | None = None
    itl: Target | None = None
    e2e: Target | None = None

    def objectives(self) -> Objectives:
        """The targets as the engine knows them: whole milliseconds, 0 for none."""

        def ms(target: Target | None) -> int:
            return round(target.target_s * 1000) if target else 0

        return Objectives(ttft_ms=ms(self.ttft), itl_ms=ms(self.itl), e2e_ms=ms(self.e2e))


@dataclass(frozen=True, slots=True)
class Bound:
    """Range the tuner may move one parameter in; None where the user set no edge."""

    min: int | None = None
    max: int | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """User's ranges per parameter that the tuner moves, in the units of Limits."""

    max_batch_tokens: Bound = Bound()
    max_batch_sequences: Bound = Bound()
    prefill_chunk_tokens: Bound = Bound()
    max_queued_tokens: Bound = Bound()


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the limits are moved."""

    mode: TuningMode = TuningMode.AUTO
    interval_s: float = 10.0
    bounds: Bounds = Bounds()
    on_metrics_loss: OnMetricsLoss = OnMetricsLoss.HOLD


@dataclass(frozen=True, slots=True)
class Batching:
    """Scheduler parameters: where the live ones start, and what is reserved at start."""

    mode: BatchingMode = BatchingMode.CONTINUOUS
    window_ms: int = 0
    max_batch_tokens: int = 2048
    max_batch_sequences: int = 128
    prefill_chunk_tokens: int = 512
    max_queued_requests: int = 1024
    max_queued_tokens: int = 65536
    queue_timeout_ms: int = 30_000
    kv_memory_percent: int = 90
    kv_block_tokens: int = 16
    prefix_caching: bool = True
    capacity_max_batch_tokens: int = 8192
    capacity_max_batch_sequences: int = 256

    def limits(self) -> Limits:
        """The live limits that the spec asks for (generation 0)."""
        return Limits(
            mode=self.mode,
            window_ms=self.window_ms,
            max_batch_tokens=self.max_batch_tokens,
            max_batch_sequences=self.max_batch_sequences,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            queue_timeout_ms=self.queue_timeout_ms,
        )

    def envelope(self) -> Capacity:
        """What the spec reserves; the KV figures are the engine's to measure and 0 here."""
        return Capacity(
            max_batch_tokens=self.capacity_max_batch_tokens,
            max_batch_sequences=self.capacity_max_batch_sequences,
            kv_blocks=0,
            block_tokens=self.kv_block_tokens,
            max_model_tokens=0,
        )


@dataclass(frozen=True, slots=True)
class SecretKeyRef:
    """One key of a Secret in the resource's namespace."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    uri: str
    name: str  # name in the OpenAI API
    revision: str = "main"
    max_model_len: int = 0
    dtype: str = "auto"
    hf_token: SecretKeyRef | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """Which engine runs it."""

    engine: str = "headway"
    image: str = ""
    extra_args: tuple[str, ...] = ()
    env: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Rollout:
    """How pods are replaced and how long their streams may finish."""

    strategy: RolloutStrategy = RolloutStrategy.AUTO
    drain_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Resource:
    """One InferenceDeployment. `uid` and `generation` are the API server's."""

    namespace: str
    name: str
    uid: str
    generation: int
    model: Model
    runtime: Runtime = Runtime()
    replicas: int = 1
    batching: Batching = Batching()
    slo: Slo = Slo()
    tuning: Tuning = Tuning()
    tenancy: Tenancy = field(default_factory=Tenancy)
    rollout: Rollout = Rollout()
    resources: dict[str, Any] = field(default_factory=dict)
    pod_template: dict[str, Any] = field(default_factory=dict)
    deleting: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)


class Effect(StrEnum):
    """What an edit of a field does."""

    LIVE = "Live"
    RESTART = "Restart"


_LIVE_FIELDS = (
    "replicas",
    "batching.mode",
    "batching.window",
    "batching.maxBatchTokens",
    "batching.maxBatchSequences",
    "batching.prefillChunkTokens",
    "batching.queue",
    "slo",
    "tuning",
    "rollout.strategy",
)


def restart_class(path: str) -> Effect:
    """Effect of an edit below `path` (relative to spec): LIVE keeps the pods, RESTART replaces them."""
    live = any(path == known or path.startswith(f"{known}.") for known in _LIVE_FIELDS)
    return Effect.LIVE if live else Effect.RESTART


def parse(body: Mapping[str, Any]) -> Resource:
    """The resource in an API object, with or without the schema's defaults applied.

    Raises InvalidSpec with every field that cannot be converted.
    """
    problems: list[Problem] = []
    top = Reader(body, problems)
    metadata, spec = top.section("metadata"), top.section("spec")
    name = metadata.text("name", "")
    resource = Resource(
        namespace=metadata.text("namespace", "default"),
        name=name,
        uid=metadata.text("uid", ""),
        generation=metadata.integer("generation", 1),
        model=_model(spec.section("model"), name),
        runtime=_runtime(spec.section("runtime")),
        replicas=spec.integer("replicas", 1),
        batching=_batching(spec.section("batching")),
        slo=_slo(spec.section("slo")),
        tuning=_tuning(spec.section("tuning")),
        tenancy=read_tenancy(spec.section("tenancy")),
        rollout=_rollout(spec.section("rollout")),
        resources=dict(spec.mapping("resources")),
        pod_template=dict(spec.mapping("podTemplate")),
        deleting="deletionTimestamp" in metadata.body,
    )
    for path, value in (("metadata.name", name), ("spec.model.uri", resource.model.uri)):
        if not value:
            problems.append(Problem(path, "is required"))
    if problems:
        raise InvalidSpec(tuple(problems))
    return resource


def _model(read: Reader, resource_name: str) -> Model:
    d = Model(uri="", name=resource_name)
    token = read.section("hfTokenSecretRef")
    return Model(
        uri=read.text("uri", d.uri),
        name=read.text("name", d.name),
        revision=read.text("revision", d.revision),
        max_model_len=read.integer("maxModelLen", d.max_model_len),
        dtype=read.text("dtype", d.dtype),
        hf_token=SecretKeyRef(token.text("name", ""), token.text("key", "token")) if token.body else None,
    )


def _runtime(read: Reader) -> Runtime:
    d = Runtime()
    return Runtime(
        engine=read.text("engine", d.engine),
        image=read.text("image", d.image),
        extra_args=read.items("extraArgs"),
        env=read.items("env"),
    )


def _batching(read: Reader) -> Batching:
    d = Batching()
    queue, kv, capacity = read.section("queue"), read.section("kvCache"), read.section("capacity")
    return Batching(
        mode=read.choice("mode", d.mode),
        window_ms=read.duration_ms("window", d.window_ms),
        max_batch_tokens=read.integer("maxBatchTokens", d.max_batch_tokens),
        max_batch_sequences=read.integer("maxBatchSequences", d.max_batch_sequences),
        prefill_chunk_tokens=read.integer("prefillChunkTokens", d.prefill_chunk_tokens),
        max_queued_requests=queue.integer("maxRequests", d.max_queued_requests),
        max_queued_tokens=queue.integer("maxTokens", d.max_queued_tokens),
        queue_timeout_ms=queue.duration_ms("timeout", d.queue_timeout_ms),
        kv_memory_percent=kv.integer("memoryPercent", d.kv_memory_percent),
        kv_block_tokens=kv.integer("blockTokens", d.kv_block_tokens),
        prefix_caching=kv.flag("prefixCaching", d.prefix_caching),
        capacity_max_batch_tokens=capacity.integer("maxBatchTokens", d.capacity_max_batch_tokens),
        capacity_max_batch_sequences=capacity.integer("maxBatchSequences", d.capacity_max_batch_sequences),
    )


def _slo(read: Reader) -> Slo:
    def target(key: str) -> Target | None:
        part = read.section(key)
        for percentile in Percentile:
            if percentile.value in part.body:
                return Target(part.duration_ms(percentile.value, 0) / 1000, percentile)
        return None

    return Slo(ttft=target("ttft"), itl=target("itl"), e2e=target("e2e"))


def _tuning(read: Reader) -> Tuning:
    d = Tuning()
    bounds = read.section("bounds")

    def bound(key: str) -> Bound:
        part = bounds.section(key)
        return Bound(part.maybe_integer("min"), part.maybe_integer("max"))

    return Tuning(
        mode=read.choice("mode", d.mode),
        interval_s=read.duration_ms("interval", round(d.interval_s * 1000)) / 1000,
        bounds=Bounds(
            max_batch_tokens=bound("maxBatchTokens"),
            max_batch_sequences=bound("maxBatchSequences"),
            prefill_chunk_tokens=bound("prefillChunkTokens"),
            max_queued_tokens=bound("maxQueuedTokens"),
        ),
        on_metrics_loss=read.choice("onMetricsLoss", d.on_metrics_loss),
    )


def _rollout(read: Reader) -> Rollout:
    d = Rollout()
    return Rollout(
        strategy=read.choice("strategy", d.strategy),
        drain_timeout_s=read.duration_ms("drainTimeout", round(d.drain_timeout_s * 1000)) / 1000,
    )
