"""Which models count as Llama-shaped: what the lean forward passes, on a CPU and on an accelerator, compute.

One list for both, so that what one learns to serve the other is asked about. Knows nothing of either.
"""

from headway_engine.model import LoadedModel

CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def why_not_llama(model: LoadedModel) -> str | None:
    """What of this model a Llama's forward pass would leave out; None when it is one."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    checks = (
        (type(model.module).__name__ in CLASSES, f"{type(model.module).__name__} is not one of {CLASSES}"),
        (getattr(config, "hidden_act", "") == "silu", "its activation is not silu"),
        (not getattr(config, "mlp_bias", False), "its MLP has biases"),
        (rope.get("rope_type", "default") in _FIXED_ROPE, f"rope type {rope.get('rope_type')} has no table"),
        (rope.get("partial_rotary_factor", 1.0) == 1.0, "only part of each head is rotated"),
        (getattr(model.module, "hf_quantizer", None) is None, "its weights are quantized"),
    )
    return next((reason for fine, reason in checks if not fine), None)
