"""Facts to the status of an InferenceDeployment: conditions, parameters, figures, tuning history.

Pure: the previous status and the time are arguments. Conditions follow the Kubernetes API conventions
and kstatus: Reconciling and Stalled are there only while true. Knows nothing of how it is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from headway_operator.fleet import PodRef, Unreachable
from headway_operator.metrics import Observation, Sample
from headway_operator.resource import Resource
from headway_operator.tuner.controller import Decision
from headway_operator.tuner.memory import Memory

FIGURES_EVERY_S = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """A field of the spec that cannot take effect. `fatal`: nothing can run until it is edited."""

    reason: str
    message: str
    fatal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the controller knows about one resource at one moment."""

    resource: Resource
    deployment: Mapping[str, Any] | None
    pods: tuple[PodRef, ...] = ()
    samples: Mapping[str, Sample | Unreachable] = field(default_factory=dict)
    observation: Observation | None = None
    decision: Decision | None = None
    memory: Memory = field(default_factory=Memory)
    refused: Mapping[str, str] = field(default_factory=dict)
    """Pods that did not take the limits, with the reason."""
    problems: tuple[Problem, ...] = ()
    endpoint: str = ""


def build(facts: Facts, previous_status: Mapping[str, Any] | None, now: datetime) -> dict[str, Any]:
    """The whole status that should stand now."""
    return {"observedGeneration": facts.resource.generation, "conditions": []}


def differs(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> bool:
    """Whether `new` must be written at once: figures alone may wait for `FIGURES_EVERY_S`."""
    return old is None or dict(old) != dict(new)
