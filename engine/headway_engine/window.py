"""When a batch leaves: the window, and what counts as full. A truth table, nothing else.

A batch that nobody has started is open: whoever arrives before the moment it starts is in it. Knows nothing
of who is chosen into the batch, of blocks, or of the clock.
"""

from dataclasses import dataclass

from headway_engine.protocol import BatchingMode, Limits

CLOCK_GRAIN_S = 1e-6
"""Sleeping until a deadline computed in floats may end a rounding error early; that is not early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What the window looks at. `oldest_arrival_s` is of the longest-waiting request."""

    requests: int
    prompt_tokens: int
    oldest_arrival_s: float
    urgent: bool = False  # someone of a class above the default waits
    last: bool = False  # nobody else can come (draining)


def leaves_at_s(limits: Limits, waiting: Waiting) -> float:
    """The time from which an idle engine starts these requests; minus infinity: at once.

    Held are only requests that would start an idle engine: a step that others can join is never delayed.

    - window 0 never waits;
    - a full batch leaves at once: `max_batch_sequences` requests, or (except in Static, where the number of
      requests is the batch) prompts that already fill a step of `max_batch_tokens`;
    - otherwise it leaves when its oldest member has waited the window;
    - in Continuous, an urgent request is not held: others can join at the next step anyway.
    """
    at_once = float("-inf")
    if limits.window_ms == 0 or waiting.last:
        return at_once
    if waiting.requests >= limits.max_batch_sequences:
        return at_once
    if limits.mode is not BatchingMode.STATIC and waiting.prompt_tokens >= limits.max_batch_tokens:
        return at_once
    if limits.mode is BatchingMode.CONTINUOUS and waiting.urgent:
        return at_once
    return waiting.oldest_arrival_s + limits.window_ms / 1000 - CLOCK_GRAIN_S
