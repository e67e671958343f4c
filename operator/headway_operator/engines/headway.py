"""The table of Headway's own engine: every limit is live."""

import math
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from headway_engine.protocol import (
    CONTROL_KEY_ENV,
    HEALTH_PATH,
    MANAGEMENT_PORT,
    PUBLIC_PORT,
    READY_PATH,
    Metric,
)
from headway_operator.engines.table import Engine, Option, Parameter, Probe, Signal, Support
from headway_operator.resource import Resource

CACHE_ENV = "HEADWAY_CACHE"
"""Environment variable that names the folder for downloaded and converted models."""


def _live(name: str, limits_field: str, unit: str, capacity_field: str | None = None) -> Parameter:
    return Parameter(name, limits_field, unit, Support.LIVE, capacity_field)


def _seconds(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _threads(resource: Resource) -> str | None:
    """Compute threads from the CPU limit: more threads than the quota allows only throttle each other."""
    limits = resource.resources.get("limits", {})
    if "cpu" not in limits or any(
        argument.startswith("--threads") for argument in resource.runtime.extra_args
    ):
        return None
    cores: Decimal = parse_quantity(limits["cpu"])
    return str(max(1, math.floor(cores)))


HEADWAY = Engine(
    name="headway",
    parameters=(
        _live("window", "window_ms", "milliseconds"),
        _live("maxBatchTokens", "max_batch_tokens", "tokens", "max_batch_tokens"),
        _live("maxBatchSequences", "max_batch_sequences", "sequences", "max_batch_sequences"),
        _live("prefillChunkTokens", "prefill_chunk_tokens", "tokens", "max_batch_tokens"),
        _live("maxQueuedTokens", "max_queued_tokens", "tokens"),
        _live("maxQueuedRequests", "max_queued_requests", "requests"),
    ),
    options=(
        Option("--model", lambda r: r.model.uri),
        Option("--revision", lambda r: r.model.revision),
        Option("--served-model-name", lambda r: r.model.name),
        Option("--max-model-len", lambda r: str(r.model.max_model_len)),
        Option("--dtype", lambda r: r.model.dtype),
        Option("--capacity-max-batch-tokens", lambda r: str(r.batching.capacity_max_batch_tokens)),
        Option("--capacity-max-batch-sequences", lambda r: str(r.batching.capacity_max_batch_sequences)),
        Option("--kv-memory-percent", lambda r: str(r.batching.kv_memory_percent)),
        Option("--kv-block-tokens", lambda r: str(r.batching.kv_block_tokens)),
        Option("--prefix-caching", lambda r: "" if r.batching.prefix_caching else None),
        Option("--no-prefix-caching", lambda r: None if r.batching.prefix_caching else ""),
        Option("--drain-timeout-s", lambda r: _seconds(r.rollout.drain_timeout_s)),
        Option("--threads", _threads),
    ),
    required_flags=(),
    limits_flag="--limits-file",
    objectives_flag="--objectives-file",
    tenants_flag="--tenants-file",
    keys_flag="--keys-file",
    signals={
        Signal.TTFT: Metric.TTFT,
        Signal.ITL: Metric.ITL,
        Signal.E2E: Metric.E2E,
        Signal.QUEUE: Metric.QUEUE,
        Signal.ARRIVED: Metric.ARRIVED,
        Signal.OUTCOME: Metric.OUTCOME,
        Signal.PROMPT_TOKENS: Metric.PROMPT_TOKENS,
        Signal.OUTPUT_TOKENS: Metric.OUTPUT_TOKENS,
        Signal.RUNNING: Metric.RUNNING,
        Signal.WAITING: Metric.WAITING,
        Signal.QUEUED_TOKENS: Metric.QUEUED_TOKENS,
        Signal.KV_USED_RATIO: Metric.KV_USED_RATIO,
        Signal.STEP_STATISTIC: Metric.STEP_STATISTIC,
    },
    public_port=PUBLIC_PORT,
    management_port=MANAGEMENT_PORT,
    control_key_env=CONTROL_KEY_ENV,
    cache_env=CACHE_ENV,
    # A large model may load for half an hour; a small one should not wait for the next probe.
    startup=Probe(READY_PATH, "management", period_s=2, timeout_s=2, failures=900),
    readiness=Probe(READY_PATH, "management", period_s=2, timeout_s=2, failures=2),
    liveness=Probe(HEALTH_PATH, "management", period_s=10, timeout_s=5, failures=6),
)
