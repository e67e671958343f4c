"""Decode throughput against the memory-bandwidth limit, and a burst against transformers' own batching.

    python tests/gpu/throughput.py [--out bench/results/gpu-NAME.md] [--device cuda] [--model random://llama?...]

Random weights of a real size are enough: time does not depend on their values. The limit is the bytes of
weights, keys and values that a step reads, over the bandwidth of a copy on the same device. Runs on a CPU
too, where its numbers say little, so that the script itself is tested without an accelerator.
"""

import argparse
import copy
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from headway_engine.config import EngineConfig
from headway_engine.lean.choice import CANDIDATES, needs_of, pick
from headway_engine.lean.graphs import CudaRecorder, EagerRecorder
from headway_engine.lean.kernels import GatherKernel, PagedKernel
from headway_engine.lean.runner import LeanRunner
from headway_engine.model import LoadedModel, default_cache_dir, load, resolve
from headway_engine.protocol import Capacity, Limits
from headway_engine.runner import TransformersRunner, build_runner
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import Chunk, Finished, Request, SamplingParams, Sequence, Step

BLOCK = 16
PEER_PAGE = 256
MODEL = "random://llama?hidden=2048&layers=16&heads=32&kv_heads=8&intermediate=8192&vocab=128256&context=4096"


def now_s(device: torch.device) -> float:
    """The clock, when everything asked of the device so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def copy_gb_per_s(device: torch.device, size: int) -> float:
    """Bytes read and written by a copy on the device, the best of three."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(3):
        began_s = now_s(device)
        for _ in range(10):
            target.copy_(source)
        best = max(best, 10 * 2 * size / 1e9 / (now_s(device) - began_s))
    return best


def kernels(model: LoadedModel) -> dict[str, PagedKernel]:
    """Every kernel that works here, in order of preference."""
    found: dict[str, PagedKernel] = {}
    if model.device.type == "cuda":
        needs = needs_of(frozenset(model.layer_shapes.values()), model.dtype, BLOCK, model.device)
        for candidate in CANDIDATES:
            try:
                kernel = pick(needs, model.device, asked=candidate.name)
            except ValueError as error:
                print(f"left out: {error}")
            else:
                assert kernel is not None
                found[candidate.name] = kernel
    return found or {"torch": GatherKernel()}


def runners(model: LoadedModel, capacity: Capacity) -> Iterator[tuple[str, Any]]:
    """Each with weights of its own: some take them over."""
    available = kernels(model)
    best, kernel = next(iter(available.items()))
    on_cuda = model.device.type == "cuda"

    def fresh() -> LoadedModel:
        return dataclasses.replace(model, module=copy.deepcopy(model.module))

    def recorder() -> Any:
        return CudaRecorder(model.device) if on_cuda else EagerRecorder()

    yield "transformers, torch", TransformersRunner(fresh(), capacity)
    yield f"transformers, {best}", TransformersRunner(fresh(), capacity, kernel=kernel)
    yield f"lean, {best}, no graphs", LeanRunner(fresh(), capacity, kernel)
    for name, other in available.items():
        yield f"lean, {name}, graphs", LeanRunner(fresh(), capacity, other, recorder())
    if "torch" not in available:
        yield "lean, torch, graphs", LeanRunner(fresh(), capacity, None, recorder())


def decode_seconds(runner: Any, device: torch.device, batch: int, context: int, steps: int) -> float:
    """Of one step, sampling and the copy of the tokens to the host included."""
    width = (context + steps + 8) // BLOCK + 1
    sequences = [
        Sequence(
            request=Request(
                id=str(i), prompt=(5,) * context, sampling=SamplingParams(max_tokens=1), arrival_s=0.0
            ),
            tokens=[5] * (context + steps + 8),
            block_table=list(range(i * width, (i + 1) * width)),
        )
        for i in range(batch)
    ]
    for warm in range(3):
        runner.run(Step(tuple(Chunk(s, context + warm, 1, samples=True) for s in sequences)))
    began_s = now_s(device)
    for number in range(steps):
        runner.run(Step(tuple(Chunk(s, context + 3 + number, 1, samples=True) for s in sequences)))
    return (now_s(device) - began_s) / steps


def burst_headway(model: LoadedModel, prompts: list[list[int]], output: int) -> tuple[str, float]:
    """Name of the runner, and output tokens a second of all prompts at once, as shipped."""
    longest = len(prompts[0]) + output
    capacity = Capacity(
        max_batch_tokens=8192,
        max_batch_sequences=len(prompts),
        kv_blocks=(longest // BLOCK + 2) * len(prompts),
        block_tokens=BLOCK,
        max_model_tokens=longest + 1,
    )
    config = EngineConfig(model=MODEL, runner="lean" if model.device.type == "cpu" else "auto")
    runner = build_runner(config, dataclasses.replace(model, module=copy.deepcopy(model.module)), capacity)
    limits = Limits(
        max_batch_tokens=8192,
        max_batch_sequences=len(prompts),
        prefill_chunk_tokens=8192,
        max_queued_tokens=10_000_000,
    )
    took_s = 0.0
    for salt in ("warm-up", "measured"):
        scheduler = Scheduler(capacity, limits)
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=output)
            request = Request(
                id=str(number), prompt=tuple(prompt), sampling=sampling, arrival_s=0.0, cache_salt=salt
            )
            scheduler.admit(request, 0.0)
        began_s, ended = now_s(model.device), 0
        while ended < len(prompts):
            step = scheduler.next_step(time.perf_counter())
            assert step is not None
            events = scheduler.commit(step, runner.run(step), time.perf_counter())
            ended += sum(isinstance(event, Finished) for event in events)
        took_s = now_s(model.device) - began_s
    return runner.name, len(prompts) * output / took_s


