"""The status of a resource whose spec cannot be read: every field at fault is named.

What was running goes on running, so all else in the status stays as it is. Pure.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from headway_operator.resource import InvalidSpec

MESSAGE_LIMIT = 1024


def invalid_status(body: Mapping[str, Any], error: InvalidSpec, now: datetime) -> dict[str, Any]:
    """Ready=False and Stalled=True, reason InvalidSpec; the other conditions keep their last word."""
    generation = body["metadata"].get("generation", 0)
    before: Mapping[str, Any] = body.get("status") or {}
    message = "; ".join(str(problem) for problem in error.problems)[:MESSAGE_LIMIT]
    conditions = {c["type"]: c for c in before.get("conditions") or [] if c["type"] != "Reconciling"}
    for type_, value in (("Ready", "False"), ("Stalled", "True")):
        old = conditions.get(type_, {})
        since = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions[type_] = {
            "type": type_,
            "status": value,
            "reason": "InvalidSpec",
            "message": message,
            "observedGeneration": generation,
            "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == value else since,
        }
    return {**before, "observedGeneration": generation, "conditions": list(conditions.values())}
