"""Facts to conditions, by the Kubernetes API conventions and kstatus.

Ready, MetricsAvailable, SLOMet, SLOFeasible, TuningActive and ParametersDrifted are always there;
Reconciling and Stalled only while they are true, so that `helm --wait` and `kubectl wait` see a settled
resource as settled. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from headway_engine.protocol import Limits
from headway_operator.fleet import PodRef, Unreachable
from headway_operator.metrics import Observation, Sample
from headway_operator.resource import Resource, TuningMode
from headway_operator.tuner.adopt import standing_limits
from headway_operator.tuner.controller import Decision, State
from headway_operator.tuner.evidence import TargetEvidence
from headway_operator.tuner.memory import Feasibility, Memory
from headway_operator.tuner.quantiles import Judgement

FIGURE_CONDITIONS = ("SLOMet", "SLOFeasible", "TuningActive")
"""Conditions whose message holds figures: a new message alone is not worth a write."""
FALLBACK = "ReadyOnFallback"
"""Reason of Ready where a pod serves, and not in the way that it should."""
MISSES_TO_TELL = 3
MESSAGE = 1024

Json = dict[str, Any]


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


@dataclass(frozen=True, slots=True)
class _Finding:
    """A condition before it has a time."""

    type: str
    status: str
    reason: str
    message: str


def wanted(facts: Facts) -> Limits:
    """The limits that should be in force."""
    if facts.decision is not None:
        return facts.decision.limits
    resource = facts.resource
    return standing_limits(resource.slo, resource.tuning, resource.batching, facts.memory)


def stamp(moment: datetime) -> str:
    """As Kubernetes writes times: whole seconds, UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def conditions(facts: Facts, before: Mapping[str, Any], now: datetime) -> list[Json]:
    """All conditions in a fixed order; `lastTransitionTime` moves only with the status."""
    old = {c["type"]: c for c in before.get("conditions") or []}
    stalled = _stalled(facts)
    found = (
        _ready(facts, stalled, old.get("Ready")),
        None if stalled else _reconciling(facts),
        stalled,
        _metrics(facts, old.get("MetricsAvailable")),
        _slo_met(facts, old.get("SLOMet")),
        _slo_feasible(facts, old.get("SLOFeasible")),
        _tuning(facts, old.get("TuningActive")),
        _drifted(facts),
    )
    return [_timed(f, old.get(f.type), facts.resource.generation, now) for f in found if f is not None]


def _timed(finding: _Finding, old: Mapping[str, Any] | None, generation: int, now: datetime) -> Json:
    same = old is not None and old.get("status") == finding.status and old.get("lastTransitionTime")
    return {
        "type": finding.type,
        "status": finding.status,
        "reason": finding.reason,
        "message": finding.message[:MESSAGE],
        "observedGeneration": generation,
        "lastTransitionTime": old["lastTransitionTime"] if same and old is not None else stamp(now),
    }


def _counts(facts: Facts) -> tuple[int, int, int]:
    """Replicas wanted, ready, and of the newest template."""
    status: Mapping[str, Any] = (facts.deployment or {}).get("status") or {}
    ready, updated = status.get("readyReplicas") or 0, status.get("updatedReplicas") or 0
    return facts.resource.replicas, int(ready), int(updated)


def _ready(facts: Facts, stalled: _Finding | None, old: Mapping[str, Any] | None) -> _Finding:
    desired, ready, _ = _counts(facts)
    if ready > 0:
        serve = f"{ready} of {desired} replicas serve"
        if words := _fallbacks(facts, old):
            return _Finding("Ready", "True", FALLBACK, f"{serve}; {words}")
        return _Finding("Ready", "True", "Serving", serve)
    if stalled is not None:
        return _Finding("Ready", "False", stalled.reason, stalled.message)
    if desired == 0:
        return _Finding("Ready", "True", "ScaledToZero", "no replicas are asked for: nothing is served")
    for problem in facts.problems:
        return _Finding("Ready", "False", problem.reason, problem.message)
    if troubles := _troubles(facts):
        return _Finding("Ready", "False", "PodsFailing", troubles[0])
    return _Finding("Ready", "False", "NoReplicaReady", f"none of {desired} replicas is ready yet")


