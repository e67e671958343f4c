"""What an edit of the resource would do to the limits, by the controller's own tuner and what it has learnt.

The model of the engine and of the traffic stands in the resource's status; `decide` is asked what it would do
after each edit. Pure, and knows nothing of clusters or of how it is told.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headway_engine.protocol import Capacity, Limits
from headway_operator.resource import Bound, Resource, Slo, Target, Tuning, TuningMode, parse
from headway_operator.tuner.controller import Decision, decide
from headway_operator.tuner.decision import TUNABLES
from headway_operator.tuner.memory import Memory, from_status

Json = Mapping[str, Any]

MOST_MS = 99_999
"""The resource's durations have five digits a unit."""


@dataclass(frozen=True, slots=True)
class Move:
    """One limit that would be another, with the tuner's reason."""

    parameter: str
    old: int
    new: int
    why: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """An edit of one field, and what would follow. No moves: the limits would stay."""

    path: str
    old: str
    new: str
    moves: tuple[Move, ...]
    reason: str  # of the whole decision
    predicted_step_s: float | None  # a full step under the limits that would be in force


def what_ifs(body: Json) -> list[WhatIf]:
    """The edits worth knowing of. Empty where the tuner has learnt nothing yet."""
    resource, memory = parse(body), learnt(body)
    if memory is None or memory.tuned is None:
        return []
    capacity = _capacity(body, resource)
    slo, tuning = resource.slo, resource.tuning
    advised = replace(tuning, mode=TuningMode.RECOMMEND) if tuning.mode is TuningMode.OFF else tuning
    found = [
        _asked(
            resource, capacity, memory, edit.path, edit.old, edit.new, edit.slo or slo, edit.tuning or advised
        )
        for edit in _edits(slo, advised, memory.tuned)
    ]
    return [what_if for what_if in found if what_if is not None]


def learnt(body: Json) -> Memory | None:
    """What the tuner knows; None where it knows of no step yet."""
    state = ((body.get("status") or {}).get("tuning") or {}).get("state")
    memory = from_status(state)
    return memory if memory.cost is not None and memory.tuned is not None else None


@dataclass(frozen=True, slots=True)
class _Edit:
    path: str
    old: str
    new: str
    slo: Slo | None = None
    tuning: Tuning | None = None


def _edits(slo: Slo, tuning: Tuning, tuned: Limits) -> Iterator[_Edit]:
    """Targets twice as loose and twice as tight, and bounds that a limit stands at, taken away."""
    for name in ("itl", "ttft"):
        target: Target | None = getattr(slo, name)
        if target is None:
            continue
        for factor in (2.0, 0.5):
            # The resource takes whole milliseconds.
            other = replace(target, target_s=max(1, round(target.target_s * 1000 * factor)) / 1000)
            path = f"spec.slo.{name}.{target.percentile.value}"
            yield _Edit(path, _ms(target), _ms(other), slo=replace(slo, **{name: other}))
    for field, name in TUNABLES.items():
        bound: Bound = getattr(tuning.bounds, field)
        for edge in ("min", "max"):
            at = getattr(bound, edge)
            if at is not None and at == getattr(tuned, field):
                free = replace(tuning.bounds, **{field: replace(bound, **{edge: None})})
                path = f"spec.tuning.bounds.{name}.{edge}"
                yield _Edit(path, str(at), "none", tuning=replace(tuning, bounds=free))


def _asked(
    resource: Resource,
    capacity: Capacity,
    memory: Memory,
    path: str,
    old: str,
    new: str,
    slo: Slo,
    tuning: Tuning,
) -> WhatIf | None:
    before = memory.tuned
    assert before is not None, "what_ifs looked"
    if memory.objective == 0:
        return None  # written by nobody who had a target: an edit would not be seen as one
    # At the time of the last look: an edit is taken in at the next one, and nothing is known of later.
    decision = decide(slo, tuning, resource.batching, capacity, before, memory, None, memory.seen_at_s)
    after = decision.memory.tuned
    assert after is not None, "decide fills it in"
    moves = _moves(before, after, decision)
    return WhatIf(path, old, new, moves, decision.reason, decision.evidence.predicted_step_s)


def _moves(before: Limits, after: Limits, decision: Decision) -> tuple[Move, ...]:
    reasons = {change.parameter: change.why for change in decision.changes}
    return tuple(
        Move(name, getattr(before, field), getattr(after, field), reasons.get(name, decision.reason))
        for field, name in TUNABLES.items()
        if getattr(before, field) != getattr(after, field)
    )


def _capacity(body: Json, resource: Resource) -> Capacity:
    """What the pods reserved, as far as the status tells; KV blocks are not in it."""
    told = {
        p["name"]: p["capacity"]
        for p in (body.get("status") or {}).get("parameters") or ()
        if "capacity" in p
    }
    envelope = resource.batching.envelope()
    return msgspec.structs.replace(
        envelope,
        max_batch_tokens=told.get("maxBatchTokens", envelope.max_batch_tokens),
        max_batch_sequences=told.get("maxBatchSequences", envelope.max_batch_sequences),
    )


def _ms(target: Target) -> str:
    total_ms = round(target.target_s * 1000)
    if total_ms <= MOST_MS:
        return f"{total_ms}ms"
    whole_s, rest_ms = divmod(total_ms, 1000)
    return f"{whole_s}s" + (f"{rest_ms}ms" if rest_ms else "")
