"""One answer in the making: the core's events of its choices become text, counts and finish reasons. Pure.

Knows how text grows and when it stops; knows nothing of bodies, sockets and who computes the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway_engine.detokenise import Decode, Detokeniser, StopMatcher
from headway_engine.sequence import (
    Event,
    Finished,
    FinishReason,
    PromptOut,
    Started,
    TokenLogprob,
    TokenOut,
)
from headway_engine.tool_calls import CallPart, ToolCallReader

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that ended with whole calls."""

Piece = Callable[[int], tuple[str, bytes]]
"""One token as text and as bytes."""


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its log-probability. `offset` is where its text begins in the choice's text. A prompt's
    first token has nothing before it, and so no log-probability."""

    text: str
    raw: bytes
    logprob: float | None
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
    scored: bool = False  # the text begins with the prompt, token by token with log-probabilities
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
    _prompt_tokens: int = field(init=False, default=0)  # those that are echoed with log-probabilities
    _echoing: Detokeniser = field(init=False)
    _echoed: list[TokenInfo] = field(init=False, default_factory=list)
    _early: list[Event] = field(init=False, default_factory=list)  # of the output, before the prompt's scores
    _logprobs: list[TokenInfo] = field(init=False, default_factory=list)
    _sent_first: bool = field(init=False, default=False)
    _sent_last: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._detokeniser = Detokeniser(self.decode, self.prompt)
        self._echoing = Detokeniser(self.decode)
        self._matcher = StopMatcher(self.stops)
        if self.scored:
            self._echo_token(None)
        elif self.echo:
            self._emit(self.echo)
            self._known_chars = len(self.echo)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    @property
    def told_reason(self) -> str | None:
        """Why it ended, in OpenAI's words; None while it goes on."""
        if self.finish_reason == FinishReason.STOP and self.calls is not None and self.calls.whole:
            return TOOL_CALLS  # and not when the answer was cut: a client must not run half a call
        return self.finish_reason

    def push(self, event: Event) -> None:
        """Take one event of the core. What comes after the end is ignored: the core may be a step ahead."""
        if self.done:
            return
        match event:
            case Started(cached_prompt_tokens=cached):
                self.cached_tokens = cached
            case PromptOut(scores=scores):
                for score in scores:
                    self._echo_token(score)
                if not self._unscored:
                    early, self._early = self._early, []
                    for event in early:
                        self.push(event)
            case TokenOut() | Finished(reason=FinishReason.STOP | FinishReason.LENGTH) if self._unscored:
                self._early.append(event)  # another sample scores the prompt of both, and is behind
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
        echoed, self._echoed = self._echoed, []
        if not text and not calls and not shown and not echoed and self.finish_reason is None:
            return None
        self._logprobs = self._logprobs[len(shown) :]
        reason = self.told_reason
        delta = Delta(self.index, text, (*echoed, *shown), reason, first=not self._sent_first, calls=calls)
        self._sent_first = True
        self._sent_last = self.finish_reason is not None
        return delta

    @property
    def _unscored(self) -> bool:
        """Log-probabilities of the prompt are still to come."""
        return self.scored and self._prompt_tokens < len(self.prompt)

    def _read(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """New text, and what it holds of tool calls."""
        if self.calls is None:
            return text, ()
        text, calls = self.calls.push(text)
        if not self.done:
            return text, calls
        rest, more = self.calls.flush()
        return text + rest, calls + more

    def _echo_token(self, score: TokenLogprob | None) -> None:
        """One more token of the prompt. The text is what the tokens add up to, so that offsets are right."""
        token = self.prompt[self._prompt_tokens]
        self._prompt_tokens += 1
        self._echoed.append(self._info(token, score))
        text = self._echoing.push(token)
        if self._prompt_tokens == len(self.prompt):
            text += self._echoing.flush()
        self._known_chars += len(text)
        self._emit(text)

    def _info(self, token: int, score: TokenLogprob | None) -> TokenInfo:
        """The entry of a token whose text begins where the known text ends."""
        top = () if score is None else tuple((*self.piece(id), logprob) for id, logprob in score.top)
        return TokenInfo(*self.piece(token), score.logprob if score else None, top, self._known_chars)

    def _push_token(self, event: TokenOut) -> None:
        self.completion_tokens += 1
        if event.token in self.stop_token_ids and self.completion_tokens >= self.min_tokens:
            # The mark that ends the text is no part of it; Finished follows. Who scores a prompt counts
            # entries from the end, and expects one for each token that was generated.
            if self.scored:
                self._logprobs.append(self._info(event.token, event.logprob))
            return
        info = None if event.logprob is None else self._info(event.token, event.logprob)
        text = self._detokeniser.push(event.token)
        self._known_chars += len(text)
        if info is not None:
            self._logprobs.append(info)
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
