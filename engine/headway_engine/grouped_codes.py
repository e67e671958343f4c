"""A quantized matrix as codes, scales and offsets. Knows nothing of files, and of how kernels lay it out."""

from dataclasses import dataclass

import torch


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

    def widened(self, bits: int, offsets: bool, group: int) -> "GroupedCodes":
        """The same weights in `bits`, at least as many, with offsets or not, in groups at most as large."""
        codes, scales, own = self.codes, self.scales, self.offsets
        if own is None and offsets:
            own = scales * -(1 << self.bits - 1)  # a power of two: exact
        elif own is None:
            codes = codes + ((1 << bits - 1) - (1 << self.bits - 1))
        times = self.group // group
        scales = scales.repeat_interleave(times, dim=1)
        return GroupedCodes(bits, codes, scales, None if own is None else own.repeat_interleave(times, dim=1))

    def weights(self) -> torch.Tensor:
        """[rows, columns] float32."""
        rows, columns = self.shape
        scales = self.scales.float()
        offsets = scales * -(1 << self.bits - 1) if self.offsets is None else self.offsets.float()
        wide = self.codes.to(torch.float32).view(rows, -1, self.group)
        return wide.mul_(scales[..., None]).add_(offsets[..., None]).view(rows, columns)
