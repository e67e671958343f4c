"""A GGUF file as a model whose matrices stay in the file's blocks.

transformers and gguf know the names of tensors and the order of their rows; here blocks are put where the
model wants them. Only for architectures whose tensors are at most reordered by rows, which keeps blocks
whole. Parsing the file takes seconds, so what is in it is written down once (`write_index`) and read from
there. Knows nothing of kernels and caches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from headway_engine import drafts
from headway_engine.gguf_blocks import kept_packed
from headway_engine.gguf_model import described, lacks, without_weights
from headway_engine.model_error import ModelError
from headway_engine.model_source import ModelSource, gguf_cache, must_be_unchanged
from headway_engine.packed_weights import BlockedEmbedding, BlockedLinear, BlockedMatrix

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF's names of the Llama shapes."""

_INDEX = "blocks.json"
_VALUES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    gguf_name: str
    name: str  # of the model's parameter
    type: str  # gguf's name of it
    shape: tuple[int, ...]  # of the parameter, in weights
    first_byte: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Index:
    """What is in a file. No tensors: its matrices cannot be kept in blocks."""

    architecture: str
    tensors: tuple[Tensor, ...] = ()

    @property
    def block_types(self) -> list[str]:
        """GGUF's names of the types of its blocks that are kept."""
        return sorted({tensor.type for tensor in self.tensors if kept_packed(tensor.type)})


def index_folder(source: ModelSource, progress: Callable[[str], None]) -> Path:
    """A folder with the index of a GGUF file, written once for a file. Raises ModelError."""
    assert source.path is not None
    assert source.content is not None
    gguf, content = source.path, source.content

    def index(out: Path) -> None:
        progress(f"reading what is in {gguf.name} (once)")
        write_index(gguf, out)
        must_be_unchanged(source)

    return drafts.once(gguf_cache(content, source.cache_dir) / "index", index)


def write_index(gguf: Path, out: Path) -> None:
    """Save configuration and index under `out`. Raises ModelError."""
    config, reader, architecture = described(gguf)
    config.save_pretrained(str(out))
    index = Index(architecture)
    if architecture in ARCHITECTURES and any(kept_packed(t.tensor_type.name) for t in reader.tensors):
        index = Index(architecture, _tensors(gguf, reader, architecture, config))
    (out / _INDEX).write_bytes(msgspec.json.encode(index))


def read_index(folder: Path) -> Index:
    """What `write_index` wrote."""
    return msgspec.json.decode((folder / _INDEX).read_bytes(), type=Index)


def read_packed(gguf: Path, folder: Path, dtype: torch.dtype) -> Any:
    """The transformers module of a file whose index has tensors, on the CPU: matrices in the file's blocks,
    the rest in `dtype`. `folder` has the index. Raises ModelError that names what the file lacks."""
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    auto: Any = transformers
    known: Any = modeling_gguf_pytorch_utils
    config = auto.AutoConfig.from_pretrained(str(folder))
    module = without_weights(config, dtype)
    index = read_index(folder)
    processor = known.TENSOR_PROCESSORS.get(index.architecture, known.TensorProcessor)(
        config=config.to_dict()
    )
    # Nobody writes to it; torch warns of what says that it cannot be written to.
    file = np.memmap(gguf, dtype=np.uint8, mode="c")
    found = {}
    for tensor in index.tensors:
        raw = file[tensor.first_byte : tensor.first_byte + tensor.bytes]
        rows = processor.process(raw.reshape(tensor.shape[0], -1), tensor.gguf_name).weights
        found[tensor.name] = _Part(tensor, rows, mapped=np.may_share_memory(rows, file))
    _fill(module, found, dtype, gguf)
    if "lm_head.weight" not in found:
        module.set_submodule("lm_head", _tied_head(module.get_input_embeddings()))
    _renew_buffers(module, config)
    return module


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor with its bytes, uint8 [rows, bytes of a row], as the model orders rows."""

    tensor: Tensor
    raw: Any
    mapped: bool  # a part of the file, and no copy

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Plain numbers, or those of blocks of a type that is not kept, in `dtype`."""
        kind, shape, raw = self.tensor.type, self.tensor.shape, np.array(self.raw)
        if kind in _VALUES:
            return torch.from_numpy(raw).view(_VALUES[kind]).view(shape).to(dtype)
        from gguf import GGMLQuantizationType, quants

        wide = quants.dequantize(raw, GGMLQuantizationType[kind])
        return torch.from_numpy(wide).view(shape).to(dtype)


_Found = dict[str, _Part]


def _tensors(gguf: Path, reader: Any, architecture: str, config: Any) -> tuple[Tensor, ...]:
    import gguf as library

    module = without_weights(config, torch.float32)
    arch = next(arch for arch, name in library.MODEL_ARCH_NAMES.items() if name == architecture)
    names = library.get_tensor_name_map(arch, config.num_hidden_layers)
    parameters: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, parameter in module.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if (gguf_stem := names.get_name(stem)) is not None:
            parameters[f"{gguf_stem}.{kind}"] = (name, tuple(parameter.shape))
    found = []
    for tensor in reader.tensors:
        if tensor.name not in parameters:
            continue
        name, shape = parameters[tensor.name]
        stored = tuple(int(size) for size in reversed(tensor.shape))
        if stored != shape:
            raise ModelError(
                f"model: {gguf} is not what its metadata says: {tensor.name} has the shape {stored}, and a "
                f"{config.model_type} of these sizes {shape}; convert the model anew"
            )
        found.append(
            Tensor(
                gguf_name=tensor.name,
                name=name,
                type=tensor.tensor_type.name,
                shape=shape,
                first_byte=int(tensor.data_offset),
                bytes=int(tensor.n_bytes),
            )
        )
    return tuple(found)


def _fill(module: Any, found: _Found, dtype: torch.dtype, gguf: Path) -> None:
    missing: list[str] = []
    biases = {
        name.removesuffix(".bias"): one.values(dtype) for name, one in found.items() if name.endswith(".bias")
    }
    for name, part in list(module.named_modules()):
        for kind, _ in list(part.named_parameters(recurse=False)):
            full = f"{name}.{kind}"
            if full not in found:
                if name != "lm_head":
                    missing.append(full)
                continue
            values = found[full]
            if (
                kind == "weight"
                and isinstance(part, nn.Linear | nn.Embedding)
                and kept_packed(values.tensor.type)
            ):
                matrix = BlockedMatrix(
                    values.raw, values.tensor.type, values.tensor.shape[1], mapped=values.mapped
                )
                module.set_submodule(
                    name,
                    BlockedEmbedding(matrix, dtype)
                    if isinstance(part, nn.Embedding)
                    else BlockedLinear(matrix, biases.get(name)),
                )
            else:
                setattr(part, kind, nn.Parameter(values.values(dtype), requires_grad=False))
    if missing:
        raise lacks(gguf, module.config, missing)


def _tied_head(embedding: Any) -> nn.Module:
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
