"""When preemptions come so thick that somebody should hear of it: once when it begins, once when it is over.

One preemption now and then is how a full cache is meant to work; many mean that sequences are computed again
and again. Pure; knows nothing of logs and of who is preempted.
"""

from collections import deque
from dataclasses import dataclass, field

MANY = 10
WITHIN_S = 10.0
"""So many preemptions in so short a time are a storm; none for as long, and it is over."""


@dataclass(frozen=True, slots=True)
class Began:
    """The storm's first preemptions, and how long they took."""

    preemptions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Over:
    """All of the storm."""

    preemptions: int
    seconds: float


@dataclass(slots=True)
class Storms:
    """Reads a running total; one comparison while nothing happens."""

    _total: int = 0
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=MANY))
    _began_s: float = 0.0
    _before: int = 0  # the total when the storm began
    raging: bool = False

    def note(self, total: int, now_s: float) -> Began | Over | None:
        """Take in the total of all preemptions until now; what has changed by it."""
        if total == self._total:
            return self._calm(now_s) if self.raging else None
        self._recent_s.extend([now_s] * min(total - self._total, MANY))
        before, self._total = self._total, total
        if self.raging or len(self._recent_s) < MANY or now_s - self._recent_s[0] > WITHIN_S:
            return None
        self.raging, self._began_s = True, self._recent_s[0]
        self._before = min(before, total - MANY)
        return Began(total - self._before, now_s - self._began_s)

    def _calm(self, now_s: float) -> Over | None:
        last_s = self._recent_s[-1]
        if now_s - last_s < WITHIN_S:
            return None
        self.raging = False
        self._recent_s.clear()
        return Over(self._total - self._before, last_s - self._began_s)
