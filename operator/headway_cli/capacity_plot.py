"""A simulation over time as one SVG picture: load, latencies beside their targets, limits, replicas.

Pure, and needs no library: the same figures give the same text. Gaps stay gaps: what was not measured in an
interval has no line there.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from headway_cli.capacity_report import Figures, Moment
from headway_cli.table import clock

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, GAP = 960, 130, 70, 150, 50, 42
INK, GRID, TARGET = "#333333", "#dddddd", "#c0392b"
COLOURS = ("#1f6fb4", "#d9822b")
MOST_POINTS = 2000
"""Of one line; more than that no screen shows."""


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    value: Callable[[Moment], float | None]
    steps: bool = False  # holds its value until the next one


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    lines: tuple[_Line, ...]
    target: float | None = None


def svg(found: Figures) -> str:
    """The picture."""
    panels = _panels(found)
    height = TOP + len(panels) * (PANEL_HEIGHT + GAP)
    title = (
        f"{found.name}: {found.offered} requests on {found.replicas} "
        f"replica{'s' if found.replicas > 1 else ''}, attainment {found.attainment:.1%}"
    )
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="26" font-size="16">{escape(title)}</text>',
    ]
    end_s = found.ticks[-1].at_s if found.ticks else 1.0
    for number, panel in enumerate(panels):
        body += _panel(panel, _thinned(found.ticks), end_s, TOP + number * (PANEL_HEIGHT + GAP))
    return "\n".join([*body, "</svg>", ""])


def _panels(found: Figures) -> list[_Panel]:
    ttft, itl, _ = found.targets

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1000

    return [
        _Panel(
            "requests/s",
            (_Line("offered", lambda m: m.offered_per_s), _Line("refused", lambda m: m.refused_per_s)),
        ),
        _Panel(
            f"TTFT {ttft.percentile or 'p95'}, ms",
            (_Line("measured", lambda m: ms(m.ttft_s)),),
            ms(ttft.target_s),
        ),
        _Panel(
            f"ITL {itl.percentile or 'p95'}, ms",
            (_Line("measured", lambda m: ms(m.itl_s)),),
            ms(itl.target_s),
        ),
        _Panel("maxBatchTokens", (_Line("in force", lambda m: m.max_batch_tokens, steps=True),)),
        _Panel(
            "replicas",
            (
                _Line("there", lambda m: m.replicas, steps=True),
                _Line("asked for", lambda m: m.replicas_needed, steps=True),
            ),
        ),
    ]


def _thinned(ticks: Sequence[Moment]) -> Sequence[Moment]:
    return ticks[:: math.ceil(len(ticks) / MOST_POINTS)] if len(ticks) > MOST_POINTS else ticks


def _panel(panel: _Panel, ticks: Sequence[Moment], end_s: float, top: float) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, top + PANEL_HEIGHT
    values = [v for line in panel.lines for tick in ticks if (v := line.value(tick)) is not None]
    most = _round_up(max([*values, panel.target or 0.0], default=0.0))

    def x(at_s: float) -> float:
        return LEFT + (right - LEFT) * at_s / end_s

    def y(value: float) -> float:
        return bottom - PANEL_HEIGHT * value / most

    yield f'<text x="{LEFT}" y="{top - 6:g}" font-weight="bold">{escape(panel.title)}</text>'
    for share in (0.0, 0.5, 1.0):
        at, label = y(most * share), f"{most * share:g}"
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="{GRID}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        label = clock(end_s * share)
        yield (
            f'<text x="{x(end_s * share):.1f}" y="{bottom + 15:g}" text-anchor="middle" '
            f'font-size="10">{label}</text>'
        )
    names = []
    if panel.target is not None:
        at = y(panel.target)
        yield (
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="{TARGET}" '
            'stroke-dasharray="5 4"/>'
        )
        names.append((f"target {panel.target:g}", TARGET))
    for line, colour in zip(panel.lines, COLOURS, strict=False):
        names.append((line.name, colour))
        for points in _runs((tick.at_s, line.value(tick)) for tick in ticks):
            corners = _stairs(points) if line.steps else points
            path = " ".join(f"{x(at_s):.1f},{y(value):.1f}" for at_s, value in corners)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    for number, (name, colour) in enumerate(names):
        at = top + 12 + 16 * number
        yield f'<text x="{right + 10}" y="{at:g}" fill="{colour}">{escape(name)}</text>'


def _runs(points: Iterable[tuple[float, float | None]]) -> Iterator[list[tuple[float, float]]]:
    """Stretches without a missing value."""
    run: list[tuple[float, float]] = []
    for at_s, value in points:
        if value is not None:
            run.append((at_s, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _stairs(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Each value holds from the look before to its own."""
    before_s = None
    for at_s, value in points:
        if before_s is not None:
            yield before_s, value
        yield at_s, value
        before_s = at_s


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten: an axis that people can read."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
