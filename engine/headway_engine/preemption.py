"""Who gives way when there is no block left, and who may be passed over while waiting for blocks.

Both are rules about being fair to the unlucky: a sequence is preempted only so often, a request is passed
only so long. Knows nothing of how blocks are counted or steps are planned.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headway_engine.sequence import RequestId, Sequence

MAX_PREEMPTIONS = 3
"""A sequence preempted so often is chosen again only when nobody else can be."""

SKIP_WINDOW = 8
"""How many waiting requests that do not fit may be passed over in one step."""

SKIP_AGE_S = 2.0
"""How long a request may be passed over before nobody passes it any more."""

SKIP_ADMISSIONS = 64
"""How many admissions may pass a request before nobody passes it any more."""


def choose_victim(
    running: Iterable[Sequence], wanting: Sequence, class_of: Callable[[Sequence], int]
) -> Sequence:
    """Who gives its blocks up so that `wanting`, one of `running`, can have one.

    Nobody of a higher class; of the rest the lowest class first, and there the one that is cheapest to
    compute again. Who was preempted MAX_PREEMPTIONS times comes last, and among such the newest goes: so
    the oldest of the highest class always gets on, and preemption cannot go round in a circle. It may be
    `wanting` itself.
    """
    own_class = class_of(wanting)

    def rank(s: Sequence) -> tuple[bool, int, int, int]:
        worn = s.preemptions >= MAX_PREEMPTIONS
        return (worn, class_of(s), 0 if worn else s.computed, -s.order)

    return min((s for s in running if class_of(s) <= own_class), key=rank)


def choose_displaced(
    running: Iterable[Sequence],
    newcomer: Sequence,
    class_of: Callable[[Sequence], int],
    enough_with: Callable[[Sequence], bool],
) -> list[Sequence]:
    """Which running sequences of lower classes make way for a newcomer that finds no slot or no blocks.

    As few as are enough, in the order of `choose_victim`; none when that would not help. `enough_with` is
    told of one after the other and says whether all so far, together, are enough. Who was preempted
    MAX_PREEMPTIONS times stays: a low class is slowed down by a higher one, and not stopped.
    """
    own_class = class_of(newcomer)
    lower = [s for s in running if class_of(s) < own_class and s.preemptions < MAX_PREEMPTIONS]
    lower.sort(key=lambda s: (class_of(s), s.computed, -s.order))
    for count, sequence in enumerate(lower, start=1):
        if enough_with(sequence):
            return lower[:count]
    return []


@dataclass(slots=True)
class _PassedOver:
    """Since when a waiting request has been passed over, and how many admissions went past it."""

    since_s: float
    admissions: int = 0


class Patience:
    """Remembers who was passed over because it did not fit, and says when that must stop."""

    def __init__(self) -> None:
        self._passed: dict[RequestId, _PassedOver] = {}

    def may_pass(self, sequence: Sequence, now_s: float) -> bool:
        """A request does not fit: whether those behind it may still go first."""
        if sequence.preemptions:
            # Who goes past a preempted sequence would take the very blocks it lost.
            return False
        seen = self._passed.setdefault(sequence.id, _PassedOver(now_s))
        return now_s - seen.since_s < SKIP_AGE_S and seen.admissions < SKIP_ADMISSIONS

    def count_admission(self, passed: Iterable[Sequence]) -> None:
        """Somebody was admitted past these."""
        for sequence in passed:
            self._passed[sequence.id].admissions += 1

    def forget(self, sequence: Sequence) -> None:
        """A request runs now, or is gone."""
        self._passed.pop(sequence.id, None)