def burst_transformers(model: LoadedModel, prompts: list[list[int]], output: int) -> float:
    """Output tokens a second of transformers' own continuous batching, with what it chooses itself."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    module: Any = copy.deepcopy(model.module)
    module.set_attn_implementation("sdpa")
    manager = module.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=(-(-(len(prompts[0]) + output) // PEER_PAGE) + 1) * len(prompts),
            page_size=PEER_PAGE,
            max_batch_tokens=8192,
            max_requests_per_batch=len(prompts),
            allow_block_sharing=False,
        ),
    )
    manager.start()
    took_s = 0.0
    for turn in ("warm-up", "measured"):
        began_s = now_s(model.device)
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=f"{turn}-{number}", max_new_tokens=output, eos_token_id=-1)
        ended = 0
        while ended < len(prompts):
            result = manager.get_result(timeout=60.0)
            assert result is not None, "transformers' continuous batching has stopped"
            if result.is_finished():
                assert len(result.generated_tokens) == output, result.error
                ended += 1
        took_s = now_s(model.device) - began_s
    manager.stop(block=True)
    return len(prompts) * output / took_s


def report(a: argparse.Namespace) -> Iterator[str]:
    """The page, line by line, as it comes to be known."""
    source = resolve(a.model, "main", default_cache_dir())
    model = load(source, dtype=a.dtype, device=a.device, max_model_len=0, progress=print)
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    bandwidth = copy_gb_per_s(device, a.copy_bytes)
    token_bytes = sum(shape.bytes_per_token(model.dtype) for shape in model.layer_shapes.values())
    batches = [int(word) for word in a.batches.split(",")]
    capacity = Capacity(
        max_batch_tokens=8192,
        max_batch_sequences=max(batches),
        kv_blocks=((a.context + a.steps + 8) // BLOCK + 1) * max(batches),
        block_tokens=BLOCK,
        max_model_tokens=min(model.max_model_tokens, a.context + a.steps + 64),
    )
    yield f"# {name}"
    yield ""
    yield f"`python tests/gpu/throughput.py {' '.join(sys.argv[1:])}`, torch {torch.__version__}"
    yield ""
    yield f"{model.description}, {model.dtype}; a copy moves {bandwidth:.0f} GB/s, read and written."
    yield ""
    yield f"## Decode at context {a.context}"
    yield ""
    yield "| runner | batch | ms a step | tokens/s | limit, tokens/s | share |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for label, runner in runners(model, capacity):
        for batch in batches:
            step_s = decode_seconds(runner, device, batch, a.context, a.steps)
            limit = batch * bandwidth * 1e9 / (model.weight_bytes + batch * a.context * token_bytes)
            rate = batch / step_s
            figures = f"{1e3 * step_s:.2f} | {rate:.0f} | {limit:.0f} | {rate / limit:.2f}"
            yield f"| {label} | {batch} | {figures} |"
        del runner
        if device.type == "cuda":
            torch.cuda.empty_cache()
    prompts = [[5 + (7 * i + j) % 200 for j in range(a.prompt)] for i in range(a.requests)]
    ours, tokens_per_s = burst_headway(model, prompts, a.output)
    yield ""
    yield f"## A burst: {a.requests} prompts of {a.prompt} tokens, {a.output} tokens each"
    yield ""
    yield "| engine | output tokens/s |"
    yield "| --- | --- |"
    yield f"| Headway ({ours}) | {tokens_per_s:.0f} |"
    if not a.no_peer:
        theirs = burst_transformers(model, prompts, a.output)
        yield f"| transformers' continuous batching | {theirs:.0f} |"
        yield ""
        yield f"Ratio: {tokens_per_s / theirs:.2f}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=MODEL)
    p.add_argument("--device", default="cuda")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--batches", default="1,8,32,128")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--requests", type=int, default=64)
    p.add_argument("--prompt", type=int, default=256)
    p.add_argument("--output", type=int, default=128)
    p.add_argument("--copy-bytes", type=int, default=1 << 30)
    p.add_argument("--no-peer", action="store_true", help="leave transformers' continuous batching out")
    p.add_argument("--out", type=Path, help="a file for the page; its folder is made")
    return p.parse_args(argv)


def main() -> int:
    """Print the page, and write it if asked."""
    a = arguments()
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        print("no accelerator here")
        return 1
    lines = []
    for line in report(a):
        print(line, flush=True)
        lines.append(line)
        if a.out:  # after each line, so that a run that is cut short leaves what it knew
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
