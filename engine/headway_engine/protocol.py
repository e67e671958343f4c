"""Words that the engine and its controller share: limits, capacity, objectives, paths, metric names.

All that goes over the wire between them is here, so a change here is a change of the protocol. It knows
nothing of torch, HTTP or Kubernetes, and imports only msgspec.
"""

from enum import StrEnum

import msgspec

PUBLIC_PORT = 8000
MANAGEMENT_PORT = 8001

METRICS_PATH = "/metrics"
HEALTH_PATH = "/healthz"
READY_PATH = "/readyz"
LIMITS_PATH = "/control/limits"
OBJECTIVES_PATH = "/control/objectives"
CAPACITY_PATH = "/control/capacity"

CONTROL_KEY_ENV = "HEADWAY_CONTROL_KEY"
"""Environment variable that carries the bearer key of `/control/*`."""

TENANT_HEADER = "X-Headway-Tenant"

MAX_GENERATION = 1 << 53
"""What a JSON reader and a gauge still hold exactly; nobody changes limits so often."""


class BatchingMode(StrEnum):
    """How batches are formed. Static and Dynamic run a batch to its end; Continuous changes it every step."""

    STATIC = "Static"
    DYNAMIC = "Dynamic"
    CONTINUOUS = "Continuous"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole set of scheduler parameters in force; sent whole, read back whole.

    `generation` grows with every change made through the control API, so that a reader can tell
    which of two sets is newer. All token and request counts are per engine process.
    """

    generation: int = 0
    mode: BatchingMode = BatchingMode.CONTINUOUS
    window_ms: int = 0
    max_batch_tokens: int = 2048
    max_batch_sequences: int = 128
    prefill_chunk_tokens: int = 512
    max_queued_requests: int = 1024
    max_queued_tokens: int = 65536
    queue_timeout_ms: int = 30_000

    def same_values(self, other: "Limits") -> bool:
        """Equal in everything but the generation."""
        return msgspec.structs.replace(self, generation=0) == msgspec.structs.replace(other, generation=0)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What was reserved at start. Live limits move below it and never above."""

    max_batch_tokens: int
    max_batch_sequences: int
    kv_blocks: int
    block_tokens: int
    max_model_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit in the cache."""
        return self.kv_blocks * self.block_tokens


class Objectives(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SLO targets in milliseconds; 0 means no target.

    The engine only places histogram boundaries at them; judging is the controller's work. A change
    of objectives restarts the latency histograms (to Prometheus: a counter reset).
    """

    ttft_ms: int = 0
    itl_ms: int = 0
    e2e_ms: int = 0


