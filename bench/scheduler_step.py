"""Prints how long the scheduler takes for one step of 64 decoding sequences, on one core.

    python bench/scheduler_step.py [--sequences 64] [--steps 400]

The clock of the scheduler stands still and no model runs: the time is that of next_step and commit alone.
"""

import argparse
import statistics
import time

from headway_engine.protocol import Capacity, Limits
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import Request, SampledToken, SamplingParams


def main() -> None:
    """Fill the engine, let everyone decode, and print the median, the 99th percentile and the worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=1000, help="requests that queue behind them")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=1024)
    arguments = parser.parse_args()
    n, steps = arguments.sequences, arguments.steps
    blocks = n * (arguments.prompt + steps + 64) // 16
    capacity = Capacity(
        max_batch_tokens=8192,
        max_batch_sequences=n,
        kv_blocks=blocks + blocks // 50,
        block_tokens=16,
        max_model_tokens=arguments.prompt + steps + 64,
    )
    limits = Limits(
        max_batch_tokens=8192,
        max_batch_sequences=n,
        prefill_chunk_tokens=8192,
        max_queued_requests=100_000,
        max_queued_tokens=1_000_000_000,
    )
    scheduler = Scheduler(capacity, limits)
    for i in range(n + arguments.waiting):
        scheduler.admit(
            Request(
                id=f"r{i}",
                prompt=tuple((i * 7919 + k) % 50_000 for k in range(arguments.prompt)),
                sampling=SamplingParams(max_tokens=steps + 32),
                arrival_s=0.0,
                tenant=f"t{i % 10}",
            ),
            0.0,
        )
    seconds: list[float] = []
    while len(seconds) < steps:
        begin = time.perf_counter()
        step = scheduler.next_step(0.0)
        planned = time.perf_counter()
        assert step is not None
        sampled = {c.sequence.id: SampledToken(17) for c in step.chunks if c.samples}
        commit = time.perf_counter()
        scheduler.commit(step, sampled, 0.0)
        end = time.perf_counter()
        if step.prefill_tokens == 0:
            seconds.append(planned - begin + end - commit)
    seconds.sort()
    print(
        f"{n} decoding sequences, {scheduler.waiting} waiting, {len(seconds)} steps: median "
        f"{statistics.median(seconds) * 1e3:.3f} ms, p99 {seconds[int(len(seconds) * 0.99)] * 1e3:.3f} ms, "
        f"worst {seconds[-1] * 1e3:.3f} ms a step"
    )


if __name__ == "__main__":
    main()
