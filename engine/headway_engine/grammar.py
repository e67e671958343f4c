"""Grammars at work: which tokens may come next in each constrained sequence.

A grammar is a string that `structured` or `tools` wrote: compiled here, bounded in memory and in time, and
followed token by token. Where a sequence stands in its grammar is found from its output tokens alone, so
preemption, a step that is run again and tokens that come in several at a time need no care of their own.
Knows nothing of schemas, requests' bodies and logits, and imports no torch: the front end checks with it.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from headway_engine.sequence import Sequence

KEPT_GRAMMARS = 32
"""Compiled grammars that are kept for the next request with the same one."""

LIMITS = LLParserLimits(
    max_grammar_size=50_000,
    max_lexer_states=20_000,  # 1 to 2 kB each
    initial_lexer_fuel=500_000,
    step_max_items=25_000,
    verbose_errors=False,
)
"""What a grammar may cost: compiling stays under a second, a mask in the tens of milliseconds at worst."""

CHECKED_STEPS = 4
"""Tokens that a check goes on from the beginning: what is forced without end shows itself there."""


class GrammarError(ValueError):
    """A grammar that cannot be followed, in words for the client."""


class GrammarFailed(Exception):
    """Following their grammars failed for these sequences."""

    def __init__(self, message: str, ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.ids = ids


@dataclass(frozen=True, slots=True)
class Allowed:
    """`mask[i]` says of each token whether it may come next in the sequence of row `rows[i]`."""

    rows: tuple[int, ...]
    mask: NDArray[np.bool_]


@dataclass(slots=True)
class _Place:
    """Where a sequence is in its grammar."""

    matcher: LLMatcher
    consumed: int = 0  # output tokens that the matcher has seen


class Grammars:
    """Compiled grammars of one tokenizer, and where the sequences that follow them are.

    `prepare` may be called from any thread; `allowed` from one.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        # A sequence that nobody holds any more is over, however it ended.
        self._places: WeakKeyDictionary[Sequence, _Place] = WeakKeyDictionary()
        self._executor = LLExecutor()

    @classmethod
    def of_model(cls, tokenizer_dir: Path, end_ids: tuple[int, ...]) -> "Grammars":
        """For the model whose tokenizer lies there and whose texts end with one of `end_ids`."""
        text = (tokenizer_dir / "tokenizer.json").read_text("utf-8")
        return cls(LLTokenizer(text, eos_token=list(end_ids)))

    def prepare(self, grammar: str) -> None:
        """Compile ahead, so that the step that needs it does not wait. A bad grammar is told of later."""
        self._matcher(grammar)

    def allowed(self, sequences: Iterable[Sequence], width: int) -> Allowed | None:
        """Which of `width` tokens may come next, for those that follow a grammar. Raises GrammarFailed."""
        rows: list[int] = []
        matchers: list[LLMatcher] = []
        failed: dict[str, str] = {}
        for row, sequence in enumerate(sequences):
            if not sequence.request.sampling.grammar:
                continue
            place = self._place(sequence)
            if place.matcher.is_error():
                failed[sequence.id] = place.matcher.get_error()
            rows.append(row)
            matchers.append(place.matcher)
        if failed:
            raise GrammarFailed(_words(next(iter(failed.values()))), tuple(failed))
        if not rows:
            return None
        bits = allocate_token_bitmask(len(rows), self._tokenizer.vocab_size)
        fill_next_token_bitmask_par(
            self._executor, [(matcher, i) for i, matcher in enumerate(matchers)], bits
        )
        known = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : self._tokenizer.vocab_size]
        mask = np.zeros((len(rows), width), dtype=np.bool_)
        shared = min(width, known.shape[1])  # a model may have fewer or more rows of weights than names
        mask[:, :shared] = known[:, :shared]
        self._check(list(sequences), rows, matchers, mask)
        return Allowed(tuple(rows), mask)

    def _check(
        self,
        sequences: list[Sequence],
        rows: list[int],
        matchers: list[LLMatcher],
        mask: NDArray[np.bool_],
    ) -> None:
        """Raise GrammarFailed for those who got no mask, or an empty one."""
        bad = [i for i, m in enumerate(matchers) if m.is_error() or not mask[i].any()]
        if bad:
            reason = matchers[bad[0]].get_error() or "no token of this model can go on from here"
            raise GrammarFailed(_words(reason), tuple(sequences[rows[i]].id for i in bad))

    def _place(self, sequence: Sequence) -> _Place:
        """The sequence's place, moved on over the tokens that have come since."""
        place = self._places.get(sequence)
        if place is None:
            place = self._places[sequence] = _Place(self._matcher(sequence.request.sampling.grammar))
        new = sequence.tokens[sequence.prompt_len + place.consumed :]
        if new and not place.matcher.is_error():
            place.matcher.consume_tokens(new)
            place.consumed += len(new)
        return place

    def _matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of the grammar; one with an error for a bad grammar."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found.deep_copy()
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()


def check(grammar: str) -> None:
    """Raise GrammarError for a grammar that is wrong, too costly, or fulfilled by nothing.

    Done with the 256 bytes as tokens: what a grammar costs and means hardly depends on the vocabulary, and
    the real one takes time and memory. Compiling can take most of a second: keep it off the event loop
    (llguidance lets go of the interpreter meanwhile).
    """
    tokenizer = _byte_tokenizer()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    for _ in range(CHECKED_STEPS):
        if matcher.is_error():
            break
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        choices = np.unpackbits(packed, bitorder="little")[: tokenizer.vocab_size].nonzero()[0]
        if not choices.size or choices[0] == _Bytes.eos_token_id:
            break
        matcher.consume_token(int(choices[0]))
    if matcher.is_error():
        raise GrammarError(_words(matcher.get_error()))


class _Bytes:
    """What llguidance wants to know of a tokenizer: here each byte is a token, and one more is the end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def _words(error: str) -> str:
    """llguidance's message, on one line and without its state."""
    if "NoExtension" in error:
        return "nothing fulfils it"
    return " ".join(_lines(error))[:300]


def _lines(error: str) -> Iterator[str]:
    return (line.strip() for line in error.splitlines() if line.strip() and "<non-verbose/>" not in line)
