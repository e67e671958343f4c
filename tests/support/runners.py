"""Every way to compute a step that a CPU can show, each on a tiny model of its own.

A test of what all of them must do is parametrised by these names.
"""

from functools import cache

import pytest

from headway_engine.fused import build
from headway_engine.fused.llama import FusedRunner
from headway_engine.lean.graphs import Bucket, EagerRecorder
from headway_engine.lean.kernels import GatherKernel
from headway_engine.lean.runner import LeanRunner
from headway_engine.protocol import Capacity
from headway_engine.runner import Runner, TransformersRunner
from support import tiny_models


def capacity(blocks: int = 64, tokens: int = 64) -> Capacity:
    """Eight sequences in so many blocks of four tokens, with steps of so many tokens: small enough for a few
    requests to be too many."""
    return Capacity(
        max_batch_tokens=tokens,
        max_batch_sequences=8,
        kv_blocks=blocks,
        block_tokens=4,
        max_model_tokens=min(97, blocks * 4),
    )


@cache
def kept(kind: str, architecture: str, tokens: int = 64) -> Runner:
    """One runner of a kind for all who ask, of `capacity`; its blocks keep what those before wrote."""
    return fresh(kind, architecture, capacity(tokens=tokens))


def fresh(kind: str, architecture: str, capacity: Capacity, sizes: list[Bucket] | None = None) -> Runner:
    """A new runner. The test is skipped where the kind needs a compiler and there is none.

    `padded`: transformers, attention by torch alone. `kernel`: transformers, attention by the C++ kernel.
    `fused`: the whole step in C++. `lean`: the accelerator's forward pass, attention by torch alone.
    `lean graphs`: the same with a kernel, and decodes of these `sizes` in static memory.
    """
    model = tiny_models.fresh(architecture)
    match kind:
        case "padded":
            return TransformersRunner(model, capacity)
        case "lean":
            return LeanRunner(model, capacity)
        case "lean graphs":
            return LeanRunner(model, capacity, GatherKernel(), EagerRecorder(), sizes)
    library = build.kernels()
    if library is None:
        pytest.skip("no C++ compiler here")
    if kind == "kernel":
        return TransformersRunner(model, capacity, library)
    assert kind == "fused", f"{kind} is no way to compute"
    return FusedRunner(model, capacity, library, threads=1)
