"""`headway replay`: play a trace against any OpenAI endpoint and say how it did."""

import argparse
import asyncio
import json
from pathlib import Path
from random import Random

import aiohttp
from rich.console import Console

from headway_cli import arguments, client, openloop, report, table, traces
from headway_cli.client import Api, Endpoint
from headway_cli.console import make_console, step
from headway_cli.errors import EXIT_OK, Failed, UserError
from headway_cli.report import Record
from headway_cli.traces import Arrival, BadTrace
from headway_operator.resource import Percentile, Slo, Target, duration_ms

PROGRESS_EVERY_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `headway replay`."""
    parser.add_argument("--url", required=True, help="endpoint, with or without /v1")
    parser.add_argument("--model", default="", help="model name; default: the first one listed")
    parser.add_argument("--api-key", default="", help="bearer key, where the endpoint wants one")
    parser.add_argument("--api", type=Api, choices=list(Api), default=Api.CHAT, help="which call to use")
    add_trace_arguments(parser)
    parser.add_argument("--ttft", metavar="DURATION", help="target for the first token, such as 500ms")
    parser.add_argument("--itl", metavar="DURATION", help="target for the gaps between tokens, such as 50ms")
    parser.add_argument("--e2e", metavar="DURATION", help="target for the whole answer, such as 15s")
    parser.add_argument(
        "--percentile", type=Percentile, choices=list(Percentile), default=Percentile.P95,
        help="percentile of the targets (default p95)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=arguments.positive, default=600.0, metavar="S", help="give a request up after"
    )
    parser.add_argument("--natural-length", action="store_true", help="let answers end by themselves")
    parser.add_argument(
        "--json", type=arguments.file_to_write, metavar="FILE", help="write summary and every request there"
    )


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Which traffic; the same for `headway up --trace`."""
    parser.add_argument(
        "--trace", metavar="FILE",
        help="CSV (plain, Azure or ServeGen) or Mooncake JSON lines; `sample`: the one shipped with Headway",
    )  # fmt: skip
    parser.add_argument(
        "--scale", type=arguments.positive, default=1.0, metavar="X", help="times the traffic (default 1)"
    )
    parser.add_argument(
        "--start", type=arguments.not_negative, default=0.0, metavar="S", help="begin so far into the trace"
    )
    parser.add_argument("--duration", type=arguments.positive, metavar="S", help="play only so much of it")
    parser.add_argument(
        "--max-prompt", type=arguments.count, default=0, metavar="TOKENS", help="shrink prompts to fit"
    )
    parser.add_argument(
        "--max-output", type=arguments.count, default=0, metavar="TOKENS", help="cap of answers"
    )
    parser.add_argument("--seed", type=int, default=1, help="of thinning and prompts (default 1)")


def chosen_arrivals(args: argparse.Namespace) -> list[Arrival]:
    """The arrivals that the trace options ask for. Raises UserError."""
    try:
        found = traces.read(Path(args.trace)) if args.trace not in (None, "sample") else traces.shipped()
        length_s = found[-1].at_s + 1.0 - args.start if args.duration is None else args.duration
        cut = traces.scaled(traces.window(found, args.start, length_s), args.scale, Random(args.seed))
    except BadTrace as e:
        raise UserError(str(e)) from e
    if not cut:
        raise UserError(
            "no requests are left of the trace",
            f"It has {len(found)} in {found[-1].at_s:.0f} s: check --start, --duration and --scale",
        )
    if args.max_prompt or args.max_output:
        cut = traces.fitted(cut, args.max_prompt or 1 << 40, args.max_output or 1 << 40).arrivals
    return cut


def targets(args: argparse.Namespace) -> Slo:
    """The targets on the command line. Raises UserError for what is not a duration."""

    def target(name: str) -> Target | None:
        text = getattr(args, name)
        if text is None:
            return None
        try:
            return Target(duration_ms(text) / 1000, args.percentile)
        except ValueError as e:
            raise UserError(f"--{name} {text}: not a duration", "Write 500ms, 2s or 1m30s") from e

    return Slo(ttft=target("ttft"), itl=target("itl"), e2e=target("e2e"))


def run(args: argparse.Namespace) -> int:
    """The command."""
    return asyncio.run(_run(args, make_console()))


async def _run(args: argparse.Namespace, console: Console) -> int:
    slo = targets(args)
    arrivals = chosen_arrivals(args)
    url = args.url.rstrip("/").removesuffix("/v1")
    async with aiohttp.ClientSession() as session:
        try:
            model = args.model or await client.served_model(session, url, args.api_key)
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as e:
            raise Failed(f"{url}: cannot list models: {e or type(e).__name__}") from e
    planned = openloop.plan(arrivals, Random(args.seed), args.api)
    last_s = arrivals[-1].at_s
    step(
        console,
        f"{len(planned)} requests in {last_s:.0f} s ({traces.requests_per_second(arrivals):.2f}/s) "
        f"to {model} at {url}",
    )
    done: list[Record] = []
    progress = asyncio.create_task(_tell_progress(console, done, len(planned)))
    try:
        records = await openloop.replay(
            planned,
            Endpoint(url, model, args.api, args.api_key),
            on_record=done.append,
            exact_length=not args.natural_length,
            timeout_s=args.timeout,
        )
    finally:
        progress.cancel()
    duration_s = max(r.due_s + r.send_lag_s + r.answer.e2e_s for r in records)
    result = report.summarise(records, slo, duration_s)
    console.print(table.summary(result, slo))
    if args.json:
        args.json.write_text(json.dumps(report.as_json(result, records), indent=1) + "\n")
    return EXIT_OK


async def _tell_progress(console: Console, done: list[Record], total: int) -> None:
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        console.print(f"    {len(done)} of {total} answered")
