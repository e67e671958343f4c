"""Products of rows with a model's matrices: torch (oneDNN) beside the kernels, on every instruction set.

    python bench/linear.py [--dtype bfloat16] [--threads 2] [--rounds 5]

The matrices are those of SmolLM2-135M's layers, 30 of each kind with numbers of their own, so that they come
from memory as in a model. All are multiplied once in each round, by each in turn; milliseconds for all,
median (minimum).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

from machine import cpu_words, spin_as_the_engine

spin_as_the_engine()
import torch
from torch import nn

from headway_engine.cgroup import usable_cores
from headway_engine.fused import build
from headway_engine.fused.modules import take_over

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS = 30
ROWS = (1, 4, 8, 16, 32, 64, 128, 512)


def layers(dtype: torch.dtype) -> nn.ModuleList:
    """The matrices, random."""
    made = (nn.Linear(k, n, bias=False, dtype=dtype) for _ in range(LAYERS) for n, k in SHAPES)
    return nn.ModuleList(made).requires_grad_(False)


def all_of(modules: nn.ModuleList, inputs: dict[int, torch.Tensor]) -> Callable[[], None]:
    """Multiplies with every matrix once."""

    def run() -> None:
        for module in modules:
            module(inputs[module.in_features])

    return run


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    p.add_argument("--threads", type=int, default=usable_cores())
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    dtype = getattr(torch, a.dtype)
    sides = {"torch": layers(dtype)}
    for name in build.usable():
        sides[name] = layers(dtype)
        take_over(sides[name], build.load(name), a.threads)
    print(f"{cpu_words()}, {a.threads} threads, {a.dtype}, load {os.getloadavg()[0]:.1f}")
    print("| rows | " + " | ".join(sides) + " |")
    print("|---" * (len(sides) + 1) + "|")
    for rows in ROWS:
        inputs = {k: torch.randn(rows, k).to(dtype) for _, k in SHAPES}
        taken: dict[str, list[float]] = {}
        for number in range(a.rounds + 1):
            for side, modules in sides.items():
                began_s = time.perf_counter()
                all_of(modules, inputs)()
                if number:  # the first round warms up
                    taken.setdefault(side, []).append(1e3 * (time.perf_counter() - began_s))
        cells = (f"{statistics.median(taken[side]):.1f} ({min(taken[side]):.1f})" for side in sides)
        print(f"| {rows} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
