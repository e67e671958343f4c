"""One engine, one process, one workload, no HTTP: prints a line `RESULT {json}`.

    python bench/offline.py headway --model FOLDER --workload w64 --dtype float32 [--runner fused]
    python bench/offline.py transformers-cb --model FOLDER ...
    PEER_PYTHON bench/offline.py vllm --model FOLDER ...

Ours runs as shipped, but for the prefix cache, which nobody has here: the real scheduler with paged blocks
and fairness. All engines get at most 64 sequences and 512 tokens a step, and 2 GiB of KV space.
"""

import argparse
import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from machine import spin_as_the_engine
from workload import WORKLOADS, Item, Timing, alone_figures, figures, named, played

SEQUENCES = 64
STEP_TOKENS = 512
KV_TOKENS = 46_592  # 2 GiB for SmolLM2-135M in float32: vLLM takes whole GiB


def headway(items: list[Item], args: argparse.Namespace) -> tuple[float, dict[int, Timing], str]:
    """The scheduler and a runner in a plain loop; arrivals are honoured."""
    spin_as_the_engine()
    import torch

    from headway_engine.config import EngineConfig
    from headway_engine.loading import load
    from headway_engine.model_source import default_cache_dir, resolve
    from headway_engine.protocol import Limits
    from headway_engine.scheduler import Scheduler
    from headway_engine.sequence import Finished, Request, SamplingParams, TokenOut

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = EngineConfig(
        model=Path(args.model).resolve().as_uri(),
        dtype=args.dtype,
        runner=args.runner,
        max_model_len=1024,
        capacity_max_batch_tokens=STEP_TOKENS,
        capacity_max_batch_sequences=SEQUENCES,
        kv_blocks=KV_TOKENS // 16,
        kv_block_tokens=16,
    )
    loaded = load(config, resolve(config.model, "main", default_cache_dir()), lambda _: None)
    capacity, runner = loaded.capacity, loaded.serving.runner
    limits = Limits(
        max_batch_tokens=STEP_TOKENS,
        max_batch_sequences=SEQUENCES,
        prefill_chunk_tokens=STEP_TOKENS,
        max_queued_tokens=1_000_000,
        queue_timeout_ms=0,
    )

    def run(todo: list[Item], salt: str) -> tuple[float, dict[int, Timing]]:
        scheduler = Scheduler(capacity, limits, prefix_caching=False)

        def submit(item: Item, now_s: float) -> None:
            sampling = SamplingParams(max_tokens=item.output_tokens)
            admitted = scheduler.admit(
                Request(
                    id=str(item.id), prompt=item.prompt, sampling=sampling, arrival_s=now_s, cache_salt=salt
                ),
                now_s,
            )
            assert admitted.id == str(item.id), admitted

        def turn(now_s: float, _: bool) -> list[tuple[int, bool]] | None:
            step = scheduler.next_step(now_s)
            if step is None:
                return None
            events = scheduler.commit(step, runner.run(step), now_s)
            kinds = (TokenOut, Finished)
            return [(int(e.id), isinstance(e, Finished)) for e in events if isinstance(e, kinds)]

        return played(args.workload, todo, submit, turn)

    run([Item(i.id, i.prompt, i.output_tokens, 0.0) for i in items[:8]], "warm-up")
    wall_s, timings = run(items, "measured")
    return wall_s, timings, f"{runner.name} on {loaded.serving.path.kernels}, weights {runner.weights}"


def transformers_cb(items: list[Item], args: argparse.Namespace) -> tuple[float, dict[int, Timing], str]:
    """transformers' own continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa").eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32,
            num_blocks=KV_TOKENS // 32,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=SEQUENCES,
            allow_block_sharing=False,
            use_cuda_graph=False,
            use_async_batching=False,
        ),
    )
    manager.start()

    def run(todo: list[Item]) -> tuple[float, dict[int, Timing]]:
        output = {item.id: item.output_tokens for item in todo}

        def submit(item: Item, _: float) -> None:
            manager.add_request(
                list(item.prompt),
                request_id=str(item.id),
                max_new_tokens=item.output_tokens,
                streaming=True,
                eos_token_id=-1,
            )

        def turn(_: float, more: bool) -> list[tuple[int, bool]]:
            result = manager.get_result(timeout=0.005 if more else 1.0)
            if result is None:
                return []
            id, ended = int(result.request_id), result.is_finished()
            assert not ended or len(result.generated_tokens) == output[id], result.error
            return [(id, ended)]

        return played(args.workload, todo, submit, turn)

    run([Item(i.id, i.prompt, i.output_tokens, 0.0) for i in items[:4]])
    wall_s, timings = run(items)
    manager.stop(block=True)
    return wall_s, timings, "transformers continuous batching"


def vllm(items: list[Item], args: argparse.Namespace) -> tuple[float, dict[int, Timing], str]:
    """vLLM's engine core in one process, without prefix caching; eager, or compiled."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{len(os.sched_getaffinity(0)) - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=STEP_TOKENS,
        block_size=32,
        enforce_eager=not args.compiled,
        enable_prefix_caching=False,
        disable_log_stats=True,
    ).llm_engine

    def run(todo: list[Item], name: str) -> tuple[float, dict[int, Timing]]:
        def submit(item: Item, _: float) -> None:
            sampling = SamplingParams(
                temperature=0,
                max_tokens=item.output_tokens,
                min_tokens=item.output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            engine.add_request(f"{name}-{item.id}", {"prompt_token_ids": list(item.prompt)}, sampling)

        def turn(_: float, __: bool) -> list[tuple[int, bool]] | None:
            if not engine.has_unfinished_requests():
                return None
            return [
                (int(output.request_id.split("-")[1]), output.finished)
                for output in engine.step()
                if output.outputs[0].token_ids or output.finished
            ]

        return played(args.workload, todo, submit, turn)

    run([Item(i.id, i.prompt, i.output_tokens, 0.0) for i in items[:8]], "warmup")
    wall_s, timings = run(items, "measured")
    return wall_s, timings, "vLLM"


ENGINES = {"headway": headway, "transformers-cb": transformers_cb, "vllm": vllm}


def main() -> None:
    """Run one engine once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", required=True, help="a Hugging Face folder; headway only: or a GGUF file")
    parser.add_argument("--workload", default="w64", choices=WORKLOADS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--runner", default="auto", help="headway only: auto, transformers or fused")
    parser.add_argument("--compiled", action="store_true", help="vLLM only: compile, as it does by itself")
    args = parser.parse_args()
    items = named(args.workload)
    wall_s, timings, name = ENGINES[args.engine](items, args)
    result = {"engine": args.engine, "runner": name, **figures(items, wall_s, timings)}
    if args.workload == "one":
        result |= alone_figures(items, timings)
    result["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
