"""What is worth an event: limits that moved, and conditions that turned bad or good again. Pure.

Knows nothing of how an event is posted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway_operator.conditions import FALLBACK
from headway_operator.resource import TuningMode
from headway_operator.tuner.controller import Change

BAD = {
    "Ready": "False",
    "Stalled": "True",
    "MetricsAvailable": "False",
    "SLOMet": "False",
    "SLOFeasible": "False",
}
"""Condition to the status in which somebody should look."""
GOOD = {"Ready": "True", "Stalled": None, "MetricsAvailable": "True", "SLOMet": "True", "SLOFeasible": "True"}
"""None: the condition is gone."""

CONDITION_EVERY_S = 120.0
BURST = 25
REFILL_S = 60.0


@dataclass(frozen=True, slots=True)
class News:
    """One event to be. `topic` is what is limited: a condition that flaps, or the limits."""

    topic: str
    type: str
    reason: str
    note: str
    action: str


def changes_of_limits(changes: Iterable[Change], mode: TuningMode) -> list[News]:
    """What was done, and apart from it what the tuner would do where it may only recommend."""
    done: list[Change] = []
    advised: list[Change] = []
    for change in changes:
        (advised if mode is TuningMode.RECOMMEND and not change.edited else done).append(change)
    return [
        News(topic="limits", type="Normal", reason=reason, note=_sentences(part), action=action)
        for part, reason, action in (
            (done, "LimitsChanged", "Tune"),
            (advised, "LimitsRecommended", "Recommend"),
        )
        if part
    ]


def _sentences(changes: Iterable[Change]) -> str:
    return "; ".join(f"{c.parameter} {c.old} → {c.new}: {c.why}" for c in changes)


def transitions(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[News]:
    """Conditions that turned bad, those that turned good after having been bad, and a fallback that began."""
    old, new = _by_type(before or {}), _by_type(after)
    found = []
    for type_, bad in BAD.items():
        was, is_ = old.get(type_, {}), new.get(type_, {})
        if is_.get("reason") == FALLBACK:
            if was.get("reason") != FALLBACK:
                found.append(_of_condition(type_, "Warning", FALLBACK, is_["message"], topic=FALLBACK))
            continue
        if is_.get("status") == was.get("status"):
            continue
        # A new resource that is not ready yet is no news.
        starting = type_ == "Ready" and was.get("status") != "True"
        if is_.get("status") == bad and not starting:
            found.append(_of_condition(type_, "Warning", is_["reason"], is_["message"]))
        elif was.get("status") == bad and is_.get("status") == GOOD[type_]:
            reason = is_.get("reason") or "Resumed"
            found.append(
                _of_condition(type_, "Normal", reason, is_.get("message") or f"was: {was['message']}")
            )
    return found


def _of_condition(type_: str, severity: str, reason: str, message: str, topic: str = "") -> News:
    note = f"{type_}: {message}"
    return News(topic=topic or type_, type=severity, reason=reason, note=note, action="Reconcile")


def _by_type(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {condition["type"]: condition for condition in status.get("conditions") or []}


@dataclass(slots=True)
class Quota:
    """How many events one resource may have: each condition now and then, limits in bursts."""

    _told_s: dict[str, float] = field(default_factory=dict)
    _left: float = BURST
    _counted_s: float | None = None

    def allows(self, topic: str, now_s: float) -> bool:
        """Whether an event may go out now; counts it where it may."""
        if topic in BAD or topic == FALLBACK:
            if now_s - self._told_s.get(topic, -CONDITION_EVERY_S) < CONDITION_EVERY_S:
                return False
            self._told_s[topic] = now_s
            return True
        elapsed_s = 0.0 if self._counted_s is None else now_s - self._counted_s
        self._left, self._counted_s = min(BURST, self._left + elapsed_s / REFILL_S), now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