def _fallbacks(facts: Facts, old: Mapping[str, Any] | None) -> str:
    """Which ways of computing failed in which pods, why, and what serves; empty where none did."""
    found: dict[str, list[str]] = {}
    silent = False
    for pod in facts.pods:
        sample = facts.samples.get(pod.name)
        silent = silent or (pod.ready and not isinstance(sample, Sample))
        if isinstance(sample, Sample) and sample.computing is not None and sample.computing.left:
            left = ", ".join(f"{way} ({why})" for way, why in sample.computing.left)
            words = f"{left} did not pass the check at start, {sample.computing.way} serves"
            found.setdefault(words, []).append(pod.name)
    if not found and silent and old is not None and old.get("reason") == FALLBACK:
        # Nothing is known that would say otherwise.
        return str(old["message"]).partition("; ")[2]
    lines = (f"in {', '.join(pods)} {words}" for words, pods in sorted(found.items()))
    return "; ".join(f"{line}: see runner-fallback in its log" for line in lines)


def _troubles(facts: Facts) -> list[str]:
    return [pod.trouble for pod in facts.pods if pod.trouble and not pod.ready]


def _reconciling(facts: Facts) -> _Finding | None:
    desired, ready, updated = _counts(facts)
    deployment = facts.deployment
    if deployment is None:
        return _Finding("Reconciling", "True", "Creating", "the objects of this resource are being made")
    status: Mapping[str, Any] = deployment.get("status") or {}
    total = int(status.get("replicas") or 0)
    seen = int(status.get("observedGeneration") or 0)
    if seen < int((deployment.get("metadata") or {}).get("generation") or 0):
        return _Finding(
            "Reconciling", "True", "RollingOut", "the Deployment has not seen its newest spec yet"
        )
    if updated < desired or total > updated:
        words = f"{updated} of {desired} replicas are of the newest template, {ready} are ready"
        words = "; ".join((words, *(problem.message for problem in facts.problems), *_troubles(facts)[:1]))
        return _Finding("Reconciling", "True", "RollingOut", words)
    if ready < desired:
        words = "; ".join((f"{ready} of {desired} replicas are ready", *_troubles(facts)[:1]))
        return _Finding("Reconciling", "True", "Starting", words)
    return None


def _stalled(facts: Facts) -> _Finding | None:
    for problem in facts.problems:
        if problem.fatal:
            return _Finding("Stalled", "True", problem.reason, problem.message)
    status: Mapping[str, Any] = (facts.deployment or {}).get("status") or {}
    for condition in status.get("conditions") or []:
        late = condition.get("type") == "Progressing" and condition.get("status") == "False"
        failed = condition.get("type") == "ReplicaFailure" and condition.get("status") == "True"
        if late or failed:
            reason = condition.get("reason") or ("NoProgress" if late else "ReplicaFailure")
            return _Finding("Stalled", "True", reason, condition.get("message") or "no progress")
    return None


def _metrics(facts: Facts, old: Mapping[str, Any] | None) -> _Finding:
    type_ = "MetricsAvailable"
    if not any(pod.ready for pod in facts.pods):
        return _Finding(type_, "Unknown", "NoReadyPod", "there is no ready pod to measure")
    silent = {name: s.reason for name, s in facts.samples.items() if isinstance(s, Unreachable)}
    answered = len(facts.samples) - len(silent)
    words = "; ".join(f"{name}: {reason}" for name, reason in sorted(silent.items()))
    if answered and not silent:
        return _Finding(type_, "True", "AllAnswer", f"{answered} of {answered} ready pods answer")
    if answered:
        return _Finding(
            type_, "True", "SomeSilent", f"{answered} of {len(facts.samples)} ready pods answer; {words}"
        )
    if silent and facts.memory.missed >= MISSES_TO_TELL:
        return _Finding(type_, "False", "NoneAnswers", words)
    if old is not None:
        # Once or twice is no news.
        return _Finding(type_, old["status"], old["reason"], old["message"])
    return _Finding(type_, "Unknown", "NotYetMeasured", "no pod was asked yet")


