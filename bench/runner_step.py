"""Step times of the runners on one model, side by side, and the share of the memory limit decoding reaches.

    python bench/runner_step.py [--model URI] [--dtype float32] [--threads 2] [--rounds 9] [--skip padded]

Each case is measured in turn for every runner, round by round, so that a slow minute of the machine hits all
alike; the table gives medians. `blocks` is the fused path with the weights of a GGUF file in its blocks. The
limit of decodes is bytes of weights (as the fused path stores plain ones), keys and values over the read
bandwidth; that of a prompt is its multiplications and additions over what torch reaches in a square product
of 2,048. Both are measured in every round, too. Run it on a quiet machine; it prints the load.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from machine import cpu_words, spin_as_the_engine
from workload import MODEL

spin_as_the_engine()
import torch

from headway_engine.cgroup import usable_cores
from headway_engine.fused import build, isa
from headway_engine.fused.llama import FusedRunner, stored_type
from headway_engine.model import LoadedModel, default_cache_dir, load, resolve
from headway_engine.protocol import Capacity
from headway_engine.runner import Runner, TransformersRunner
from headway_engine.sequence import Chunk, Request, SamplingParams, Sequence, Step

BLOCK = 16
CONTEXT = 256


@dataclass(frozen=True)
class Case:
    """A step to time: `decodes` sequences at CONTEXT, or one prefill chunk of `prefill` tokens."""

    name: str
    decodes: int = 0
    prefill: int = 0


CASES = (
    *(Case(f"decode {n}", decodes=n) for n in (1, 8, 32, 64)),
    *(Case(f"prefill {n}", prefill=n) for n in (128, 512)),
    Case("mixed 16+256", decodes=16, prefill=256),
)


class Limits:
    """What the machine can do, measured in every round: it differs by the minute as steps do."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._data = torch.ones(1 << 27)  # 512 MiB
        size = 2048
        self._left = torch.ones(size, size, dtype=dtype)
        self._operations = 2 * size**3
        self._bytes_per_s: list[float] = []
        self._operations_per_s: list[float] = []

    def measure(self) -> None:
        """Once more."""
        began_s = time.perf_counter()
        self._data.sum()
        read_s = time.perf_counter()
        self._left @ self._left
        self._bytes_per_s.append(self._data.nbytes / (read_s - began_s))
        self._operations_per_s.append(self._operations / (time.perf_counter() - read_s))

    @property
    def bytes_per_s(self) -> float:
        """Of plain reading, the median."""
        return statistics.median(self._bytes_per_s)

    @property
    def operations_per_s(self) -> float:
        """Of a plain product, the median."""
        return statistics.median(self._operations_per_s)


