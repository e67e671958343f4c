"""What becomes of limits: brought below capacity at start, numbered when they change. Pure.

`protocol` says what limits are and which are valid; this module knows nothing of who asks.
"""

import msgspec

from headway_engine.protocol import Capacity, Limits


def successor(current: Limits, wanted: Limits) -> Limits:
    """What is in force after `wanted` was asked for. The generation moves only when a value does."""
    if wanted.same_values(current):
        return current
    return msgspec.structs.replace(wanted, generation=max(current.generation, wanted.generation) + 1)


def clamp(limits: Limits, capacity: Capacity) -> Limits:
    """The nearest limits that capacity allows. Used at start only: a live change is refused, not bent."""
    tokens = min(limits.max_batch_tokens, capacity.max_batch_tokens)
    return msgspec.structs.replace(
        limits,
        max_batch_tokens=tokens,
        max_batch_sequences=min(limits.max_batch_sequences, capacity.max_batch_sequences, tokens),
        prefill_chunk_tokens=min(limits.prefill_chunk_tokens, capacity.max_batch_tokens),
    )


def differences(old: Limits, new: Limits) -> list[tuple[str, object, object]]:
    """(field, old value, new value) for each that differs."""
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in Limits.__struct_fields__)
    return [(name, was, now) for name, was, now in pairs if was != now]
