"""Decode throughput on an accelerator against its memory-bandwidth limit; prints one table.

    python tests/gpu/throughput.py [--model random://llama?hidden=2048&layers=16&heads=32&kv_heads=8&...]

Random weights of a real size are enough: time does not depend on their values. The limit is the bytes of
weights, keys and values that a step reads over the bandwidth of a device-to-device copy.
"""

import argparse
import sys
import time

import torch

from headway_engine.model import default_cache_dir, load, resolve
from headway_engine.protocol import Capacity
from headway_engine.runner import TransformersRunner
from headway_engine.sequence import Chunk, Request, SamplingParams, Sequence, Step
from headway_engine.stepping import layer_shapes

BLOCK = 16


def copy_gb_per_s() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(20):
        target.copy_(source)
    torch.cuda.synchronize()
    return 20 * 2 * source.nbytes / 1e9 / (time.perf_counter() - began_s)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model",
        default="random://llama?hidden=2048&layers=16&heads=32&kv_heads=8&intermediate=8192&vocab=128256"
        "&context=4096",
    )
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--steps", type=int, default=30)
    a = p.parse_args()
    if not torch.cuda.is_available():
        print("no accelerator here")
        return 1
    source = resolve(a.model, "main", default_cache_dir())
    model = load(source, dtype="auto", device="cuda", max_model_len=0, progress=print)
    width = (a.context + a.steps + 64) // BLOCK + 1
    batches = (1, 8, 32, 128)
    capacity = Capacity(
        max_batch_tokens=8192,
        max_batch_sequences=max(batches),
        kv_blocks=width * max(batches),
        block_tokens=BLOCK,
        max_model_tokens=a.context + a.steps + 64,
    )
    token_bytes = sum(shape.bytes_per_token(model.dtype) for shape in layer_shapes(model).values())
    bandwidth = copy_gb_per_s()
    runner = TransformersRunner(model, capacity)
    print(f"{torch.cuda.get_device_name()}, {model.description}, {model.dtype}, copy {bandwidth:.0f} GB/s")
    print(
        f"| batch at context {a.context} | ms a step | tokens/s | limit, tokens/s | share |\n"
        "|---|---|---|---|---|"
    )
    for batch in batches:
        sequences = [
            Sequence(
                request=Request(
                    id=str(i), prompt=(5,) * a.context, sampling=SamplingParams(max_tokens=1), arrival_s=0.0
                ),
                tokens=[5] * (a.context + a.steps + 8),
                block_table=list(range(i * width, (i + 1) * width)),
            )
            for i in range(batch)
        ]
        for warm in range(3):
            runner.run(Step(tuple(Chunk(s, a.context + warm, 1, samples=True) for s in sequences)))
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for number in range(a.steps):
            runner.run(Step(tuple(Chunk(s, a.context + 3 + number, 1, samples=True) for s in sequences)))
        step_s = (time.perf_counter() - began_s) / a.steps
        limit = batch * bandwidth * 1e9 / (model.weight_bytes + batch * a.context * token_bytes)
        rate = batch / step_s
        print(f"| {batch} | {1e3 * step_s:.2f} | {rate:.0f} | {limit:.0f} | {rate / limit:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
