"""Tables say what matters, in a terminal and in a pipe."""

import io

from rich.console import Console, RenderableType

from headway_cli import table
from headway_cli.console import make_console
from headway_cli.figures import Figures
from headway_cli.report import Spread, summarise
from headway_cli.table import View
from headway_engine.protocol import Limits
from headway_operator.resource import Slo, Target

SLO = Slo(ttft=Target(0.5), itl=Target(0.05))
FIGURES = Figures(
    window_s=15,
    ttft_p95_s=0.6,
    itl_p95_s=0.04,
    output_tokens_per_s=123.4,
    prompt_tokens_per_s=456.7,
    requests_per_s=1.25,
    running=7,
    waiting=2,
    kv_used_ratio=0.42,
    limits=Limits(generation=3, max_batch_tokens=640, prefill_chunk_tokens=96),
    pods=1,
)
VIEW = View(
    name="chat",
    endpoint="http://127.0.0.1:8000/v1",
    state="ready",
    elapsed_s=75,
    figures=FIGURES,
    slo=SLO,
    verdict="Shrink",
    reason="ITL binds",
    decisions=("12:00:00  maxBatchTokens 2048 → 640: ITL binds",),
    traffic="3 of 9 answered",
)


def text(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_live_table_shows_latency_against_targets_limits_and_reasons() -> None:
    """Everything that `headway up` promises to show."""
    shown = text(table.live(VIEW))
    for part in (
        "600ms / 500ms", "40ms / 50ms", "123 tok/s", "1.25 /s", "42%", "maxBatchTokens 640", "generation 3",
        "Shrink", "ITL binds", "2048 → 640", "3 of 9", "ready", "1:15",
    ):  # fmt: skip
        assert part in shown


def test_the_live_table_shows_dashes_while_nothing_is_known() -> None:
    """Unknown is not 0."""
    empty = View("chat", "url", "loading", 0, Figures(), Slo())
    assert "loading" in text(table.live(empty))
    assert "- " in text(table.live(empty))
    assert "ttft-p95=-" in table.plain(empty)


def test_the_plain_line_has_the_same_figures() -> None:
    """One line, words that a grep finds."""
    line = table.plain(VIEW)
    assert "\n" not in line
    for part in ("ttft-p95=600ms", "itl-p95=40ms", "running=7", "maxBatchTokens=640", "generation=3"):
        assert part in line


def test_pods_that_differ_are_told() -> None:
    """The limits of one would pass for those of all."""
    assert "pods differ" in table.limits_line(Limits(), mixed=True)


def test_milliseconds_read_well_at_every_size() -> None:
    """Short, and no false digits."""
    assert [table.milliseconds(s) for s in (None, 0.0042, 0.0421, 1.25, 12.34)] == [
        "-", "4.2ms", "42ms", "1250ms", "12.3s",
    ]  # fmt: skip


def test_a_slow_client_is_warned_about() -> None:
    """Its figures must not pass for the server's."""
    report = summarise([], SLO, 1.0)
    slow = type(report)(
        **{name: getattr(report, name) for name in report.__dataclass_fields__}
        | {"client_too_slow": True, "send_lag": Spread(1, 0.1, 0.1, 0.1), "errors": (("429: full", 3),)}
    )
    shown = text(table.summary(slow, SLO))
    assert "client is the bottleneck" in shown
    assert "3 x 429: full" in shown


def test_a_pipe_gets_no_colour_and_no_wrapping() -> None:
    """Lines of a log stay lines."""
    console = make_console(io.StringIO())
    console.print("[bold]x[/]" + "y" * 300)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "x" + "y" * 300 + "\n"
