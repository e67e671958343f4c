"""Tables for people: the live one of `headway up`, and the summary of a replay. Pure: values in, text out."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headway_cli.figures import Figures
from headway_cli.report import Report, Spread
from headway_engine.protocol import Limits
from headway_operator.resource import Slo, Target


@dataclass(frozen=True, slots=True)
class View:
    """Everything that the live table shows."""

    name: str
    endpoint: str
    state: str  # Ready, or what it is doing
    elapsed_s: float
    figures: Figures
    slo: Slo
    verdict: str = ""  # of the tuner, one word
    reason: str = ""  # in one sentence
    decisions: tuple[str, ...] = ()  # newest last
    traffic: str = ""  # what a replay is doing


def live(view: View) -> RenderableType:
    """The live table."""
    f = view.figures
    now = Table(show_header=True, header_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("TTFT p95", "ITL p95", "output", "prompt", "requests", "running", "waiting", "KV used"):
        now.add_column(heading, no_wrap=True)
    now.add_row(
        against(f.ttft_p95_s, view.slo.ttft),
        against(f.itl_p95_s, view.slo.itl),
        rate(f.output_tokens_per_s, "tok/s"),
        rate(f.prompt_tokens_per_s, "tok/s"),
        rate(f.requests_per_s, "/s", digits=2),
        str(f.running),
        str(f.waiting),
        "-" if f.kv_used_ratio is None else f"{f.kv_used_ratio:.0%}",
    )
    lines: list[RenderableType] = [now, Text("")]
    if f.limits is not None:
        lines.append(Text.assemble(("limits   ", "bold"), limits_line(f.limits, mixed=f.mixed)))
    if view.traffic:
        lines.append(Text.assemble(("traffic  ", "bold"), view.traffic))
    if view.verdict or view.reason:
        lines.append(Text.assemble(("tuner    ", "bold"), (view.verdict, "cyan"), f"  {view.reason}"))
    if view.decisions:
        lines += [Text(""), Text("changes", style="bold"), *(Text(f"  {line}") for line in view.decisions)]
    title = f"{view.name}  {view.endpoint}  {view.state}  {clock(view.elapsed_s)}"
    return Panel(Group(*lines), title=title, title_align="left", subtitle="Ctrl-C: finish streams and stop")


def plain(view: View) -> str:
    """The same in one line, for logs and pipes."""
    f = view.figures
    parts = [
        f"[{clock(view.elapsed_s)}]",
        f"ttft-p95={milliseconds(f.ttft_p95_s)}",
        f"itl-p95={milliseconds(f.itl_p95_s)}",
        f"output={rate(f.output_tokens_per_s, 'tok/s').replace(' ', '')}",
        f"running={f.running}",
        f"waiting={f.waiting}",
    ]
    if f.limits is not None:
        parts.append(
            f"maxBatchTokens={f.limits.max_batch_tokens} chunk={f.limits.prefill_chunk_tokens} "
            f"generation={f.limits.generation}"
        )
    if view.traffic:
        parts.append(f"traffic=({view.traffic})")
    if view.verdict:
        parts.append(f"tuner={view.verdict}")
    return " ".join(parts)


def limits_line(limits: Limits, *, mixed: bool = False) -> str:
    """Limits in force, with their generation."""
    text = (
        f"maxBatchTokens {limits.max_batch_tokens}   prefillChunkTokens {limits.prefill_chunk_tokens}   "
        f"maxBatchSequences {limits.max_batch_sequences}   queue {limits.max_queued_tokens} tokens   "
        f"window {limits.window_ms} ms   generation {limits.generation}"
    )
    return f"{text}   (pods differ)" if mixed else text


def milliseconds(seconds: float | None) -> str:
    """`1234ms` as people write it: two significant digits below 10 ms, whole ones above."""
    if seconds is None:
        return "-"
    ms = seconds * 1000
    return f"{ms:.1f}ms" if ms < 10 else f"{ms:.0f}ms" if ms < 10_000 else f"{seconds:.1f}s"


def against(seconds: float | None, target: Target | None) -> Text:
    """A latency, red above its target and green below, with the target beside it."""
    value = milliseconds(seconds)
    if target is None:
        return Text(value)
    style = "" if seconds is None else "bold red" if seconds > target.target_s else "green"
    return Text.assemble((value, style), f" / {milliseconds(target.target_s)}")


def rate(value: float | None, unit: str, digits: int = 0) -> str:
    """A rate with its unit, `-` where it is not known."""
    return "-" if value is None else f"{value:.{digits}f} {unit}"


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def summary(report: Report, slo: Slo) -> RenderableType:
    """A replay's report: counts, attainment and percentiles beside the targets."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for heading in ("", "p50", "p95", "p99", "target", "missed by"):
        table.add_column(heading, no_wrap=True)
    rows: Sequence[tuple[str, Spread | None, Target | None, int]] = (
        ("TTFT", report.ttft, slo.ttft, report.missed_ttft),
        ("ITL", report.itl, slo.itl, report.missed_itl),
        ("e2e", report.e2e, slo.e2e, report.missed_e2e),
    )
    for name, spread, target, missed in rows:
        figures = (spread.p50_s, spread.p95_s, spread.p99_s) if spread else (None, None, None)
        wanted = f"{target.percentile} {milliseconds(target.target_s)}" if target else "-"
        share = f"{missed} of {report.finished}" if target else "-"
        table.add_row(name, *(milliseconds(s) for s in figures), wanted, share)
    lines: list[RenderableType] = [
        Text(
            f"{report.offered} requests in {report.duration_s:.0f} s: {report.finished} finished, "
            f"{report.rejected} rejected, {report.failed} failed"
        ),
        Text(
            f"attainment {report.attainment:.1%} (share of offered requests that met every target), "
            f"goodput {report.goodput_rps:.2f} requests/s, {report.output_tokens_per_s:.0f} output tokens/s",
            style="bold",
        ),
        table,
    ]
    if report.gaps_over is not None:
        lines.append(Text(f"{report.gaps_over:.1%} of all gaps were over the ITL target"))
    lines += [Text(f"  {count} x {cause}") for cause, count in report.errors]
    if report.send_lag is not None:
        lines.append(Text(f"send lag p99 {milliseconds(report.send_lag.p99_s)}", style="dim"))
    if report.client_too_slow:
        lines.append(
            Text(
                "WARNING: requests left late: the client is the bottleneck, and these figures are not the "
                "server's. Replay from another machine, or less traffic (--scale).",
                style="bold yellow",
            )
        )
    return Group(*lines)
