"""What the tuner carries from one decision to the next, and its compact form in the status.

Everything that matters is here, so a restarted or failed-over controller goes on where the other one
stopped. The text form is JSON of at most `MAX_STATE_BYTES`. Knows nothing of how it is used.
"""

from enum import StrEnum
from typing import Any

import msgspec

from headway_engine.protocol import Limits
from headway_engine.stepcost import StepCost, StepStatistics
from headway_operator.tuner.calm import Course
from headway_operator.tuner.quantiles import Exceedances

VERSION = 1
MAX_STATE_BYTES = 3072
_DIGITS = 7


class Feasibility(StrEnum):
    """Whether the targets can be met, and if not, whether replicas would help."""

    UNKNOWN = "Unknown"
    FEASIBLE = "Feasible"
    BELOW_ENGINE_FLOOR = "BelowEngineFloor"
    CAPACITY_LIMITED = "CapacityLimited"


class Window(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one stretch of time about one target."""

    at_s: float
    samples: float
    low: float
    high: float

    @property
    def exceedances(self) -> Exceedances:
        return Exceedances(self.samples, self.low, self.high)


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """Requests that came in one stretch of time, its length, and how many of them were refused."""

    at_s: float
    requests: float
    seconds: float
    refused: float = 0.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the traffic asks for, smoothed. Rates are those of all pods together."""

    decode_sequences: float = 0.0  # that a decoding sequence shares its step with, itself included
    kv_tokens_per_sequence: float = 0.0
    arrivals_per_s: float = 0.0  # rises count at once, falls slowly; the others are slow means
    accepted_per_s: float = 0.0
    refused_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0  # computed, so without prefix hits
    output_tokens_per_s: float = 0.0
    pods: int = 1

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens to compute, per accepted request."""
        return self.prefill_tokens_per_s / self.accepted_per_s if self.accepted_per_s > 0 else 0.0

    @property
    def output_tokens(self) -> float:
        """Output tokens per accepted request."""
        return self.output_tokens_per_s / self.accepted_per_s if self.accepted_per_s > 0 else 0.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A change whose outcome is still being watched."""

    at_s: float
    before: Limits
    grew: bool
    arrivals_per_s: float
    decode_sequences: float
    violated_before: tuple[str, ...] = ()
    intervals: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The tuner's state. `fresh_because` says why there is none from before; it is not stored."""

    version: int = VERSION
    base: Limits | None = None  # the limits that the spec asked for when last seen
    tuned: Limits | None = None  # where the tuner stands; in force when it may act
    objective: int = 0  # fingerprint of targets and bounds
    sums: StepStatistics = StepStatistics()
    sums_budget: int = 0  # maxBatchTokens under which the latest of them were made
    cost: StepCost | None = None
    kappa: float = 1.0
    queue_scale: float = 1.0
    overhead_s: float = 0.0  # between steps, as decoding sequences feel it
    load: Load = Load()
    ttft: tuple[Window, ...] = ()
    itl: tuple[Window, ...] = ()
    e2e: tuple[Window, ...] = ()
    refused: tuple[Window, ...] = ()  # rejected and failed: misses of every target
    good: Limits | None = None
    good_at_s: float = 0.0
    trial: Trial | None = None
    courses: dict[str, Course] = {}  # by field of Limits
    no_growth_until_s: float = 0.0
    changed_at_s: float = 0.0
    seen_at_s: float = 0.0  # when something was last observed
    missed: int = 0  # ticks in a row without any scrape
    traffic: tuple[Traffic, ...] = ()  # of the last five minutes
    sparse: bool = False  # the last look found too few requests
    knows_steps: bool = False  # and steps enough to ask the model
    forget_fast: int = 0  # intervals still to learn faster in
    feasibility: Feasibility = Feasibility.UNKNOWN
    suspected: Feasibility = Feasibility.UNKNOWN
    suspected_ticks: int = 0
    suspected_since_s: float = 0.0
    fresh_because: str = ""


def to_status(memory: Memory) -> str:
    """The text for `status.tuning.state`, at most MAX_STATE_BYTES long."""
    text = _encode(memory)
    while len(text) > MAX_STATE_BYTES and (memory.ttft or memory.itl or memory.e2e or memory.refused):
        # Counts are what can be gathered again; the model cannot.
        memory = msgspec.structs.replace(memory, ttft=memory.ttft[1:], itl=memory.itl[1:], e2e=memory.e2e[1:])
        text = _encode(memory)
    return text


def from_status(value: object) -> Memory:
    """The Memory that a status holds; a fresh one, with the reason, where it holds none that can be read."""
    if value is None or value == "":
        return Memory(fresh_because="no state in the status yet")
    if not isinstance(value, str):
        return Memory(fresh_because="the state in the status is not text")
    try:
        document: Any = msgspec.json.decode(value)
        if isinstance(document, dict) and document.get("version") != VERSION:
            return Memory(fresh_because=f"the state in the status has version {document.get('version')}")
        memory = msgspec.convert(document, Memory)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return Memory(fresh_because=f"the state in the status cannot be read: {error}")
    if not _is_possible(memory):
        return Memory(fresh_because="the state in the status holds numbers that no decision leaves behind")
    return memory


def _is_possible(memory: Memory) -> bool:
    """Whether this could have been written by us: others may edit a status, and a zero would divide."""
    cost = memory.cost
    return (
        1.0 <= memory.kappa <= 10.0
        and 0.0 < memory.queue_scale <= 10.0
        and memory.overhead_s >= 0
        and (cost is None or min(msgspec.structs.astuple(cost)) >= 0)
    )


def _encode(memory: Memory) -> str:
    # Rounded first: what rounds to its default is left out, now as after a restart.
    plain = _rounded(msgspec.to_builtins(msgspec.structs.replace(memory, fresh_because="")))
    defaults = _rounded(msgspec.to_builtins(Memory()))
    kept = {k: v for k, v in plain.items() if k == "version" or v != defaults[k]}
    return msgspec.json.encode(kept).decode()


def _rounded(value: Any) -> Any:
    """Floats to a few digits: they are estimates, and the status has to stay small."""
    if isinstance(value, float):
        short = float(f"{value:.{_DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value
