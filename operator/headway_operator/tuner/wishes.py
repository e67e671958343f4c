"""Of what the model asks for, what is taken now: at once where a target was missed, else calmly.

Knows how much of a difference is worth a change at all; what chance and earlier turns say is in `calm`.
"""

from msgspec.structs import replace

from headway_engine.protocol import Limits
from headway_operator.resource import Slo
from headway_operator.tuner import calm
from headway_operator.tuner.calm import GROW, SHRINK, Course
from headway_operator.tuner.learn import Interval
from headway_operator.tuner.memory import Memory
from headway_operator.tuner.solve import Solution, grid

HYSTERESIS = 0.06
GROWTH_HYSTERESIS = 0.12
"""Inside the targets a little more budget gains little, and the measured correction wobbles by as much."""
LEAST_BAD_HYSTERESIS = 0.5
"""Where no value meets the target, none is worth much fuss."""
QUEUE_HYSTERESIS = 0.04
"""Of a damped move: about twice as much lies between the cap and what the model asks for."""


def pressed_by(
    slo: Slo, interval: Interval, broken: tuple[str, ...], *, least_bad: bool, room_helps: bool
) -> dict[tuple[str, int], float]:
    """Limits and ways to go at once, each with the share of a change that is worth it: away from lateness,
    and from refusing more than lateness asks for.

    The last interval alone decides: it is no proof, but who waits for proof misses more. Where more comes
    than can be served a longer queue refuses as many (`room_helps`).
    """
    found: dict[tuple[str, int], float] = {}
    itl_late = "ITL" in broken or (slo.itl is not None and (interval.itl_s or 0.0) > slo.itl.target_s)
    if itl_late and not least_bad:
        found["max_batch_sequences", SHRINK] = HYSTERESIS
        found["max_batch_tokens", SHRINK] = 0.0 if "ITL" in broken else HYSTERESIS
    if slo.ttft is not None and interval.ttft_s is not None:
        ttft_late = interval.ttft_s > slo.ttft.target_s
        many_refused = interval.refused > slo.ttft.percentile.miss_share
        if ttft_late:
            found["max_queued_tokens", SHRINK] = QUEUE_HYSTERESIS
        elif many_refused and room_helps:
            found["max_queued_tokens", GROW] = QUEUE_HYSTERESIS
        if (ttft_late or many_refused) and not itl_late:
            found["max_batch_tokens", GROW] = HYSTERESIS
    return found


def take(
    memory: Memory,
    solution: Solution,
    start: Limits,
    pressed: dict[tuple[str, int], float],
    now_s: float,
    *,
    frozen: bool,
    free: bool,
) -> tuple[Memory, dict[str, int]]:
    """The values to have, each the model's or the present one; and the courses after that.

    `free`: targets or bounds are new, so that what was seen of the wishes before says nothing.
    """
    worth = LEAST_BAD_HYSTERESIS if solution.least_bad else HYSTERESIS
    asked = (
        ("max_batch_tokens", solution.max_batch_tokens, worth, frozen),
        ("max_queued_tokens", solution.max_queued_tokens, QUEUE_HYSTERESIS, frozen),
        ("prefill_chunk_tokens", solution.prefill_chunk_tokens, HYSTERESIS, False),
        ("max_batch_sequences", solution.max_batch_sequences, HYSTERESIS, False),
    )
    values, courses = {}, {}
    for name, found, hysteresis, no_growth in asked:
        now = getattr(start, name)
        way = GROW if found.value > now else SHRINK
        urgent = (name, way) in pressed
        # Half of the way is for wishes that may be noise.
        whole = urgent and (name, way) == ("max_queued_tokens", GROW)
        least = pressed.get((name, way), hysteresis)
        goal = _worth_it(now, int(found.aim) if whole else found.value, frozen=no_growth, hysteresis=least)
        course = calm.look(Course() if free else memory.courses.get(name, Course()), found.aim, now_s)
        wish = calm.Wish(now, found.aim, goal, urgent or free)
        values[name], courses[name] = calm.weigh(course, wish, now_s)
    # Sequences above the budget are refused by the engine, whatever the hysteresis says.
    values["max_batch_sequences"] = min(values["max_batch_sequences"], values["max_batch_tokens"])
    return replace(memory, courses=courses), values


def _worth_it(now: int, wanted: int, *, frozen: bool, hysteresis: float) -> int:
    """`wanted`, or `now` where the difference is too small to be worth a change, or growth is off."""
    if wanted > now:
        if frozen:
            return now
        hysteresis = max(hysteresis, GROWTH_HYSTERESIS)
    least = max(hysteresis * now, grid(now)) if hysteresis > 0 else 0
    return wanted if abs(wanted - now) > least else now


def unasked(memory: Memory) -> Memory:
    """Nobody looked: what was asked for before is no longer asked for without a break."""
    courses = {name: calm.quiet(course) for name, course in memory.courses.items()}
    return replace(memory, courses=courses)


def regretted(courses: dict[str, Course], now: Limits, before: Limits, now_s: float) -> dict[str, Course]:
    """The courses after going back from `now` to `before` for another reason than the model's wish."""
    return {
        name: calm.regret(course, now_s) if getattr(now, name) != getattr(before, name) else course
        for name, course in courses.items()
    }
