"""Random traffic on the real model for a long time: nothing lost, no leak, no wrong answer.

    python bench/soak.py --minutes 30 [--seed 1]

Prompts, outputs, sampling, tenants, priorities, samples, streams, schemas, embeddings and bad bodies are
drawn at random; a fifth of the requests is cancelled, some clients stop reading; limits change every second,
modes included. Prints one Markdown table; the exit status is 1 when anything was wrong. The engine computes
on one core and leaves the other to the clients. The traffic and the checks are those of
tests/headway_engine/test_soak.py.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import aiohttp

BENCH = Path(__file__).parent
sys.path[:0] = [str(BENCH), str(BENCH.parent / "tests")]

from machine import conditions
from workload import FIRST_PLAIN_ID, MODEL, VOCABULARY

from headway_engine.protocol import Metric, Outcome
from support.client import LONGEST_ANSWER_S, send
from support.engine_server import Engine, engine_server
from support.eventually import eventually
from support.soak import Findings, Plan, soak
from support.traffic import COMPLETIONS, MODEL_NAME, TENANTS, Ask, Law, token_prompts

CONTEXT_TOKENS = 1024
KV_BLOCKS = 300
"""Of 16 tokens: too few for the 32 sequences that capacity allows, so that some are preempted."""

WARM_MINUTES = 10
"""Shorter runs are not judged by memory: it grows until every block of the cache has been written once."""

PROBES = (
    "The capital of France is",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5,",
    "Once upon a time there was a",
    "def add(a, b):\n    return",
    "The opposite of hot is",
)


def engine_arguments(folder: Path) -> list[str]:
    """A small cache, two declared tenants."""
    tenants = folder / "tenants.json"
    tenants.write_text(json.dumps({"tenants": TENANTS}))
    sizes = {
        "--max-model-len": CONTEXT_TOKENS,
        "--kv-blocks": KV_BLOCKS,
        "--capacity-max-batch-tokens": 512,
        "--capacity-max-batch-sequences": 32,
        "--drain-timeout-s": 300,
    }
    return [*(str(part) for pair in sizes.items() for part in pair), "--tenants-file", str(tenants)]


def table(findings: Findings, exit_status: int) -> str:
    """What was seen, a row each."""
    f = findings
    m = f.samples
    outcomes = {o.value: int(m[f'{Metric.OUTCOME}{{outcome="{o}"}}']) for o in Outcome}
    arrived = int(m[Metric.ARRIVED])
    rows = {
        "minutes of traffic": f"{f.seconds / 60:.1f}",
        "requests by what the client saw": ", ".join(f"{k}: {v}" for k, v in f.outcomes.most_common()),
        "sequences": f"{arrived} arrived = " + " + ".join(f"{v} {k}" for k, v in outcomes.items()),
        "cancelled, of all sequences": f"{outcomes['aborted'] / max(1, arrived):.0%}",
        "scrapes, each with balanced books and green health": str(f.scrapes),
        "changes of limits; wrong ones, refused": f"{f.flips}; {f.refused_flips}",
        "rests, with every gauge back at 0": str(f.rests),
        "greedy probes; certain tokens in all of them": f"{f.probes}; {f.certain_probe_tokens}",
        "embeddings answered; vectors in them, each looked at": f"{f.embeddings}; {f.vectors}",
        "steps; tokens out": f"{m[Metric.STEPS]:.0f}; {m[Metric.OUTPUT_TOKENS]:.0f}",
        "preempted": f"{m[Metric.PREEMPTIONS]:.0f}",
        "prompt tokens found in the prefix cache": f"{m[Metric.PREFIX_HIT_TOKENS]:.0f}",
        "KV blocks held at the end": f"{m[Metric.KV_USED_BLOCKS]:.0f} of {KV_BLOCKS}",
        "exit status after SIGTERM amid streams": str(exit_status),
    }
    for process, points in f.resident.items():
        growth, bound = f.growth(process)
        rows[f"RSS of the {process}, MiB"] = (
            f"{points[-1].bytes / 2**20:.0f}; {growth / 2**20:+.1f} over the last two thirds, "
            f"bound {bound / 2**20:.0f}"
        )
    rows["complaints"] = str(f.complaints_total)
    return "\n".join(["| what | seen |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in rows.items())])


async def drained(engine: Engine, findings: Findings) -> int:
    """SIGTERM while four streams run: they end well, and so does the engine."""
    body = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 60, "stream": True, "ignore_eos": True}
    ask = Ask(path=COMPLETIONS, body=json.dumps(body).encode(), stream=True)
    async with aiohttp.ClientSession() as http:
        streams = [asyncio.create_task(send(http, engine.url, ask)) for _ in range(4)]
        await eventually(lambda: engine.metrics()[Metric.RUNNING] == len(streams), what="all four run")
        status = await asyncio.to_thread(engine.terminate, LONGEST_ANSWER_S)
        for outcome in await asyncio.gather(*streams):
            if outcome.word != "200" or outcome.complaint:
                findings.complain(f"a stream during the drain: {outcome}")
    return status


def main() -> int:
    """Soak, drain, print; 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="folder for the engine's log; default: thrown away")
    args = parser.parse_args()
    before = conditions()
    law = Law(
        prompt=token_prompts(VOCABULARY, first_plain_id=FIRST_PLAIN_ID),
        most_prompt_tokens=500,
        most_output_tokens=96,
        most_model_tokens=CONTEXT_TOKENS,
        leave_share=0.3,  # some of them get their answer before they lose patience
    )
    plan = Plan(seconds=args.minutes * 60, law=law, probes=PROBES, seed=args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.log or Path(scratch)
        with engine_server(folder, MODEL, engine_arguments(folder)) as engine:
            findings = asyncio.run(soak(engine, plan))
            exit_status = asyncio.run(drained(engine, findings))
    if exit_status:
        findings.complain(f"exit status {exit_status} after SIGTERM")
    if args.minutes >= WARM_MINUTES:
        findings.judge_growth()
    print(f"{before}\n\n`python bench/soak.py {' '.join(sys.argv[1:])}`\n\n{table(findings, exit_status)}")
    for complaint in findings.complaints:
        print(complaint, file=sys.stderr)
    return 1 if findings.complaints_total else 0


if __name__ == "__main__":
    sys.exit(main())
