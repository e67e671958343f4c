"""What a step of the engine costs: from the command line, a profile that was measured, or a running engine.

Knows nothing of what is done with it.
"""

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway_cli.errors import Failed, UserError
from headway_engine.protocol import METRICS_PATH, Capacity
from headway_engine.stepcost import StepCost
from headway_operator.metrics import MetricsError, parse
from headway_operator.tuner.model import fit

HOW = (
    "Give --step-cost BASE_MS,PREFILL_US,DECODE_US,KV_NS (ms a step, us a prompt token, us a decoding "
    "sequence, ns a cached token that decodes read), --step-cost PROFILE, --from URL of a running "
    "engine's management port, or a file with the status of a deployment that has run"
)
SCRAPE_TIMEOUT_S = 10.0
LONGEST_PART_S = 3600.0
"""Nothing that takes more than an hour is a part of a step; it is a number in another unit."""
_UNITS_S = (1e-3, 1e-6, 1e-6, 1e-9)
_NAMES = ("BASE_MS", "PREFILL_US", "DECODE_US", "KV_NS")


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured step cost, and where it comes from."""

    cost: StepCost
    source: str


PROFILES = {
    "smollm2-135m-2cpu": Profile(
        StepCost(base_s=21.4e-3, per_prefill_token_s=1.2e-3, per_decode_s=1.6e-3, per_kv_token_s=2e-6),
        "SmolLM2-135M in float32 on 2 Xeon cores, fitted to the medians of bench/runner_step.py that "
        "bench/README.md lists (within 15 % of each)",
    ),
}
"""Only what was measured with this engine."""


@dataclass(frozen=True, slots=True)
class Known:
    """A step cost with its source in words; capacity where an engine told it."""

    cost: StepCost
    source: str
    capacity: Capacity | None = None


def from_option(text: str) -> Known:
    """The value of --step-cost. Raises UserError that names the part."""
    if text in PROFILES:
        profile = PROFILES[text]
        return Known(profile.cost, f"profile {text}: {profile.source}")
    parts = text.split(",")
    if len(parts) != len(_UNITS_S):
        raise UserError(
            f"--step-cost {text}: neither a profile ({', '.join(PROFILES)}) nor four numbers", HOW
        )
    values = []
    for name, part, unit_s in zip(_NAMES, parts, _UNITS_S, strict=True):
        try:
            value = float(part)
        except ValueError:
            raise UserError(f"--step-cost {text}: {name} is {part!r}, not a number", HOW) from None
        if not 0 <= value * unit_s <= LONGEST_PART_S:
            raise UserError(f"--step-cost {text}: {name} is {part}, which no step can cost", HOW)
        values.append(value * unit_s)
    if values[0] + values[1] <= 0 or values[0] + values[2] <= 0:
        raise UserError(f"--step-cost {text}: a step must take some time", HOW)
    cost = StepCost(
        base_s=values[0], per_prefill_token_s=values[1], per_decode_s=values[2], per_kv_token_s=values[3]
    )
    return Known(cost, "--step-cost")


def from_engine(url: str) -> Known:
    """What a running engine has measured of itself. Raises UserError, or Failed when it does not answer."""
    base = url.rstrip("/").removesuffix(METRICS_PATH)
    if not base.startswith(("http://", "https://")):
        raise UserError(f"--from {url}: not an http:// URL", HOW)
    try:
        with urllib.request.urlopen(base + METRICS_PATH, timeout=SCRAPE_TIMEOUT_S) as answer:
            text = answer.read().decode(errors="replace")
    except (urllib.error.URLError, OSError, ValueError) as e:
        raise Failed(f"{base}{METRICS_PATH}: {getattr(e, 'reason', e)}") from e
    try:
        sample = parse(text)
    except MetricsError as e:
        raise UserError(
            f"{base}{METRICS_PATH}: {e}", "The management port is 8001 unless told otherwise"
        ) from e
    found = fit(sample.statistics, None) if sample.statistics is not None else None
    if found is None or found.cost.base_s + found.cost.per_prefill_token_s <= 0:
        raise UserError(
            f"{base}: the engine has run too few steps to know what one costs",
            "Send it some traffic first (`headway replay`)",
        )
    return Known(found.cost, f"{found.steps:.0f} steps measured at {base}", sample.capacity)


def from_status(status: Mapping[str, Any]) -> Known | None:
    """What the controller has written into a resource's status; None where it has not."""
    told: Any = (status.get("tuning") or {}).get("stepCost")
    try:
        cost = StepCost(
            base_s=int(told["baseMicroseconds"]) / 1e6,
            per_prefill_token_s=int(told["perPrefillTokenNanoseconds"]) / 1e9,
            per_decode_s=int(told["perDecodeNanoseconds"]) / 1e9,
            per_kv_token_s=int(told.get("perKvTokenPicoseconds", 0)) / 1e12,
        )
    except (KeyError, TypeError, ValueError):
        return None
    return Known(cost, "the tuner's, from the status in the file")


def in_words(cost: StepCost) -> str:
    """The four numbers with their units, as --step-cost takes them."""
    values = (cost.base_s, cost.per_prefill_token_s, cost.per_decode_s, cost.per_kv_token_s)
    return ",".join(f"{value / unit:.6g}" for value, unit in zip(values, _UNITS_S, strict=True))
