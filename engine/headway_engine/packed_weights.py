"""Modules whose weights stay in the blocks of their file: they compute right, and slowly.

The kernels take the blocks over. Until then, and for the model's own forward pass (probes, the check at
start), these modules widen what they need while they need it. Knows nothing of files.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from headway_engine.gguf_blocks import grouped
from headway_engine.grouped_codes import GroupedCodes

_WIDE_ELEMENTS = 1 << 19
"""Weights that are widened at a time: as many as a core's own cache holds, which is twice as fast as more."""

_QUANTIZED_AT_ONCE = 1 << 24
"""Weights that are put into blocks at a time."""


class BlockedMatrix(nn.Module):
    """A matrix [rows, columns] in blocks: uint8 [rows, bytes of a row], of a type known to `gguf_blocks`."""

    raw: torch.Tensor

    def __init__(
        self, raw: "np.ndarray[Any, Any]", type_name: str, columns: int, mapped: bool = False
    ) -> None:
        """`mapped`: `raw` is a part of a file that is mapped, so it takes no memory of the process."""
        super().__init__()
        self.type_name = type_name
        self.columns = columns
        self.mapped = mapped
        self.register_buffer("raw", torch.from_numpy(raw), persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.raw.shape[0], self.columns

    @property
    def panel_bytes(self) -> int:
        """What the kernels' own copy of it takes: for some types it is larger than the blocks."""
        one = grouped(self.raw[:1].numpy(), self.type_name)
        numbers = one.scales.numel() + (0 if one.offsets is None else one.offsets.numel())
        return self.raw.shape[0] * (self.columns * one.bits // 8 + numbers * one.scales.itemsize)

    def codes(self) -> GroupedCodes:
        """The whole matrix."""
        return grouped(self.raw.numpy(), self.type_name)

    def rows(self, index: torch.Tensor | slice) -> torch.Tensor:
        """Some rows, float32 [n, columns]."""
        return grouped(self.raw[index].numpy(), self.type_name).weights()

    def drop(self) -> None:
        """Give the memory back. The matrix cannot be used any more."""
        self.raw = self.raw.new_empty(0)


class BlockedLinear(nn.Module):
    """`nn.Linear` over a BlockedMatrix."""

    def __init__(self, matrix: BlockedMatrix, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.matrix = matrix
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the type of `x`."""
        some = max(1, _WIDE_ELEMENTS // self.in_features)
        parts = [
            functional.linear(x, self.matrix.rows(slice(first, first + some)).to(x.dtype))
            for first in range(0, self.out_features, some)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class BlockedEmbedding(nn.Module):
    """`nn.Embedding` over a BlockedMatrix, in `dtype`."""

    def __init__(self, matrix: BlockedMatrix, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.matrix = matrix
        # A tensor, so that whoever changes the type of a model's tensors changes what this gives.
        self.like: torch.Tensor
        self.register_buffer("like", torch.zeros((), dtype=dtype), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] to [..., embedding_dim]."""
        return self.matrix.rows(ids.reshape(-1)).to(self.like.dtype).view(*ids.shape, self.embedding_dim)


def put_into_blocks(model: Any) -> None:
    """Replace linear layers and embeddings by such in blocks of 8 bits (Q8_0: 32 weights share a scale), one
    after the other, so that memory does not double. Rows that are no whole blocks stay as they are."""
    from gguf import GGMLQuantizationType, quants

    size = 32
    matrices: dict[int, BlockedMatrix] = {}
    for name, part in list(model.named_modules()):
        if type(part) not in (nn.Linear, nn.Embedding) or part.weight.shape[1] % size:
            continue
        weight, key = part.weight.data, part.weight.data_ptr()
        if key not in matrices:
            rows = max(1, _QUANTIZED_AT_ONCE // weight.shape[1])
            pieces = [
                quants.quantize(weight[at : at + rows].float().numpy(), GGMLQuantizationType.Q8_0)
                for at in range(0, weight.shape[0], rows)
            ]
            matrices[key] = BlockedMatrix(np.concatenate(pieces), "Q8_0", weight.shape[1])
        matrix = matrices[key]
        model.set_submodule(
            name,
            BlockedLinear(matrix, None if part.bias is None else part.bias.data)
            if isinstance(part, nn.Linear)
            else BlockedEmbedding(matrix, weight.dtype),
        )


def weight_of(module: Any) -> torch.Tensor | GroupedCodes:
    """The weights of a linear layer or an embedding, as they are: a tensor, or codes."""
    if (matrix := _matrix_of(module)) is not None:
        return matrix.codes()
    weight: torch.Tensor = module.weight
    return weight


def plain_weight(module: Any) -> tuple[torch.Tensor, ...]:
    """Its weights where they are a plain tensor, nothing where they are in blocks."""
    return (module.weight,) if _matrix_of(module) is None else ()


def same_storage(one: Any, other: Any) -> bool:
    """Whether two modules share their weights (a head tied to its embedding)."""
    if (matrix := _matrix_of(one)) is not None:
        return matrix is _matrix_of(other)
    return hasattr(other, "weight") and one.weight.data_ptr() == other.weight.data_ptr()


def is_packed(model: Any) -> bool:
    """Whether any weights of this module are in blocks."""
    return any(True for _ in _matrices(model))


def block_types(model: Any) -> list[str]:
    """GGUF's names of the types of its blocks, of which most weights are first."""
    sizes: Counter[str] = Counter()
    for matrix in _matrices(model):
        sizes[matrix.type_name] += math.prod(matrix.shape)
    return [name for name, _ in sizes.most_common()]


def blocked_weights(model: Any) -> int:
    """How many weights of this module are in blocks."""
    return sum(math.prod(matrix.shape) for matrix in _matrices(model))


def bytes_to_come(model: Any) -> int:
    """Memory that this module's weights in blocks will take once the kernels have their own copy of them,
    beyond what they take now."""
    return sum(
        matrix.panel_bytes - (0 if matrix.mapped else matrix.raw.nbytes)
        for matrix in _matrices(model)
        if matrix.raw.numel()
    )


def mapped_bytes(model: Any) -> int:
    """How much of this module's weights is in a file that is mapped."""
    return sum(matrix.raw.nbytes for matrix in _matrices(model) if matrix.mapped)


def token_rows(part: nn.Module) -> list[torch.Tensor]:
    """The tensors of an embedding or a head that have a row for each token."""
    own: list[torch.Tensor] = list(part.parameters(recurse=False))
    matrix = _matrix_of(part)
    return own if matrix is None else [matrix.raw, *own]


def drop_weights(*modules: Any) -> None:
    """Give the memory of these modules' weights back."""
    for module in modules:
        if (matrix := _matrix_of(module)) is not None:
            matrix.drop()
        else:
            module.weight.data = module.weight.data.new_empty(0)


def _matrix_of(module: Any) -> BlockedMatrix | None:
    """The blocks of a linear layer or an embedding; None where its weights are a plain tensor."""
    matrix = getattr(module, "matrix", None)
    return matrix if isinstance(matrix, BlockedMatrix) else None


def _matrices(model: Any) -> Iterator[BlockedMatrix]:
    """All of a model, those that modules share once."""
    return (part for part in model.modules() if isinstance(part, BlockedMatrix))
