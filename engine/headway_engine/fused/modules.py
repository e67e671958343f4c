"""Linear layers of any transformers model, computed by the kernels on packed weights.

`take_over` replaces modules in place, so that weights are in memory once. Knows nothing of attention and
steps.
"""

import ctypes
from typing import Any

import torch
from torch import nn

from headway_engine.fused import native
from headway_engine.fused.packing import Packer

_TYPES = (torch.float32, torch.bfloat16)


class KernelLinear(nn.Module):
    """`nn.Linear` with packed weights: [..., in_features] to [..., out_features], float32 or bfloat16."""

    def __init__(self, linear: nn.Linear, packer: Packer, stored: torch.dtype, threads: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._short = linear.weight.dtype is torch.bfloat16
        self._packer = packer  # owns the memory
        self.matrix = packer.matrix(linear.weight, packer.dense(stored, short=self._short))
        self._bias = None if linear.bias is None else packer.floats(linear.bias)
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


def take_over(module: Any, library: ctypes.CDLL, stored: torch.dtype, threads: int) -> int:
    """Replace linear layers, and an embedding that is tied to the head; how many layers that were.

    `stored`: the type that holds all plain weights exactly. Layers whose weights are shared otherwise stay.
    """
    packer = Packer(native.declare(library))
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            holders.setdefault(parameter.data_ptr(), []).append((name, part))
    replaced = 0
    for name, part in list(module.named_modules()):
        if type(part) is not nn.Linear or part.weight.dtype not in _TYPES:
            continue
        tied = [other for other in holders[part.weight.data_ptr()] if other[1] is not part]
        if len(tied) > 1 or any(type(other) is not nn.Embedding for _, other in tied):
            continue
        dtype = part.weight.dtype
        ours = KernelLinear(part, packer, stored, threads)
        module.set_submodule(name, ours)
        for other_name, _ in tied:
            module.set_submodule(other_name, KernelEmbedding(ours, packer, dtype, threads))
        replaced += 1
    return replaced


def _rows(source: int | None, out: torch.Tensor, number: int) -> native.CRows:
    return native.CRows(source, out.data_ptr(), number, out.dtype is torch.bfloat16)
