"""The rules between fields of a spec, as the CRD states them in CEL, for where there is no API server.

Paths in the problems are the CRD's fieldPaths; tests send one table of resources to both sides and
hold them to the same verdicts. Knows nothing of the schema's mechanics.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from headway_operator.reader import Problem, duration_ms

Json = dict[str, Any]

OWNED_OPTIONS = frozenset(
    f"--{name}"
    for name in (
        "model", "revision", "served-model-name", "max-model-len", "dtype", "host", "port", "management-port",
        "capacity-max-batch-tokens", "capacity-max-batch-sequences", "kv-memory-percent", "kv-block-tokens",
        "prefix-caching", "no-prefix-caching", "limits-file", "objectives-file", "tenants-file",
        "keys-file", "drain-timeout-s",
    )
)  # fmt: skip
OWNED_VARIABLES = frozenset({"POD_IP", "POD_NAME", "HF_TOKEN"})
OWNED_LABELS = frozenset(
    f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "managed-by")
)

LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
COMPUTE_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage"})

SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
DURATIONS_MS: dict[str, tuple[int, int]] = {
    "batching.window": (0, SECOND_MS),
    "batching.queue.timeout": (0, HOUR_MS),
    "tuning.interval": (2 * SECOND_MS, 10 * MINUTE_MS),
    "rollout.drainTimeout": (0, HOUR_MS),
    **{f"slo.ttft.{p}": (1, 10 * MINUTE_MS) for p in ("p50", "p90", "p95", "p99")},
    **{f"slo.itl.{p}": (1, MINUTE_MS) for p in ("p50", "p90", "p95", "p99")},
    **{f"slo.e2e.{p}": (1, HOUR_MS) for p in ("p50", "p90", "p95", "p99")},
}


def _get(body: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(body, dict) or key not in body:
            return None
        body = body[key]
    return body


def _ms(spec: Json, path: str) -> int | None:
    text = _get(spec, path)
    return None if text is None else duration_ms(text)


def problems(spec: Json) -> Iterator[Problem]:
    """Every rule that the spec breaks. Its schema must be right and its defaults filled in."""
    for path, (low, high) in DURATIONS_MS.items():
        value = _ms(spec, path)
        if value is not None and not low <= value <= high:
            yield Problem(f"spec.{path}", f"must be between {low} ms and {high} ms")
    yield from _model_rules(spec)
    yield from _batching_rules(spec)
    yield from _slo_rules(spec)
    yield from _bounds_rules(spec)
    yield from _tenancy_rules(spec)
    yield from _resources_rules(spec)
    yield from _pod_rules(spec)


def _model_rules(spec: Json) -> Iterator[Problem]:
    model = spec["model"]
    if not model["uri"].startswith("hf://"):
        if "hfTokenSecretRef" in model:
            yield Problem(
                "spec.model.hfTokenSecretRef", "only an hf:// model is read with a Hugging Face token"
            )
        if model["revision"] != "main":
            yield Problem("spec.model.revision", "only an hf:// model has revisions")


def _batching_rules(spec: Json) -> Iterator[Problem]:
    batching, capacity = spec["batching"], spec["batching"]["capacity"]
    token_each = "every running sequence needs one token a step"
    if capacity["maxBatchTokens"] < capacity["maxBatchSequences"]:
        yield Problem(
            "spec.batching.capacity.maxBatchTokens",
            f"must be at least batching.capacity.maxBatchSequences: {token_each}",
        )
    if batching["maxBatchTokens"] < batching["maxBatchSequences"]:
        yield Problem(
            "spec.batching.maxBatchTokens", f"must be at least batching.maxBatchSequences: {token_each}"
        )
    for key, ceiling in (
        ("maxBatchTokens", "maxBatchTokens"),
        ("maxBatchSequences", "maxBatchSequences"),
        ("prefillChunkTokens", "maxBatchTokens"),
    ):
        if batching[key] > capacity[ceiling]:
            yield Problem(f"spec.batching.{key}", f"must be at most batching.capacity.{ceiling}")


def _slo_rules(spec: Json) -> Iterator[Problem]:
    ttft, e2e = _get(spec, "slo.ttft") or {}, _get(spec, "slo.e2e") or {}
    for percentile in ttft.keys() & e2e.keys():
        if duration_ms(ttft[percentile]) > duration_ms(e2e[percentile]):
            yield Problem("spec.slo.e2e", "must not be shorter than ttft, which is a part of it")
    if not ttft:
        return
    window_ms = _ms(spec, "batching.window")
    if window_ms and window_ms >= duration_ms(next(iter(ttft.values()))):
        yield Problem("spec.batching.window", "must be shorter than slo.ttft, which it is a part of")


def _bounds_rules(spec: Json) -> Iterator[Problem]:
    bounds = spec["tuning"]["bounds"]
    path = "spec.tuning.bounds"
    for key, bound in bounds.items():
        if "min" in bound and "max" in bound and bound["min"] > bound["max"]:
            yield Problem(f"{path}.{key}.min", "min must not be above max")
    most, least = _get(bounds, "maxBatchTokens.max"), _get(bounds, "maxBatchSequences.min")
    if most is not None and least is not None and most < least:
        yield Problem(f"{path}.maxBatchTokens.max", "must not be below maxBatchSequences.min")
    for key, ceiling in (
        ("maxBatchTokens", "maxBatchTokens"),
        ("maxBatchSequences", "maxBatchSequences"),
        ("prefillChunkTokens", "maxBatchTokens"),
    ):
        if any(edge > spec["batching"]["capacity"][ceiling] for edge in bounds.get(key, {}).values()):
            yield Problem(f"{path}.{key}", f"must be at most batching.capacity.{ceiling}")


def _tenancy_rules(spec: Json) -> Iterator[Problem]:
    tenancy = spec.get("tenancy", {})
    tenants = tenancy.get("tenants", [])
    names = [tenant["name"] for tenant in tenants]
    for index, tenant in enumerate(tenants):
        path = f"spec.tenancy.tenants[{index}]"
        if names.index(tenant["name"]) < index:
            yield Problem(path, "stands twice")
        if tenant["burstTokens"] and not tenant["tokensPerSecond"]:
            yield Problem(f"{path}.burstTokens", "has no effect without tokensPerSecond")
    if tenancy.get("fairness") == "FirstComeFirstServed" and any(t["weight"] != 1 for t in tenants):
        yield Problem("spec.tenancy.tenants", "a weight has no effect with FirstComeFirstServed")


def _quantity(value: int | str) -> Decimal:
    number: Decimal = parse_quantity(value)
    return number


def _resources_rules(spec: Json) -> Iterator[Problem]:
    limits, requests = (_get(spec, f"resources.{key}") or {} for key in ("limits", "requests"))
    for name in requests.keys() & limits.keys():
        if _quantity(requests[name]) > _quantity(limits[name]):
            yield Problem("spec.resources.requests", "must not be above the limit of the same resource")
    for name in requests:
        if "/" in name and (name not in limits or _quantity(requests[name]) != _quantity(limits[name])):
            yield Problem("spec.resources.requests", "an accelerator needs a limit equal to its request")
    for name in {**limits, **requests}:
        if name not in COMPUTE_RESOURCES and not name.startswith("hugepages-") and "/" not in name:
            yield Problem(
                "spec.resources",
                "names a resource that containers do not have (accelerators are written VENDOR/NAME)",
            )


def _pod_rules(spec: Json) -> Iterator[Problem]:
    runtime, template = spec["runtime"], spec.get("podTemplate", {})
    if any(argument.split("=", 1)[0] in OWNED_OPTIONS for argument in runtime.get("extraArgs", [])):
        yield Problem(
            "spec.runtime.extraArgs",
            "sets an option that Headway sets from a field of this resource or for itself",
        )
    names = [variable["name"] for variable in runtime.get("env", [])]
    for index, variable in enumerate(runtime.get("env", [])):
        path = f"spec.runtime.env[{index}]"
        if "value" in variable and "valueFrom" in variable:
            yield Problem(f"{path}.valueFrom", "has both value and valueFrom")
        if variable["name"].startswith("HEADWAY_") or variable["name"] in OWNED_VARIABLES:
            yield Problem(f"{path}.name", "is set by Headway")
        if names.index(variable["name"]) < index:
            yield Problem(path, "stands twice")
    if any(key.startswith("headway.dev/") or key in OWNED_LABELS for key in template.get("labels", {})):
        yield Problem("spec.podTemplate.labels", "sets a label that Headway sets")
    for section in ("labels", "annotations", "nodeSelector"):
        if not all(LABEL_KEY.fullmatch(key) for key in template.get(section, {})):
            yield Problem(
                f"spec.podTemplate.{section}", "must be a label's key, such as team or example.com/team"
            )
    volumes = {volume["name"] for volume in template.get("volumes", [])}
    for index, volume in enumerate(template.get("volumes", [])):
        if volume["name"].startswith("headway-"):
            yield Problem(f"spec.podTemplate.volumes[{index}].name", "must not start with headway-")
    for index, mount in enumerate(template.get("volumeMounts", [])):
        if mount["mountPath"] in ("/tmp", "/etc/headway", "/etc/headway-keys"):
            yield Problem(f"spec.podTemplate.volumeMounts[{index}].mountPath", "is used by Headway")
    if any(mount["name"] not in volumes for mount in template.get("volumeMounts", [])):
        yield Problem(
            "spec.podTemplate.volumeMounts", "names a volume that podTemplate.volumes does not have"
        )
