"""A transformers causal language model, loaded and judged: what cannot be served right is refused.

Puts together where weights come from (`model_source`, `weights`) and what can be handled (`architecture`,
`listening`); knows nothing of caches of keys and values, batches or queues.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from headway_engine.architecture import context_limit, refusal, unheard
from headway_engine.devices import choose_device, choose_dtype, slow_here
from headway_engine.gguf_model import without_weights
from headway_engine.gguf_packed import index_folder, read_index, read_packed
from headway_engine.listening import LayerShape, listen
from headway_engine.logs import fields
from headway_engine.model_error import ELSEWHERE
from headway_engine.model_source import (
    ModelError,
    ModelSource,
    RandomShape,
    SourceKind,
    default_cache_dir,
    resolve,
    weights_folder,
)
from headway_engine.packed_weights import blocked_weights, bytes_to_come, is_packed, mapped_bytes
from headway_engine.weights import read_folder, stored_dtype

log = logging.getLogger(__name__)

_BLOCKS_FIT = torch.bfloat16
"""The type that holds weights of blocks: what its rounding adds is far below what the blocks lost."""

_Auto: Any = AutoModelForCausalLM  # its methods carry no types

__all__ = [
    "LoadedModel",
    "ModelError",
    "ModelSource",
    "choose_device",
    "choose_dtype",
    "default_cache_dir",
    "load",
    "refusal",
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
    layer_shapes: Mapping[int, LayerShape] = field(default_factory=dict)  # of keys and values, by layer
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # of generation_config.json

    @property
    def in_blocks(self) -> bool:
        """Whether weights are in the blocks of a file. Only the kernels compute fast with those."""
        return is_packed(self.module)

    @property
    def weight_bytes(self) -> int:
        """Memory of all parameters and buffers, tied ones counted once, quantized ones as they are stored."""
        stored = (
            tensor
            for whole in (*self.module.parameters(), *self.module.buffers())
            for tensor in _stored_tensors(whole)
        )
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in stored}.values())

    @property
    def bytes_to_come(self) -> int:
        """Memory that the kernels will take for weights in blocks, beyond what those take now: all of their
        copy where the blocks are in a file that is mapped. 0 for plain weights."""
        return bytes_to_come(self.module)

    @property
    def serving_bytes(self) -> int:
        """Memory of the weights once a runner has taken them over."""
        return self.weight_bytes - mapped_bytes(self.module) + self.bytes_to_come


def load(
    source: ModelSource,
    *,
    dtype: str,
    device: str,
    max_model_len: int,
    progress: Callable[[str], None],
    quantize: str = "",
    keep_blocks: bool = False,
) -> LoadedModel:
    """Load the weights and check that the model can be served right. Raises ModelError.

    `quantize` packs the weights while they are read, see `config.QUANTIZATIONS`; empty: as they are.
    `keep_blocks`: matrices of a GGUF file stay in its blocks where that is possible. Only the kernels compute
    fast with them.
    """
    target = choose_device(device)
    if source.shape is not None and quantize:
        raise ModelError(f"quantization: {source.uri} has no weights to read; leave --quantization out")
    blocks = None
    if keep_blocks and target.type == "cpu" and not quantize:
        blocks = blocks_of(source, progress)
    folder = weights_folder(source, progress) if source.shape is None and blocks is None else None
    stored = _BLOCKS_FIT if blocks else stored_dtype(folder) if folder else None
    compute = choose_dtype(dtype, target, stored)
    if slow_here(compute, target):
        # Right, and slow; the fused path widens bfloat16 while it reads, so it is no reason to refuse.
        why = "this CPU imitates it; through transformers, float32 is several times faster"
        log.warning(fields("slow-dtype", dtype=dtype, why=why))
    if blocks is not None:
        assert source.path is not None, "blocks are of a file"
        size = source.path.stat().st_size / 2**30
        progress(f"reading {source.path.name}: weights stay in its {size:.2f} GiB")
        module = read_packed(source.path, blocks, compute)
    elif folder is not None:
        module = read_folder(folder, source.uri, compute, quantize, progress)
    else:
        assert source.shape is not None, "a source has a folder or a shape"
        progress(f"making a random {source.shape.architecture} model")
        module = _random_model(source.shape, compute)
    module = module.eval().requires_grad_(False).to(target)
    config = _text_config(module)
    max_model_tokens = context_limit(config, max_model_len)
    layer_shapes = _heard_shapes(module, config, max_model_tokens, target)
    millions = (sum(p.numel() for p in module.parameters()) + blocked_weights(module)) / 1e6
    return LoadedModel(
        module=module,
        config=config,
        tokenizer_dir=source.tokenizer_dir,
        device=target,
        dtype=compute,
        max_model_tokens=max_model_tokens,
        description=f"{type(module).__name__}, {millions:.1f} M parameters",
        eos_token_ids=_eos_token_ids(module, int(getattr(config, "vocab_size", 0))),
        layer_shapes=layer_shapes,
        sampling_defaults=_sampling_defaults(module),
    )


def blocks_of(source: ModelSource, progress: Callable[[str], None]) -> Path | None:
    """The folder of the index, if matrices of this model can be kept in the blocks of a GGUF file; else None.
    Raises ModelError."""
    if source.kind is not SourceKind.GGUF:
        return None
    folder = index_folder(source, progress)
    return folder if read_index(folder).tensors else None


def _heard_shapes(
    module: Any, config: Any, max_model_tokens: int, device: torch.device
) -> Mapping[int, LayerShape]:
    """Shapes of keys and values by layer. Raises ModelError for a model that cannot be served right."""
    reason = refusal(module, config, max_model_tokens)
    if reason is None:
        if is_packed(module):  # it asks for the same without weights, which would take long to widen
            module, device = without_weights(module.config, torch.float32), torch.device("meta")
        heard = listen(module, device)
        reason = unheard(heard.calls, max_model_tokens)
        if reason is None and heard.why_not_paged is None:
            return heard.shapes
        reason = reason or f"{heard.why_not_paged}; {ELSEWHERE}"
    raise ModelError(f"model: {type(module).__name__} cannot be served: {reason}")


def _text_config(module: Any) -> Any:
    try:
        return module.config.get_text_config()
    except ValueError as error:  # several texts in one model
        raise ModelError(f"model: {type(module).__name__} cannot be served: {error}") from error


def _stored_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensor, or those that a quantized one keeps its numbers in (it has no address of its own)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _stored_tensors(getattr(tensor, name))


def _eos_token_ids(module: Any, vocab_size: int) -> tuple[int, ...]:
    """All ids that end a text: those of the generation configuration, else of the configuration.

    Ids that the model has no weights for are left out, and said: it can never give them, so nothing is lost,
    and models that were trimmed or put together from others have such ids and serve well elsewhere. Kept,
    they would fail each request that bans them for a while (`min_tokens`).
    """
    for config in (getattr(module, "generation_config", None), module.config):
        said = getattr(config, "eos_token_id", None)
        ids = list(said) if isinstance(said, list | tuple) else [] if said is None else [said]
        known = tuple(id for id in ids if type(id) is int and id >= 0 and (id < vocab_size or not vocab_size))
        if len(known) < len(ids):
            log.warning(
                fields(
                    "end-ids-unknown",
                    ids=",".join(str(id) for id in ids if id not in known),
                    vocabulary=vocab_size,
                    where=type(config).__name__,
                    kept=",".join(map(str, known)) or "none",
                )
            )
        if known:
            return known
    return ()


def _sampling_defaults(module: Any) -> dict[str, float]:
    """What the model's authors recommend for requests that say nothing; what makes no sense is left out."""
    generation = getattr(module, "generation_config", None)
    said = generation.to_diff_dict() if generation is not None else {}
    sensible: dict[str, Callable[[float], bool]] = {
        "temperature": lambda v: 0 <= v <= 2,
        "top_p": lambda v: 0 < v <= 1,
        "top_k": lambda v: v >= 0 and v == int(v),
        "min_p": lambda v: 0 <= v <= 1,
        "repetition_penalty": lambda v: 0 < v <= 100,
    }
    return {
        name: float(value)
        for name, makes_sense in sensible.items()
        if isinstance(value := said.get(name), int | float) and makes_sense(value)
    }


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
