"""Prints how long it takes to sample one step: torch's path beside the kernels', with one and more threads.

    python bench/sampling_step.py [--rows 32] [--vocabulary 49152] [--threads 1,2] [--rounds 15]

Logits are random normal numbers; temperature is 0.8, so `peaked` (spread 4) has a few dozen likely tokens,
`model-like` (2.5) some 1,500, and `flat` (0.3) tens of thousands. What is timed is `sample` as the runners
call it: the check for numbers, the draw, and the answers as objects. Paths take turns, round by round, so
that a slow minute of the machine hits both.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field

import torch

from headway_engine.fused import build, isa
from headway_engine.fused.sampler import KernelPicker
from headway_engine.sampling import Picker, TorchPicker, sample
from headway_engine.sequence import Request, SamplingParams, Sequence

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Case:
    """How every row is sampled, and how wide its logits spread."""

    name: str
    spread: float
    cut: dict[str, float] = field(default_factory=lambda: {"temperature": TEMPERATURE})


CASES = (
    Case("greedy", 2.5, {}),
    Case("temperature only", 2.5),
    *(
        Case(f"top-p 0.9, {shape}", spread, {"temperature": TEMPERATURE, "top_p": 0.9})
        for shape, spread in (("peaked", 4.0), ("model-like", 2.5), ("flat", 0.3))
    ),
    Case("top-k 50, top-p 0.9", 2.5, {"temperature": TEMPERATURE, "top_k": 50, "top_p": 0.9}),
    Case("min-p 0.05", 2.5, {"temperature": TEMPERATURE, "min_p": 0.05}),
)


def sequences(rows: int, cut: dict[str, float]) -> list[Sequence]:
    """Rows with seeds of their own."""
    requests = [
        Request(
            id=str(row),
            prompt=(1,),
            sampling=SamplingParams(max_tokens=1, seed=row, **cut),
            arrival_s=0.0,
        )
        for row in range(rows)
    ]
    return [Sequence(request=request, tokens=[1]) for request in requests]


def paths(threads: int) -> dict[str, Picker]:
    """Those that this machine has."""
    library = build.kernels()
    found: dict[str, Picker] = {"torch": TorchPicker()}
    if library is not None:
        found["kernels"] = KernelPicker(library, threads)
    return found


def main() -> None:
    """Measure every case, and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn((arguments.rows, arguments.vocabulary), generator=generator)
    counts = [int(count) for count in arguments.threads.split(",")]
    taken: dict[tuple[str, int, str], list[float]] = {}
    for case in CASES:
        logits = normal * case.spread
        batch = sequences(arguments.rows, case.cut)
        for threads in counts:
            torch.set_num_threads(threads)
            pickers = paths(threads)
            for number in range(arguments.rounds + 1):
                for name, picker in pickers.items():
                    fresh = logits.clone()
                    began_s = time.perf_counter()
                    sample(fresh, batch, picker=picker)
                    if number:  # the first round warms up
                        taken.setdefault((case.name, threads, name), []).append(time.perf_counter() - began_s)
    columns = [(threads, name) for name in paths(1) for threads in counts]
    print(f"{arguments.rows} rows, {arguments.vocabulary} tokens, {isa.available()[0]}, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}; ms, median (minimum) of {arguments.rounds}")
    print("| sampling | " + " | ".join(f"{name}, {threads} thr." for threads, name in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for case in CASES:
        cells = [
            f"{1e3 * statistics.median(seconds):.2f} ({1e3 * min(seconds):.2f})"
            for seconds in (taken[case.name, threads, name] for threads, name in columns)
        ]
        print(f"| {case.name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
