"""`headway explain NAME [LIMIT]`: what each limit is for, why it stands there, and what edits would do.

`status` says how a deployment does; this goes through its limits, and says by the tuner's own model what they
would be after an edit. `words` is pure.
"""

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headway_cli.documents import admitted
from headway_cli.errors import EXIT_OK, UserError
from headway_cli.status import fetch
from headway_cli.whatif import Move, WhatIf, learnt, what_ifs
from headway_operator.reader import InvalidSpec
from headway_operator.resource import KIND
from headway_operator.tuner.words import span

Json = Mapping[str, Any]

SHOWN_MOVES = 3
SET_BY_TUNER = "set by the tuner"
"""What the status says of a limit whose move it no longer remembers."""


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a limit is, what more and less of it do, and where it stands in the resource."""

    what: str
    more: str
    less: str
    path: str
    tuned: bool = True


MEANINGS = {
    "maxBatchTokens": _Meaning(
        "the most tokens, of prompts and decodes together, that one step computes",
        "prompts get in sooner and throughput grows; steps, and so the gaps between tokens, are longer",
        "gaps between tokens are shorter; prompts take more steps, and throughput falls",
        "batching.maxBatchTokens",
    ),
    "maxBatchSequences": _Meaning(
        "the most requests that run at once",
        "fewer wait, and a step serves more of them; each gap is longer, and more KV cache is in use",
        "each gap is shorter; more wait",
        "batching.maxBatchSequences",
    ),
    "prefillChunkTokens": _Meaning(
        "the largest piece of one prompt in one step",
        "a long prompt is done sooner; those that decode beside it wait longer",
        "a long prompt disturbs others less, and takes more steps itself",
        "batching.prefillChunkTokens",
    ),
    "maxQueuedTokens": _Meaning(
        "the most prompt tokens that may wait; beyond it newcomers get 429 with Retry-After",
        "fewer are refused; those who wait may wait longer than the TTFT target",
        "who is let in gets a first token in time; more are refused in a burst",
        "batching.queue.maxTokens",
    ),
    "maxQueuedRequests": _Meaning(
        "the most requests that may wait; beyond it newcomers get 429 with Retry-After",
        "fewer are refused",
        "more are refused in a burst",
        "batching.queue.maxRequests",
        tuned=False,
    ),
    "window": _Meaning(
        "how long an idle engine may hold a request so that others can join its first step",
        "fuller steps where traffic is thin; first tokens are later by as much",
        "first tokens are sooner; 0 holds nobody",
        "batching.window",
        tuned=False,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `headway explain`."""
    parser.add_argument("name", nargs="?", help="name of the InferenceDeployment")
    parser.add_argument("limit", nargs="?", choices=list(MEANINGS), metavar="LIMIT", help="; ".join(MEANINGS))
    parser.add_argument("-n", "--namespace", default="default", help="its namespace (default: default)")
    parser.add_argument("--kubeconfig", type=Path, help="file to log in with; default: as kubectl")
    parser.add_argument(
        "-f", "--file", type=Path, metavar="FILE",
        help="instead of a cluster: what `kubectl get infd NAME -o yaml` printed",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """The command."""
    if args.file is not None:
        limit = args.limit or (args.name if args.name in MEANINGS else None)
        body = from_file(args.file)
        if args.name not in (None, limit, body["metadata"].get("name")):
            raise UserError(f"{args.file}: it is about {body['metadata'].get('name')}, not about {args.name}")
        body = admitted(dict(body), args.file)
    elif args.name is None:
        raise UserError("which deployment?", "Give its name, or -f FILE")
    else:
        limit, body = args.limit, asyncio.run(fetch(args.kubeconfig, args.namespace, args.name))
    try:
        print("\n".join(words(body, limit)))
    except InvalidSpec as e:
        problems = "\n".join(f"  {problem}" for problem in e.problems)
        raise UserError(f"the resource is not valid\n{problems}") from e
    return EXIT_OK


def from_file(path: Path) -> Json:
    """The one resource of a file, status and all. Raises UserError."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from e
    except yaml.YAMLError as e:
        raise UserError(f"{path}: not YAML: {e}") from e
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise UserError(f"{path}: not one {KIND}", "kubectl get infd NAME -o yaml > FILE")
    for field in ("metadata", "spec"):
        if not isinstance(found.get(field), dict):
            raise UserError(f"{path}: {field} is missing")
    return found


def words(body: Json, limit: str | None = None) -> list[str]:
    """The whole answer, line by line; about one limit where it is named."""
    status: Json = body.get("status") or {}
    parameters: Sequence[Json] = status.get("parameters") or ()
    if not parameters:
        return ["The controller has not looked at it yet. Is it running?"]
    found = what_ifs(body)
    lines: list[str] = []
    for parameter in parameters:
        name = parameter["name"]
        if name in MEANINGS and limit in (None, name):
            lines += [*_limit(parameter, MEANINGS[name], body, found, alone=limit is not None), ""]
    return [*lines, *_edits(body, found, limit)]


def _limit(p: Json, meaning: _Meaning, body: Json, found: Sequence[WhatIf], *, alone: bool) -> Iterator[str]:
    name, unit = p["name"], p.get("unit", "")
    applied = p.get("applied")
    yield f"{name}: {'not the same in all pods, or not read' if applied is None else f'{applied} {unit}'}"
    yield f"  it is    {meaning.what}"
    if alone:
        yield f"  more     {meaning.more}"
        yield f"  less     {meaning.less}"
    if applied is not None and applied != p.get("desired") and "desired" in p:
        yield f"  wanted   {p['desired']}: pods have not all taken it yet"
    if "recommended" in p and p["recommended"] != applied:
        yield f"  advised  {p['recommended']}: spec.tuning.mode is Recommend, so it is not applied"
    yield f"  why      {_why(p, body)}"
    yield f"  range    {_range(p, meaning, body)}"
    moves = list(_moved(name, body))
    for move in moves[:SHOWN_MOVES] if alone else moves[:1]:
        yield f"  moved    {move}"


def _why(p: Json, body: Json) -> str:
    """The reason of the last move, or the tuner's present one where nobody remembers the move."""
    reason = p.get("reason") or "not told"
    said = (body["status"].get("tuning") or {}).get("message")
    return f"{reason}. It says: {said}" if said and reason == SET_BY_TUNER else str(reason)


def _range(p: Json, meaning: _Meaning, body: Json) -> str:
    """Who may move it, between what."""
    spec: Any = body["spec"]
    asked = spec
    for part in meaning.path.split("."):
        asked = asked.get(part) if isinstance(asked, Mapping) else None
    parts = [f"spec.{meaning.path} {'is not set' if asked is None else f'asks for {asked}'}"]
    tuning = spec.get("tuning") or {}
    if not meaning.tuned:
        parts.append("the tuner does not move it")
    elif tuning.get("mode", "Auto") == "Off":
        parts.append("spec.tuning.mode is Off: nothing moves it")
    else:
        bound = (tuning.get("bounds") or {}).get(p["name"]) or {}
        edges = [f"{edge} {bound[edge]}" for edge in ("min", "max") if edge in bound]
        parts.append(f"the tuner may move it ({', '.join(edges) or 'no bounds'})")
    if "capacity" in p:
        parts.append(f"{p['capacity']} are reserved, and more needs a restart")
    parts.append(f"an edit is {str(p.get('support', 'Live')).lower()}")
    return "; ".join(parts)


def _moved(name: str, body: Json) -> Iterator[str]:
    for entry in (body["status"].get("tuning") or {}).get("history") or ():
        for change in entry.get("changes") or ():
            if change["name"] == name:
                yield f"{entry['time']}  {change['from']} -> {change['to']}"


def _edits(body: Json, found: Sequence[WhatIf], limit: str | None) -> Iterator[str]:
    """What would change it, in numbers where the tuner has a model."""
    yield "What edits would do, by the tuner's model of this engine under this traffic"
    if learnt(body) is None:
        yield "  nothing can be said yet: the tuner has not seen enough steps to know what one costs"
        return
    told = False
    for what_if in found:
        moves = [m for m in what_if.moves if limit in (None, m.parameter)]
        if limit is not None and not moves:
            continue
        told = True
        would = "; ".join(_move(m) for m in moves) or what_if.reason
        yield f"  {what_if.path} {what_if.old} -> {what_if.new}: {would}"
        if what_if.predicted_step_s is not None and moves:
            yield f"      a full step would take {span(what_if.predicted_step_s)}"
    if not told:
        yield f"  no edit of a target moves {limit or 'a limit'} now"


def _move(move: Move) -> str:
    return f"{move.parameter} {move.old} -> {move.new}"
