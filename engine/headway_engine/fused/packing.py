"""Matrices packed for the kernels: which element type holds a model's weights, and their panels.

Knows nothing of layers; what is packed lives as long as the `Packer`.
"""

import ctypes
import math
from collections.abc import Sequence as Seq

import numpy as np
import torch

from headway_engine.fused.native import CMatrix, Element
from headway_engine.grouped_codes import GroupedCodes

_HELD_IN = {
    Element.SINGLE: torch.float32,
    Element.BRAIN: torch.bfloat16,
    Element.HALF: torch.float16,
    Element.PAIRS: torch.bfloat16,
}
_PLAIN = {torch.float32: Element.SINGLE, torch.bfloat16: Element.BRAIN, torch.float16: Element.HALF}


Weight = torch.Tensor | GroupedCodes
"""A matrix [rows, columns], plain or quantized."""


def narrowest(matrices: Seq[torch.Tensor]) -> torch.dtype:
    """The type that holds all of these (one at least) exactly: their own, or a narrower one."""
    for dtype in (torch.bfloat16, torch.float16):  # bfloat16 is the quicker to widen
        if all(_holds(dtype, matrix) for matrix in matrices):
            return dtype
    return matrices[0].dtype


def _holds(dtype: torch.dtype, matrix: torch.Tensor) -> bool:
    if matrix.dtype is dtype:
        return True
    narrow = matrix.detach().to(dtype)
    same = torch.equal(narrow.to(matrix.dtype), matrix)
    return same and all(math.isfinite(end) for end in torch.aminmax(narrow))


def mixed(weights: Seq[Weight]) -> bool:
    """Whether some are plain and some are codes, which are unpacked then."""
    return len({isinstance(one, GroupedCodes) for one in weights}) > 1


def alike(weights: Seq[Weight]) -> list[Weight]:
    """The same matrices in one form, that of the one which needs most: plain, or codes of one kind."""
    grouped = [one for one in weights if isinstance(one, GroupedCodes)]
    if len(grouped) < len(weights):
        plain = next(one for one in weights if not isinstance(one, GroupedCodes))
        return [one.weights().to(plain.dtype) if isinstance(one, GroupedCodes) else one for one in weights]
    bits, group = max(one.bits for one in grouped), min(one.group for one in grouped)
    offsets = any(one.offsets is not None for one in grouped)
    return [one.widened(bits, offsets, group) for one in grouped]


def stacked(weights: Seq[Weight]) -> Weight:
    """Matrices of as many columns, one below the other."""
    same = alike(weights)
    grouped = [one for one in same if isinstance(one, GroupedCodes)]
    if not grouped:
        return torch.cat([one for one in same if isinstance(one, torch.Tensor)])
    offsets = [one.offsets for one in grouped if one.offsets is not None]
    return GroupedCodes(
        grouped[0].bits,
        torch.cat([one.codes for one in grouped]),
        torch.cat([one.scales for one in grouped]),
        torch.cat(offsets) if offsets else None,
    )


def large_pages(size: int) -> torch.Tensor:
    """So many bytes, not initialised. numpy asks the system for large pages, where memory is more than some
    MiB; torch does not. They are read some 20 % faster."""
    return torch.from_numpy(np.empty(size, dtype=np.uint8))


class _Arena:
    """Memory for panels, in pieces that have large pages."""

    _PIECE_BYTES = 64 << 20
    _LINE_BYTES = 64  # of a cache line

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, uint8, not initialised, from a cache line on."""
        whole = -(-size // self._LINE_BYTES) * self._LINE_BYTES
        if self._left.numel() < whole:
            piece = large_pages(max(whole, self._PIECE_BYTES) + self._LINE_BYTES)
            self._left = piece[-piece.data_ptr() % self._LINE_BYTES :]
        taken, self._left = self._left[:size], self._left[whole:]
        return taken


class Packer:
    """Packs matrices in the layout of one `library` and keeps their memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._columns = int(library.hw_panel_columns())
        self._kept: list[torch.Tensor] = []
        self._arena = _Arena()

    @property
    def multiplies_bf16(self) -> bool:
        """Whether products of bfloat16 are to be had."""
        return bool(self.library.hw_multiplies_bf16())

    def dense(self, stored: torch.dtype, short: bool) -> Element:
        """The element for plain weights kept in `stored`; `short`: products may be of bfloat16."""
        if short and stored is torch.bfloat16 and self.multiplies_bf16:
            return Element.PAIRS
        return _PLAIN[stored]

    def matrix(self, weight: Weight, dense: Element) -> CMatrix:
        """A whole matrix [n, k]; plain weights as `dense`."""
        return self._pack((weight,), dense)

    def pair(self, gate: Weight, up: Weight, dense: Element) -> CMatrix:
        """Two matrices [n, k] that share panels, half of each one's columns."""
        return self._pack(alike((gate, up)), dense)

    def _pack(self, weights: Seq[Weight], dense: Element) -> CMatrix:
        n, k = weights[0].shape
        element = _element_of(weights[0]) if isinstance(weights[0], GroupedCodes) else dense
        group = weights[0].group if isinstance(weights[0], GroupedCodes) else 0
        width = self._columns // len(weights)
        packed = self._arena.take(self.library.hw_packed_bytes(element, n, k, group, width))
        for i, weight in enumerate(weights):
            sources = _sources(weight, element)
            self.library.hw_pack(
                *(None if s is None else s.data_ptr() for s in sources),
                n, k, element, group, packed.data_ptr(), i * width, width,
            )  # fmt: skip
        rows = n if len(weights) == 1 else -(-n // width) * self._columns
        return CMatrix(panels=self.keep(packed), rows=rows, columns=k, element=element, group=group)

    def floats(self, tensor: torch.Tensor) -> int:
        """The address of its numbers in float32."""
        return self.keep(tensor.detach().float().contiguous())

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that lives from now on as long as this does."""
        self._kept.append(tensor)
        return tensor.data_ptr()


def _element_of(codes: GroupedCodes) -> Element:
    if codes.bits == 4:
        return Element.FOUR if codes.offsets is None else Element.FOUR_OFFSET
    return Element.EIGHT if codes.offsets is None else Element.EIGHT_OFFSET


def _sources(weight: Weight, element: Element) -> tuple[torch.Tensor | None, ...]:
    if not isinstance(weight, GroupedCodes):
        return weight.detach().to(_HELD_IN[element]).contiguous(), None, None
    return (
        weight.codes.contiguous(),
        weight.scales.contiguous(),
        None if weight.offsets is None else weight.offsets.contiguous(),
    )
