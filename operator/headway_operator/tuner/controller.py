"""Observation to Decision: which limits should be in force now, and why.

Pure: time is an argument and the next memory is part of the answer. Knows nothing of pods, HTTP or
Kubernetes.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from headway_engine.protocol import Capacity, Limits
from headway_engine.stepcost import StepCost
from headway_operator.metrics import Observation
from headway_operator.resource import Batching, Slo, Tuning, TuningMode
from headway_operator.tuner.memory import Feasibility, Memory
from headway_operator.tuner.quantiles import Exceedances, Judgement


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


@dataclass(frozen=True, slots=True)
class TargetEvidence:
    """How one target stands: counts since the last change, the percentile itself of the last interval."""

    target_s: float
    percentile: str
    judgement: Judgement
    seen: Exceedances
    window_s: float
    value_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The numbers behind a decision. None: not known."""

    ttft: TargetEvidence | None = None
    itl: TargetEvidence | None = None
    e2e: TargetEvidence | None = None
    cost: StepCost | None = None
    model_error: float | None = None  # last interval's mean step time against the model, as a share
    predicted_step_s: float | None = None
    attainment: float | None = None  # share of offered requests that met every target, last interval
    offered_per_s: float | None = None
    finished_per_s: float | None = None
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    capacity_per_s: float | None = None  # requests a second that the deployment can serve inside the targets
    replicas_needed: int | None = None
    best_ttft_s: float | None = None
    best_itl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What should be in force, and why. `recommended` is set where it differs from `limits` (Recommend)."""

    limits: Limits
    verdict: Verdict
    state: State
    reason: str
    memory: Memory
    changes: tuple[Change, ...] = ()
    recommended: Limits | None = None
    feasibility: Feasibility = Feasibility.UNKNOWN
    feasibility_reason: str = ""
    evidence: Evidence = field(default_factory=Evidence)


def decide(
    slo: Slo,
    tuning: Tuning,
    batching: Batching,
    capacity: Capacity,
    current: Limits,
    memory: Memory,
    observation: Observation | None,
    now_s: float,
) -> Decision:
    """The limits that should be in force from now on.

    `current` is what the engines report, `capacity` what one of them reserved. `observation` is None
    when no pod could be scraped, which is not the same as no traffic.
    """
    base = batching.limits()
    memory = msgspec.structs.replace(memory, base=base, tuned=memory.tuned or base)
    if tuning.mode is TuningMode.OFF:
        return Decision(
            limits=base, verdict=Verdict.HOLD, state=State.OFF, reason="tuning.mode is Off", memory=memory
        )
    if slo.ttft is None and slo.itl is None:
        return Decision(
            limits=base,
            verdict=Verdict.HOLD,
            state=State.NO_TARGET,
            reason="the resource has neither slo.ttft nor slo.itl: there is nothing to tune for",
            memory=memory,
        )
    assert memory.tuned is not None
    return Decision(
        limits=memory.tuned,
        verdict=Verdict.HOLD,
        state=State.LEARNING,
        reason="not enough steps seen yet to know what one costs",
        memory=memory,
    )
