"""Request traces as arrivals: readers of the published formats, thinning, and fitting to a context length.

A trace holds when a request came and how long it was, never what it said. Time is never stretched: that
would stretch bursts too. Less traffic keeps a random share of the requests, more traffic repeats them with
a little jitter. Knows nothing of prompts, HTTP or clocks.
"""

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import as_file, files
from pathlib import Path
from random import Random
from typing import Any

CONVERSATION = "azure_conv_2023_sample.csv"
"""The trace that ships with Headway; see data/README.md for its source and licence."""

SHIPPED_SHARE = 0.4
"""Share of the original's requests that the shipped trace has."""

MOST_TOKENS = 100_000_000
"""More than any model takes; a longer request is a column that means something else."""

MOST_REQUESTS = 10_000_000
"""Lists of more do not fit into the memory of an ordinary machine."""

LONGEST_S = 366 * 86_400.0
"""A trace of more than a year is one whose times are in another unit."""

MOST_PREFIX_ID = 1 << 62

JITTER_S = 0.5
"""How far a repeated request is moved from the one it repeats."""


class BadTrace(ValueError):
    """A trace that cannot be read; the message names file, line and what was expected."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the start of the trace, and its lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()  # of the prompt's blocks of 512 tokens, where the trace tells them


def read(path: Path) -> list[Arrival]:
    """Arrivals of a file in time order, the first at 0 s.

    Known by their header: Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens), ServeGen CSV (timestamp_ms,
    input_length, output_length), plain CSV (arrival_s, prompt_tokens, output_tokens); files that begin with
    `{` are Mooncake JSON lines (timestamp in ms, input_length, output_length). Raises BadTrace that names
    file, line and field.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            found = list(_rows(lines, str(path)))
    except OSError as e:
        raise BadTrace(f"{path}: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise BadTrace(f"{path}: not a text file") from e
    if not found:
        raise BadTrace(f"{path}: no requests in it")
    ordered = _from_zero(found)
    if ordered[-1].at_s > LONGEST_S:
        raise BadTrace(
            f"{path}: the last request comes {ordered[-1].at_s:g} s after the first, more than a year: "
            "is the time in another unit?"
        )
    return ordered


def shipped(name: str = CONVERSATION) -> list[Arrival]:
    """Arrivals of a trace that ships with Headway."""
    with as_file(files("headway_cli") / "data" / name) as path:
        return read(path)


def poisson(
    rate_per_s: float, duration_s: float, prompt_tokens: int, output_tokens: int, chance: Random
) -> list[Arrival]:
    """Arrivals at random, independent of each other, all of one size."""
    found: list[Arrival] = []
    at_s = chance.expovariate(rate_per_s)
    while at_s < duration_s:
        found.append(Arrival(at_s, prompt_tokens, output_tokens))
        at_s += chance.expovariate(rate_per_s)
    return found


def scaled(arrivals: Sequence[Arrival], scale: float, chance: Random) -> list[Arrival]:
    """`scale` times the traffic, without stretching time.

    Up to 1 each request is kept with that probability. Above, every request comes floor(scale) times and
    once more with the probability of the rest; repeats are moved by up to half a second.
    """
    if scale <= 0:
        raise BadTrace(f"scale {scale:g}: must be above 0")
    if scale * len(arrivals) > MOST_REQUESTS:
        raise BadTrace(
            f"scale {scale:g}: makes {scale * len(arrivals):.3g} requests of {len(arrivals)}; "
            f"{MOST_REQUESTS} are the most"
        )
    whole, rest = int(scale), scale - int(scale)
    out: list[Arrival] = []
    for arrival in arrivals:
        copies = whole + (chance.random() < rest)
        if copies:
            out.append(arrival)
        out += [
            replace(arrival, at_s=max(0.0, arrival.at_s + chance.uniform(-JITTER_S, JITTER_S)))
            for _ in range(copies - 1)
        ]
    return sorted(out, key=_time)


def window(arrivals: Sequence[Arrival], start_s: float, duration_s: float) -> list[Arrival]:
    """The arrivals of one stretch of time, counted from its start."""
    end_s = start_s + duration_s
    return [replace(a, at_s=a.at_s - start_s) for a in arrivals if start_s <= a.at_s < end_s]


@dataclass(frozen=True, slots=True)
class Fit:
    """Arrivals with shorter lengths, and the factors that made them so."""

    arrivals: list[Arrival]
    prompt_factor: float
    output_factor: float


def fitted(arrivals: Sequence[Arrival], max_prompt_tokens: int, max_output_tokens: int) -> Fit:
    """Prompts and outputs each shrunk by one factor, so that 95 % of them stay under their cap.

    One factor for all prompts keeps the shape of the mix; the few longer ones are cut at the cap. Lengths
    that fit as they are stay as they are.
    """
    prompt_factor = _factor([a.prompt_tokens for a in arrivals], max_prompt_tokens)
    output_factor = _factor([a.output_tokens for a in arrivals], max_output_tokens)

    def fit(tokens: int, factor: float, cap: int) -> int:
        return max(1, min(cap, round(tokens * factor)))

    return Fit(
        [
            replace(
                a,
                prompt_tokens=fit(a.prompt_tokens, prompt_factor, max_prompt_tokens),
                output_tokens=fit(a.output_tokens, output_factor, max_output_tokens),
            )
            for a in arrivals
        ],
        prompt_factor,
        output_factor,
    )


def _factor(lengths: list[int], cap: int) -> float:
    """What brings the 95th percentile under the cap; 1 where it is."""
    long = sorted(lengths)[int(0.95 * (len(lengths) - 1))] if lengths else 0
    return min(1.0, cap / long) if long else 1.0


def requests_per_second(arrivals: Sequence[Arrival]) -> float:
    """Mean arrival rate over the time the arrivals span; 0 for fewer than two."""
    span_s = arrivals[-1].at_s - arrivals[0].at_s if len(arrivals) > 1 else 0.0
    return (len(arrivals) - 1) / span_s if span_s > 0 else 0.0


def _time(arrival: Arrival) -> float:
    return arrival.at_s


def _from_zero(arrivals: Iterable[Arrival]) -> list[Arrival]:
    ordered = sorted(arrivals, key=_time)
    return [replace(a, at_s=a.at_s - ordered[0].at_s) for a in ordered]


@dataclass(frozen=True, slots=True)
class _Format:
    """What the fields of a format are called, and how its times read."""

    name: str
    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]

    def arrival(self, row: Mapping[str, Any], where: str) -> Arrival:
        """One request of a file; `where` is the file and the line."""
        return Arrival(
            _seconds(self._field(row, self.time, where), self.seconds, f"{where}, {self.time}"),
            _tokens(self._field(row, self.prompt, where), f"{where}, {self.prompt}"),
            _tokens(self._field(row, self.output, where), f"{where}, {self.output}"),
            _prefix_ids(row.get("hash_ids"), f"{where}, hash_ids"),
        )

    def _field(self, row: Mapping[str, Any], name: str, where: str) -> Any:
        if row.get(name) is None:
            raise BadTrace(f"{where}, {name}: is missing")
        return row[name]


