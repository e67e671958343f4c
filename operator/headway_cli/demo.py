"""`headway demo`: a real model answers, then real traffic shows the tuner at work. Nothing is staged.

What is chosen for the show is said aloud: targets and traffic come from a measurement of this machine, and
the starting limits are bad on purpose. Everything else is what `headway up` does with any resource.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from random import Random

import aiohttp
from rich.console import Console
from rich.table import Table

from headway_cli import arguments, client, openloop, probe, report, table, traces
from headway_cli.client import Answer, Ending
from headway_cli.console import make_console, step
from headway_cli.documents import Manifest, read_resources
from headway_cli.errors import Failed
from headway_cli.pairs import Pair, compare
from headway_cli.probe import Suited
from headway_cli.report import Record, Report
from headway_cli.traces import Arrival
from headway_cli.up import Session, changes
from headway_operator.resource import Slo

TRACE_START_S = 360.0
"""Where the traffic is played from: the trace begins quietly."""
SHARE_BEFORE = 1 / 5
"""Share of the time in which the tuner only recommends, so that there is a before."""
SETTLE_S = 20.0
"""Left out between before and after: the tuner moves in steps."""
ANSWER_TOKENS = 60
SHOWN_REASONS = 4
SLOWED = 1.5
"""From this factor on a slower machine is worth a word."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `headway demo`."""
    parser.add_argument(
        "--minutes", type=arguments.positive, default=3.0, help="minutes of traffic (default 3)"
    )
    parser.add_argument("--prompt", default="What is the capital of France?", help="the first question")
    parser.add_argument("-f", "--file", type=Path, help="another resource than examples/quickstart.yaml")
    parser.add_argument(
        "--port", type=arguments.port, default=0, help="port of the endpoint (default: any free)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of thinning and prompts (default 1)")


def run(args: argparse.Namespace) -> int:
    """The command."""
    return asyncio.run(_run(args, make_console()))


def quickstart() -> Path:
    """The example that the demo serves: in the work tree, or where the package carries it."""
    work_tree = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    return (
        work_tree if work_tree.is_file() else Path(str(files("headway_cli") / "examples" / "quickstart.yaml"))
    )


async def _run(args: argparse.Namespace, console: Console) -> int:
    resource, others = read_resources(args.file or quickstart())
    # While the machine is measured nobody shall move limits; the promise follows from the measurement.
    resource["spec"]["tuning"]["mode"] = "Off"
    async with Session(console, resource, others, port=args.port) as session:
        if await session.until_ready():
            session.introduce()
            await _show(session, args)
    return session.exit_status


async def _show(session: Session, args: argparse.Namespace) -> None:
    await answer(session, args.prompt)
    suited, arrivals = await prepare(session, args.minutes * 60, args.seed)
    if session.stop.is_set():
        return
    await spoil(session, suited)
    async with session.showing():
        act = await play(session, arrivals, args.minutes * 60, Random(args.seed))
    conclude(session, act, suited)
    # Last: it edits the resource, and the history that the summary tells from would be of these edits.
    if pairs := await pair_up(session, act, suited, Random(args.seed)):
        session.console.print(f"    {paired_words(pairs)}", markup=False)
    session.console.print(
        "\n    Next: headway up -f examples/quickstart.yaml, or kubectl apply -f the same file.\n",
        markup=False,
    )


