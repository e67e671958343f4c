"""The one exception of finding, reading and judging a model, and how it says what other errors said.

Needs nothing, so that anything may raise it.
"""

from collections.abc import Iterable


class ModelError(ValueError):
    """A model that cannot be found, read or served right. The text names the setting and a way out."""


ELSEWHERE = "serve it with another engine, such as vLLM"
"""The way out where a model cannot be had here at all."""


def in_words(error: Exception, most: int = 400, secrets: Iterable[str] = ()) -> str:
    """What an error says, on one line and without `secrets`; its beginning, where that goes on for pages
    (transformers lists every class it knows)."""
    text = " ".join(str(error).split()) or type(error).__name__
    for secret in secrets:
        text = text.replace(secret, "***")
    return text if len(text) <= most else text[:most] + " ..."