def _utc_seconds(text: str) -> float:
    """Seconds of an Azure time stamp, UTC where it names no zone."""
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _milliseconds(value: Any) -> float:
    return float(value) / 1000


_MOONCAKE = _Format("Mooncake", "timestamp", "input_length", "output_length", _milliseconds)
_CSV_FORMATS = (
    _Format("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _utc_seconds),
    _Format("ServeGen", "timestamp_ms", "input_length", "output_length", _milliseconds),
    _Format("seconds", "arrival_s", "prompt_tokens", "output_tokens", float),
)


def _rows(lines: Iterable[str], where: str) -> Iterator[Arrival]:
    """Arrivals as they stand in the file; times may start anywhere."""
    numbered = ((n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.startswith("#"))
    try:
        first_number, first = next(numbered)
    except StopIteration:
        return
    first = first.lstrip("\ufeff")
    if first.lstrip().startswith("{"):
        for n, line in itertools.chain([(first_number, first)], numbered):
            yield _MOONCAKE.arrival(_json_row(line, f"{where}, line {n}"), f"{where}, line {n}")
        return
    header = [name.strip() for name in next(csv.reader([first]))]
    format = next((f for f in _CSV_FORMATS if {f.time, f.prompt, f.output} <= set(header)), None)
    if format is None:
        known = "; ".join(f"{f.time},{f.prompt},{f.output} ({f.name})" for f in _CSV_FORMATS)
        raise BadTrace(
            f"{where}, line {first_number}: unknown columns {', '.join(header)}; Headway reads {known}; and "
            "JSON lines with timestamp in ms, input_length, output_length (Mooncake)"
        )
    for n, line in numbered:
        yield format.arrival(_csv_row(line, header, f"{where}, line {n}"), f"{where}, line {n}")


def _csv_row(line: str, header: Sequence[str], where: str) -> Mapping[str, str]:
    try:
        return dict(zip(header, next(csv.reader([line])), strict=False))
    except csv.Error as e:
        raise BadTrace(f"{where}: not a row of a CSV file ({e})") from e


def _json_row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise BadTrace(f"{where}: not a line of JSON ({e})") from e
    if not isinstance(row, dict):
        raise BadTrace(f"{where}: not a JSON object")
    return row


def _seconds(value: Any, seconds: Callable[[Any], float], where: str) -> float:
    try:
        found = seconds(value)
    except (ValueError, TypeError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise BadTrace(f"{where}: {value!r} is not a time")
    return found


def _tokens(value: Any, where: str, most: int = MOST_TOKENS) -> int:
    try:
        found = int(value)
    except (ValueError, TypeError, OverflowError):
        raise BadTrace(f"{where}: {value!r} is not a whole number") from None
    if not 0 <= found <= most:
        raise BadTrace(f"{where}: {found} is not between 0 and {most}")
    return found


def _prefix_ids(value: Any, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadTrace(f"{where}: {value!r} is not a list")
    return tuple(_tokens(id, where, MOST_PREFIX_ID) for id in value)
