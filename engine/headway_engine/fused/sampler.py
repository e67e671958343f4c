"""A Picker in C++: tokens from float32 logits on a CPU, with no sort and in milliseconds for a whole batch.

Knows nothing of penalties, grammars and log-probabilities, which are done with before or beside it.
"""

import ctypes
from collections.abc import Sequence as Seq

import numpy as np
import torch

from headway_engine.fused import native
from headway_engine.sampling import warmth
from headway_engine.sequence import SamplingParams


class KernelPicker:
    """Where sampling meets the kernels. Holds the memory they work in: one thread may call it at a time."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = native.declare(library)
        self._threads = threads
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """See Picker."""
        logits = _readable(logits)
        rows, vocabulary = logits.shape
        found = torch.empty(rows)
        if rows:
            self._library.hw_highest(logits.data_ptr(), rows, vocabulary, found.data_ptr(), self._threads)
        return found

    def pick(self, logits: torch.Tensor, params: Seq[SamplingParams], uniforms: Seq[float]) -> list[int]:
        """See Picker."""
        logits = _readable(logits)
        rows, vocabulary = logits.shape
        if not rows == len(params) == len(uniforms):
            raise ValueError(f"{rows} rows of logits for {len(params)} sequences and {len(uniforms)} numbers")
        if not rows:
            return []
        wishes = np.array(
            [
                (u, p.top_p, p.min_p, warmth(p) if p.temperature > 0 else 0.0, min(p.top_k, vocabulary))
                for p, u in zip(params, uniforms, strict=True)
            ],
            dtype=native.WISH,
        )
        need = self._library.hw_sample_workspace(vocabulary, self._threads)
        if self._workspace.numel() < need:
            self._workspace = torch.empty(need, dtype=torch.uint8)
        tokens = np.empty(rows, dtype=np.int32)
        self._library.hw_sample(
            logits.data_ptr(),
            rows,
            vocabulary,
            native.pointer(wishes),
            native.pointer(tokens),
            self._workspace.data_ptr(),
            self._threads,
        )
        found: list[int] = tokens.tolist()
        return found


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """As C reads them."""
    if logits.device.type != "cpu" or logits.dtype is not torch.float32 or logits.ndim != 2:
        raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} on {logits.device}")
    return logits.contiguous()
