"""The engine's nouns: what is asked for, what runs, what one step computes, what came of it.

Nothing here knows how sequences are chosen, where their keys and values lie, or what torch is.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

import msgspec

TokenId = int
RequestId = str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. The defaults are greedy decoding up to `max_tokens`.

    Validated at the API's edge (`openai`); the core trusts it. `temperature` 0 is greedy.
    """

    max_tokens: int  # 0: the prompt is only computed
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no cut
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1  # -1: none; 0: the chosen token's; n: also the n likeliest
    prompt_logprobs: int = -1  # the same for the prompt's own tokens, from the second on
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included; empty with ignore_eos
    grammar: str = ""  # what the output must obey, see `grammar`; empty: nothing


class Pooling(StrEnum):
    """How the hidden states of a prompt become one vector."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean over all tokens


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that the core is asked to continue, or to make a vector of. `id` is ours, never the
    client's."""

    id: RequestId
    prompt: tuple[TokenId, ...]
    sampling: SamplingParams
    arrival_s: float  # time.monotonic() when the HTTP request arrived
    tenant: str = ""
    priority: int = 0  # higher is more urgent
    call: str = ""  # the same for all sequences of one call; empty: it is the only one
    cache_salt: str = ""  # prefix-cache hits only inside one salt
    pooling: Pooling | None = None  # the prompt's vector is asked for, and no output (max_tokens is 0)


class Status(Enum):
    """Where a sequence is. WAITING -> RUNNING -> FINISHED; preemption goes back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are OpenAI's words; the others are ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"  # waited longer than the queue timeout; never ran


class RejectReason(StrEnum):
    """Why a request was not admitted to the queue."""

    TOO_LONG = "too_long"  # can never fit: 400
    QUEUE_FULL = "queue_full"  # 429
    DRAINING = "draining"  # 503


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request on its way: its tokens so far and how many of them have keys and values in the cache.

    Owned by the scheduler; nobody else writes to it.
    """

    request: Request
    tokens: list[TokenId]  # prompt, then output
    status: Status = Status.WAITING
    computed: int = 0  # tokens whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)
    cached_prompt_tokens: int = 0  # prefix-cache hits of the first admission
    preemptions: int = 0
    scored: int = 0  # prompt tokens whose successors' log-probabilities are out
    first_scheduled_s: float | None = None
    finish_reason: FinishReason | None = None
    order: int = 0  # place in the order of admission to the queue; never changes
    # Of the full blocks of `tokens`, as far as needed.
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def reusable(self) -> int:
        """Tokens whose keys and values may come from the prefix cache. Those that must yield logits still
        must be computed: the last, and all that are to be scored. A mean is over what was computed."""
        if self.request.pooling is Pooling.MEAN:
            return 0
        last = len(self.tokens) - 1
        return last if self.request.sampling.prompt_logprobs < 0 else min(last, self.scored)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a step: compute tokens[start : start + length] of one sequence.

    A decode is a chunk of one token. `samples` is true when the chunk reaches the sequence's last
    known token, so that the step yields a new one.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool

    @property
    def is_decode(self) -> bool:
        """True for a step of a sequence that has produced output already."""
        return self.length == 1 and self.start >= self.sequence.prompt_len

    @property
    def pools(self) -> bool:
        """True for the last chunk of a prompt whose vector is asked for."""
        sequence = self.sequence
        return sequence.request.pooling is not None and self.start + self.length == len(sequence.tokens)

    @property
    def scored(self) -> range:
        """Positions whose logits give the log-probability of the prompt's next token, where that is asked for
        and not out yet."""
        sequence = self.sequence
        if sequence.request.sampling.prompt_logprobs < 0:
            return range(0)
        end = min(self.start + self.length, sequence.prompt_len - 1)
        return range(max(self.start, sequence.scored), end)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: chunks in the order decodes first. `prefill_tokens`, `decode_sequences` and
    `kv_tokens` are the features of the step-time model (see `stepcost`)."""

    chunks: tuple[Chunk, ...]
    wiped: tuple[int, ...] = ()  # blocks to zero before anything is computed: they may hold what is no number

    @property
    def tokens(self) -> int:
        return sum(c.length for c in self.chunks)

    @property
    def decode_sequences(self) -> int:
        return sum(1 for c in self.chunks if c.is_decode)

    @property
    def prefill_tokens(self) -> int:
        return sum(c.length for c in self.chunks if not c.is_decode)

    @property
    def kv_tokens(self) -> int:
        """Cached tokens that the step's decodes read."""
        return sum(c.start + c.length for c in self.chunks if c.is_decode)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of the chosen token and of the likeliest ones, natural log."""

    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


NO_TOKEN = -1


class SampledToken(msgspec.Struct, frozen=True):
    """What the runner returns for a chunk that samples, scores or pools."""

    token: TokenId  # NO_TOKEN when none was sampled
    logprob: TokenLogprob | None = None
    scores: tuple[TokenLogprob, ...] = ()  # one for each of the chunk's `scored`
    vector: bytes = b""  # of a chunk that pools: float32, little-endian, of length 1


class TokenOut(msgspec.Struct, frozen=True, tag="token"):
    """A sequence has one more token."""

    id: RequestId
    token: TokenId
    logprob: TokenLogprob | None = None


class PromptOut(msgspec.Struct, frozen=True, tag="prompt"):
    """Log-probabilities of the prompt's next tokens; the first token of a prompt has none."""

    id: RequestId
    scores: tuple[TokenLogprob, ...]


class VectorOut(msgspec.Struct, frozen=True, tag="vector"):
    """The vector of a prompt: float32, little-endian, of length 1. Finished follows."""

    id: RequestId
    vector: bytes


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A sequence was scheduled for the first time (queueing ended); told when that step is done."""

    id: RequestId
    cached_prompt_tokens: int
    at_s: float = 0.0  # time.monotonic() when its first step began; 0: not told


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    """A sequence gave its blocks up and waits to be computed again."""

    id: RequestId


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A sequence ended; no event for it follows."""

    id: RequestId
    reason: FinishReason
    message: str = ""


Event = TokenOut | PromptOut | VectorOut | Started | Preempted | Finished


class Rejected(msgspec.Struct, frozen=True):
    """A request that was refused, with words for the client."""

    id: RequestId
    reason: RejectReason
    message: str
    retry_after_s: float = 1.0
