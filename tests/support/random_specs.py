"""Random specs drawn from the schema itself: about half of them valid, many wrong in one place or two.

Values sit on and beside the edges that rules between fields speak of. Knows no rule.
"""

import random
from typing import Any

from headway_operator.schema import load_crd, openapi_schema

Json = dict[str, Any]

DURATIONS = (
    "0ms", "1ms", "50ms", "100ms", "999ms", "1s", "1001ms", "1999ms", "2s", "5s", "10s", "1m", "10m", "601s",
    "60m", "1h", "3601s", "1h1ms", "00001s", "1s1s", "1m1h",
)  # fmt: skip
NUMBERS = (
    0,
    1,
    2,
    16,
    127,
    128,
    129,
    255,
    256,
    257,
    511,
    512,
    513,
    2047,
    2048,
    2049,
    8191,
    8192,
    8193,
    65536,
)
QUANTITIES = (1, 2, "1", "2", "500m", "1Gi", "2.5", "1000m", "0.5", "1e3", "2Ki")
KEYS = (
    "cpu",
    "memory",
    "nvidia.com/gpu",
    "gpu",
    "team",
    "a/b",
    "headway.dev/x",
    "app.kubernetes.io/name",
    "a b",
)
URIS = ("hf://a/b", "file:///x", "random://llama", "package://m/f", "hf://a")
WORDS = (
    "a", "b", "main", "A", "x-y", "a b", "a.b", "a/b", "--threads=2", "--port", "--ports=1", "--host=1",
    "/tmp", "/cache", "/m", "HEADWAY_X", "HF_TOKEN", "headway-x",
)  # fmt: skip


def random_spec(chance: random.Random) -> Json:
    """One spec; the same state of `chance` gives the same one."""
    spec: Json = _value(
        openapi_schema(load_crd())["properties"]["spec"], "spec", chance, chance.choice((0.05, 0.1, 0.2, 0.3))
    )
    for key in list(spec.get("slo", {})):
        if chance.random() < 0.7:  # else it almost always has none or several percentiles
            spec["slo"][key] = {chance.choice(("p50", "p95")): chance.choice(DURATIONS)}
    return spec


def _value(node: Json, path: str, chance: random.Random, share: float) -> Any:
    if "enum" in node:
        return chance.choice(node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        return chance.choice(QUANTITIES)
    match node.get("type"):
        case "integer":
            return chance.choice((*NUMBERS, node.get("minimum", 0), node.get("maximum", 9)))
        case "boolean":
            return chance.random() < 0.5
        case "string" if "(h|m|s|ms)" in node.get("pattern", ""):
            return chance.choice(DURATIONS)
        case "string":
            return chance.choice(URIS if path.endswith("uri") else WORDS)
        case "array":
            return [_value(node["items"], path, chance, share) for _ in range(chance.choice((0, 1, 1, 2)))]
        case "object" if "properties" in node:
            required = node.get("required", ())
            return {
                key: _value(part, f"{path}.{key}", chance, share)
                for key, part in node["properties"].items()
                if key in required or chance.random() < share
            }
        case "object" if "additionalProperties" in node:
            values = node["additionalProperties"]
            return {
                chance.choice(KEYS): _value(values, path, chance, share)
                for _ in range(chance.choice((0, 1, 2)))
            }
        case _:
            return {}
