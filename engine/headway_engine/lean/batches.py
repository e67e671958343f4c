"""A step's chunks as the batch that attends: by a kernel, or by torch's own attention where there is none."""

import torch

from headway_engine.attention import KeyValueCache, PagedBatch, make_batch
from headway_engine.lean.kernels import PagedKernel, kernel_batch
from headway_engine.sequence import Chunk


def batch_of(
    chunks: list[Chunk], cache: KeyValueCache, kernel: PagedKernel | None, device: torch.device
) -> PagedBatch:
    """The batch of chunks in row order, single tokens first."""
    singles = sum(1 for chunk in chunks if chunk.length == 1)
    decodes = [(c.start + 1, c.sequence.block_table) for c in chunks[:singles]]
    prefills = [(c.start, c.length, c.sequence.block_table) for c in chunks[singles:]]
    if kernel is None:
        return make_batch(cache, decodes, prefills, device)
    return kernel_batch(cache, kernel, decodes, prefills, device)
