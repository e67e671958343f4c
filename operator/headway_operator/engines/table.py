"""The shape of an engine's table.

Knows no engine. A table says, for every parameter and signal, how this engine does it or that it
cannot, so that nothing a user writes is dropped silently.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from headway_operator.resource import Resource


class Support(StrEnum):
    """How an engine follows a parameter."""

    LIVE = "Live"
    RESTART = "Restart"
    APPROXIMATE = "Approximate"
    UNSUPPORTED = "Unsupported"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tunable of the scheduler, as the resource, `Limits` and this engine call it.

    `limits_field` is its name in Limits; `capacity_field` that of its ceiling in Capacity, where it has
    one. `flag` is the engine's option for parameters that need a restart. `note` says what a user
    should know when support is not LIVE.
    """

    name: str
    limits_field: str
    unit: str
    support: Support
    capacity_field: str | None = None
    flag: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """One command line option that is fixed until a restart; `value` is None where it is left out.

    A flag without a value is written as an empty string.
    """

    flag: str
    value: Callable[[Resource], str | None]

    def arguments(self, resource: Resource) -> list[str]:
        """The option as it stands in a pod: one argument, `--flag=value`, or none."""
        value = self.value(resource)
        if value is None:
            return []
        # Kubernetes expands $(NAME) in arguments; $$ is its way to write a plain $.
        return [f"{self.flag}={value}".replace("$(", "$$(") if value else self.flag]


class Signal(StrEnum):
    """What the controller measures, whatever an engine calls it."""

    TTFT = "ttft"
    ITL = "itl"
    E2E = "e2e"
    QUEUE = "queue"
    ARRIVED = "arrived"
    OUTCOME = "outcome"
    PROMPT_TOKENS = "promptTokens"
    OUTPUT_TOKENS = "outputTokens"
    RUNNING = "running"
    WAITING = "waiting"
    QUEUED_TOKENS = "queuedTokens"
    KV_USED_RATIO = "kvUsedRatio"
    STEP_STATISTIC = "stepStatistic"


@dataclass(frozen=True, slots=True)
class Probe:
    """An HTTP probe on a named port; times in whole seconds."""

    path: str
    port: str
    period_s: int
    timeout_s: int
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """All the controller knows of one engine."""

    name: str
    parameters: tuple[Parameter, ...]
    options: tuple[Option, ...]
    required_flags: tuple[str, ...]  # options of Headway's own, always present
    limits_flag: str | None  # option that names the file of live limits to start with
    objectives_flag: str | None
    tenants_flag: str | None = None  # option that names the file of tenants; read at start
    keys_flag: str | None = None  # option that names the folder of API keys; followed while it runs
    signals: Mapping[Signal, str]  # a signal that is absent cannot be measured here
    public_port: int
    management_port: int
    control_key_env: str | None
    cache_env: str | None
    startup: Probe
    readiness: Probe
    liveness: Probe

    def parameter(self, name: str) -> Parameter:
        """The parameter with this name in the resource; KeyError without one."""
        return {parameter.name: parameter for parameter in self.parameters}[name]

    def arguments(self, resource: Resource) -> list[str]:
        """Everything that is fixed until a restart, as arguments of the engine."""
        return [argument for option in self.options for argument in option.arguments(resource)]
