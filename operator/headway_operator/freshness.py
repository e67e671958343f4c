"""What is worth a write of the status: what a reader would act on, not a figure that wobbles.

Compares what stands with what would stand. Knows nothing of how either came about.
"""

import math
from collections.abc import Mapping
from typing import Any

from headway_operator.conditions import FIGURE_CONDITIONS

FIGURES_EVERY_S = 60
"""Figures alone are written at most this often."""
REFRESH_S = 300
"""Under traffic figures are written this often whether or not they moved, so that they are never older."""
NEWS = 0.10
"""Share by which a figure must differ to be news, however many requests it is from."""
DEVIATIONS = 1.645
"""As for verdicts on targets: chance alone goes further up in 5 %, and further down in 5 %."""

Json = dict[str, Any]


def differs(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> bool:
    """Whether `new` must be written at once: figures alone may wait for `FIGURES_EVERY_S`."""
    return old is None or _without_figures(old) != _without_figures(new)


def _without_figures(status: Mapping[str, Any]) -> Json:
    """The part of a status that is news when it changes."""
    kept = {k: v for k, v in status.items() if k not in ("throughput", "capacity", "feasibility", "slo")}
    kept["conditions"] = [
        {k: v for k, v in c.items() if k != "message" or c["type"] not in FIGURE_CONDITIONS}
        for c in status.get("conditions") or []
    ]
    kept["parameters"] = [
        {k: v for k, v in p.items() if k != "reason"} for p in status.get("parameters") or []
    ]
    kept["slo"] = {
        name: {k: part.get(k) for k in ("targetMilliseconds", "percentile")}
        for name, part in (status.get("slo") or {}).items()
        if isinstance(part, Mapping)
        if "targetMilliseconds" in part
    }
    tuning = status.get("tuning") or {}
    kept["tuning"] = {k: tuning.get(k) for k in ("generation", "lastChangeTime", "history")}
    recommendation = status.get("recommendation") or {}
    kept["recommendation"] = recommendation.get("changes")
    return kept


def figures_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a figure moved by more than chance moves it, with as many requests as it is from."""
    was, now = old.get("slo") or {}, new.get("slo") or {}
    requests = max(1, was.get("samples") or 0, now.get("samples") or 0)
    # Two Poisson counts of n differ by sqrt(2 n) by chance, two shares of n by no more than sqrt(1 / (2 n)).
    share = max(NEWS, DEVIATIONS * math.sqrt(2 / requests))
    points = max(1.0, DEVIATIONS * 100 * math.sqrt(0.5 / requests))
    if _moved(was.get("attainmentPercent"), now.get("attainmentPercent"), points):
        return True
    before, after = _measured(old), _measured(new)
    if _exact(old) != _exact(new) or before.keys() != after.keys():
        return True
    return any(_moved(before[k], after[k], max(1.0, share * max(before[k], after[k]))) for k in before)


_SCATTER = (
    "measuredMilliseconds",
    "outputTokensPerSecond",
    "promptTokensPerSecond",
    "requestsPerMinute",
    "arrivalsPerMinute",
    "rejectionsPerMinute",
    "kvUsedPercent",
    "bestTtftMilliseconds",
    "bestItlMilliseconds",
)
"""Not what runs and waits at the moment of a look: that is no measurement of anything."""


def _moved(old: float | None, new: float | None, allowance: float) -> bool:
    return old != new and (old is None or new is None or abs(new - old) > allowance)


def _measured(status: Mapping[str, Any]) -> dict[str, float]:
    """Figures that scatter with the requests that they are from."""
    parts: dict[str, Mapping[str, Any]] = {
        name: part for name, part in (status.get("slo") or {}).items() if isinstance(part, Mapping)
    }
    parts |= {name: status.get(name) or {} for name in ("throughput", "capacity", "feasibility")}
    return {
        f"{name}.{figure}": value
        for name, part in parts.items()
        for figure, value in part.items()
        if figure in _SCATTER
    }


def _exact(status: Mapping[str, Any]) -> list[Any]:
    """Figures of which every change means something."""
    capacity = status.get("capacity") or {}
    reserved = ("maxBatchTokens", "maxBatchSequences", "kvTokens", "maxModelTokens", "replicasNeeded")
    verdicts = [
        part.get("verdict") for part in (status.get("slo") or {}).values() if isinstance(part, Mapping)
    ]
    return [*verdicts, *(capacity.get(name) for name in reserved)]
