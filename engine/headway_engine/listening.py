"""What a model's layers ask of their attention function, heard in a pass of two tokens.

Configurations name features in many ways; the call itself does not lie. The shape of each layer's keys and
values is heard in the same pass. Knows nothing of what can be handled (`architecture`), and computes plain
causal attention meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

from headway_engine.model_error import ELSEWHERE, ModelError

LISTEN = "headway_listen"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and widths of one layer's keys and values."""

    heads: int
    key_width: int
    value_width: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.heads * (self.key_width + self.value_width) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Heard:
    """The calls of the attention function in one pass, in order.

    Of each call its arguments, but for queries, keys and values: among them `layer`, its number,
    `attention_mask`, and `is_causal`, wherever the layer says it. `last_row_only`: logits came for the one
    row that was asked for.
    """

    calls: tuple[Mapping[str, Any], ...]
    shapes: Mapping[int, LayerShape]  # by layer
    last_row_only: bool

    @property
    def why_not_paged(self) -> str | None:
        """Why the layers cannot have a paged cache, or logits of chosen rows; None when they can."""
        if not self.last_row_only:
            return "it does not take logits_to_keep"
        if sorted(self.shapes) != list(range(len(self.shapes))):
            return f"it calls attention in layers {sorted(self.shapes)}, which cannot be paged"
        return None


def listen(module: Any, device: torch.device) -> Heard:
    """One pass of two tokens. Raises ModelError for a model that does not run so."""
    AttentionInterface.register(LISTEN, _listen)
    calls: list[dict[str, Any]] = []
    shapes: dict[int, LayerShape] = {}
    before = module.config._attn_implementation
    try:
        module.set_attn_implementation(LISTEN)
        with torch.inference_mode():
            out = module(
                input_ids=torch.zeros((1, 2), dtype=torch.long, device=device),
                position_ids=torch.arange(2, device=device)[None],
                use_cache=False,
                logits_to_keep=torch.ones(1, dtype=torch.long, device=device),
                heard=(calls, shapes),
            )
    except Exception as error:
        raise ModelError(
            f"model: {type(module).__name__} does not run with a registered attention function: {error}; "
            f"{ELSEWHERE}"
        ) from error
    finally:
        module.set_attn_implementation(before)
    return Heard(tuple(calls), shapes, last_row_only=out.logits.shape[1] == 1)


def _listen(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    heard: tuple[list[dict[str, Any]], dict[int, LayerShape]] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if heard is not None:
        calls, shapes = heard
        causal = kwargs.get("is_causal")
        says = getattr(module, "is_causal", True) if causal is None else causal
        layer = getattr(module, "layer_idx", None)
        calls.append({**kwargs, "layer": layer, "attention_mask": attention_mask, "is_causal": says})
        if layer is not None:
            shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
    grouped = query.shape[1] != key.shape[1]
    out = sdpa(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None
