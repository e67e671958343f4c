"""When a wish of the model is worth a move: beyond its own spread, and longer than what was regretted before.

One `Course` per parameter: how far the model's answers scatter, which way the parameter went last, how long
the opposite way has been asked for since. Knows nothing of targets, models or engines.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import msgspec
from msgspec.structs import replace

from headway_operator.tuner.quantiles import CONFIDENCE

DEVIATIONS = NormalDist().inv_cdf(CONFIDENCE)
"""So many standard deviations does an answer rarely lie beyond where it scatters by chance alone."""
SPREAD_OVER_S = 300.0
"""Time over which the scatter of answers is measured: as long as requests are counted for."""
FIRST_PATIENCE_S = 30.0
MOST_PATIENCE_S = 600.0
"""So long does a lasting change wait at most, however restless the machine was before."""
FORGIVEN_BY_HALF_S = 600.0
SHRINK, GROW = -1, 1


class Course(msgspec.Struct, frozen=True, array_like=True):
    """What is remembered of one parameter. Directions are -1, 0 (none yet) and 1."""

    seen_at_s: float = 0.0
    mean: float = 0.0  # of the logarithm of the model's answers
    variance: float = 0.0
    direction: int = 0  # of the last move
    moved_at_s: float = 0.0
    patience_s: float = 0.0  # as it was at the last move
    asked: int = 0  # direction that every look since `asked_at_s` asked for
    asked_at_s: float = 0.0
    nearest: int = 0  # the least that any of those looks asked for

    @property
    def band(self) -> float:
        """Share (of the logarithm) by which an answer may differ from what is in force by chance."""
        return DEVIATIONS * math.sqrt(max(0.0, self.variance))

    def patience_at(self, now_s: float) -> float:
        """Seconds that a move back must be asked for without a break. A turn doubles it, time halves it."""
        waited_s = max(0.0, now_s - self.moved_at_s)
        return float(self.patience_s * 0.5 ** (waited_s / FORGIVEN_BY_HALF_S))


@dataclass(frozen=True, slots=True)
class Wish:
    """Where the model would go: `aim` in the end, `next` in one move."""

    now: int
    aim: float
    next: int
    urgent: bool = False
    """A target was just missed: neither chance nor patience is a reason to wait."""


def look(course: Course, aim: float, now_s: float) -> Course:
    """The course with one more answer of the model in its scatter."""
    answer = math.log(max(aim, 1.0))
    if course.seen_at_s == 0:
        return replace(course, seen_at_s=now_s, mean=answer)
    kept = math.exp(-max(0.0, now_s - course.seen_at_s) / SPREAD_OVER_S)
    away = answer - course.mean
    # Mean and variance with forgetting, in one pass.
    return replace(
        course,
        seen_at_s=now_s,
        mean=answer - kept * away,
        variance=kept * (course.variance + (1 - kept) * away * away),
    )


def weigh(course: Course, wish: Wish, now_s: float) -> tuple[int, Course]:
    """The value to have from now on, and the course after that.

    A wish inside the scatter of the model's answers is none. A wish to turn back must have been there for the
    patience that earlier turns have taught, and then goes no further than every look of that time would have.
    """
    way = _sign(wish.next - wish.now)
    away = abs(math.log(max(wish.aim, 1.0) / max(wish.now, 1)))
    if way == 0 or (away <= course.band and not wish.urgent):
        return wish.now, quiet(course)
    if way != course.asked:
        course = replace(course, asked=way, asked_at_s=now_s, nearest=wish.next)
    nearest = min(course.nearest, wish.next) if way > 0 else max(course.nearest, wish.next)
    course = replace(course, nearest=nearest)
    if course.direction != -way or wish.urgent:
        return wish.next, _moved(course, way, now_s)
    if now_s - course.asked_at_s < course.patience_at(now_s):
        return wish.now, course
    return nearest, _moved(course, way, now_s)


def quiet(course: Course) -> Course:
    """Nothing was asked for at this look, or nobody looked."""
    return replace(course, asked=0, asked_at_s=0.0, nearest=0)


def regret(course: Course, now_s: float) -> Course:
    """The last move was undone for another reason than the model's wish."""
    return _moved(course, -course.direction, now_s)


def _moved(course: Course, way: int, now_s: float) -> Course:
    patience_s = course.patience_at(now_s)
    if course.direction == -way:
        patience_s = min(max(2 * patience_s, FIRST_PATIENCE_S), MOST_PATIENCE_S)
    return quiet(replace(course, direction=way, moved_at_s=now_s, patience_s=patience_s))


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