class InvalidLimits(ValueError):
    """A set of limits that cannot be in force; `field` is the wire name of the offending one."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def check_limits(limits: Limits, capacity: Capacity) -> None:
    """Raise InvalidLimits for the first field that is out of range or above capacity.

    The set is judged as a whole: nothing may be applied when one field is wrong.
    """
    ranges = (
        ("generation", limits.generation, 0, MAX_GENERATION),
        ("window_ms", limits.window_ms, 0, 1_000),
        ("max_batch_tokens", limits.max_batch_tokens, 1, capacity.max_batch_tokens),
        ("max_batch_sequences", limits.max_batch_sequences, 1, capacity.max_batch_sequences),
        ("prefill_chunk_tokens", limits.prefill_chunk_tokens, 1, capacity.max_batch_tokens),
        ("max_queued_requests", limits.max_queued_requests, 0, 1_000_000),
        ("max_queued_tokens", limits.max_queued_tokens, 0, 1_000_000_000),
        ("queue_timeout_ms", limits.queue_timeout_ms, 0, 3_600_000),
    )
    for field, value, low, high in ranges:
        if not low <= value <= high:
            raise InvalidLimits(field, f"{value} is outside {low}..{high}")
    if limits.max_batch_tokens < limits.max_batch_sequences:
        raise InvalidLimits(
            "max_batch_tokens",
            f"{limits.max_batch_tokens} is less than max_batch_sequences ({limits.max_batch_sequences}): "
            "every running sequence needs one token a step",
        )


def clamp_limits(limits: Limits, capacity: Capacity) -> Limits:
    """The nearest limits that capacity allows. For limits chosen before capacity was known: a live change is
    refused, not bent."""
    tokens = min(limits.max_batch_tokens, capacity.max_batch_tokens)
    return msgspec.structs.replace(
        limits,
        max_batch_tokens=tokens,
        max_batch_sequences=min(limits.max_batch_sequences, capacity.max_batch_sequences, tokens),
        prefill_chunk_tokens=min(limits.prefill_chunk_tokens, capacity.max_batch_tokens),
    )


class Metric(StrEnum):
    """Names of the exported series, as they stand in the exposition (counters carry `_total`)."""

    # Histograms, seconds.
    TTFT = "headway_time_to_first_token_seconds"
    ITL = "headway_inter_token_latency_seconds"
    TPOT = "headway_time_per_output_token_seconds"
    E2E = "headway_request_latency_seconds"
    QUEUE = "headway_queue_time_seconds"
    EMBEDDING = "headway_embedding_latency_seconds"
    STEP_SECONDS = "headway_step_seconds"
    # Histograms, counts.
    STEP_TOKENS = "headway_step_tokens"
    STEP_SEQUENCES = "headway_step_sequences"
    # Counters.
    ARRIVED = "headway_requests_arrived_total"
    OUTCOME = "headway_requests_total"  # label outcome = Outcome
    PROMPT_TOKENS = "headway_prompt_tokens_total"
    OUTPUT_TOKENS = "headway_output_tokens_total"
    TENANT_TOKENS = "headway_tenant_tokens_total"  # labels tenant, kind = prompt | output; bounded
    PREFIX_HIT_TOKENS = "headway_prefix_hit_tokens_total"
    PREEMPTIONS = "headway_preemptions_total"
    STEPS = "headway_steps_total"
    STEP_STATISTIC = "headway_step_statistic_total"  # label term = StepStatistics field
    # Gauges.
    IN_FLIGHT = "headway_requests_in_flight"
    RUNNING = "headway_requests_running"
    WAITING = "headway_requests_waiting"
    QUEUED_TOKENS = "headway_queued_tokens"
    KV_USED_BLOCKS = "headway_kv_used_blocks"
    KV_USED_RATIO = "headway_kv_used_ratio"
    LIMIT = "headway_limit"  # label parameter = field of Limits; mode is its position in BatchingMode
    LIMITS_GENERATION = "headway_limits_generation"
    CAPACITY = "headway_capacity"  # label parameter = field of Capacity
    OBJECTIVE = "headway_objective_seconds"  # label objective = ttft | itl | e2e
    START_TIME = "headway_start_time_seconds"
    DRAINING = "headway_draining"
    RUNNER = "headway_runner_info"  # labels runner, kernels: what computes the model
    FALLBACK = "headway_runner_fallback"  # labels path, reason: a better way that the start check left


class Outcome(StrEnum):
    """How a request ended. Arrived = the sum of these + those in flight, always."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"
    FAILED = "failed"


LATENCY_BUCKETS_S: tuple[float, ...] = (
    0.001, 0.00125, 0.0016, 0.002, 0.0025, 0.0032, 0.004, 0.005, 0.0063, 0.008,
    0.01, 0.0125, 0.016, 0.02, 0.025, 0.032, 0.04, 0.05, 0.063, 0.08,
    0.1, 0.125, 0.16, 0.2, 0.25, 0.32, 0.4, 0.5, 0.63, 0.8,
    1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0,
    10.0, 12.5, 16.0, 20.0, 25.0, 32.0, 40.0, 50.0, 63.0, 80.0,
    100.0, 125.0, 160.0, 200.0, 250.0, 320.0, 400.0, 500.0, 630.0,
)  # fmt: skip
"""Boundaries of every latency histogram, before those of the objective are added: ten to a decade, so that a
percentile read from them by interpolation is within a fifth of the truth from 2 ms to 300 s."""

OBJECTIVE_FACTORS: tuple[float, ...] = (0.5, 0.8, 1.0, 1.25, 2.0)
"""Where boundaries sit around an objective: a boundary exactly on it makes counting misses exact."""


def latency_buckets(objective_ms: int) -> tuple[float, ...]:
    """Sorted boundaries in seconds, with exact ones around the objective (0: none)."""
    extra = (
        {round(objective_ms * factor / 1000, 6) for factor in OBJECTIVE_FACTORS} if objective_ms else set()
    )
    return tuple(sorted(set(LATENCY_BUCKETS_S) | extra))
