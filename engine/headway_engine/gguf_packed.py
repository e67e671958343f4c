"""A GGUF file as a model whose matrices stay in the file's blocks.

transformers and gguf know the names of tensors and the order of their rows; here blocks are put where the model
wants them. Only for architectures whose tensors are at most reordered by rows, which keeps blocks whole. Knows
nothing of kernels.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headway_engine.fused.gguf_blocks import kept_packed
from headway_engine.gguf_model import parsed_once
from headway_engine.model_error import ModelError
from headway_engine.packed_weights import BlockedEmbedding, BlockedLinear, BlockedMatrix

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF's names of the Llama shapes."""

_VALUES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def architecture_of(gguf: Path) -> str:
    """The architecture that the file names. Raises ModelError."""
    reader = _opened(gguf)
    field = reader.fields.get("general.architecture")
    return str(field.contents()) if field is not None else ""


def has_blocks(gguf: Path) -> bool:
    """Whether any of the file's tensors are in blocks that can be kept. Raises ModelError."""
    return any(kept_packed(tensor.tensor_type.name) for tensor in _opened(gguf).tensors)


def read_packed(gguf: Path, dtype: torch.dtype) -> Any:
    """The transformers module of a file whose architecture is one of ARCHITECTURES, on the CPU: matrices in
    blocks, the rest in `dtype`. Raises ModelError that names what the file lacks."""
    import transformers

    auto: Any = transformers
    try:
        with parsed_once():
            config = auto.AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except Exception as error:
        raise ModelError(f"model: {gguf} cannot be read as a GGUF model: {error}") from error
    with torch.device("meta"):
        module = auto.AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = _tensors(gguf, module)
    tied = bool(config.tie_word_embeddings) or "lm_head.weight" not in tensors
    _fill(module, tensors, dtype, gguf)
    if tied:
        module.set_submodule("lm_head", _tied_head(module.get_input_embeddings()))
    _renew_buffers(module, config)
    return module


def _opened(gguf: Path) -> Any:
    import gguf as library

    reader: Any = library  # its types do not foresee the replaced parser
    try:
        with parsed_once():
            return reader.GGUFReader(str(gguf))
    except Exception as error:
        raise ModelError(f"model: {gguf} cannot be read as a GGUF model: {error}") from error


def _tensors(gguf: Path, module: Any) -> dict[str, tuple[Any, str]]:
    """(array, type name) of every tensor, by the module's own name for it; rows in the module's order."""
    from transformers import modeling_gguf_pytorch_utils

    known: Any = modeling_gguf_pytorch_utils
    architecture = architecture_of(gguf)
    processor = known.TENSOR_PROCESSORS.get(architecture, known.TensorProcessor)(
        config=module.config.to_dict()
    )
    if type(processor) not in (known.TensorProcessor, known.LlamaTensorProcessor):
        raise ModelError(f"model: {gguf}: tensors of {architecture} cannot be kept in blocks")
    names = known.get_gguf_hf_weights_map(module, processor)
    found: dict[str, tuple[Any, str]] = {}
    for tensor in _opened(gguf).tensors:
        name = names.get(tensor.name)
        if name is None:
            continue
        rows = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
        ordered = processor.process(rows, tensor.name).weights
        found[name] = (ordered if tensor.data.ndim > 1 else ordered[0], tensor.tensor_type.name)
    return found


def _fill(module: Any, tensors: dict[str, tuple[Any, str]], dtype: torch.dtype, gguf: Path) -> None:
    missing: list[str] = []
    for name, part in list(module.named_modules()):
        for kind, parameter in list(part.named_parameters(recurse=False)):
            full = f"{name}.{kind}"
            if full not in tensors:
                if name != "lm_head":
                    missing.append(full)
                continue
            array, type_name = tensors[full]
            if kind == "weight" and kept_packed(type_name) and isinstance(part, nn.Linear | nn.Embedding):
                columns = parameter.shape[1]
                matrix = BlockedMatrix(np.asarray(array), type_name, columns)
                replacement = (
                    BlockedEmbedding(matrix, dtype)
                    if isinstance(part, nn.Embedding)
                    else BlockedLinear(matrix, _bias(tensors, name, dtype))
                )
                module.set_submodule(name, replacement)
                break  # its bias went along
            setattr(
                part,
                kind,
                nn.Parameter(_values(array, type_name, parameter.shape, dtype), requires_grad=False),
            )
    if missing:
        raise ModelError(f"model: {gguf} lacks weights of {module.config.model_type}: {sorted(missing)[:5]}")


def _bias(tensors: dict[str, tuple[Any, str]], name: str, dtype: torch.dtype) -> torch.Tensor | None:
    found = tensors.get(f"{name}.bias")
    return None if found is None else _values(*found, found[0].shape, dtype)


def _values(array: Any, type_name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Plain numbers, or blocks of a type that is not kept, in `dtype`."""
    if type_name in _VALUES:
        raw = torch.from_numpy(np.array(array)).view(torch.uint8).view(_VALUES[type_name])
        return raw.view(shape).to(dtype)
    from gguf import GGMLQuantizationType, quants

    wide = quants.dequantize(np.asarray(array), GGMLQuantizationType[type_name])
    return torch.from_numpy(wide).view(shape).to(dtype)


def _tied_head(embedding: Any) -> Any:
    if isinstance(embedding, BlockedEmbedding):
        return BlockedLinear(embedding.matrix)
    head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
    head.weight = embedding.weight
    return head


def _renew_buffers(module: Any, config: Any) -> None:
    """Buffers are computed from the configuration (rotary frequencies), and were on no device so far."""
    for name, part in list(module.named_modules()):
        if any(buffer.is_meta for buffer in part.buffers(recurse=False)):
            module.set_submodule(name, type(part)(config=config))
