"""`headway simulate`: what this resource would do under this traffic, on a virtual clock."""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from headway_cli import arguments, capacity_plot, capacity_table, step_costs, traces
from headway_cli.capacity_report import Figures, figures
from headway_cli.documents import Manifest, read_resources
from headway_cli.errors import EXIT_OK, UserError
from headway_cli.replay import add_trace_arguments, chosen_arrivals
from headway_cli.simulation import Setup, simulate
from headway_cli.step_costs import Known
from headway_cli.table import clock
from headway_cli.traces import Arrival
from headway_engine.protocol import Capacity, InvalidLimits
from headway_operator.resource import Batching, Resource, TuningMode, parse

PROGRESS_EVERY_S = 10.0
RATE_DURATION_S = 600.0
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
MOST_REPLICAS = 10_000
"""More than any one Deployment has; every one of them has a scheduler here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `headway simulate`."""
    tokens, replicas = arguments.count_to(traces.MOST_TOKENS), arguments.count_to(MOST_REPLICAS)
    parser.add_argument(
        "-f", "--file", type=Path, required=True, metavar="FILE", help="the resource, as for `headway up`"
    )
    add_trace_arguments(parser)
    made = parser.add_argument_group("traffic without a trace")
    made.add_argument(
        "--rate", type=arguments.positive, metavar="PER_S",
        help=f"requests a second, Poisson, for --duration (default {RATE_DURATION_S:g} s)",
    )  # fmt: skip
    made.add_argument("--prompt-tokens", type=tokens, metavar="N", help=f"default {PROMPT_TOKENS}")
    made.add_argument("--output-tokens", type=tokens, metavar="N", help=f"default {OUTPUT_TOKENS}")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--step-cost", metavar="BASE_MS,PREFILL_US,DECODE_US,KV_NS",
        help="what a step takes: ms, us a prompt token, us a decoding sequence, ns a cached token that is "
        f"read; or a measured profile: {', '.join(step_costs.PROFILES)}",
    )  # fmt: skip
    engine.add_argument(
        "--from", dest="from_url", metavar="URL",
        help="take step cost and capacity from the management port of a running engine",
    )  # fmt: skip
    engine.add_argument(
        "--noise", type=arguments.not_negative, default=0.0, metavar="SHARE",
        help="let steps vary by this share (0.1: a standard deviation of 10 %%); default: none",
    )  # fmt: skip
    engine.add_argument(
        "--kv-tokens", type=tokens, metavar="N",
        help="tokens that a replica's KV cache holds; default: enough for every sequence",
    )  # fmt: skip
    plan = parser.add_argument_group("plan")
    plan.add_argument("--replicas", type=replicas, metavar="N", help="default: the resource's")
    plan.add_argument(
        "--find-replicas", type=replicas, metavar="MOST",
        help="try one more replica at a time until the SLO is met",
    )  # fmt: skip
    plan.add_argument(
        "--tuning", type=TuningMode, choices=list(TuningMode), help="instead of the resource's mode"
    )
    plan.add_argument(
        "--price", type=arguments.not_negative, metavar="PER_HOUR", help="of one accelerator, for the cost"
    )
    plan.add_argument("--currency", default="USD", help="for the cost (default USD)")
    parser.add_argument(
        "--plot", type=arguments.file_to_write, metavar="FILE.svg", help="draw the last simulation there"
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")


def run(args: argparse.Namespace) -> int:
    """The command."""
    document, _ = read_resources(args.file)
    resource = _resource(args, document)
    known = _step_cost(args, document.get("status") or {})
    arrivals = _arrivals(args)
    capacity, assumptions = _capacity(args, resource.batching, resource, known, arrivals)
    prefixes = resource.batching.prefix_caching and any(a.prefix_ids for a in arrivals)
    cost = f"a step costs {step_costs.in_words(known.cost)} ({known.source})"
    assumptions = [cost + (f", give or take {args.noise:.0%}" if args.noise else ""), *assumptions]
    if resource.batching.prefix_caching and not prefixes:
        assumptions.append("no prompt shares a beginning with another: this traffic says nothing of prefixes")
    if resource.tenancy.tenants:
        assumptions.append("spec.tenancy is left out: this traffic names no tenants")
    setup = Setup(
        resource=resource,
        capacity=capacity,
        cost=known.cost,
        replicas=args.replicas or resource.replicas,
        prefix_caching=prefixes,
        noise=args.noise,
        seed=args.seed,
    )
    began_s = time.perf_counter()
    tried = _tried(args, setup, arrivals)
    took_s = time.perf_counter() - began_s
    # How fast it went differs from run to run, so it stands apart from the answer.
    simulated_s = sum(f.duration_s for f in tried)
    print(
        f"==> {simulated_s:.0f} s simulated in {took_s:.1f} s ({simulated_s / took_s:.0f} times as fast)",
        file=sys.stderr,
    )
    _print(args, resource, tried, assumptions)
    if args.plot is not None:
        args.plot.write_text(capacity_plot.svg(tried[-1]), encoding="utf-8")
    return EXIT_OK


def _print(
    args: argparse.Namespace, resource: Resource, tried: Sequence[Figures], assumptions: Sequence[str]
) -> None:
    if args.output == "json":
        document = {
            "assumptions": list(assumptions),
            "simulations": [msgspec.to_builtins(dataclasses.asdict(f)) for f in tried],
        }
        print(json.dumps(document, indent=1))
        return
    if args.find_replicas:
        print("\n".join([*capacity_table.comparison(tried, args.currency), ""]))
        if not tried[-1].meets:
            print(f"No number of replicas up to {args.find_replicas} meets the SLO.\n")
    acting = resource.tuning.mode is TuningMode.AUTO
    print("\n".join(capacity_table.lines(tried[-1], assumptions, currency=args.currency, acting=acting)))


def _tried(args: argparse.Namespace, setup: Setup, arrivals: Sequence[Arrival]) -> list[Figures]:
    """One simulation, or one for each number of replicas up to the first that meets the SLO."""
    counts = range(args.replicas or 1, args.find_replicas + 1) if args.find_replicas else [setup.replicas]
    found: list[Figures] = []
    for replicas in counts:
        try:
            progress = _Progress(replicas, arrivals[-1].at_s)
            outcome = simulate(dataclasses.replace(setup, replicas=replicas), arrivals, progress.tell)
        except InvalidLimits as e:
            raise UserError(f"{args.file}: the limits do not fit the engine's capacity: {e}") from e
        found.append(figures(outcome, price_per_hour=args.price))
        if found[-1].meets:
            break
    return found


class _Progress:
    """A line on standard error now and then, for simulations that take a while."""

    def __init__(self, replicas: int, end_s: float) -> None:
        self._of = f"{clock(end_s)} on {replicas} replica{'s' if replicas > 1 else ''}"
        self._told_s = time.perf_counter()

    def tell(self, now_s: float) -> None:
        """The virtual time that is reached."""
        if time.perf_counter() - self._told_s >= PROGRESS_EVERY_S:
            self._told_s = time.perf_counter()
            print(f"    {clock(now_s)} of {self._of}", file=sys.stderr)


def _resource(args: argparse.Namespace, document: Manifest) -> Resource:
    resource = parse(document)
    if args.tuning is not None:
        tuning = dataclasses.replace(resource.tuning, mode=args.tuning)
        resource = dataclasses.replace(resource, tuning=tuning)
    if args.find_replicas and args.replicas and args.find_replicas < args.replicas:
        raise UserError(f"--find-replicas {args.find_replicas}: fewer than --replicas {args.replicas}")
    if not (args.replicas or resource.replicas or args.find_replicas):
        raise UserError(f"{args.file}: spec.replicas is 0: nothing would be served", "Give --replicas")
    if args.find_replicas and not any((resource.slo.ttft, resource.slo.itl, resource.slo.e2e)):
        raise UserError(f"{args.file}: spec.slo is empty: no number of replicas could fail it")
    return resource


def _step_cost(args: argparse.Namespace, status: Mapping[str, Any]) -> Known:
    if args.step_cost is not None:
        known = step_costs.from_option(args.step_cost)
        if args.from_url is None:
            return known
        return dataclasses.replace(known, capacity=step_costs.from_engine(args.from_url).capacity)
    if args.from_url is not None:
        return step_costs.from_engine(args.from_url)
    told = step_costs.from_status(status)
    if told is not None:
        return told
    raise UserError(
        "what a step of the engine costs is not known",
        f"{step_costs.HOW}. Profiles: {', '.join(step_costs.PROFILES)}",
    )


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    of_a_trace = {"--trace": args.trace, "--start": args.start, "--max-prompt": args.max_prompt}
    of_a_trace |= {"--max-output": args.max_output, "--scale": args.scale != 1.0}
    of_a_rate = {"--prompt-tokens": args.prompt_tokens, "--output-tokens": args.output_tokens}
    if args.rate is None and args.trace is None:
        raise UserError("no traffic", "Give --trace FILE, --trace sample, or --rate PER_S")
    # What would be left out without a word is an error.
    for option, value in (of_a_rate if args.rate is None else of_a_trace).items():
        if value:
            raise UserError(f"{option} is of no use {'without' if args.rate is None else 'beside'} --rate")
    if args.rate is None:
        return chosen_arrivals(args)
    duration_s = args.duration or RATE_DURATION_S
    if args.rate * duration_s > traces.MOST_REQUESTS or duration_s > traces.LONGEST_S:
        raise UserError(
            f"--rate {args.rate:g} for {duration_s:g} s: {args.rate * duration_s:.3g} requests",
            f"At most {traces.MOST_REQUESTS} of them, in at most a year: give a smaller --rate or --duration",
        )
    found = traces.poisson(
        args.rate,
        duration_s,
        args.prompt_tokens or PROMPT_TOKENS,
        args.output_tokens or OUTPUT_TOKENS,
        Random(args.seed),
    )
    if not found:
        raise UserError("no request comes at this --rate in this --duration")
    return found


def _capacity(
    args: argparse.Namespace,
    batching: Batching,
    resource: Resource,
    known: Known,
    arrivals: Sequence[Arrival],
) -> tuple[Capacity, list[str]]:
    """What a replica reserves, and what had to be assumed of it."""
    assumed: list[str] = []
    told = known.capacity
    longest = max(max(1, a.prompt_tokens) + max(1, a.output_tokens) for a in arrivals)
    if resource.model.max_model_len:
        most = resource.model.max_model_len
    elif told is not None:
        most = told.max_model_tokens
    else:
        most = longest
        assumed.append(
            f"the model takes the longest request, {most} tokens: spec.model.maxModelLen is not set"
        )
    block_tokens = batching.kv_block_tokens
    if args.kv_tokens is not None:
        blocks = math.ceil(args.kv_tokens / block_tokens)
    elif told is not None:
        blocks, block_tokens = told.kv_blocks, told.block_tokens
    else:
        each = math.ceil(min(most, longest) / block_tokens) + 1
        blocks = each * batching.capacity_max_batch_sequences
        assumed.append("the KV cache holds every sequence that may run: --kv-tokens is not given")
    capacity = Capacity(
        max_batch_tokens=batching.capacity_max_batch_tokens,
        max_batch_sequences=batching.capacity_max_batch_sequences,
        kv_blocks=blocks,
        block_tokens=block_tokens,
        max_model_tokens=most,
    )
    return capacity, assumed
