"""What the tuner says: a decision with its verdict, its reason and its numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from headway_engine.protocol import Limits
from headway_operator.tuner.evidence import Evidence
from headway_operator.tuner.memory import Feasibility, Memory

TUNABLES: dict[str, str] = {
    "max_batch_tokens": "maxBatchTokens",
    "max_batch_sequences": "maxBatchSequences",
    "prefill_chunk_tokens": "prefillChunkTokens",
    "max_queued_tokens": "maxQueuedTokens",
}
"""Fields of Limits that the tuner moves, with their names in the resource."""


class Verdict(StrEnum):
    """What a decision does with the limits."""

    HOLD = "Hold"
    GROW = "Grow"  # more tokens a step
    SHRINK = "Shrink"
    EDIT = "Edit"  # the user changed the spec
    REVERT = "Revert"  # a change made things worse
    FALL_BACK = "FallBack"  # blind for too long


class State(StrEnum):
    """What the tuner is doing, for the TuningActive condition."""

    OFF = "Off"
    ACTIVE = "Active"
    ADVISORY = "Advisory"
    NO_TARGET = "NoTarget"
    LEARNING = "Learning"
    INSUFFICIENT_TRAFFIC = "InsufficientTraffic"
    METRICS_LOST = "MetricsLost"


@dataclass(frozen=True, slots=True)
class Change:
    """One parameter that moves. `parameter` is its name in the resource."""

    parameter: str
    old: int
    new: int
    why: str
    edited: bool = False
    """The user asked for it in the spec: it is applied in every mode, Recommend included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What should be in force, and why. `recommended` is set where it differs from `limits` (Recommend).

    `at_s` is the time that it was made at, on the clock that `decide` was given.
    """

    limits: Limits
    verdict: Verdict
    state: State
    reason: str
    memory: Memory
    at_s: float = 0.0
    changes: tuple[Change, ...] = ()
    recommended: Limits | None = None
    feasibility: Feasibility = Feasibility.UNKNOWN
    feasibility_reason: str = ""
    evidence: Evidence = field(default_factory=Evidence)


def differences(old: Limits, new: Limits, why: Callable[[str], str]) -> tuple[Change, ...]:
    return tuple(
        Change(TUNABLES[name], getattr(old, name), getattr(new, name), why(name))
        for name in TUNABLES
        if getattr(old, name) != getattr(new, name)
    )
