"""Static, Dynamic and Continuous batching on the same traces, through HTTP and SSE.

    python bench/modes.py [--rounds 2] [--requests 24] [--rate 1.5] [--sequences 8]

One engine serves everything; the mode changes live between runs, and prompts have other ids each time, so
that the prefix cache finds nothing. The limits are the same in all modes but for the window: 1 s in Static
(the batch waits for its last member as long as the engine lets it), 50 ms in Dynamic, none in Continuous.
Prints one Markdown table for each trace, with what the engine counted: the reasons for the differences.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

BENCH = Path(__file__).parent
sys.path[:0] = [str(BENCH), str(BENCH.parent / "tests")]

from machine import conditions
from serving import play
from workload import MODEL, Item, figures, make, medians, other_prompts

from headway_engine.protocol import BatchingMode, Metric
from support.engine_server import Engine, engine_server, wait_until

MODES: dict[BatchingMode, int] = {
    BatchingMode.STATIC: 1000,
    BatchingMode.DYNAMIC: 50,
    BatchingMode.CONTINUOUS: 0,
}
"""The window of each, ms."""
STEP_TOKENS = 512
CONTEXT_TOKENS = 1024


def counts(engine: Engine) -> dict[str, float]:
    """What the engine counts, from its start."""
    metrics = engine.metrics()
    return {
        "steps": metrics[Metric.STEPS],
        "rows": metrics[f"{Metric.STEP_SEQUENCES}_sum"],
        "step_s": metrics[f"{Metric.STEP_SECONDS}_sum"],
        "queue_s": metrics[f"{Metric.QUEUE}_sum"],
        "started": metrics[f"{Metric.QUEUE}_count"],
    }


def run(engine: Engine, mode: BatchingMode, items: list[Item], sequences: int) -> dict[str, float]:
    """One trace in one mode: what clients saw and what the engine counted."""
    status, answer = engine.put_limits(mode=mode, window_ms=MODES[mode])
    if status != 200:
        raise RuntimeError(f"limits were refused: {answer}")
    before = counts(engine)
    wall_s, timings = asyncio.run(play(engine.url, items))
    wait_until(lambda: engine.metrics()[Metric.RUNNING] == 0, "the core is idle")
    c = {name: value - before[name] for name, value in counts(engine).items()}
    return figures(items, wall_s, timings) | {
        "steps": c["steps"],
        "step_ms": c["step_s"] / c["steps"] * 1000,
        "idle_s": wall_s - c["step_s"],
        "occupancy": c["rows"] / c["steps"],
        "empty_rows": c["steps"] * sequences - c["rows"],
        "queue_ms": c["queue_s"] / c["started"] * 1000,
    }


def table(title: str, rounds: dict[BatchingMode, list[dict[str, float]]], sequences: int) -> str:
    """A row for each mode."""
    lines = [
        f"### {title}",
        "",
        "| mode (window) | output tok/s (rounds) | TTFT p50/p95 ms | TPOT p50 ms | ITL p95 ms | makespan s "
        f"| steps | sequences in a step, of {sequences} | empty rows | mean queue ms | step ms | no step s |",
        "|" + " --- |" * 12,
    ]
    for mode, results in rounds.items():
        m = medians(results)
        single = ", ".join(f"{r['output_tokens_per_s']:.0f}" for r in results)
        lines.append(
            f"| {mode} ({MODES[mode]} ms) | **{m['output_tokens_per_s']:.0f}** ({single}) "
            f"| {m['ttft_p50_ms']:.0f} / {m['ttft_p95_ms']:.0f} | {m['tpot_p50_ms']:.0f} "
            f"| {m['itl_p95_ms']:.0f} | {m['wall_s']:.1f} | {m['steps']:.0f} | {m['occupancy']:.1f} "
            f"| {m['empty_rows']:.0f} | {m['queue_ms']:.0f} | {m['step_ms']:.0f} | {m['idle_s']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=1.5, help="of the Poisson trace, requests a second")
    parser.add_argument("--sequences", type=int, default=8, help="most in a batch, in every mode")
    parser.add_argument("--model", default=MODEL, help="with SmolLM2's vocabulary")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine")
    args = parser.parse_args()
    before = conditions(args.model.rsplit("/", 1)[-1])
    traces = {
        f"Poisson, {args.rate:g} a second": make(args.requests, args.rate),
        f"Burst of {args.requests}": make(args.requests),
    }
    sizes = {
        "--max-model-len": CONTEXT_TOKENS,
        "--capacity-max-batch-tokens": STEP_TOKENS,
        "--capacity-max-batch-sequences": args.sequences,
        "--kv-blocks": args.sequences * CONTEXT_TOKENS // 16,
        "--threads": args.threads,
        "--served-model-name": "m",
    }
    arguments = [str(part) for pair in sizes.items() for part in pair]
    rounds: dict[str, dict[BatchingMode, list[dict[str, float]]]] = {
        title: defaultdict(list) for title in traces
    }
    number = 0
    with (
        tempfile.TemporaryDirectory() as scratch,
        engine_server(Path(scratch), args.model, arguments) as engine,
    ):
        engine.put_limits(prefill_chunk_tokens=STEP_TOKENS, max_queued_tokens=1_000_000, queue_timeout_ms=0)
        asyncio.run(play(engine.url, other_prompts(make(4), number)))
        for _ in range(args.rounds):
            for title, items in traces.items():
                for mode in MODES:
                    number += 1
                    seen = run(engine, mode, other_prompts(items, number), args.sequences)
                    rounds[title][mode].append(seen)
                    print(f"{title}: {mode}: {seen}", file=sys.stderr, flush=True)
    print(f"{before}, float32\n\n`python bench/modes.py {' '.join(sys.argv[1:])}`\n")
    for title, results in rounds.items():
        print(table(title, results, args.sequences))


if __name__ == "__main__":
    main()
