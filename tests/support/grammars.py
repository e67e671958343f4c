"""Whether a text is a sentence of a grammar."""

from llguidance import LLMatcher

from headway_engine.grammar import LIMITS, _byte_tokenizer


def accepts(grammar: str, text: str) -> bool:
    """The whole text, and it may end there."""
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    raw = list(text.encode())
    return bool(matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting())
