"""A picker for accelerators: the host waits for the device once where every token is the likeliest.

Whether the highest values are numbers and which tokens have them come over in one copy; steps that draw wait
once more, for what was drawn. Knows nothing of sequences: see `sampling.Picker`.
"""

from collections.abc import Sequence as Seq

import torch

from headway_engine.sampling import TorchPicker
from headway_engine.sequence import SamplingParams


class DevicePicker(TorchPicker):
    """See Picker. Remembers the likeliest tokens of the logits that it was asked about last."""

    def __init__(self) -> None:
        self._seen: torch.Tensor | None = None
        self._likeliest: list[int] = []

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """See Picker. On the host."""
        values, tokens = logits.max(dim=-1)
        both = torch.stack((values, tokens.to(torch.int32).view(torch.float32))).cpu()
        self._seen = logits
        self._likeliest = both[1].view(torch.int32).tolist()
        return both[0]

    def pick(self, logits: torch.Tensor, params: Seq[SamplingParams], uniforms: Seq[float]) -> list[int]:
        """See Picker."""
        likeliest, seen = self._likeliest, self._seen
        self._seen = None  # not kept longer than the step
        if seen is not logits:  # edited: other tokens may be the likeliest
            return super().pick(logits, params, uniforms)
        drawn = [row for row, p in enumerate(params) if p.temperature > 0]
        if not drawn:
            return likeliest
        tokens = list(likeliest)
        rows = logits if len(drawn) == len(params) else logits[drawn]
        picks = super().pick(rows, [params[row] for row in drawn], [uniforms[row] for row in drawn])
        for row, token in zip(drawn, picks, strict=True):
            tokens[row] = token
        return tokens
