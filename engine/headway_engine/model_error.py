"""The one exception of finding, reading and judging a model; needs nothing, so that anything may raise it."""


class ModelError(ValueError):
    """A model that cannot be found, read or served right. The text names the setting and a way out."""


ELSEWHERE = "serve it with another engine, such as vLLM"
"""The way out where a model cannot be had here at all."""
