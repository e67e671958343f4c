"""One answer in the making: the core's events of its choices become text, counts and finish reasons. Pure.

Knows how text grows and when it stops; knows nothing of bodies, sockets and who computes the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway_engine.detokenise import Decode, Detokeniser, StopMatcher
from headway_engine.sequence import Event, Finished, FinishReason, Started, TokenOut
from headway_engine.tool_calls import CallPart, ToolCallReader

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that ended with whole calls."""

Piece = Callable[[int], tuple[str, bytes]]
"""One token as text and as bytes."""


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its log-probability. `offset` is where its text begins in the choice's text."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice has new since the last delta."""

    index: int
    text: str
    logprobs: tuple[TokenInfo, ...]
    finish_reason: str | None
    first: bool
    calls: tuple[CallPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer: the prompts once, the outputs of all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Choice:
    """One sequence of the answer, as the client sees it. `stopped_here`: it ended at a stop string, which
    the core knows nothing of and must be told."""

    index: int
    prompt: Sequence[int]
    decode: Decode
    piece: Piece
    stops: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    echo: str = ""
    calls: ToolCallReader | None = None  # where the text may hold tool calls
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    failure: Finished | None = None
    stopped_here: bool = False
    _detokeniser: Detokeniser = field(init=False)
    _matcher: StopMatcher = field(init=False)
    _ready: list[str] = field(init=False, default_factory=list)  # text that may be sent
    _ready_chars: int = field(init=False, default=0)  # all text that may be sent, since the beginning
    _known_chars: int = field(init=False, default=0)  # the same with what the stop matcher holds back
    _logprobs: list[TokenInfo] = field(init=False, default_factory=list)
    _sent_first: bool = field(init=False, default=False)
    _sent_last: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._detokeniser = Detokeniser(self.decode, self.prompt)
        self._matcher = StopMatcher(self.stops)
        if self.echo:
            self._emit(self.echo)
            self._known_chars = len(self.echo)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def push(self, event: Event) -> None:
        """Take one event of the core. What comes after the end is ignored: the core may be a step ahead."""
        if self.done:
            return
        match event:
            case Started(cached_prompt_tokens=cached):
                self.cached_tokens = cached
            case TokenOut():
                self._push_token(event)
            case Finished(reason=FinishReason.STOP | FinishReason.LENGTH):
                self._close(str(event.reason))
            case Finished():
                self.failure = event

    def take(self) -> Delta | None:
        """What is new and may be sent; None when that is nothing, as after the delta that ends it."""
        if self._sent_last:
            return None
        text, calls = self._read("".join(self._ready))
        self._ready.clear()
        shown = [t for t in self._logprobs if self.done or t.offset < self._ready_chars or not self.stops]
        if not text and not calls and not shown and self.finish_reason is None:
            return None
        self._logprobs = self._logprobs[len(shown) :]
        reason = self.finish_reason
        if reason == FinishReason.STOP and self.calls is not None and self.calls.whole:
            reason = TOOL_CALLS  # and not when the answer was cut: a client must not run half a call
        delta = Delta(self.index, text, tuple(shown), reason, first=not self._sent_first, calls=calls)
        self._sent_first = True
        self._sent_last = self.finish_reason is not None
        return delta

    def _read(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """New text, and what it holds of tool calls."""
        if self.calls is None:
            return text, ()
        text, calls = self.calls.push(text)
        if not self.done:
            return text, calls
        rest, more = self.calls.flush()
        return text + rest, calls + more

    def _push_token(self, event: TokenOut) -> None:
        self.completion_tokens += 1
        if event.token in self.stop_token_ids and self.completion_tokens >= self.min_tokens:
            return  # the mark that ends the text is no part of it; Finished follows
        offset = self._known_chars
        text = self._detokeniser.push(event.token)
        self._known_chars += len(text)
        if event.logprob is not None:
            top = tuple((*self.piece(id), logprob) for id, logprob in event.logprob.top)
            self._logprobs.append(TokenInfo(*self.piece(event.token), event.logprob.logprob, top, offset))
        if self.completion_tokens <= self.min_tokens:
            self._emit(text)  # a stop string may not end what the client wants longer
            return
        self._emit(self._matcher.push(text))
        if self._matcher.matched is not None:
            self._stop_here()

    def _close(self, reason: str) -> None:
        tail = self._detokeniser.flush()
        if self.completion_tokens > self.min_tokens:
            tail = self._matcher.push(tail)
        self._emit(tail)
        if self._matcher.matched is not None:
            self._stop_here()
            return
        self._emit(self._matcher.flush())
        self.finish_reason = reason

    def _stop_here(self) -> None:
        self.finish_reason = str(FinishReason.STOP)
        self.stopped_here = True
        self._logprobs = [t for t in self._logprobs if t.offset < self._ready_chars]

    def _emit(self, text: str) -> None:
        if text:
            self._ready.append(text)
            self._ready_chars += len(text)


def usage(choices: Sequence[Choice], n: int) -> Usage:
    """Counts of an answer whose choices come in groups of `n` to a prompt."""
    firsts = choices[::n]
    return Usage(
        prompt_tokens=sum(len(c.prompt) for c in firsts),
        completion_tokens=sum(c.completion_tokens for c in choices),
        cached_tokens=sum(c.cached_tokens for c in firsts),
    )
