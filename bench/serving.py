"""One engine's server, one workload, through HTTP and SSE: prints a line `RESULT {json}`.

    python bench/serving.py headway --model FOLDER --workload p64 --dtype float32
    python bench/serving.py vllm --python PEER_PYTHON --model FOLDER --workload p64 --dtype float32

The server is started on free loopback ports, warmed, measured and stopped. Client and server share the
machine's cores, for every engine alike. Requests stream /v1/completions with token ids, greedy, with fixed
output lengths.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))

from offline import KV_TOKENS, SEQUENCES, STEP_TOKENS
from sse import sse_chunks
from workload import Item, Timing, figures, named

START_TIMEOUT_S = 300.0


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def headway_command(args: argparse.Namespace, port: int, management_port: int, scratch: Path) -> list[str]:
    """Our server as a pod would start it, with the limits of all engines here."""
    limits = scratch / "limits.json"
    limits.write_text(
        json.dumps(
            {
                "max_batch_tokens": STEP_TOKENS,
                "max_batch_sequences": SEQUENCES,
                "prefill_chunk_tokens": STEP_TOKENS,
                "max_queued_tokens": 1_000_000,
                "queue_timeout_ms": 0,
            }
        )
    )
    return [
        sys.executable,
        "-m",
        "headway_engine",
        "--model",
        Path(args.model).resolve().as_uri(),
        "--served-model-name",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--management-port",
        str(management_port),
        "--dtype",
        args.dtype,
        "--runner",
        args.runner,
        "--max-model-len",
        "1024",
        "--capacity-max-batch-tokens",
        str(STEP_TOKENS),
        "--capacity-max-batch-sequences",
        str(SEQUENCES),
        "--kv-blocks",
        str(KV_TOKENS // 16),
        "--limits-file",
        str(limits),
        "--no-prefix-caching",
    ]


def vllm_command(args: argparse.Namespace, port: int) -> list[str]:
    """vLLM's own OpenAI server, eager (compiling costs two minutes and gained nothing on a CPU)."""
    return [
        args.python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        args.model,
        "--served-model-name",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        args.dtype,
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        str(SEQUENCES),
        "--max-num-batched-tokens",
        str(STEP_TOKENS),
        "--block-size",
        "32",
        "--enforce-eager",
        "--no-enable-prefix-caching",
    ]


async def stream(session: aiohttp.ClientSession, base: str, item: Item, start_s: float) -> Timing:
    """One request at its time; the output length is checked against the usage the server reports."""
    await asyncio.sleep(max(0.0, item.at_s - (time.perf_counter() - start_s)))
    body = {
        "model": "m",
        "prompt": list(item.prompt),
        "max_tokens": item.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    async for at_s, chunk in sse_chunks(session, base, body):
        if chunk.get("choices"):
            times.append(at_s - start_s - item.at_s)
        if (usage := chunk.get("usage")) and usage["completion_tokens"] != item.output_tokens:
            raise RuntimeError(f"request {item.id}: {usage} instead of {item.output_tokens} output tokens")
    if not times:
        raise RuntimeError(f"request {item.id} got no token")
    return Timing(times[0], times[-1], tuple(b - a for a, b in pairwise(times)))


async def play(base: str, items: list[Item]) -> tuple[float, dict[int, Timing]]:
    """The whole workload, open loop."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        start_s = time.perf_counter()
        timings = await asyncio.gather(*(stream(session, base, item, start_s) for item in items))
        return time.perf_counter() - start_s, {item.id: t for item, t in zip(items, timings, strict=True)}


async def until_ready(base: str, process: subprocess.Popen[bytes]) -> None:
    """Until a completion is answered with 200."""
    body = {"model": "m", "prompt": [1000, 1001], "max_tokens": 1}
    deadline_s = time.perf_counter() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.perf_counter() < deadline_s:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            try:
                async with session.post(f"{base}/v1/completions", json=body) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # not listening yet
            await asyncio.sleep(0.1)
    raise TimeoutError("the server did not become ready")


def process_tree(root: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # ended meanwhile
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def peak_rss_mib(root: int) -> float:
    """VmHWM summed over the process tree."""
    total_kib = 0
    for pid in process_tree(root):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        total_kib += next(
            (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0
        )
    return total_kib / 1024


def main() -> None:
    """Start, warm, measure, stop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=["headway", "vllm"])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--workload", default="w64", choices=["w64", "p64", "w24"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--runner", default="auto", help="headway only")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the peer's environment")
    args = parser.parse_args()
    port, management_port = free_port(), free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as scratch:
        command = (
            headway_command(args, port, management_port, Path(scratch))
            if args.engine == "headway"
            else vllm_command(args, port)
        )
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        started_s = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=sys.stderr, start_new_session=True
        )
        try:
            asyncio.run(until_ready(base, process))
            ready_s = time.perf_counter() - started_s
            items = named(args.workload)
            # Other prompts than the measured ones: a warm prefix cache would flatter us.
            warm = [Item(i.id, tuple(reversed(i.prompt)), i.output_tokens, 0.0) for i in items[:8]]
            asyncio.run(play(base, warm))
            wall_s, timings = asyncio.run(play(base, items))
            result = {"engine": args.engine, **figures(items, wall_s, timings)}
            result |= {"ready_s": ready_s, "rss_mib": peak_rss_mib(process.pid)}
            print("RESULT " + json.dumps(result), flush=True)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