async def answer(session: Session, question: str) -> None:
    """One streamed chat answer, as it comes."""
    step(session.console, f"Asking: {question}")
    pieces: asyncio.Queue[str] = asyncio.Queue()
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(
            client.ask(http, session.endpoint, question, ANSWER_TOKENS, on_text=pieces, keep_text=True)
        )
        out = session.console.file
        out.write("\n    ")
        while not (asking.done() and pieces.empty()):
            getting = asyncio.create_task(pieces.get())
            await asyncio.wait({asking, getting}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                out.write(getting.result().replace("\n", "\n    "))
                out.flush()
            else:
                getting.cancel()
        out.write("\n\n")
    found: Answer = asking.result()
    if found.ending is not Ending.FINISHED:
        raise Failed(f"no answer: {found.http_status or ''} {found.error}")
    per_s = len(found.gaps_s) / sum(found.gaps_s) if found.gaps_s else 0.0
    session.console.print(
        f"    first token after {table.milliseconds(found.ttft_s)}, then {per_s:.1f} tokens/s", markup=False
    )


async def prepare(session: Session, length_s: float, seed: int) -> tuple[Suited, list[Arrival]]:
    """Measure the machine, then choose targets and traffic for it, aloud."""
    step(session.console, "Measuring this machine")
    samples = await session.machine.scrape()
    capacity = next((s.capacity for s in samples.values() if s.capacity), None)
    if capacity is None:
        raise Failed("the engine does not tell its capacity")
    context = capacity.max_model_tokens
    speed = await probe.measure(session.endpoint, Random(seed), min(512, context // 2))
    trace = traces.window(traces.shipped(), TRACE_START_S, length_s)
    shape = traces.fitted(trace, 1000, 1000)
    mean_share = sum(a.prompt_tokens for a in shape.arrivals) / len(trace) / 1000
    sequences = session.machine.resource.batching.max_batch_sequences
    suited = probe.suit(speed, context=context, mean_prompt_share=mean_share, max_sequences=sequences)
    fit = traces.fitted(trace, suited.max_prompt_tokens, suited.max_output_tokens)
    scale = suited.requests_per_s / (len(trace) / length_s)
    arrivals = traces.scaled(fit.arrivals, scale, Random(seed))
    if not arrivals:
        raise Failed("this machine is too slow for any traffic of the trace in this time: more --minutes")
    for line in (
        f"prefill {speed.prefill_tokens_per_s:.0f} tokens/s, decode {speed.decode_tokens_per_s:.0f} tokens/s "
        f"with {speed.streams} streams (a step takes {table.milliseconds(speed.decode_step_s)})",
        f"Targets that suit it: TTFT p95 {suited.ttft_ms} ms, ITL p95 {suited.itl_ms} ms. "
        f"A step may then hold about {suited.fitting_tokens} prompt tokens beside the decodes",
        f"Traffic that suits it: the Azure conversation trace thinned to {scale * traces.SHIPPED_SHARE:.0%}, "
        f"{len(arrivals)} requests in {length_s:.0f} s (time is not stretched),",
        f"prompts times {fit.prompt_factor:.2f} (up to {suited.max_prompt_tokens} tokens), "
        f"answers times {fit.output_factor:.2f} (up to {suited.max_output_tokens} tokens)",
    ):
        session.console.print(f"    {line}", markup=False)
    return suited, arrivals


async def spoil(session: Session, suited: Suited) -> None:
    """Set the targets, and limits that suit them badly: a step may take in everything there is."""
    machine = session.machine
    most = machine.resource.batching.capacity_max_batch_tokens
    step(
        session.console,
        f"Starting with bad limits on purpose: maxBatchTokens and prefillChunkTokens {most}. "
        "One long prompt then stops every stream until it is read",
    )

    def change(spec: Manifest) -> None:
        spec["slo"] = {"ttft": {"p95": f"{suited.ttft_ms}ms"}, "itl": {"p95": f"{suited.itl_ms}ms"}}
        spec["batching"] |= {"maxBatchTokens": most, "prefillChunkTokens": most}

    machine.edit(change)
    await machine.until_in_force(lambda limits: limits.max_batch_tokens == most)
    machine.edit(lambda spec: spec["tuning"].update(mode="Recommend"))


@dataclass(frozen=True, slots=True)
class Act:
    """What happened during the traffic."""

    records: list[Record]
    released_s: float  # when the tuner was allowed to act, on the trace's clock
    slo: Slo
    tokens_before: int
    tokens_after: int


async def play(session: Session, arrivals: Sequence[Arrival], length_s: float, chance: Random) -> Act:
    """Traffic; after a while the tuner may act."""
    slo = session.machine.resource.slo
    released_s = length_s * SHARE_BEFORE
    planned = await asyncio.to_thread(openloop.plan, arrivals, chance)
    done: list[Record] = []

    def took(record: Record) -> None:
        done.append(record)
        met = sum(report.meets(r.answer, slo) for r in done[-30:])
        session.traffic = (
            f"{len(done)} of {len(planned)} answered; of the last {len(done[-30:])}, {met} met every target"
        )

    async def release() -> None:
        await asyncio.sleep(released_s)
        session.machine.edit(lambda spec: spec["tuning"].update(mode="Auto"))
        session.note("tuning.mode Recommend -> Auto: the tuner may act now")

    before = _tokens(session)
    releasing = asyncio.create_task(release())
    try:
        records = await openloop.replay(planned, session.endpoint, on_record=took, stop=session.stop)
    finally:
        releasing.cancel()
    return Act(records, released_s, slo, before, _tokens(session))


def _tokens(session: Session) -> int:
    limits = session.figures.limits
    return limits.max_batch_tokens if limits else session.machine.resource.batching.max_batch_tokens


async def pair_up(session: Session, act: Act, suited: Suited, chance: Random) -> list[Pair]:
    """The limits at the start and at the end of the traffic, in turns and on an idle engine.

    The columns of the summary are minutes apart, and other programs may have slowed one of them; a pair is
    seconds apart. Nothing where nothing moved, or the user has seen enough.
    """
    machine, tuned = session.machine, session.figures.limits
    most = machine.resource.batching.capacity_max_batch_tokens
    if session.stop.is_set() or tuned is None or tuned.max_batch_tokens == act.tokens_before:
        return []
    step(session.console, f"Comparing both limits in {probe.PAIRS} pairs, seconds apart")
    good = {"maxBatchTokens": tuned.max_batch_tokens, "prefillChunkTokens": tuned.prefill_chunk_tokens}
    bad = {"maxBatchTokens": most, "prefillChunkTokens": most}

    async def switch(to_tuned: bool) -> None:
        values = good if to_tuned else bad

        def change(spec: Manifest) -> None:
            spec["tuning"]["mode"] = "Off"
            spec["batching"] |= values

        machine.edit(change)
        await machine.until_in_force(lambda limits: limits.max_batch_tokens == values["maxBatchTokens"])

    return await probe.paired(session.endpoint, chance, suited.max_prompt_tokens, switch, session.stop)


def paired_words(pairs: Sequence[Pair]) -> str:
    """What the pairs say; that they say nothing, where they do not agree."""
    found = compare(pairs)
    measured = (
        f"a long prompt stopped a running stream for {table.milliseconds(found.bad_s)} with the bad limits "
        f"and for {table.milliseconds(found.tuned_s)} with the tuned ones (medians of {found.pairs} pairs; "
        f"shorter in {found.better} of them)"
    )
    if found.is_better:
        return f"Side by side {measured}: {found.times:.1f} times shorter"
    if found.is_worse:
        return f"Side by side {measured}: the tuned limits are the worse ones here"
    return f"Side by side {measured}. That may be chance: no difference is shown on this machine now"


def conclude(session: Session, act: Act, suited: Suited) -> None:
    """Before and after, and every decision with its reason."""
    step(session.console, "Summary")
    before = [r for r in act.records if r.due_s + r.answer.e2e_s <= act.released_s]
    after = [r for r in act.records if r.due_s >= act.released_s + SETTLE_S]
    end_s = max((r.due_s + r.answer.e2e_s for r in act.records), default=0.0)
    whole = report.summarise(act.records, act.slo, max(end_s, 1.0))
    # First, since it decides how to read the table.
    if slower := slowdown(session, suited):
        session.console.print(f"    {slower}", markup=False)
    session.console.print(
        comparison(
            act,
            report.summarise(before, act.slo, act.released_s),
            report.summarise(after, act.slo, max(1.0, end_s - act.released_s - SETTLE_S)),
            whole,
        )
    )
    for line in decisions(session):
        session.console.print(f"    {line}", markup=False)
    if whole.client_too_slow:
        session.console.print(
            "    Requests left late: this machine was too busy to send them on time. Read with care",
            markup=False,
        )


def slowdown(session: Session, suited: Suited) -> str:
    """A word about a machine that is not as fast as it was when the targets were chosen; empty otherwise."""
    cost = (session.machine.status.get("tuning") or {}).get("stepCost") or {}
    times = cost.get("perPrefillTokenNanoseconds", 0) / 1e9 * suited.prefill_tokens_per_s
    if times < SLOWED:
        return ""
    return (
        f"A prompt token took {times:.1f} times as long in the end as when this machine was measured: other "
        "programs use it. The targets were chosen for the faster one, so the two columns below do not "
        "compare. What is measured side by side at the end does"
    )


def decisions(session: Session) -> list[str]:
    """The way of each limit that moved, and the reasons for the first moves."""
    history = (session.machine.status.get("tuning") or {}).get("history") or []
    ways: dict[str, list[int]] = {}
    for entry in reversed(history):
        for move in entry.get("changes") or ():
            ways.setdefault(move["name"], [move["from"]]).append(move["to"])
    if not ways:
        return ["", "No limit was moved: the traffic ended before the tuner had seen enough"]
    lines = ["", "What moved:"]
    lines += [f"  {name} {' → '.join(map(str, values))}" for name, values in ways.items()]
    told = [e for e in session.events if e.reason in ("LimitsChanged", "LimitsRecommended")]
    lines += ["", "Why:"]
    for event in told[:SHOWN_REASONS]:
        first, *rest = changes(event)
        lines += [f"  {first}", *(f"            {change}" for change in rest)]
    if len(told) > SHOWN_REASONS:
        lines.append(f"  and {len(told) - SHOWN_REASONS} more, each with its reason in status.tuning.history")
    return lines


def comparison(act: Act, before: Report, after: Report, whole: Report) -> Table:
    """Three columns: bad limits, tuned, everything."""
    reports = (before, after, whole)
    rows: Sequence[tuple[str, Sequence[str]]] = (
        ("maxBatchTokens", (str(act.tokens_before), str(act.tokens_after), "")),
        ("requests", [str(r.offered) for r in reports]),
        ("rejected, failed", [f"{r.rejected}, {r.failed}" for r in reports]),
        ("attainment", [f"{r.attainment:.0%}" if r.offered else "-" for r in reports]),
        ("TTFT p95", [_p95(r.ttft) for r in reports]),
        ("ITL p95", [_p95(r.itl) for r in reports]),
        ("gaps over the target", ["-" if r.gaps_over is None else f"{r.gaps_over:.1%}" for r in reports]),
        ("output tokens/s", ("", "", f"{whole.output_tokens_per_s:.0f}")),
    )
    shown = Table(box=None, pad_edge=False, padding=(0, 4, 0, 0), header_style="bold")
    targets = {
        "gaps over the target": "5%",
        "TTFT p95": table.milliseconds(act.slo.ttft.target_s) if act.slo.ttft else "",
        "ITL p95": table.milliseconds(act.slo.itl.target_s) if act.slo.itl else "",
    }
    for heading in ("", "bad limits", "tuned", "whole run", "target"):
        shown.add_column(heading, no_wrap=True)
    for name, values in rows:
        shown.add_row(name, *values, targets.get(name, ""))
    return shown


def _p95(spread: report.Spread | None) -> str:
    return table.milliseconds(spread.p95_s if spread else None)
