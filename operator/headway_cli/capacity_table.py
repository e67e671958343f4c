"""The answer of a simulation as lines of text. Pure: the same figures give the same lines."""

from collections.abc import Iterable, Iterator, Sequence

from headway_cli.capacity_report import Cost, Figures, Move, TargetFigures
from headway_cli.table import clock, milliseconds

SHOWN_MOVES = 12
"""The first and the last of them; all are in the JSON."""


def lines(found: Figures, assumptions: Sequence[str], *, currency: str, acting: bool) -> list[str]:
    """All of it. `acting`: the tuner's moves were made, and not only recommended."""
    return [
        *_traffic(found),
        "",
        *_targets(found),
        "",
        *_judgement(found),
        *_refusals(found),
        "",
        *_use(found, currency),
        *_section("Tuner moves" if acting else "Tuner's recommendations, not applied", _moves(found.moves)),
        *_section("Limits at the end", [_limits(found)]),
        *_section("Assumed", assumptions),
    ]


def comparison(rows: Sequence[Figures], currency: str) -> list[str]:
    """One row for each number of replicas that was tried."""
    table: list[tuple[str, ...]] = [
        ("replicas", "attainment", "TTFT p95", "ITL p95", "refused", "busy", "cost/M output", "meets the SLO")
    ]
    for f in rows:
        by_name = {target.name: target for target in f.targets}
        table.append(
            (
                str(f.replicas),
                f"{f.attainment:.1%}",
                _p95(by_name["TTFT"]),
                _p95(by_name["ITL"]),
                str(f.refused),
                f"{f.utilisation:.0%}",
                _per_million(f.cost, currency),
                "yes" if f.meets else "no",
            )
        )
    return _aligned(table)


def _traffic(f: Figures) -> Iterator[str]:
    yield (
        f"{f.name}: {f.offered} requests in {clock(f.duration_s)} on {f.replicas} "
        f"replica{'s' if f.replicas > 1 else ''}: {f.finished} finished, {f.refused} refused"
    )


def _targets(f: Figures) -> list[str]:
    table: list[tuple[str, ...]] = [("", "p50", "p95", "p99", "target", "kept by", "met")]
    for t in f.targets:
        seen = (t.spread.p50_s, t.spread.p95_s, t.spread.p99_s) if t.spread else (None, None, None)
        wanted = "-" if t.target_s is None else f"{t.percentile} {milliseconds(t.target_s)}"
        of = "of gaps" if t.name == "ITL" else "of offered"
        kept = "-" if t.kept is None else f"{t.kept:.1%} {of}"
        met = "-" if t.met is None else "yes" if t.met else "NO"
        table.append((t.name, *(milliseconds(s) for s in seen), wanted, kept, met))
    return _aligned(table)


def _judgement(f: Figures) -> Iterator[str]:
    yield f"attainment     {f.attainment:.1%} of offered requests met every target"
    yield f"goodput        {f.goodput_rps:.2f} requests/s inside every target"
    yield f"throughput     {f.output_tokens_per_s:.0f} output and {f.prompt_tokens_per_s:.0f} prompt tokens/s"
    said = f"tuner says     {f.verdict.feasibility}"
    if f.verdict.share < 1:
        said += f" ({f.verdict.share:.0%} of the time)"
    yield f"{said}: {f.verdict.reason}"
    if f.verdict.replicas_needed is not None:
        yield f"replicas       {f.replicas}; at its peak the tuner asked for {f.verdict.replicas_needed}"


def _refusals(f: Figures) -> Iterator[str]:
    for refused in f.refusals:
        yield f"refused        {refused.count} by {refused.why}, for example: {refused.example}"


def _use(f: Figures, currency: str) -> Iterator[str]:
    hits = f", {f.prefix_hit_tokens} prompt tokens from the prefix cache" if f.prefix_hit_tokens else ""
    yield (
        f"busy           {f.utilisation:.0%} of the replicas' time; {f.steps} steps, "
        f"{f.preemptions} preemptions{hits}"
    )
    if f.cost is not None:
        yield (
            f"cost           {f.cost.total:.2f} {currency} for {f.cost.accelerator_hours:.2f} hours of "
            f"accelerators ({f.cost.accelerators} x {clock(f.duration_s)}); "
            f"{_per_million(f.cost, currency)} per million output tokens"
        )


def _per_million(cost: Cost | None, currency: str) -> str:
    if cost is None or cost.per_million_output_tokens is None:
        return "-"
    return f"{cost.per_million_output_tokens:.2f} {currency}"


def _moves(moves: Sequence[Move]) -> Iterator[str]:
    for move in _ends(moves):
        if move is None:
            yield f"   ...  {len(moves) - SHOWN_MOVES} more: -o json has them all"
            continue
        # A decision's reason mostly is those of its moves, one after another.
        reason = move.why if move.why in move.reason else f"{move.why}: {move.reason}"
        yield f"{clock(move.at_s):>6}  {move.parameter} {move.old} -> {move.new}: {reason}"


def _ends(moves: Sequence[Move]) -> Iterator[Move | None]:
    """All, or the first and last of them with None between."""
    if len(moves) <= SHOWN_MOVES:
        yield from moves
        return
    yield from moves[: SHOWN_MOVES // 2]
    yield None
    yield from moves[-SHOWN_MOVES // 2 :]


def _limits(f: Figures) -> str:
    limits = f.limits
    return (
        f"maxBatchTokens {limits.max_batch_tokens}, prefillChunkTokens {limits.prefill_chunk_tokens}, "
        f"maxBatchSequences {limits.max_batch_sequences}, queue.maxTokens {limits.max_queued_tokens}"
    )


def _section(title: str, found: Iterable[str]) -> list[str]:
    body = [f"  {line}" for line in found]
    return ["", title, *body] if body else []


def _p95(target: TargetFigures) -> str:
    return milliseconds(target.spread.p95_s if target.spread else None)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
