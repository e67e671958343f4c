"""Headway beside its peers: interleaved rounds, medians, ratios, one Markdown table.

    python bench/run.py [--rounds 3] [--dtype float32] [--parts offline,serving] [--vllm-python PYTHON]
    python bench/run.py --parts gguf --gguf FILE [--gguf FILE] --llama-python PYTHON [--dtype bfloat16]

All engines serve the same model (SmolLM2-135M-Instruct), the same requests, in the same dtype, on the same
cores, one after another in each round, since a shared machine drifts by more than engines differ. vLLM runs
in an environment of its own: name its interpreter, or its rows are left out. So does llama.cpp, which is
compared on GGUF files, in both of its caches: one stream, and the burst.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH))

from machine import conditions
from workload import MODEL, medians


def model_folder() -> str:
    """The embedded model as one folder for every engine: our cache keeps weights and tokenizer apart."""
    from headway_engine.model_source import default_cache_dir, resolve, weights_folder

    source = resolve(MODEL, "main", default_cache_dir())
    weights = weights_folder(source, lambda what: print(what, file=sys.stderr))
    folder = default_cache_dir() / "bench" / source.name
    folder.mkdir(parents=True, exist_ok=True)
    for origin in (source.tokenizer_dir, weights):
        for file in origin.iterdir() if origin else ():
            link = folder / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file)
    return str(folder)


def measure(command: list[str]) -> dict[str, float]:
    """Run one measurement in a process of its own and read its RESULT line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return {k: v for k, v in json.loads(line[7:]).items() if isinstance(v, int | float)}
    raise RuntimeError(f"{' '.join(command)} gave no result\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def table(title: str, rounds: dict[str, list[dict[str, float]]], baseline: str) -> str:
    """One row an engine: medians, the single rounds of the main figure, and the ratio to the baseline."""
    base = medians(rounds[baseline])["output_tokens_per_s"] if baseline in rounds else None
    alone = any("decode_tokens_per_s" in result for results in rounds.values() for result in results)
    columns = [
        "engine", "output tok/s (rounds)", "ratio", "TTFT p50/p95 ms", "TPOT p50/p95 ms",
        "RSS MiB", "ready s", *(("prompt / decode tok/s", "ratio of decode") if alone else ()),
    ]  # fmt: skip
    lines = [
        f"### {title}",
        "",
        "| " + " | ".join(columns) + " |",
        "| --- " * len(columns) + "|",
    ]
    for engine, results in rounds.items():
        m = medians(results)
        single = ", ".join(f"{r['output_tokens_per_s']:.0f}" for r in results)
        ratio = f"{m['output_tokens_per_s'] / base:.2f}" if base else "-"
        ready = f"{m['ready_s']:.1f}" if "ready_s" in m else "-"
        lines.append(
            f"| {engine} | **{m['output_tokens_per_s']:.0f}** ({single}) | {ratio} "
            f"| {m['ttft_p50_ms']:.0f} / {m['ttft_p95_ms']:.0f} "
            f"| {m['tpot_p50_ms']:.1f} / {m['tpot_p95_ms']:.1f} "
            f"| {m['rss_mib']:.0f} | {ready} |{of_one(m, rounds.get(baseline)) if alone else ''}"
        )
    if base:
        lines += ["", f"Ratio: output tok/s over {baseline}'s."]
    return "\n".join(lines) + "\n"


def of_one(m: dict[str, float], baseline: list[dict[str, float]] | None) -> str:
    """Cells of a stream that was alone."""
    base = medians(baseline)["decode_tokens_per_s"] if baseline else None
    ratio = f"{m['decode_tokens_per_s'] / base:.2f}" if base else "-"
    return f" {m['prompt_tokens_per_s']:.0f} / {m['decode_tokens_per_s']:.0f} | {ratio} |"


def gguf_engines(file: str, args: argparse.Namespace) -> dict[str, list[str]]:
    """Commands of ours and llama.cpp on one GGUF file, without the workload."""
    script = [sys.executable, str(BENCH / "offline.py"), "headway", "--model", file, "--dtype", args.dtype]
    engines = {"headway, fused": [*script, "--runner", "fused"]}
    if args.llama_python:
        peer = [args.llama_python, str(BENCH / "llama_cpp_offline.py"), "--model", file]
        engines |= {f"llama.cpp, {cache}": [*peer, "--cache", cache] for cache in ("streams", "unified")}
    return engines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--parts", default="offline,serving")
    parser.add_argument("--vllm-python", default=os.environ.get("HEADWAY_BENCH_VLLM_PYTHON", ""))
    parser.add_argument("--vllm-compiled", action="store_true", help="vLLM compiled, too (offline)")
    parser.add_argument("--gguf", action="append", default=[], help="a file for the part gguf")
    parser.add_argument("--llama-python", default=os.environ.get("HEADWAY_BENCH_LLAMA_PYTHON", ""))
    parser.add_argument("--skip", action="append", default=[], help="an engine to leave out; may be repeated")
    args = parser.parse_args()
    folder = model_folder()
    common = ["--model", folder, "--dtype", args.dtype]
    script = [sys.executable, str(BENCH / "offline.py")]
    offline = {
        "headway, fused": [*script, "headway", *common, "--runner", "fused"],
        "headway, transformers": [*script, "headway", *common, "--runner", "transformers"],
        "transformers continuous batching": [*script, "transformers-cb", *common],
    }
    serving = {"headway": [sys.executable, str(BENCH / "serving.py"), "headway", *common]}
    if args.vllm_python:
        offline["vLLM"] = [args.vllm_python, str(BENCH / "offline.py"), "vllm", *common]
        if args.vllm_compiled:
            offline["vLLM, compiled"] = [*offline["vLLM"], "--compiled"]
        serving["vLLM"] = [
            sys.executable,
            str(BENCH / "serving.py"),
            "vllm",
            "--python",
            args.vllm_python,
            *common,
        ]
    gguf = {Path(file).name: gguf_engines(file, args) for file in args.gguf}
    plans: list[tuple[str, dict[str, list[str]]]] = []
    if "offline" in args.parts:
        plans.append(("Burst of 64, offline", {k: [*v, "--workload", "w64"] for k, v in offline.items()}))
    if "serving" in args.parts:
        plans.append(
            ("Burst of 64, HTTP and SSE", {k: [*v, "--workload", "w64"] for k, v in serving.items()})
        )
        plans.append(
            ("Poisson 2/s, HTTP and SSE", {k: [*v, "--workload", "p64"] for k, v in serving.items()})
        )
    if "gguf" in args.parts:
        for file, engines in gguf.items():
            for workload, title in (("one", "one stream"), ("w64", "burst of 64, offline")):
                plan = {name: [*command, "--workload", workload] for name, command in engines.items()}
                plans.append((f"{file}, {title}", plan))
    print(f"{args.dtype}, {conditions()}\n", flush=True)
    shown = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    print(f"`python bench/run.py {' '.join(shown)}`\n", flush=True)
    for title, engines in plans:
        rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _ in range(args.rounds):
            for engine, command in engines.items():
                if engine in args.skip:
                    continue
                rounds[engine].append(measure(command))
                print(
                    f"{title}: {engine}: {rounds[engine][-1]['output_tokens_per_s']:.1f} output tok/s",
                    file=sys.stderr,
                    flush=True,
                )
        baseline = "vLLM" if "vLLM" in rounds else "llama.cpp, streams"
        print(table(title, rounds, baseline), flush=True)


if __name__ == "__main__":
    main()
