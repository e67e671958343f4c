"""The tables of the engines are complete and say the truth about the engine beside them."""

import pytest

from headway_engine.config import parser
from headway_engine.protocol import Capacity, Limits, Metric
from headway_operator.engines import ENGINES, Engine, Signal, Support, engine
from headway_operator.rules import OWNED_OPTIONS
from headway_operator.schema import load_crd, openapi_schema
from support.resources import a_resource

every_engine = pytest.mark.parametrize("table", ENGINES.values(), ids=list(ENGINES))


def test_the_schema_offers_the_engines_that_there_are() -> None:
    runtime = openapi_schema(load_crd())["properties"]["spec"]["properties"]["runtime"]
    assert runtime["properties"]["engine"]["enum"] == list(ENGINES)


@every_engine
def test_every_parameter_is_a_field_of_the_limits(table: Engine) -> None:
    """And every tunable number of the limits has a row: none is dropped silently."""
    fields = {parameter.limits_field for parameter in table.parameters}
    assert fields == set(Limits.__struct_fields__) - {"generation", "mode", "queue_timeout_ms"}
    capacities = {parameter.capacity_field for parameter in table.parameters} - {None}
    assert capacities <= set(Capacity.__struct_fields__)


@every_engine
def test_a_parameter_that_is_not_live_says_how_it_is_followed(table: Engine) -> None:
    for parameter in table.parameters:
        if parameter.support is Support.RESTART:
            assert parameter.flag
        if parameter.support in (Support.APPROXIMATE, Support.UNSUPPORTED):
            assert parameter.note


@every_engine
def test_every_signal_is_found_or_known_to_be_missing(table: Engine) -> None:
    assert set(table.signals) <= set(Signal)
    assert {Signal.TTFT, Signal.ITL} <= set(table.signals)


@every_engine
def test_a_load_may_take_half_an_hour_and_a_hang_is_seen_in_minutes(table: Engine) -> None:
    assert table.startup.period_s * table.startup.failures >= 1800
    assert table.liveness.period_s * table.liveness.failures <= 120


def test_our_engine_follows_everything_live() -> None:
    assert {parameter.support for parameter in engine("headway").parameters} == {Support.LIVE}


def test_our_engine_exports_the_signals_under_these_names() -> None:
    assert set(engine("headway").signals.values()) <= set(Metric)
    assert set(engine("headway").signals) == set(Signal)


def test_our_engine_knows_every_option_of_its_table() -> None:
    known = {flag for action in parser()._actions for flag in action.option_strings}
    table = engine("headway")
    assert {option.flag for option in table.options} <= known
    assert {table.limits_flag, table.objectives_flag} <= known


def test_options_that_the_table_writes_are_closed_to_extra_arguments() -> None:
    """A user's argument must not contradict a field; `--threads` alone may be taken over."""
    table = engine("headway")
    written = {option.flag for option in table.options} | {table.limits_flag, table.objectives_flag}
    assert written - {"--threads"} <= OWNED_OPTIONS


def test_the_schema_and_the_local_check_close_the_same_options() -> None:
    runtime = openapi_schema(load_crd())["properties"]["spec"]["properties"]["runtime"]
    (rule,) = runtime["properties"]["extraArgs"]["x-kubernetes-validations"]
    alternatives = rule["rule"].split("'^--(")[1].split(")(=")[0].split("|")
    assert {f"--{name}" for name in alternatives} == OWNED_OPTIONS


@pytest.mark.parametrize(
    ("cpu", "threads"),
    [("2", "--threads=2"), (4, "--threads=4"), ("500m", "--threads=1"), ("3500m", "--threads=3")],
)
def test_compute_threads_follow_the_cpu_limit(cpu: object, threads: str) -> None:
    """More threads than the quota allows would only throttle each other."""
    resource = a_resource(spec={"resources": {"limits": {"cpu": cpu}}})
    assert threads in engine("headway").arguments(resource)


def test_without_a_cpu_limit_the_engine_counts_cores_itself() -> None:
    arguments = engine("headway").arguments(a_resource())
    assert not [argument for argument in arguments if argument.startswith("--threads")]


def test_threads_that_the_user_sets_win() -> None:
    spec = {"resources": {"limits": {"cpu": "2"}}, "runtime": {"extraArgs": ["--threads=1"]}}
    arguments = engine("headway").arguments(a_resource(spec=spec))
    assert not [argument for argument in arguments if argument.startswith("--threads")]


def test_an_engine_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        engine("nonesuch")


def test_a_shortened_option_is_not_understood() -> None:
    """Else `--mod` would be a way around the options that are closed."""
    with pytest.raises(SystemExit):
        parser().parse_args(["--model=hf://a/b", "--por=9000"])