def prompt_flops(config: Any, weights: int, tokens: int) -> float:
    """Operations of a prompt from its first token on: products with `weights`, and causal attention. The head
    computes one row."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = tokens * (tokens + 1) // 2
    attention = 4 * pairs * width * config.num_attention_heads * config.num_hidden_layers
    return 2 * weights * tokens + attention + 2 * config.hidden_size * config.vocab_size


def sequence(number: int, tokens: int, vocabulary: int) -> Sequence:
    chance = random.Random(number)
    prompt = tuple(chance.randrange(300, vocabulary) for _ in range(tokens))
    request = Request(id=str(number), prompt=prompt, sampling=SamplingParams(max_tokens=1), arrival_s=0.0)
    first = number * (640 // BLOCK)
    blocks = list(range(first, first + 640 // BLOCK))
    chance.shuffle(blocks)
    return Sequence(request=request, tokens=list(prompt), block_table=blocks)


def steps(vocabulary: int, prefix: str) -> tuple[list[Step], dict[str, Step]]:
    """Steps that fill the cache, and the step of each case whose name begins with `prefix`."""
    cases = [case for case in CASES if case.name.startswith(prefix)]
    resident = [sequence(i, CONTEXT - 1, vocabulary) for i in range(max(case.decodes for case in cases))]
    for s in resident:
        s.tokens.append(300)  # one token of output, so that the next step is a decode
    fill = [Step((Chunk(s, 0, CONTEXT - 1, samples=False),)) for s in resident]
    newcomer = sequence(64, 512, vocabulary)
    decode = [Chunk(s, CONTEXT - 1, 1, samples=True) for s in resident]
    timed = {}
    for case in cases:
        chunks = decode[: case.decodes]
        if case.prefill:
            chunks = [*chunks, Chunk(newcomer, 0, case.prefill, samples=True)]
        timed[case.name] = Step(tuple(chunks))
    return fill, timed


def runners(
    read: Callable[[bool], LoadedModel], capacity: Capacity, threads: int, skip: list[str]
) -> dict[str, Runner]:
    """By name. `read` loads the model; its argument: with weights in blocks, if it can."""
    library = build.kernels()
    found: dict[str, Runner] = {}
    if "padded" not in skip:
        found["padded"] = TransformersRunner(read(False), capacity)
    if library is not None:
        if "kernel" not in skip:
            found["kernel"] = TransformersRunner(read(False), capacity, library, threads)
        if "fused" not in skip:
            found["fused"] = FusedRunner(read(False), capacity, library, threads)
        if "blocks" not in skip and (model := read(True)).in_blocks:
            found["blocks"] = FusedRunner(model, capacity, library, threads)
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=MODEL)
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--threads", type=int, default=usable_cores())
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--skip", action="append", default=[], help="padded, kernel, fused or blocks")
    p.add_argument("--cases", default="", help="only cases whose name starts so")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    capacity = Capacity(
        max_batch_tokens=1024,
        max_batch_sequences=64,
        kv_blocks=65 * 640 // BLOCK,
        block_tokens=BLOCK,
        max_model_tokens=640,
    )
    source = resolve(a.model, "main", default_cache_dir())

    def read(keep_blocks: bool) -> LoadedModel:
        return load(
            source,
            dtype=a.dtype,
            device="cpu",
            max_model_len=640,
            progress=lambda _: None,
            keep_blocks=keep_blocks,
        )

    plain = read(False)
    config, stored, dtype = plain.config, stored_type(plain), plain.dtype
    weight_bytes = plain.weight_bytes * stored.itemsize // dtype.itemsize
    matrices = sum(p.numel() for name, p in plain.module.named_parameters() if "layers." in name)
    words = plain.description
    del plain
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * width * dtype.itemsize
    limits = Limits(dtype)
    sides = runners(read, capacity, a.threads, a.skip)
    fill, timed = steps(config.vocab_size, a.cases)
    for runner in sides.values():
        for step in fill:
            runner.run(step)
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(a.rounds + 1):
        limits.measure()
        for name, step in timed.items():
            for side, runner in sides.items():
                began_s = time.perf_counter()
                runner.run(step)
                if number:  # the first round warms up
                    taken.setdefault((name, side), []).append(time.perf_counter() - began_s)
    print(f"{cpu_words()}, {a.threads} threads, {isa.available()[0]}, load {os.getloadavg()[0]:.1f}")
    print(
        f"{words}, {a.dtype}, weights in {stored}, read {limits.bytes_per_s / 1e9:.1f} GB/s, "
        f"products {limits.operations_per_s / 1e9:.0f} GFLOP/s; ms, median (minimum) of {a.rounds}"
    )
    print("| step | " + " | ".join(sides) + " | limit | share of it: fused |")
    print("|---" * (len(sides) + 3) + "|")
    for name, step in timed.items():
        cells = [
            f"{1e3 * statistics.median(taken[name, side]):.1f} ({1e3 * min(taken[name, side]):.1f})"
            for side in sides
        ]
        limit_s = (weight_bytes + kv_bytes * step.kv_tokens) / limits.bytes_per_s
        if name.startswith("prefill"):
            limit_s = prompt_flops(config, matrices, step.prefill_tokens) / limits.operations_per_s
        mixed = name.startswith("mixed")  # has no limit that is simply told
        share = (
            ""
            if mixed or "fused" not in sides
            else f"{limit_s / statistics.median(taken[name, 'fused']):.2f}"
        )
        limit = "" if mixed else f"{1e3 * limit_s:.1f}"
        print(f"| {name} | " + " | ".join(cells) + f" | {limit} | {share} |")


if __name__ == "__main__":
    main()
