"""What a model's architecture asks for beyond plain causal attention, and whether it can be had here.

Two witnesses: the configuration, before a pass, and what the modelling code hands to its attention function,
seen in one (`unheard`). Answers are reasons in words; the caller refuses the model with them. A model that
would answer wrongly must not start. Knows nothing of weights, caches and devices.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway_engine.model_error import ELSEWHERE, ModelError

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}

_PLAIN_ARGUMENTS = {"position_ids", "cache_position", "sliding_window", "layer"}
"""What says nothing beyond plain causal attention, or is judged by itself."""

_NAMES = {
    "s_aux": "attention sinks",
    "softcap": "soft-capped attention (softcap)",
    "position_bias": "a position bias in attention",
    "attention_mask": "an attention mask of its own",
    "bidirectional": "attention in both directions",
}


def refusal(module: Any, config: Any, max_model_tokens: int) -> str | None:
    """Why this model would give wrong answers here, and a way out; None when nothing speaks against it."""
    if getattr(module.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; only decoder-only causal models are served"
    other = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if other:
        kinds = ", ".join(sorted(other))
        return f"it has {kinds} layers (a state-space or hybrid model); {ELSEWHERE}"
    if not getattr(type(module), "_supports_attention_backend", False):
        return f"its modelling code does not take transformers' attention interface; {ELSEWHERE}"
    if (window := window_in_use(config)) is not None and window < max_model_tokens:
        return window_reason(window)
    if getattr(config, "attn_logit_softcapping", None):
        return f"its configuration sets attn_logit_softcapping, which is not handled; {ELSEWHERE}"
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original and original < max_model_tokens:
            # The factors switch for a whole step with its longest text: neighbours would change answers.
            return (
                f"its rotary embedding (longrope) is another one past {original} tokens; set maxModelLen "
                f"(--max-model-len) to at most {original}, or {ELSEWHERE}"
            )
    return None


def window_in_use(config: Any) -> int | None:
    """Tokens of the sliding window that some layer attends through, as the configuration has it."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    if types is not None and "sliding_attention" not in types:
        return None
    return int(window)


def window_reason(window: int) -> str:
    return (
        f"it attends through a sliding window of {window} tokens, which is not handled; "
        f"set maxModelLen (--max-model-len) to at most {window}, or {ELSEWHERE}"
    )


def unheard(calls: Sequence[Mapping[str, Any]], max_model_tokens: int) -> str | None:
    """What would be lost of these `calls` of the attention function, one a layer; None when nothing would.

    A call is its arguments but queries, keys and values, and the number of its `layer`. Whatever is not known
    to be harmless counts: a new model's new argument must not be lost without a word.
    """
    if not calls:
        return f"its layers do not call transformers' attention interface; {ELSEWHERE}"
    layers = [call["layer"] for call in calls]
    if len(set(layers)) < len(layers):
        return f"it computes attention more than once in a layer, which is not handled; {ELSEWHERE}"
    windows = [int(window) for call in calls if (window := call.get("sliding_window"))]
    if windows and min(windows) < max_model_tokens:
        return window_reason(min(windows))
    if strange := sorted({_NAMES.get(name, name) for call in calls for name in _strange(call)}):
        return f"it asks for {', '.join(strange)}, which is not handled; {ELSEWHERE}"
    return None


def _strange(call: Mapping[str, Any]) -> Iterator[str]:
    """Names of the arguments that plain causal attention would not honour."""
    for name, value in call.items():
        if name == "is_causal":
            if value is False:
                yield "bidirectional"
        elif (
            name not in _PLAIN_ARGUMENTS
            and value is not None
            and (not isinstance(value, bool | int | float) or value)
        ):
            yield name


def context_limit(config: Any, max_model_len: int) -> int:
    """Tokens of prompt and output together: what is asked for, within the model's own. Raises ModelError."""
    limit = next(
        (
            int(value)
            for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
            if (value := getattr(config, name, None))
        ),
        None,
    )
    if limit is None:
        if max_model_len < 1:
            raise ModelError(
                "maxModelLen: the model's configuration names no context length; set --max-model-len"
            )
        return max_model_len
    if max_model_len > limit:
        raise ModelError(
            f"maxModelLen: {max_model_len} is more than the model's own limit of {limit} tokens; "
            "lower it, or set 0"
        )
    return max_model_len or limit


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters; some models have a set for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (inner for inner in parameters.values() if isinstance(inner, Mapping))
