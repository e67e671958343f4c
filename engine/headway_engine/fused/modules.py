"""Linear layers of any transformers model, computed by the kernels on packed weights.

`take_over` replaces modules in place, so that weights are in memory once. float32 weights that came from a
half-precision file are kept in the file's type when that loses not one bit. Knows nothing of attention and
steps.
"""

import ctypes
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from headway_engine.fused import native
from headway_engine.fused.packing import Packer, narrowest

_TYPES = (torch.float32, torch.bfloat16)


class KernelLinear(nn.Module):
    """`nn.Linear` with packed weights: [..., in_features] to [..., out_features], float32 or bfloat16."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        packer: Packer,
        stored: torch.dtype,
        threads: int,
    ) -> None:
        """`weight` [out_features, in_features], packed from the type `stored`, which holds it exactly."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._short = weight.dtype is torch.bfloat16
        self._packer = packer  # owns the memory
        self.matrix = packer.matrix(weight, packer.dense(stored, short=self._short))
        self._bias = None if bias is None else packer.floats(bias)
        self._threads = threads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In the type of `x`. Raises TypeError for other types."""
        if x.dtype not in _TYPES:
            raise TypeError(f"rows of {x.dtype} for a linear layer of the kernels")
        rows = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        c_rows = _rows(rows.data_ptr(), out, rows.numel() // self.in_features)
        call = self._packer.library.hw_linear
        if c_rows.rows and call(self.matrix, c_rows, self._bias, self._short, self._threads):
            raise MemoryError("no memory for a linear layer")
        return out

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, packed"


class KernelEmbedding(nn.Module):
    """`nn.Embedding` over the packed weights of a head that is tied to it, in `dtype`."""

    def __init__(self, head: KernelLinear, packer: Packer, dtype: torch.dtype, threads: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self._packer, self._matrix = packer, head.matrix
        self._dtype = dtype
        self._threads = threads

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] to [..., embedding_dim]. Raises IndexError for ids that are none of the vocabulary."""
        flat = ids.reshape(-1).to(torch.int64).contiguous()
        out = torch.empty((*ids.shape, self.embedding_dim), dtype=self._dtype)
        if not flat.numel():
            return out
        if int(flat.min()) < 0 or int(flat.max()) >= self.num_embeddings:
            raise IndexError(f"a token id is outside the vocabulary of {self.num_embeddings}")
        call = self._packer.library.hw_gather_rows
        if call(self._matrix, flat.data_ptr(), _rows(None, out, flat.numel()), self._threads):
            raise MemoryError("no memory for embeddings")
        return out


def take_over(module: Any, library: ctypes.CDLL, threads: int) -> torch.dtype | None:
    """Replace linear layers, and an embedding that is tied to the head; the type that most weights are
    kept in, or None where there are none. Layers whose weights are shared otherwise stay.
    """
    packer = Packer(native.declare(library))
    sizes: Counter[torch.dtype] = Counter()
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            holders.setdefault(parameter.data_ptr(), []).append((name, part))
    for name, part in list(module.named_modules()):
        if (weight := _weight(part)) is None:
            continue
        tied = [other for other in holders[part.weight.data_ptr()] if other[1] is not part]
        if len(tied) > 1 or any(type(other) is not nn.Embedding for _, other in tied):
            continue
        stored = narrowest([weight])
        sizes[stored] += weight.numel()
        ours = KernelLinear(weight, part.bias, packer, stored, threads)
        module.set_submodule(name, ours)
        for other_name, _ in tied:
            module.set_submodule(other_name, KernelEmbedding(ours, packer, weight.dtype, threads))
    return sizes.most_common(1)[0][0] if sizes else None


def _weight(part: Any) -> torch.Tensor | None:
    """The weight [out_features, in_features] of a plain linear layer in a type of the kernels; else None."""
    if type(part) is nn.Linear and part.weight.dtype in _TYPES:
        return part.weight
    if type(part) is Conv1D and part.weight.dtype in _TYPES:  # GPT-2's linear layer
        turned: torch.Tensor = part.weight.T
        return turned
    return None


def _rows(source: int | None, out: torch.Tensor, number: int) -> native.CRows:
    return native.CRows(source, out.data_ptr(), number, out.dtype is torch.bfloat16)
