"""Scaling of rotary embeddings as a GGUF file says it, put into a transformers configuration.

transformers leaves it out for most architectures, and without it a model answers wrongly, the more so the
longer a text is. Knows nothing of weights.
"""

from typing import Any

import numpy as np
import torch

from headway_engine.model_error import ModelError

_FACTORS = "rope_freqs.weight"
"""A tensor of divisors, one for each frequency: how Llama 3.1 and later are written."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The rest of what such divisors are made from, in every model of that family."""


def add_rope_scaling(config: Any, reader: Any, architecture: str) -> None:
    """Write what the file says into `config`. Raises ModelError for what cannot be written there."""
    scaling = _said(reader, architecture)
    factors = next((np.array(t.data).flatten() for t in reader.tensors if t.name == _FACTORS), None)
    if factors is not None and not np.all(factors == 1):
        scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    if not scaling:
        return
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "") not in ("default", scaling["rope_type"]):
        raise _refused(scaling["rope_type"], config)
    config.rope_parameters = rope | scaling
    if factors is not None and not _gives(config, factors):
        raise _refused(f"by {_FACTORS}, unlike Llama 3's", config)


def _said(reader: Any, architecture: str) -> dict[str, Any]:
    """The scaling in the file's metadata; empty where there is none."""

    def value(name: str) -> Any:
        field = reader.fields.get(f"{architecture}.rope.scaling.{name}")
        return None if field is None else field.contents()

    kind, factor = value("type"), value("factor")
    if factor is None and (old := reader.fields.get(f"{architecture}.rope.scale_linear")) is not None:
        factor = old.contents()
    if kind is None:
        kind = "linear"  # as llama.cpp reads it
    if kind == "none" or factor in (None, 0.0, 1.0):
        return {}
    said = {"rope_type": str(kind), "factor": float(factor)}
    if kind == "yarn" and (original := value("original_context_length")) is not None:
        return said | {"original_max_position_embeddings": int(original)}
    if kind != "linear":
        raise ModelError(
            f"model: its rotary embedding is scaled ({kind}) in a way that is not read from GGUF files; use "
            "the model as a Hugging Face folder"
        )
    return said


def _gives(config: Any, factors: "np.ndarray[Any, Any]") -> bool:
    """Whether this configuration divides the frequencies by these factors."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, width, 2) / width)
    return len(factors) == len(plain) and bool(np.allclose(plain / scaled.numpy(), factors, rtol=1e-3))


def _refused(how: str, config: Any) -> ModelError:
    return ModelError(
        f"model: its rotary embedding is scaled ({how}), which cannot be read from a GGUF file for "
        f"{config.model_type}; use the model as a Hugging Face folder"
    )
