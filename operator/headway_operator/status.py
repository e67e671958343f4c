"""Facts to the status of an InferenceDeployment: parameters, figures, tuning history.

Pure: the previous status and the time are arguments. Conditions are in `conditions`. Figures are whole
numbers with the unit in the name; what is not known is absent, and what was measured before stays until
it is measured again. Knows nothing of how a status is written.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from headway_engine.protocol import Limits
from headway_operator.conditions import Facts, Problem, conditions, stamp, wanted
from headway_operator.engines import Parameter, engine
from headway_operator.manifests import selector
from headway_operator.metrics import Sample
from headway_operator.resource import Target
from headway_operator.tuner.controller import Change, Decision, Verdict
from headway_operator.tuner.evidence import Evidence, TargetEvidence
from headway_operator.tuner.memory import Feasibility, to_status

__all__ = ["Facts", "Problem", "build"]

HISTORY = 20
SENTENCE = 1024

Json = dict[str, Any]


def build(facts: Facts, previous_status: Mapping[str, Any] | None, now: datetime) -> Json:
    """The whole status that should stand now."""
    before: Mapping[str, Any] = previous_status or {}
    resource, deployment = facts.resource, (facts.deployment or {}).get("status") or {}
    status: Json = {
        "observedGeneration": resource.generation,
        "conditions": conditions(facts, before, now),
        "endpoint": facts.endpoint,
        "model": resource.model.name,
        "mode": _mode(facts),
        "replicas": int(deployment.get("replicas") or 0),
        "readyReplicas": int(deployment.get("readyReplicas") or 0),
        "updatedReplicas": int(deployment.get("updatedReplicas") or 0),
        "selector": ",".join(f"{k}={v}" for k, v in sorted(selector(resource.name).items())),
        "parameters": [_parameter(p, facts, before) for p in engine(resource.runtime.engine).parameters],
        "slo": _slo(facts, before),
        "throughput": _throughput(facts) or before.get("throughput"),
        "capacity": _capacity(facts, before),
        "feasibility": _feasibility(facts, before),
        "recommendation": _recommendation(facts, before, now),
        "tuning": _tuning(facts, before),
    }
    return {name: value for name, value in status.items() if value not in (None, "", {})}


def _samples(facts: Facts) -> list[Sample]:
    return [sample for _, sample in sorted(facts.samples.items()) if isinstance(sample, Sample)]


def _mode(facts: Facts) -> str:
    in_force = {sample.limits.mode for sample in _samples(facts) if sample.limits is not None}
    return in_force.pop().value if len(in_force) == 1 else facts.resource.batching.mode.value


def _parameter(parameter: Parameter, facts: Facts, before: Mapping[str, Any]) -> Json:
    name = parameter.limits_field
    desired = getattr(wanted(facts), name)
    reported = [sample.limits for sample in _samples(facts)]
    applied = {getattr(limits, name) for limits in reported if limits is not None}
    agree = len(applied) == 1 and None not in reported
    decision = facts.decision
    recommended = decision.recommended if decision is not None else None
    result: Json = {
        "name": parameter.name,
        "unit": parameter.unit,
        "desired": desired,
        "applied": applied.pop() if agree else None,
        "recommended": getattr(recommended, name) if recommended is not None else None,
        "capacity": _ceiling(parameter, facts),
        "support": parameter.support.value,
        "reason": _reason(parameter, desired, facts, before)[:SENTENCE],
    }
    return {key: value for key, value in result.items() if value is not None}


def _ceiling(parameter: Parameter, facts: Facts) -> int | None:
    if parameter.capacity_field is None:
        return None
    reserved = [sample.capacity for sample in _samples(facts) if sample.capacity is not None]
    found = reserved or [facts.resource.batching.envelope()]
    return min(int(getattr(capacity, parameter.capacity_field)) for capacity in found)


def _reason(parameter: Parameter, desired: int, facts: Facts, before: Mapping[str, Any]) -> str:
    """Why the limit has its value: the change that led to it, or the spec."""
    for change in facts.decision.changes if facts.decision is not None else ():
        if change.parameter == parameter.name and change.new == desired:
            return change.why
    if desired == getattr(facts.resource.batching.limits(), parameter.limits_field):
        return parameter.note or "as spec.batching says"
    for old in before.get("parameters") or []:
        if old.get("name") == parameter.name and old.get("desired") == desired and old.get("reason"):
            return str(old["reason"])
    return "set by the tuner"


def _slo(facts: Facts, before: Mapping[str, Any]) -> Json:
    old: Mapping[str, Any] = before.get("slo") or {}
    evidence = facts.decision.evidence if facts.decision is not None else Evidence()
    slo = facts.resource.slo
    figures = (
        ("ttft", slo.ttft, evidence.ttft, evidence.measured_ttft_s),
        ("itl", slo.itl, evidence.itl, evidence.measured_itl_s),
        ("e2e", slo.e2e, evidence.e2e, evidence.measured_e2e_s),
    )
    result: Json = {}
    for name, target, seen, measured_s in figures:
        part = _target(target, seen, measured_s, old.get(name) or {})
        if part:
            result[name] = part
    if evidence.attainment is not None:
        result["attainmentPercent"] = max(0, min(100, round(100 * evidence.attainment)))
        result["samples"] = round(evidence.offered or 0)
        result["windowSeconds"] = round(evidence.window_s)
    else:
        result |= {k: old[k] for k in ("attainmentPercent", "samples", "windowSeconds") if k in old}
    return result


def _target(
    target: Target | None, seen: TargetEvidence | None, measured_s: float | None, old: Mapping[str, Any]
) -> Json:
    """One target; figures of before stay while there are none now and the target is the same."""
    part: Json = {}
    if target is not None:
        part = {
            "targetMilliseconds": round(target.target_s * 1000),
            "percentile": target.percentile.value,
        }
    same = all(old.get(k) == part.get(k) for k in ("targetMilliseconds", "percentile"))
    if measured_s is not None:
        part["measuredMilliseconds"] = max(1, round(measured_s * 1000))
        part.setdefault("percentile", "p95")
    elif "measuredMilliseconds" in old and (same or target is None):
        part["measuredMilliseconds"] = old["measuredMilliseconds"]
        part.setdefault("percentile", "p95")
    if seen is not None and seen.seen.samples >= 1:
        part["verdict"] = seen.judgement.value
        part["samples"] = round(seen.seen.samples)
        part["misses"] = round(seen.seen.high)
    elif same and target is not None:
        part |= {k: old[k] for k in ("verdict", "samples", "misses") if k in old}
    return part


def _throughput(facts: Facts) -> Json:
    seen, decision = facts.observation, facts.decision
    if seen is None or seen.pods == 0 or decision is None:
        return {}
    evidence = decision.evidence

    def per_minute(rate: float | None) -> int | None:
        return None if rate is None else round(60 * rate)

    figures = {
        "outputTokensPerSecond": _round(evidence.output_tokens_per_s),
        "promptTokensPerSecond": _round(evidence.prompt_tokens_per_s),
        "requestsPerMinute": per_minute(evidence.finished_per_s),
        "arrivalsPerMinute": per_minute(evidence.offered_per_s),
        "rejectionsPerMinute": per_minute(evidence.refused_per_s),
        "running": _round(seen.running),
        "waiting": _round(seen.waiting),
        "kvUsedPercent": _round(None if seen.kv_used_ratio is None else 100 * seen.kv_used_ratio),
    }
    return _known(figures)


def _capacity(facts: Facts, before: Mapping[str, Any]) -> Json:
    """What the pods reserved, and what they could serve inside the promise."""
    old: Mapping[str, Any] = before.get("capacity") or {}
    reserved = [sample.capacity for sample in _samples(facts) if sample.capacity is not None]
    result: Json = {}
    if reserved:
        result = {
            "maxBatchTokens": min(c.max_batch_tokens for c in reserved),
            "maxBatchSequences": min(c.max_batch_sequences for c in reserved),
            "kvTokens": min(c.kv_tokens for c in reserved),
            "maxModelTokens": min(c.max_model_tokens for c in reserved),
        }
    decision = facts.decision
    if decision is not None and decision.evidence.capacity_per_s is not None:
        per_s = decision.evidence.capacity_per_s
        result["requestsPerMinute"] = round(60 * per_s)
        result["outputTokensPerSecond"] = round(per_s * decision.memory.load.output_tokens)
        needed = decision.evidence.replicas_needed
        if needed is not None:
            result["replicasNeeded"] = needed
    return {**old, **result}


def _feasibility(facts: Facts, before: Mapping[str, Any]) -> Json:
    slo, decision = facts.resource.slo, facts.decision
    if slo.ttft is None and slo.itl is None:
        return {}
    old: Mapping[str, Any] = before.get("feasibility") or {}
    if decision is None:
        return dict(old)
    verdict = decision.feasibility
    message = decision.feasibility_reason
    if not message and old.get("verdict") == verdict.value:
        message = old.get("message", "")
    evidence = decision.evidence
    figures = _known(
        {
            "bestTtftMilliseconds": _milliseconds(evidence.best_ttft_s),
            "bestItlMilliseconds": _milliseconds(evidence.best_itl_s),
        }
    )
    if verdict is Feasibility.BELOW_ENGINE_FLOOR and not figures:
        figures = {k: v for k, v in old.items() if k.startswith("best")}
    elif verdict is not Feasibility.BELOW_ENGINE_FLOOR:
        figures = {}
    return {"verdict": verdict.value, **({"message": message[:SENTENCE]} if message else {}), **figures}


def _recommendation(facts: Facts, before: Mapping[str, Any], now: datetime) -> Json:
    """Limits that the tuner would set and may not. The time is that of the latest change of them."""
    decision = facts.decision
    old: Mapping[str, Any] = before.get("recommendation") or {}
    if decision is None:
        return dict(old) if facts.resource.tuning.mode.value == "Recommend" else {}
    if decision.recommended is None:
        return {}
    changes = _limits_changes(decision, facts)
    if changes == old.get("changes"):
        return dict(old)
    words = "; ".join(f"{c.parameter} {c.old} -> {c.new}: {c.why}" for c in decision.changes)
    return {
        "time": stamp(now),
        "reason": decision.verdict.value,
        "message": (words or decision.reason)[:SENTENCE],
        "changes": changes,
    }


def _limits_changes(decision: Decision, facts: Facts) -> list[Json]:
    assert decision.recommended is not None
    changes = []
    for parameter in engine(facts.resource.runtime.engine).parameters:
        old = getattr(decision.limits, parameter.limits_field)
        new = getattr(decision.recommended, parameter.limits_field)
        if old != new:
            changes.append({"name": parameter.name, "from": old, "to": new})
    return changes


def _tuning(facts: Facts, before: Mapping[str, Any]) -> Json:
    old: Mapping[str, Any] = before.get("tuning") or {}
    decision, memory = facts.decision, facts.memory
    history = _history(decision, facts, old.get("history") or [])
    result: Json = {
        "state": to_status(memory),
        "generation": _generation(facts) or old.get("generation"),
        "lastChangeTime": history[0]["time"] if history else None,
        "history": history or None,
    }
    if decision is not None:
        result |= {
            "verdict": decision.verdict.value,
            "reason": decision.state.value,
            "message": decision.reason[:SENTENCE],
        }
    else:
        result |= {k: old[k] for k in ("verdict", "reason", "message") if k in old}
    cost = memory.cost
    if cost is not None:
        result["stepCost"] = {
            "baseMicroseconds": round(cost.base_s * 1e6),
            "perPrefillTokenNanoseconds": round(cost.per_prefill_token_s * 1e9),
            "perDecodeNanoseconds": round(cost.per_decode_s * 1e9),
            "perKvTokenPicoseconds": round(cost.per_kv_token_s * 1e12),
            "steps": round(memory.sums.n),
        }
    return _known(result)


def _history(decision: Decision | None, facts: Facts, old: Sequence[Json]) -> list[Json]:
    """Newest first. A decision that is still the latest one is entered once."""
    entries = [dict(entry) for entry in old]
    if decision is None or not decision.changes or decision.recommended is not None:
        return entries[:HISTORY]
    entry: Json = {
        "time": stamp(datetime.fromtimestamp(decision.at_s, UTC)),
        "verdict": decision.verdict.value,
        "reason": _one_word(decision.verdict),
        "message": _why(decision)[:SENTENCE],
        "changes": [_change(change) for change in decision.changes],
    }
    latest = entries[0] if entries else {}
    if all(latest.get(k) == entry[k] for k in ("time", "changes")):
        entries = entries[1:]
    generation = _generation(facts)
    if generation is not None:
        entry["generation"] = generation
    elif "generation" in latest and latest.get("time") == entry["time"]:
        entry["generation"] = latest["generation"]
    return [entry, *entries][:HISTORY]


def _one_word(verdict: Verdict) -> str:
    return {
        Verdict.HOLD: "Held",
        Verdict.GROW: "RoomInTargets",
        Verdict.SHRINK: "TargetBinds",
        Verdict.EDIT: "SpecEdited",
        Verdict.REVERT: "RolledBack",
        Verdict.FALL_BACK: "MetricsLost",
    }[verdict]


def _why(decision: Decision) -> str:
    """Why the limits moved: the user's edits in their own words, then the tuner's reason if it moved any."""
    edits = [f"{c.parameter} {c.old} -> {c.new}: {c.why}" for c in decision.changes if c.edited]
    tuned = [decision.reason] if len(edits) < len(decision.changes) else []
    return "; ".join(edits + tuned)


def _change(change: Change) -> Json:
    return {"name": change.parameter, "from": change.old, "to": change.new}


def _generation(facts: Facts) -> int | None:
    """Generation of the wanted limits in the pods that have them in force."""
    target: Limits = wanted(facts)
    found = [s.limits for s in _samples(facts) if s.limits is not None and s.limits.same_values(target)]
    return max((limits.generation for limits in found), default=None)


def _round(value: float | None) -> int | None:
    return None if value is None else round(value)


def _milliseconds(value_s: float | None) -> int | None:
    return None if value_s is None else max(1, round(value_s * 1000))


def _known(figures: Json) -> Json:
    return {name: value for name, value in figures.items() if value is not None}
