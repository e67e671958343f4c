"""What the API front end and the engine core say to each other.

The two are separate processes joined by one channel: commands go in, reports come out. Every message
is a frozen struct, encoded with MessagePack. Deltas of one step travel together in one StepReport, so
that the front end is woken once a step and not once a token. Nothing here knows how bytes travel.
"""

from typing import Protocol

import msgspec

from headway_engine.protocol import Capacity, Limits
from headway_engine.sequence import Event, Pooling, Rejected, Request, RequestId
from headway_engine.stepcost import StepStatistics

# Commands: front end to core.


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Queue a request; answered by events, or by Refused."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget a request and free its blocks. Unknown or finished ids are fine."""

    id: RequestId


class SetLimits(msgspec.Struct, frozen=True, tag="set_limits"):
    """Put these limits in force between two steps; answered by LimitsApplied with the same ticket."""

    ticket: int
    limits: Limits


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse newcomers from now on; what was admitted goes on to its end."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop now."""


Command = Submit | Abort | SetLimits | Drain | Stop

# Reports: core to front end.


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """What the core is doing before it can serve; shown by /readyz."""

    what: str


class Embeddings(msgspec.Struct, frozen=True, kw_only=True, tag="embeddings"):
    """How the model makes a vector of a prompt."""

    pooling: Pooling
    dimensions: int
    cuts: tuple[int, ...] = ()  # fewer dimensions that its vectors may be cut to
    any_cut: bool = False  # any fewer will do


class NoEmbeddings(msgspec.Struct, frozen=True, tag="no_embeddings"):
    """The model makes no vectors, and why, in words for clients."""

    reason: str = "its runner makes none"


class Fallback(msgspec.Struct, frozen=True, tag="fallback"):
    """A better way of computing the model, which was left for the next."""

    path: str  # "fused on amx"
    reason: str  # one of a few: unavailable, failed, wrong logits, logits not finite
    why: str = ""  # a sentence


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and the loop turns."""

    capacity: Capacity
    limits: Limits
    model: str  # architecture and parameter count, in words
    device: str
    dtype: str
    runner: str
    kernels: str = ""  # what the runner computes with: an instruction set, an attention kernel, or torch
    fallbacks: tuple[Fallback, ...] = ()  # better ways that were left, best first
    tokenizer_dir: str = ""  # folder with tokenizer.json, for the front end's own tokeniser
    stop_token_ids: tuple[int, ...] = ()  # the model's end-of-sequence ids
    vocab_size: int = 0  # token ids that the model has weights for; 0: as many as the tokenizer knows
    grammars: bool = True  # requests may have a grammar
    sampling_defaults: dict[str, float] = {}  # the model's own, for what a client leaves open
    embeddings: Embeddings | NoEmbeddings = NoEmbeddings()


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """The core's state after a step, and its running totals."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_used_blocks: int = 0
    prefix_hit_tokens_total: int = 0
    preemptions_total: int = 0
    statistics: StepStatistics = StepStatistics()


class Pool(Protocol):
    """What gauges say of the block pool."""

    @property
    def used_blocks(self) -> int: ...


class Counted(Protocol):
    """What gauges say of the scheduler."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...
    @property
    def pool(self) -> Pool: ...
    @property
    def prefix_hit_tokens_total(self) -> int: ...
    @property
    def preemptions_total(self) -> int: ...


def gauges_of(scheduler: Counted, statistics: StepStatistics) -> Gauges:
    """The scheduler's state now, beside the sums over its steps."""
    return Gauges(
        running=scheduler.running,
        waiting=scheduler.waiting,
        queued_tokens=scheduler.queued_tokens,
        kv_used_blocks=scheduler.pool.used_blocks,
        prefix_hit_tokens_total=scheduler.prefix_hit_tokens_total,
        preemptions_total=scheduler.preemptions_total,
        statistics=statistics,
    )


class StepReport(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """One finished step (or, with step_tokens 0, a change outside a step: aborts, timeouts)."""

    at_s: float  # time.monotonic() when the step's tokens were known
    events: tuple[Event, ...] = ()
    step_seconds: float = 0.0
    step_tokens: int = 0
    step_sequences: int = 0
    gauges: Gauges


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The scheduler refused a Submit."""

    rejected: Rejected
    gauges: Gauges


class LimitsApplied(msgspec.Struct, frozen=True, tag="limits_applied"):
    """The answer to SetLimits: what is in force now. Ticket 0: the core changed them by itself."""

    ticket: int
    limits: Limits


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The core cannot go on (load failure, device error); its process ends after this."""

    message: str


Report = Loading | Ready | StepReport | Refused | LimitsApplied | Died
