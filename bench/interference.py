"""What a long prompt costs those who decode already: their gaps between tokens before and during its prefill.

    python bench/interference.py [--rounds 3] [--max-model-len 2048] [--chunks 64,128]

Sixteen streams decode; then a prompt of the model's maximum length arrives. With chunked prefill, the 95th
percentile of their gaps may rise by no more than the time of one step that computes a chunk alone, at the end
of such a prompt, where a chunk is dearest; that step is timed in the same round by the engine's own metrics.
With chunks as large as the prompt (`off`) the same script shows the damage. One engine serves all rounds;
chunk sizes change live. Prints one Markdown table of medians over rounds.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp

BENCH = Path(__file__).parent
sys.path[:0] = [str(BENCH), str(BENCH.parent / "tests")]

from machine import conditions
from sse import sse_chunks
from workload import FIRST_PLAIN_ID, MODEL, VOCABULARY, medians, percentile

from headway_engine.protocol import Metric
from support.engine_server import Engine, engine_server

DECODERS = 16
BLOCK_TOKENS = 16
BEFORE_TOKENS = 40
"""Tokens of each decoder before the prompt comes: 640 gaps, of which 32 lie above the 95th percentile."""
ALONE = 5
"""Times that a chunk is computed alone in a round."""


@dataclass(slots=True)
class Stream:
    """A decoder: when its tokens came."""

    times: list[float] = field(default_factory=list)

    def gaps(self, start_s: float, end_s: float) -> list[float]:
        """Gaps that overlap the time between, and lie in it with their end if they can."""
        return [b - a for a, b in pairwise(self.times) if b > start_s and a < end_s]


async def decode(
    session: aiohttp.ClientSession, base: str, number: int, most_tokens: int, stream: Stream
) -> None:
    """Goes on until it is cancelled."""
    body = {
        "model": "m",
        "prompt": f"Story number {number}. Once upon a time there was a",
        "max_tokens": most_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with aclosing(sse_chunks(session, base, body)) as chunks:
        async for at_s, _ in chunks:
            stream.times.append(at_s)


async def first_token_s(session: aiohttp.ClientSession, base: str, prompt: list[int]) -> float:
    """TTFT of a prompt."""
    started_s = time.perf_counter()
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    async with aclosing(sse_chunks(session, base, body)) as chunks:
        async for at_s, _ in chunks:
            return at_s - started_s
    raise RuntimeError("the long prompt got no token")


async def until(condition: Callable[[], bool], what: str, streams: Sequence[asyncio.Task[None]] = ()) -> None:
    """Poll, without getting in the way of the steps that are measured. Raises what ended a stream."""
    for _ in range(2400):
        if condition():
            return
        for stream in streams:
            if stream.done():
                stream.result()
                raise RuntimeError(f"a decoder came to its end before {what}")
        await asyncio.sleep(0.05)
    raise TimeoutError(what)


def idle(engine: Engine) -> bool:
    """Nothing in flight, and the core is through with what was cancelled."""
    metrics = engine.metrics()
    return metrics[Metric.IN_FLIGHT] == metrics[Metric.RUNNING] == 0


def ids(draw: random.Random, count: int) -> list[int]:
    """Token ids that nobody has sent before."""
    return [draw.randrange(FIRST_PLAIN_ID, VOCABULARY) for _ in range(count)]


async def steps_alone(
    session: aiohttp.ClientSession, engine: Engine, prompt: list[int], chunk: int, draw: random.Random
) -> list[float]:
    """Seconds of steps that compute one chunk at the end of the prompt and nothing else. What comes before it
    is found in the prefix cache, whole blocks of it, so a step may have some tokens more than the chunk."""
    known = max(0, (len(prompt) - chunk) // BLOCK_TOKENS * BLOCK_TOKENS)
    seconds = []
    for _ in range(ALONE if known else 1):
        before = engine.metrics()
        await first_token_s(session, engine.url, prompt[:known] + ids(draw, len(prompt) - known))
        await until(lambda: idle(engine), "the engine is idle again")
        after = engine.metrics()
        if after[Metric.STEPS] - before[Metric.STEPS] != 1:
            raise RuntimeError("a lone chunk took more than one step: was its beginning evicted?")
        seconds.append(after[f"{Metric.STEP_SECONDS}_sum"] - before[f"{Metric.STEP_SECONDS}_sum"])
    return seconds


async def one_round(engine: Engine, prompt_tokens: int, chunk: int, seed: int) -> dict[str, float]:
    """Decoders, then the prompt, then the chunk alone; figures in milliseconds."""
    status, answer = engine.put_limits(prefill_chunk_tokens=chunk)
    if status != 200:
        raise RuntimeError(f"limits were refused: {answer}")
    draw = random.Random(seed)
    prompt = ids(draw, prompt_tokens)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        streams = [Stream() for _ in range(DECODERS)]
        tasks = [
            asyncio.create_task(decode(session, engine.url, DECODERS * seed + i, prompt_tokens - 64, s))
            for i, s in enumerate(streams)
        ]
        await until(lambda: all(s.times for s in streams), "all decode", tasks)
        began_s = time.perf_counter()
        await until(
            lambda: all(sum(t > began_s for t in s.times) >= BEFORE_TOKENS for s in streams),
            "decoding without a prompt",
            tasks,
        )
        asked_s = time.perf_counter()
        ttft_s = await first_token_s(session, engine.url, prompt)
        done_s = asked_s + ttft_s
        # The last gap of a decoder may still be open.
        await until(lambda: all(s.times[-1] > done_s for s in streams), "a token after the prefill", tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: idle(engine), "the engine is idle")
        alone = await steps_alone(session, engine, prompt, min(chunk, prompt_tokens), draw)
    before = [gap for s in streams for gap in s.gaps(began_s, asked_s)]
    during = [gap for s in streams for gap in s.gaps(asked_s, done_s)]
    figures = {
        f"{name}_{of}": value * 1000
        for name, gaps in (("before", before), ("during", during))
        for of, value in (
            ("p50", percentile(gaps, 0.5)),
            ("p95", percentile(gaps, 0.95)),
            ("max", max(gaps)),
        )
    }
    figures |= {"ttft": ttft_s * 1000, "alone": statistics.median(alone) * 1000}
    figures["rise"] = figures["during_p95"] - figures["before_p95"]
    figures["kept"] = float(figures["rise"] <= figures["alone"])
    return figures


def table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """A row for each chunk size."""
    lines = [
        "| chunk | ITL p50/p95/max before, ms | during the prefill, ms | rise of p95 | a chunk alone, ms "
        "| rise ≤ one chunk (rounds) | TTFT of the long prompt, ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    smallest = next(iter(rounds))
    for name, results in rounds.items():
        m = medians(results)
        kept = f"{sum(r['kept'] for r in results):.0f} of {len(results)}"
        promise = f"{'yes' if m['rise'] <= m['alone'] else 'no'} ({kept})"
        if name == "off":
            promise = f"{m['rise'] / medians(rounds[smallest])['alone']:.1f} chunks of {smallest}"
        lines.append(
            f"| {name} | {m['before_p50']:.0f} / {m['before_p95']:.0f} / {m['before_max']:.0f} "
            f"| {m['during_p50']:.0f} / {m['during_p95']:.0f} / {m['during_max']:.0f} "
            f"| {m['rise']:.0f} | {m['alone']:.0f} | {promise} | {m['ttft']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=2048, help="SmolLM2's own is 8192")
    parser.add_argument("--chunks", default="64,128", help="tokens; `off` is measured always")
    parser.add_argument("--model", default=MODEL, help="with SmolLM2's vocabulary")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine")
    args = parser.parse_args()
    before = conditions(args.model.rsplit("/", 1)[-1])
    prompt_tokens = args.max_model_len - 1  # one is left for the answer
    whole = args.max_model_len + DECODERS
    chunks = {size: int(size) for size in args.chunks.split(",")} | {"off": whole}
    sizes = {
        "--max-model-len": args.max_model_len,
        "--capacity-max-batch-tokens": whole,
        "--capacity-max-batch-sequences": 2 * DECODERS,
        "--kv-block-tokens": BLOCK_TOKENS,
        "--kv-blocks": (DECODERS + 4) * args.max_model_len // BLOCK_TOKENS,
        "--threads": args.threads,
        "--served-model-name": "m",
    }
    arguments = [str(part) for pair in sizes.items() for part in pair]
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as scratch,
        engine_server(Path(scratch), args.model, arguments) as engine,
    ):
        engine.put_limits(max_batch_tokens=whole, max_batch_sequences=2 * DECODERS, queue_timeout_ms=0)
        for number in range(args.rounds):
            for name, chunk in chunks.items():
                seed = sum(map(len, rounds.values()))  # new each time: a prompt seen before is in the cache
                rounds[name].append(asyncio.run(one_round(engine, prompt_tokens, chunk, seed)))
                print(f"round {number + 1}, chunk {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
    print(f"{before}, float32\n\n`python bench/interference.py {' '.join(sys.argv[1:])}`\n")
    print(f"{DECODERS} decodes; a prompt of {prompt_tokens} tokens; medians of {args.rounds} rounds.\n")
    print(table(rounds))


if __name__ == "__main__":
    main()