def _slo_met(facts: Facts, old: Mapping[str, Any] | None) -> _Finding:
    """True and False need evidence; while it is thin the last verdict stands, with what is known now."""
    type_, slo = "SLOMet", facts.resource.slo
    if slo.ttft is None and slo.itl is None and slo.e2e is None:
        return _Finding(type_, "Unknown", "NoTarget", "the resource has no slo")
    if facts.decision is None:
        return _kept(type_, old, "NotYetMeasured", "nothing was measured yet")
    evidence = facts.decision.evidence
    named = [("TTFT", evidence.ttft), ("ITL", evidence.itl), ("e2e", evidence.e2e)]
    known = [(name, target) for name, target in named if target is not None and target.seen.samples >= 1]
    if not known:
        return _kept(type_, old, "NoTraffic", "no request finished yet that could be judged")
    words = "; ".join(_target_words(name, target) for name, target in known)
    broken = [name for name, target in known if target.judgement is Judgement.VIOLATED]
    if broken:
        return _Finding(type_, "False", "TargetMissed", words)
    if all(target.judgement is Judgement.MET for _, target in known):
        return _Finding(type_, "True", "TargetsMet", words)
    if old is not None and old.get("status") in ("True", "False") and _same_targets(facts, old):
        return _Finding(type_, old["status"], old["reason"], f"undecided at present: {words}")
    return _Finding(type_, "Unknown", "TooFewSamples", words)


def _same_targets(facts: Facts, old: Mapping[str, Any]) -> bool:
    """A verdict of before an edit says nothing about the spec of now."""
    return old.get("observedGeneration") == facts.resource.generation


def _kept(type_: str, old: Mapping[str, Any] | None, reason: str, message: str) -> _Finding:
    if old is not None and old.get("reason") != "NoTarget":
        return _Finding(type_, old["status"], old["reason"], old["message"])
    return _Finding(type_, "Unknown", reason, message)


def _target_words(name: str, target: TargetEvidence) -> str:
    misses, samples = target.seen.high, target.seen.samples
    return (
        f"{name} {target.percentile} target {target.target_s * 1000:.0f} ms: {misses:.0f} of {samples:.0f} "
        f"over it ({target.judgement.value.lower()})"
    )


def _slo_feasible(facts: Facts, old: Mapping[str, Any] | None) -> _Finding:
    type_, slo, decision = "SLOFeasible", facts.resource.slo, facts.decision
    if slo.ttft is None and slo.itl is None:
        return _Finding(type_, "Unknown", "NoTarget", "the resource has neither slo.ttft nor slo.itl")
    if decision is None:
        return _kept(type_, old, "NotYetMeasured", "what a step costs is not known yet")
    verdict, message = decision.feasibility, decision.feasibility_reason
    if not message and old is not None and old.get("reason") == verdict.value:
        message = old["message"]
    status = {
        Feasibility.FEASIBLE: "True",
        Feasibility.BELOW_ENGINE_FLOOR: "False",
        Feasibility.CAPACITY_LIMITED: "False",
        Feasibility.UNKNOWN: "Unknown",
    }[verdict]
    return _Finding(type_, status, verdict.value, message or _PLAIN[verdict])


_PLAIN = {
    Feasibility.FEASIBLE: "a setting that meets the targets exists",
    Feasibility.BELOW_ENGINE_FLOOR: "one request alone is too slow for the target: replicas do not help",
    Feasibility.CAPACITY_LIMITED: "more requests arrive than can be served inside the targets",
    Feasibility.UNKNOWN: "what a step costs is not known yet",
}


def _tuning(facts: Facts, old: Mapping[str, Any] | None) -> _Finding:
    type_, decision = "TuningActive", facts.decision
    if facts.resource.tuning.mode is TuningMode.OFF:
        return _Finding(type_, "False", State.OFF.value, "tuning.mode is Off")
    if decision is None:
        return _kept(type_, old, "Waiting", "waiting for a pod that can be measured")
    running = decision.state in (State.ACTIVE, State.LEARNING, State.INSUFFICIENT_TRAFFIC)
    advisory = facts.resource.tuning.mode is TuningMode.RECOMMEND
    if running and advisory:
        return _Finding(type_, "False", State.ADVISORY.value, f"tuning.mode is Recommend. {decision.reason}")
    return _Finding(type_, "True" if running else "False", decision.state.value, decision.reason)


def _drifted(facts: Facts) -> _Finding:
    type_, target = "ParametersDrifted", wanted(facts)
    if facts.refused:
        words = "; ".join(f"{name}: {reason}" for name, reason in sorted(facts.refused.items()))
        return _Finding(type_, "True", "LimitsRefused", words)
    other = sorted(
        name
        for name, sample in facts.samples.items()
        if isinstance(sample, Sample) and sample.limits is not None and not sample.limits.same_values(target)
    )
    if other:
        return _Finding(type_, "True", "LimitsDiffer", f"other limits are in force in {', '.join(other)}")
    return _Finding(type_, "False", "InForce", "every pod that answers has the wanted limits")
