"""What the controller remembers of one resource between two runs, and which limits that makes wanted.

All of it may be lost at any time: what matters is in the status, the rest is read again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from headway_engine.protocol import Capacity, Limits, Objectives
from headway_operator.cluster import Manifest
from headway_operator.fleet import Unreachable
from headway_operator.metrics import Observation, Sample
from headway_operator.news import Quota
from headway_operator.resource import Resource, Slo, Tuning
from headway_operator.status import Problem
from headway_operator.tuner.adopt import standing_limits
from headway_operator.tuner.controller import Change, Decision
from headway_operator.tuner.memory import Memory


@dataclass(frozen=True, slots=True)
class Basis:
    """The part of a spec that limits are decided from. Another basis: another decision."""

    limits: Limits
    capacity: Capacity
    slo: Slo
    tuning: Tuning

    @classmethod
    def of(cls, resource: Resource) -> "Basis":
        batching = resource.batching
        return cls(batching.limits(), batching.envelope(), resource.slo, resource.tuning)

    @property
    def objectives(self) -> Objectives:
        return self.slo.objectives()


@dataclass(slots=True)
class Known:
    """One resource, as last seen. Times are monotonic seconds."""

    uid: str
    memory: Memory
    basis: Basis | None = None
    limits: Limits = field(default_factory=Limits)  # what should be in force, generation 0
    configured: Limits | None = None  # what the ConfigMap for new pods holds
    control_key: str = ""
    applied_generation: int = 0  # of the spec whose objects were made so last
    deployment: Manifest | None = None
    problems: tuple[Problem, ...] = ()
    samples: Mapping[str, Sample | Unreachable] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # pod to reason
    before: Mapping[str, Sample] = field(default_factory=dict)  # answers of the last tick
    ticked_s: float | None = None
    observation: Observation | None = None
    decision: Decision | None = None
    untold: tuple[tuple[Change, ...], ...] = ()  # changes for which no event was posted yet
    recommended: Limits | None = None  # what the last event about a recommendation said
    quota: Quota = field(default_factory=Quota)
    busy: bool = False  # there was traffic since the last status write, or in what it told
    written_s: float | None = None


def has_traffic(observation: Observation | None) -> bool:
    """Whether requests came or ran in the last interval."""
    return observation is not None and bool(observation.arrivals or observation.running)


def wanted_limits(resource: Resource, known: Known) -> Limits:
    """What should be in force before the tuner is asked again.

    The tuner's last word about this spec holds; else its state from the status (a restarted controller),
    under the edits made since; else what the spec says, at once.
    """
    if known.decision is not None:
        return plain(known.decision.limits)
    return standing_limits(resource.slo, resource.tuning, resource.batching, known.memory)


def plain(limits: Limits) -> Limits:
    """Without the generation, which is the engine's to give."""
    return msgspec.structs.replace(limits, generation=0)
