"""A transformers causal language model, loaded and judged: what cannot be served right is refused.

Knows where weights come from (`model_source`) and what attention features are handled; nothing of caches
of keys and values, batches or queues.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from headway_engine.model_source import (
    ModelError,
    ModelSource,
    RandomShape,
    default_cache_dir,
    resolve,
    weights_folder,
)

_Auto: Any = AutoModelForCausalLM  # the methods of neither carry types
_logging: Any = logging

__all__ = [
    "LoadedModel",
    "ModelError",
    "ModelSource",
    "choose_device",
    "choose_dtype",
    "default_cache_dir",
    "load",
    "resolve",
]


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, in eval mode. `max_model_tokens` bounds prompt and output together."""

    module: nn.Module
    config: Any
    tokenizer_dir: Path | None
    device: torch.device
    dtype: torch.dtype
    max_model_tokens: int
    description: str  # "LlamaForCausalLM, 134.5 M parameters"
    eos_token_ids: tuple[int, ...]

    @property
    def weight_bytes(self) -> int:
        """Memory of all parameters and buffers, tied ones counted once."""
        tensors = {t.data_ptr(): t.nbytes for t in (*self.module.parameters(), *self.module.buffers())}
        return sum(tensors.values())


def choose_device(name: str) -> torch.device:
    """The device behind `auto`, `cpu`, `cuda` or `cuda:N`. Raises ModelError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise ModelError(
            f"device: {name!r} is not there ({torch.cuda.device_count()} CUDA devices); use auto or cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute type behind `auto`: bfloat16 where the hardware multiplies it, else float32.

    A CPU without bf16 instructions runs it 20 to 400 times slower than float32 (docs, performance).
    """
    if name != "auto":
        try:
            return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
        except KeyError:
            raise ModelError(f"dtype: {name!r}; use auto, float32, bfloat16 or float16") from None
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _cpu_multiplies_bf16() else torch.float32


def load(
    source: ModelSource,
    *,
    dtype: str,
    device: str,
    max_model_len: int,
    progress: Callable[[str], None],
) -> LoadedModel:
    """Load the weights and check that the model can be served right. Raises ModelError."""
    _logging.disable_progress_bar()  # progress goes to `progress`, not to the terminal
    target = choose_device(device)
    compute = choose_dtype(dtype, target)
    if source.shape is not None:
        progress(f"making a random {source.shape.architecture} model")
        module = _random_model(source.shape, compute)
    else:
        folder = weights_folder(source, progress)
        progress(f"loading weights from {folder}")
        module = _read_folder(folder, source, compute)
    module = module.eval().requires_grad_(False).to(target)
    config = module.config.get_text_config()
    max_model_tokens = _context_limit(config, max_model_len)
    if reason := refusal(module, config, max_model_tokens):
        raise ModelError(f"model: {type(module).__name__} cannot be served: {reason}")
    millions = sum(p.numel() for p in module.parameters()) / 1e6
    return LoadedModel(
        module=module,
        config=config,
        tokenizer_dir=source.tokenizer_dir,
        device=target,
        dtype=compute,
        max_model_tokens=max_model_tokens,
        description=f"{type(module).__name__}, {millions:.1f} M parameters",
        eos_token_ids=_eos_token_ids(module),
    )


def refusal(module: Any, config: Any, max_model_tokens: int) -> str | None:
    """Why this model would give wrong answers here, and a way out; None when it is fine."""
    if getattr(module.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; only decoder-only causal models are served"
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        return (
            f"it has {', '.join(sorted(other))} layers (a hybrid model); run it on the vllm or sglang runtime"
        )
    if not getattr(type(module), "_supports_attention_backend", False):
        return (
            "its modelling code does not take transformers' attention interface; run it on the vllm runtime"
        )
    window = _window_in_use(config)
    if window is not None and window < max_model_tokens:
        return (
            f"it attends through a sliding window of {window} tokens, which is not handled; "
            f"set maxModelLen (--max-model-len) to at most {window}, or run it on the vllm runtime"
        )
    for name in ("attn_logit_softcapping",):
        if getattr(config, name, None):
            return f"its configuration sets {name}, which is not handled; run it on the vllm runtime"
    return None


def _window_in_use(config: Any) -> int | None:
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    if types is not None and "sliding_attention" not in types:
        return None
    return int(window)


def _context_limit(config: Any, max_model_len: int) -> int:
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


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    """All ids that end a text: those of the generation configuration, else of the configuration."""
    for config in (getattr(module, "generation_config", None), module.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def _read_folder(folder: Path, source: ModelSource, dtype: torch.dtype) -> Any:
    try:
        return _Auto.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except MemoryError as error:
        raise ModelError(f"model: not enough memory for the weights of {source.uri}") from error
    except Exception as error:
        raise ModelError(
            f"model: {source.uri} cannot be loaded as a causal language model: {error}"
        ) from error


def _random_model(shape: RandomShape, dtype: torch.dtype) -> Any:
    """A model with seeded weights. Their spread is 1/sqrt(hidden), not the usual 0.02, and biases and norms
    are not the usual zeros and ones, so that small models say varied things and a test of them can fail."""
    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "intermediate_size": shape.intermediate or 3 * shape.hidden,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "initializer_range": shape.hidden**-0.5,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": shape.architecture == "llama",  # tied and untied both occur
    }
    if shape.architecture == "gpt2":
        del sizes["num_key_value_heads"], sizes["intermediate_size"]
        sizes["n_inner"] = shape.intermediate or 3 * shape.hidden
    try:
        config = AutoConfig.for_model(shape.architecture, **sizes)
    except ValueError as error:
        raise ModelError(
            f"model: transformers knows no architecture {shape.architecture!r}; try llama, qwen2 or gpt2"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        try:
            module = _Auto.from_config(config, dtype=torch.float32)
        except Exception as error:
            raise ModelError(f"model: a random {shape.architecture} cannot be made: {error}") from error
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return module.to(dtype)


def _cpu_multiplies_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
