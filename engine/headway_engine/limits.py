"""What becomes of limits when they change: a new number, and words for what differs. Pure.

`protocol` says what limits are, which are valid, and how capacity bends them; this module knows not who asks.
"""

import msgspec

from headway_engine.protocol import Limits


def successor(current: Limits, wanted: Limits) -> Limits:
    """What is in force after `wanted` was asked for. The generation moves only when a value does."""
    if wanted.same_values(current):
        return current
    return msgspec.structs.replace(wanted, generation=max(current.generation, wanted.generation) + 1)


def differences(old: Limits, new: Limits) -> list[tuple[str, object, object]]:
    """(field, old value, new value) for each that differs."""
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in Limits.__struct_fields__)
    return [(name, was, now) for name, was, now in pairs if was != now]
