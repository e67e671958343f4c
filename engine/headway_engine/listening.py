"""What a model's layers ask of their attention function, heard in a pass of two tokens.

Configurations name features in many ways; the call itself does not lie. Knows nothing of what can be handled
(`architecture`), and computes plain causal attention meanwhile.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

from headway_engine.model_error import ELSEWHERE, ModelError

LISTEN = "headway_listen"


def attention_calls(module: Any, device: torch.device) -> list[dict[str, Any]]:
    """The arguments of each call of the attention function, but for queries, keys and values.

    Among them `layer`, its number, `attention_mask`, and `is_causal`, wherever the layer says it. Raises
    ModelError for a model that does not run so.
    """
    AttentionInterface.register(LISTEN, _listen)
    heard: list[dict[str, Any]] = []
    before = module.config._attn_implementation
    try:
        module.set_attn_implementation(LISTEN)
        with torch.inference_mode():
            module(
                input_ids=torch.zeros((1, 2), dtype=torch.long, device=device),
                position_ids=torch.arange(2, device=device)[None],
                use_cache=False,
                heard=heard,
            )
    except Exception as error:
        raise ModelError(
            f"model: {type(module).__name__} does not run with a registered attention function: {error}; "
            f"{ELSEWHERE}"
        ) from error
    finally:
        module.set_attn_implementation(before)
    return heard


def _listen(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    heard: list[dict[str, Any]] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if heard is not None:
        causal = kwargs.get("is_causal")
        says = getattr(module, "is_causal", True) if causal is None else causal
        layer = getattr(module, "layer_idx", None)
        heard.append({**kwargs, "layer": layer, "attention_mask": attention_mask, "is_causal": says})
    grouped = query.shape[1] != key.shape[1]
    out = sdpa(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None
