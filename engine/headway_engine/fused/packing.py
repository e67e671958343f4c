"""Matrices packed for the kernels: which element type holds a model's weights, and their panels.

Knows nothing of layers; what is packed lives as long as the `Packer`.
"""

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from headway_engine.fused.native import CMatrix, Element

_HELD_IN = {
    Element.SINGLE: torch.float32,
    Element.BRAIN: torch.bfloat16,
    Element.HALF: torch.float16,
    Element.PAIRS: torch.bfloat16,
}
_PLAIN = {torch.float32: Element.SINGLE, torch.bfloat16: Element.BRAIN, torch.float16: Element.HALF}


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A quantized matrix [rows, columns]: weight = code * scale + offset, by groups along the columns.

    Without offsets, offset = -8 * scale (4 bits) or -128 * scale (8 bits).
    """

    bits: int  # 4 or 8
    codes: torch.Tensor  # [rows, columns] uint8
    scales: torch.Tensor  # [rows, columns / group] float16
    offsets: torch.Tensor | None  # likewise

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def element(self) -> Element:
        if self.bits == 4:
            return Element.FOUR if self.offsets is None else Element.FOUR_OFFSET
        return Element.EIGHT if self.offsets is None else Element.EIGHT_OFFSET

    def rows_of(self, others: Seq["GroupedCodes"]) -> "GroupedCodes":
        """This matrix with the rows of others, of the same kind, below."""
        every = (self, *others)
        offsets = [one.offsets for one in every if one.offsets is not None]
        return GroupedCodes(
            self.bits,
            torch.cat([one.codes for one in every]),
            torch.cat([one.scales for one in every]),
            torch.cat(offsets) if offsets else None,
        )

    def weights(self) -> torch.Tensor:
        """[rows, columns] float32."""
        scales = self.scales.float()
        offsets = scales * (-8 if self.bits == 4 else -128) if self.offsets is None else self.offsets.float()
        rows, columns = self.shape
        grouped = self.codes.float().view(rows, -1, self.group)
        return (grouped * scales[..., None] + offsets[..., None]).view(rows, columns)


Weight = torch.Tensor | GroupedCodes


class Packer:
    """Packs matrices with one library's layout and keeps their memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._columns = int(library.hw_panel_columns())
        self._kept: list[torch.Tensor] = []

    @property
    def multiplies_bf16(self) -> bool:
        """Whether products of bfloat16 are to be had."""
        return bool(self._library.hw_multiplies_bf16())

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
        return self._pack((gate, up), dense)

    def _pack(self, weights: Seq[Weight], dense: Element) -> CMatrix:
        n, k = weights[0].shape
        element = weights[0].element if isinstance(weights[0], GroupedCodes) else dense
        group = weights[0].group if isinstance(weights[0], GroupedCodes) else 0
        width = self._columns // len(weights)
        # Whole cache lines: torch aligns to 64 bytes.
        packed = torch.empty(self._library.hw_packed_bytes(element, n, k, group, width), dtype=torch.uint8)
        for i, weight in enumerate(weights):
            sources = _sources(weight, element)
            self._library.hw_pack(
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


def _sources(weight: Weight, element: Element) -> tuple[torch.Tensor | None, ...]:
    if not isinstance(weight, GroupedCodes):
        return weight.detach().to(_HELD_IN[element]).contiguous(), None, None
    return (
        weight.codes.contiguous(),
        weight.scales.contiguous(),
        None if weight.offsets is None else weight.offsets.contiguous(),
    )
