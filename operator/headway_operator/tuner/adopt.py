"""What an edit of the spec means for limits that the tuner has moved.

Fields that the tuner does not move follow the spec. Those it moves follow an edit of that very field, and
otherwise stay where the tuner has them. Knows nothing of observations.
"""

import zlib

import msgspec

from headway_engine.protocol import Capacity, InvalidLimits, Limits, check_limits, clamp_limits
from headway_operator.resource import Batching, Slo, Tuning, TuningMode
from headway_operator.tuner.decision import TUNABLES, Change
from headway_operator.tuner.memory import Memory


def adopt(
    slo: Slo, tuning: Tuning, batching: Batching, capacity: Capacity, memory: Memory
) -> tuple[Memory, tuple[Change, ...], bool]:
    """The memory under the present spec, the edits found, and whether targets or bounds are new."""
    base = batching.limits()
    old, tuned = memory.base or base, memory.tuned or base
    edited = [name for name in TUNABLES if getattr(old, name) != getattr(base, name)]
    values = {name: getattr(base if name in edited else tuned, name) for name in TUNABLES}
    adopted = fit_in(msgspec.structs.replace(base, **values), capacity)
    changes = tuple(
        Change(
            TUNABLES[name],
            getattr(tuned, name),
            getattr(adopted, name),
            "spec.batching was edited",
            edited=True,
        )
        for name in edited
        if getattr(tuned, name) != getattr(adopted, name)
    )
    objective = zlib.crc32(repr((slo, tuning.bounds)).encode())
    free = memory.objective != 0 and memory.objective != objective
    if edited or free:
        courses = {name: course for name, course in memory.courses.items() if name not in edited}
        memory = msgspec.structs.replace(memory, trial=None, courses=courses)
    if free:
        # The counts were about other targets.
        memory = msgspec.structs.replace(memory, ttft=(), itl=(), e2e=())
    memory = msgspec.structs.replace(memory, base=base, tuned=adopted, objective=objective)
    return memory, changes, free


def standing_limits(slo: Slo, tuning: Tuning, batching: Batching, memory: Memory) -> Limits:
    """What should be in force before anything was observed: the stored state under the present spec.

    The spec itself where nothing may be tuned, nothing is stored, or what is stored no longer fits.
    """
    spec, envelope = batching.limits(), batching.envelope()
    tunes = tuning.mode is TuningMode.AUTO and (slo.ttft is not None or slo.itl is not None)
    if not tunes or memory.tuned is None or memory.base is None:
        return spec
    try:
        check_limits(memory.tuned, envelope)
    except InvalidLimits:
        return spec
    # An edit of one limit is in force at once; it does not throw away what was tuned about the others.
    adopted, _, _ = adopt(slo, tuning, batching, envelope, memory)
    return spec if adopted.tuned is None else msgspec.structs.replace(adopted.tuned, generation=0)


def fit_in(limits: Limits, capacity: Capacity) -> Limits:
    """The nearest limits that an engine of this capacity can have in force."""
    at_least_one = msgspec.structs.replace(limits, max_batch_tokens=max(1, limits.max_batch_tokens))
    return clamp_limits(at_least_one, capacity)


def merge(base: Limits, tuned: Limits) -> Limits:
    """The spec's limits with the tuned values in them."""
    return msgspec.structs.replace(base, **{name: getattr(tuned, name) for name in TUNABLES})


def same_tunables(a: Limits, b: Limits) -> bool:
    return all(getattr(a, name) == getattr(b, name) for name in TUNABLES)
