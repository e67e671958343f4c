"""`headway status NAME`, `kubectl headway status NAME`: what is set, why, what would change it, in words.

`words` is pure: the resource as the API server has it goes in, lines come out. It tells what the status says
and adds no judgement of its own.
"""

import argparse
import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway_cli.errors import EXIT_OK, Failed, UserError
from headway_operator.cluster import ClusterError
from headway_operator.cluster_kube import KubeCluster, LoginFailed, log_in
from headway_operator.resource import API_VERSION, KIND

Json = Mapping[str, Any]

SHOWN_CHANGES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `headway status`."""
    parser.add_argument("name", help="name of the InferenceDeployment")
    parser.add_argument("-n", "--namespace", default="default", help="its namespace (default: default)")
    parser.add_argument("--kubeconfig", type=Path, help="file to log in with; default: as kubectl")


def run(args: argparse.Namespace) -> int:
    """The command."""
    body = asyncio.run(fetch(args.kubeconfig, args.namespace, args.name))
    print("\n".join(words(body)))
    return EXIT_OK


async def fetch(kubeconfig: Path | None, namespace: str, name: str) -> Json:
    """The resource. Raises UserError for one that is not there, Failed when the cluster does not answer."""
    try:
        cluster = KubeCluster(await log_in(kubeconfig))
    except LoginFailed as e:
        raise UserError(str(e), "Name a kubeconfig with --kubeconfig or KUBECONFIG") from e
    try:
        body = await cluster.get(API_VERSION, KIND, namespace, name)
    except ClusterError as e:
        raise Failed(str(e)) from e
    finally:
        await cluster.close()
    if body is None:
        raise UserError(
            f"there is no InferenceDeployment {name} in namespace {namespace}",
            "`kubectl get infd -A` lists all",
        )
    return body


def words(body: Json) -> list[str]:
    """The whole answer, line by line."""
    status: Json = body.get("status") or {}
    if not status:
        return [*_head(body, status), "The controller has not looked at it yet. Is it running?"]
    return [
        *_head(body, status),
        *_section("Promise", _promise(status)),
        *_section("Limits in force, and why", _limits(status)),
        *_section("Tuner", _tuner(body, status)),
        *_section("Latest changes", _history(status)),
        *_section("What would change it", _ways_out(body, status)),
    ]


def _section(title: str, lines: Iterator[str]) -> list[str]:
    found = [f"  {line}" for line in lines]
    return ["", title, *found] if found else []


def _conditions(status: Json) -> dict[str, Json]:
    return {c["type"]: c for c in status.get("conditions") or ()}


_TOLD: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Ready", ("True",), "ready"),
    ("Ready", ("False", "Unknown"), "not ready"),
    ("Reconciling", ("True",), "changing"),
    ("Stalled", ("True",), "stuck"),
    ("MetricsAvailable", ("False", "Unknown"), "not measured"),
    ("ParametersDrifted", ("True",), "limits differ"),
)
"""Conditions that are worth a line, the values that make them so, and the words for it."""


def _head(body: Json, status: Json) -> list[str]:
    spec, metadata = body["spec"], body["metadata"]
    engine = (spec.get("runtime") or {}).get("engine", "headway")
    namespace = metadata.get("namespace", "default")
    lines = [f"{metadata['name']} in {namespace}: {spec['model']['uri']} on {engine}"]
    found = _conditions(status)
    for type_, values, label in _TOLD:
        condition = found.get(type_)
        if condition is not None and condition["status"] in values:
            lines.append(f"  {label}: {condition['message']}")
    if status.get("endpoint"):
        lines.append(f"  endpoint {status['endpoint']}, model name {status.get('model', '')}")
    return lines


def _promise(status: Json) -> Iterator[str]:
    slo: Json = status.get("slo") or {}
    for name, label in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "e2e")):
        part = slo.get(name)
        if not part:
            continue
        line = f"{label} {part.get('percentile', 'p95')}"
        line += (
            f" {part['measuredMilliseconds']} ms" if "measuredMilliseconds" in part else " not measured yet"
        )
        if "targetMilliseconds" in part:
            line += f", target {part['targetMilliseconds']} ms"
        if "verdict" in part:
            line += (
                f": {part['verdict'].lower()} ({part.get('misses', 0)} of {part.get('samples', 0)} over it)"
            )
        yield line
    if "attainmentPercent" in slo:
        yield (
            f"{slo['attainmentPercent']} % of {slo.get('samples', 0)} offered requests met every target "
            f"in the last {slo.get('windowSeconds', 0)} s"
        )
    feasibility: Json = status.get("feasibility") or {}
    if feasibility:
        yield f"{feasibility['verdict']}. {feasibility.get('message', '')}".strip()


def _limits(status: Json) -> Iterator[str]:
    found = _conditions(status)
    unread = (found.get("MetricsAvailable") or {}).get("status") != "True"
    for p in status.get("parameters") or ():
        value = p.get("applied")
        unknown = "not read from every pod" if unread else "differs between pods"
        line = f"{p['name']} {unknown if value is None else value}"
        if value != p.get("desired") and "desired" in p:
            line += f" (wanted {p['desired']})"
        if "recommended" in p and p["recommended"] != value:
            line += f" (recommended {p['recommended']})"
        if "capacity" in p:
            line += f" of at most {p['capacity']}"
        yield f"{line}: {p.get('reason', '')}".rstrip(": ")


def _tuner(body: Json, status: Json) -> Iterator[str]:
    tuning: Json = status.get("tuning") or {}
    mode = (body["spec"].get("tuning") or {}).get("mode", "Auto")
    if tuning.get("message"):
        yield f"{mode}. {tuning['message']}"
    else:
        yield f"{mode}"
    cost = tuning.get("stepCost")
    if cost:
        yield (
            f"a step costs {cost['baseMicroseconds'] / 1000:.1f} ms, "
            f"{cost['perPrefillTokenNanoseconds'] / 1000:.0f} us a prompt token "
            f"and {cost['perDecodeNanoseconds'] / 1000:.0f} us a decoding sequence"
        )


def _history(status: Json) -> Iterator[str]:
    for entry in ((status.get("tuning") or {}).get("history") or ())[:SHOWN_CHANGES]:
        moves = ", ".join(f"{c['name']} {c['from']} -> {c['to']}" for c in entry.get("changes") or ())
        yield f"{entry['time']}  {moves}: {entry.get('message', entry.get('verdict', ''))}"


def _ways_out(body: Json, status: Json) -> Iterator[str]:
    """What the user could edit, by what stands in the way."""
    spec = body["spec"]
    mode = (spec.get("tuning") or {}).get("mode", "Auto")
    if not spec.get("slo"):
        yield "spec.slo: without a target there is nothing to tune for"
    if mode == "Off":
        yield "spec.tuning.mode: Recommend shows what the tuner would set, Auto lets it"
    if mode == "Recommend" and status.get("recommendation"):
        yield f"spec.tuning.mode: Auto would apply the recommendation ({status['recommendation']['message']})"
    feasibility: Json = status.get("feasibility") or {}
    if feasibility.get("verdict") == "BelowEngineFloor":
        best = [
            f"spec.slo.{name}: {feasibility[key]} ms is the best that this engine can reach here"
            for name, key in (("ttft", "bestTtftMilliseconds"), ("itl", "bestItlMilliseconds"))
            if key in feasibility
        ]
        yield from best or ["spec.slo: looser targets, a smaller model or a faster accelerator"]
        yield "spec.replicas would not help: one request alone is too slow"
    needed = (status.get("capacity") or {}).get("replicasNeeded")
    if feasibility.get("verdict") == "CapacityLimited" and needed:
        yield f"spec.replicas: {needed} would serve the present load inside the targets"
    bounds = (spec.get("tuning") or {}).get("bounds") or {}
    for p in status.get("parameters") or ():
        bound = bounds.get(p["name"]) or {}
        for edge in ("min", "max"):
            if edge in bound and bound[edge] == p.get("desired"):
                yield f"spec.tuning.bounds.{p['name']}.{edge}: the limit stands at it"
        ceiling = f"spec.batching.capacity.{p['name']}"
        if "capacity" in p and p["capacity"] == p.get("desired"):
            yield f"{ceiling}: the limit stands at what was reserved (an edit restarts the pods)"
