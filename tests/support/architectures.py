"""Architectures that are served: a table of tiny models, their folders on disk, and the models in memory.

Random weights, spread wide so that answers vary; norms and biases are not their usual ones and zeros.
"""

import copy
import dataclasses
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway_engine.model import LoadedModel, load
from headway_engine.model_source import resolve
from headway_engine.small_copy import shared

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OLD_STYLE = {"num_key_value_heads": None, "intermediate_size": None}  # not theirs to name
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {  # keys and values out of one latent vector, keys wider than values
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
TEMPERATURE_BY_POSITION = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
GEMMA = {"head_dim": 8, "initializer_range": 0.05, "tie_word_embeddings": False}
BOTH_KINDS = ["sliding_attention", "full_attention"]

SERVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 97}),  # as wide as the context: no window
    ("ministral3", {"rope_parameters": TEMPERATURE_BY_POSITION}),
    ("mixtral", EXPERTS),
    ("qwen2", {}),
    ("qwen2_moe", EXPERTS),
    ("qwen3", {"head_dim": 8}),
    ("qwen3_moe", {"head_dim": 8, **EXPERTS}),
    ("gemma", {"head_dim": 8}),  # scales its embeddings
    (
        "gemma2",
        {**GEMMA, "initializer_range": 0.3, "attn_logit_softcapping": None, "sliding_window": 128},
    ),  # caps its logits
    ("gemma3_text", {**GEMMA, "sliding_window": 97, "layer_types": BOTH_KINDS}),
    ("gpt2", OLD_STYLE),
    ("gpt_bigcode", OLD_STYLE),  # one head of keys for all
    ("gpt_neox", {}),
    ("gptj", {**OLD_STYLE, "rotary_dim": 4}),
    ("codegen", {**OLD_STYLE, "n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}),
    ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    ("phi", {}),
    ("phi3", {}),
    ("phi3", {"original_max_position_embeddings": 97, "rope_scaling": LONGROPE}),
    ("starcoder2", {}),
    ("olmo", {}),
    ("olmo2", {}),
    ("smollm3", {"no_rope_layers": [1, 0]}),
    ("cohere", {}),
    ("glm4", {"head_dim": 8}),
    ("granite", {"embedding_multiplier": 12.0, "logits_scaling": 4.0, "attention_multiplier": 0.1}),
    ("granitemoe", EXPERTS),
    ("deepseek_v2", {**LATENT, **ROUTED, "topk_group": 1}),
    ("deepseek_v3", {**LATENT, **ROUTED, "topk_group": 1}),
]


def names(rows: list[Any]) -> list[str]:
    return [f"{row[0]}-{number}" for number, row in enumerate(rows)]


def saved(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    """A folder with a random model of this kind; norms and biases are not their usual ones and zeros."""
    sizes = {
        name: value for name, value in (SIZES | changes).items() if not (value is None and name in SIZES)
    }
    config = AutoConfig.for_model(kind, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    module.save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: str = "float32") -> LoadedModel:
    source = resolve(f"file://{folder}", "main", folder / "cache")
    return load(source, dtype=dtype, device="cpu", max_model_len=97, progress=lambda _: None)


@cache
def _kept(row: int) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        return loaded(saved(Path(folder), *SERVED[row]))


def in_memory(row: int, dtype: torch.dtype) -> LoadedModel:
    """The model of a row of SERVED in this type, for a runner to take over; loaded once for all who ask."""
    model = _kept(row)
    module = copy.deepcopy(model.module)
    for parameter in module.parameters():  # as they are loaded: rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    return dataclasses.replace(model, module=module, config=module.config.get_text_config(), dtype=dtype)  # type: ignore[operator, union-attr]


def again(model: LoadedModel) -> LoadedModel:
    """The same model once more, in the same memory: who takes its weights over empties that one alone."""
    module = shared(model.module, {})
    return dataclasses.replace(model, module=module, config=module.config.get_text_config())
