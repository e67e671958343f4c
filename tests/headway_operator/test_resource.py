"""Reading a resource: what the user wrote becomes values, or every problem is named."""

import dataclasses
from datetime import timedelta

import pytest
from hypothesis import given, settings
from kubernetes.utils.duration import format_duration

from headway_engine.protocol import BatchingMode, Objectives, check_limits
from headway_operator.reader import duration_ms
from headway_operator.resource import (
    Bound,
    Effect,
    InvalidSpec,
    OnMetricsLoss,
    Percentile,
    Resource,
    RolloutStrategy,
    SecretKeyRef,
    Target,
    TuningMode,
    parse,
    restart_class,
)
from headway_operator.tenancy import Fairness, Tenancy, Tenant
from support.resources import a_body, a_resource, a_stored_body, merged, specs

quick = settings(max_examples=40, deadline=None)

EVERY_FIELD = {
    "model": {
        "uri": "hf://org/model",
        "revision": "v2",
        "name": "served",
        "maxModelLen": 4096,
        "dtype": "bfloat16",
        "hfTokenSecretRef": {"name": "hf", "key": "secret"},
    },
    "runtime": {"image": "engine:9", "extraArgs": ["--threads=2"], "env": [{"name": "A", "value": "1"}]},
    "replicas": 3,
    "batching": {
        "mode": "Dynamic",
        "window": "20ms",
        "maxBatchTokens": 300,
        "maxBatchSequences": 30,
        "prefillChunkTokens": 200,
        "queue": {"maxRequests": 7, "maxTokens": 8, "timeout": "1m"},
        "kvCache": {"memoryPercent": 50, "blockTokens": 32, "prefixCaching": False},
        "capacity": {"maxBatchTokens": 400, "maxBatchSequences": 40},
    },
    "slo": {"ttft": {"p99": "300ms"}, "itl": {"p50": "25ms"}, "e2e": {"p90": "1m"}},
    "tuning": {
        "mode": "Recommend",
        "interval": "2500ms",
        "bounds": {
            "maxBatchTokens": {"min": 100, "max": 350},
            "maxBatchSequences": {"max": 35},
            "prefillChunkTokens": {"min": 50},
            "maxQueuedTokens": {"min": 1, "max": 2},
        },
        "onMetricsLoss": "Static",
    },
    "tenancy": {
        "fairness": "FirstComeFirstServed",
        "tenants": [{"name": "gold", "priority": 3}],
        "keysSecretRef": {"name": "chat-keys"},
    },
    "rollout": {"strategy": "Recreate", "drainTimeout": "90s"},
    "resources": {"limits": {"cpu": "2"}},
    "podTemplate": {"labels": {"team": "a"}},
}


def test_every_field_reaches_its_value() -> None:
    """Nothing that a user can write is dropped on the way."""
    r = a_resource(namespace="models", spec=EVERY_FIELD, uid="u-1", generation=4)
    assert (r.namespace, r.name, r.uid, r.generation, r.deleting) == ("models", "chat", "u-1", 4, False)
    assert r.key == ("models", "chat")
    assert r.model.uri == "hf://org/model"
    assert (r.model.revision, r.model.name, r.model.max_model_len, r.model.dtype) == (
        "v2",
        "served",
        4096,
        "bfloat16",
    )
    assert r.model.hf_token == SecretKeyRef("hf", "secret")
    assert (r.runtime.engine, r.runtime.image, r.runtime.extra_args) == (
        "headway",
        "engine:9",
        ("--threads=2",),
    )
    assert r.runtime.env == ({"name": "A", "value": "1"},)
    assert r.replicas == 3
    assert r.batching.limits() == type(r.batching.limits())(
        mode=BatchingMode.DYNAMIC,
        window_ms=20,
        max_batch_tokens=300,
        max_batch_sequences=30,
        prefill_chunk_tokens=200,
        max_queued_requests=7,
        max_queued_tokens=8,
        queue_timeout_ms=60_000,
    )
    assert (r.batching.kv_memory_percent, r.batching.kv_block_tokens, r.batching.prefix_caching) == (
        50,
        32,
        False,
    )
    assert (r.batching.envelope().max_batch_tokens, r.batching.envelope().max_batch_sequences) == (400, 40)
    assert r.slo.ttft == Target(0.3, Percentile.P99)
    assert r.slo.itl == Target(0.025, Percentile.P50)
    assert r.slo.e2e == Target(60.0, Percentile.P90)
    assert r.slo.objectives() == Objectives(ttft_ms=300, itl_ms=25, e2e_ms=60_000)
    assert (r.tuning.mode, r.tuning.interval_s) == (TuningMode.RECOMMEND, 2.5)
    assert r.tuning.on_metrics_loss is OnMetricsLoss.STATIC
    assert r.tuning.bounds.max_batch_tokens == Bound(100, 350)
    assert r.tuning.bounds.max_batch_sequences == Bound(None, 35)
    assert r.tuning.bounds.prefill_chunk_tokens == Bound(50, None)
    assert r.tuning.bounds.max_queued_tokens == Bound(1, 2)
    assert r.tenancy == Tenancy(
        Fairness.FIRST_COME_FIRST_SERVED, (Tenant("gold", priority=3),), keys_secret="chat-keys"
    )
    assert (r.rollout.strategy, r.rollout.drain_timeout_s) == (RolloutStrategy.RECREATE, 90.0)
    assert r.resources == {"limits": {"cpu": "2"}}
    assert r.pod_template == {"labels": {"team": "a"}}


