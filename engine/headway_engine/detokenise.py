"""Token ids to text, one token at a time: no character is split, no part of a stop string gets out.

Works on any `decode` function (ids to text) and knows nothing of tokenizers or requests.
"""

from collections.abc import Callable, Iterable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
"""What decoders put where bytes do not (yet) make a character."""

CONTEXT_TOKENS = 6
"""Known tokens decoded with each new one, because the text of a token depends on its neighbours."""

PATIENCE_TOKENS = 8
"""A character has at most four bytes, so text that has been incomplete for this long is no character."""

WINDOW_TOKENS = 64


class Detokeniser:
    """The text of a growing sequence of tokens. `push` and `flush` together yield the text exactly once."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """`context` is the end of the prompt: a first token's leading space depends on what stood before."""
        self._decode = decode
        self._window = list(context[-CONTEXT_TOKENS:])
        while self._window and REPLACEMENT in (text := decode(self._window)):
            self._window.pop(0)  # begins or ends inside a character, which could spoil its neighbours
        self._sent = len(text) if self._window else 0  # characters of the window's text
        self._whole = [len(self._window)]  # places in the window where its text was complete

    def push(self, token: int) -> str:
        """The text that has become certain with this token; may be empty."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            new = text[self._sent :]
            self._sent = len(text)
            self._whole.append(len(self._window))
            self._forget()
            return new
        if len(self._window) - self._whole[-1] <= PATIENCE_TOKENS:
            return ""
        # Not text but bytes. The last replacement sign may yet become a character.
        new = text[self._sent : -1]
        self._sent = max(self._sent, len(text) - 1)
        if len(self._window) > WINDOW_TOKENS:
            self._window = self._window[-PATIENCE_TOKENS - 1 :]
            self._whole = [0]
            self._sent = max(len(self._decode(self._window)) - 1, 0)
        return new

    def flush(self) -> str:
        """What is held back, at the sequence's end: an unfinished character becomes a replacement sign."""
        text = self._decode(self._window) if self._window else ""
        new = text[self._sent :]
        self._sent += len(new)
        return new

    def _forget(self) -> None:
        """Shorten the window, at a place where no character is cut."""
        if len(self._window) <= 2 * CONTEXT_TOKENS:
            return
        cuts = [place for place in self._whole if place <= len(self._window) - CONTEXT_TOKENS]
        if cuts and cuts[-1]:
            cut = cuts[-1]
            self._window = self._window[cut:]
            self._whole = [place - cut for place in self._whole if place >= cut]
            self._sent = len(self._decode(self._window))


class StopMatcher:
    """Passes text on, but holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be sent. After a match: what stood before it, and `matched` is set."""
        if not self._stops:
            return text
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            # The earliest match wins; of two that begin together, the one that is complete first.
            at, self.matched = min(hits, key=lambda hit: (hit[0], len(hit[1])))
            out, self._held = self._held[:at], ""
            return out
        keep = max(overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        out, self._held = self._held, ""
        return out


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