def test_the_table_above_leaves_no_value_at_its_default() -> None:
    """A field added later must be added to that table too."""
    full, plain = a_resource(spec=EVERY_FIELD), a_resource(uid="")
    untested = [
        f"{part.name}.{field.name}"
        for part in dataclasses.fields(Resource)
        if dataclasses.is_dataclass(getattr(full, part.name))
        for field in dataclasses.fields(getattr(full, part.name))
        if getattr(getattr(full, part.name), field.name) == getattr(getattr(plain, part.name), field.name)
    ]
    assert untested == ["runtime.engine"]  # there is one engine only


@quick
@given(specs())
def test_defaults_of_the_schema_and_of_the_values_are_the_same(spec: dict[str, object]) -> None:
    """A resource means the same whether an API server filled in the defaults or nobody did."""
    stored = a_stored_body(spec=spec)
    bare = a_body(spec=spec)
    bare["metadata"] |= {"uid": stored["metadata"]["uid"], "generation": 1}
    assert parse(bare) == parse(stored)


@quick
@given(specs())
def test_limits_of_a_valid_spec_are_valid_in_the_engine(spec: dict[str, object]) -> None:
    """What the schema accepts as live limits, the engine's own check accepts within the reserved capacity."""
    batching = a_resource(spec=spec).batching
    check_limits(batching.limits(), batching.envelope())


def test_a_resource_that_is_being_deleted_says_so() -> None:
    body = a_stored_body()
    body["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert parse(body).deleting


def test_the_served_name_is_the_resource_name_unless_given() -> None:
    assert a_resource("support").model.name == "support"


def test_all_problems_are_named_at_once() -> None:
    """One edit mends a resource; nobody meets its faults one by one."""
    body = merged(
        a_body(),
        {
            "spec": {
                "model": {"uri": 7},
                "replicas": "two",
                "batching": {"window": "soon", "mode": "Sometimes", "kvCache": {"prefixCaching": "yes"}},
                "tuning": {"bounds": {"maxBatchTokens": {"min": 1.5}}},
                "slo": {"ttft": [1]},
                "runtime": {"extraArgs": "--x"},
            }
        },
    )
    with pytest.raises(InvalidSpec) as caught:
        parse(body)
    assert {problem.path for problem in caught.value.problems} == {
        "spec.model.uri",
        "spec.replicas",
        "spec.batching.window",
        "spec.batching.mode",
        "spec.batching.kvCache.prefixCaching",
        "spec.tuning.bounds.maxBatchTokens.min",
        "spec.slo.ttft",
        "spec.runtime.extraArgs",
    }
    assert "spec.batching.mode: must be one of Static, Dynamic, Continuous" in str(caught.value)


@pytest.mark.parametrize("body", [{}, {"metadata": {"name": "x"}}, {"spec": None}, {"spec": []}])
def test_a_body_with_little_in_it_is_refused_and_never_crashes(body: dict[str, object]) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse(body)
    assert "spec.model.uri" in {problem.path for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("text", "ms"),
    [("0ms", 0), ("0s", 0), ("20ms", 20), ("1s", 1000), ("1m30s", 90_000), ("1h1ms", 3_600_001)],
)
def test_durations_are_whole_milliseconds(text: str, ms: int) -> None:
    assert duration_ms(text) == ms
    assert duration_ms(format_duration(timedelta(milliseconds=ms))) == ms


@pytest.mark.parametrize("text", ["", "20", "1.5s", "-1s", "1us", "1 s", "1d", "ms"])
def test_other_texts_are_not_durations(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        duration_ms(text)


@pytest.mark.parametrize(
    ("path", "effect"),
    [
        ("replicas", Effect.LIVE),
        ("batching.window", Effect.LIVE),
        ("batching.queue.timeout", Effect.LIVE),
        ("batching.maxBatchTokens", Effect.LIVE),
        ("batching.capacity.maxBatchTokens", Effect.RESTART),
        ("batching.kvCache.prefixCaching", Effect.RESTART),
        ("slo.ttft.p95", Effect.LIVE),
        ("tuning.mode", Effect.LIVE),
        ("model.uri", Effect.RESTART),
        ("rollout.strategy", Effect.LIVE),
        ("rollout.drainTimeout", Effect.RESTART),
        ("resources", Effect.RESTART),
    ],
)
def test_what_an_edit_does_to_running_pods(path: str, effect: Effect) -> None:
    assert restart_class(path) is effect
