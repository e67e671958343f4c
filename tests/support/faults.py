"""Mistakes in computing a model, put into a runner through the model, the batches or the cache it is handed.

The check at start must see each of them. Nothing of the check itself is changed.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from headway_engine.attention import PaddedBatch, gather
from headway_engine.fused import native
from headway_engine.fused.llama import FusedRunner
from headway_engine.model import LoadedModel
from headway_engine.protocol import Capacity
from headway_engine.start_check import Build
from headway_engine.stepping import StepRunner

Module = Any


@dataclass(frozen=True)
class Fault:
    """One mistake. `model` changes the module that a runner is built of, `runner` the runner that came of it;
    `applies` says of a model whether it can be made there."""

    name: str
    applies: Callable[[Module], bool] = lambda module: True
    model: Callable[[Module], None] = lambda module: None
    runner: Callable[[Any], None] = lambda runner: None

    def __str__(self) -> str:
        return self.name

    def in_(self, build: Build) -> Build:
        """Builds the same runner with this mistake in it."""

        def faulty(model: LoadedModel, capacity: Capacity) -> StepRunner:
            self.model(model.module)
            runner = build(model, capacity)
            self.runner(runner)
            return runner

        return faulty


def attentions(module: Module) -> list[Any]:
    """The attention of each layer, in order."""
    found = {p.layer_idx: p for p in module.modules() if hasattr(p, "layer_idx") and hasattr(p, "scaling")}
    return [found[number] for number in sorted(found)]


def rotaries(module: Module) -> list[Any]:
    """Modules that make rotary tables."""
    return [
        part
        for part in module.modules()
        if any(_is_frequency(n) for n, _ in part.named_buffers(recurse=False))
    ]


def _is_frequency(name: str) -> bool:
    return name.endswith("inv_freq") and not name.startswith("original")


def replaced(parameter: nn.Parameter, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Another tensor in a parameter: its memory may be somebody else's."""
    parameter.data = change(parameter.data.clone())


def scaled_frequencies(factor: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Module], None]:
    def change(module: Module) -> None:
        for part in rotaries(module):
            for name, frequencies in list(part.named_buffers(recurse=False)):
                if _is_frequency(name):
                    share = torch.arange(len(frequencies)) / len(frequencies)
                    setattr(part, name, (frequencies.float() * factor(share)).to(frequencies.dtype))

    return change


def more_scale(module: Module) -> None:
    for attention in attentions(module):
        attention.scaling *= 1.02


def later_positions(module: Module) -> None:
    """From token 24 on, every position is one more."""
    for part in rotaries(module):
        original = part.forward

        def forward(x: Any, position_ids: Any, *rest: Any, _original: Any = original, **more: Any) -> Any:
            return _original(x, position_ids + (position_ids >= 24), *rest, **more)

        part.forward = forward
    for name, part in module.named_modules():
        if name.endswith(("wpe", "embed_positions")):
            first = 24 + getattr(part, "offset", 0)
            replaced(part.weight, lambda w, first=first: torch.cat((w[:first], w[first + 1 :], w[-1:])))


def lost_head(module: Module, layer: int = -1) -> None:
    """A layer's first head says nothing."""
    attention = attentions(module)[layer]
    width = attention.head_dim
    for name, axis in (("o_proj", 1), ("dense", 1), ("out_proj", 1), ("c_proj", None)):
        if (part := getattr(attention, name, None)) is not None:
            rows = axis is None and not isinstance(part, nn.Linear)  # Conv1D lies the other way

            def silent(weight: torch.Tensor, rows: bool = rows) -> torch.Tensor:
                weight[:width] = 0 if rows else weight[:width]
                weight[:, :width] = weight[:, :width] if rows else 0
                return weight

            replaced(part.weight, silent)
            return
    raise AssertionError(f"{type(attention).__name__} has no output projection that is known here")


def reordered(part: Any, width: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The rows of a projection in another order; `change` is given [heads, width, ...]."""
    for parameter in part.parameters():
        replaced(parameter, lambda p: change(p.view(-1, width, *p.shape[1:])).reshape(p.shape))


def mixed_heads(module: Module) -> None:
    """Each key head stands where another one belongs."""
    for attention in attentions(module):
        for part in (attention.k_proj, attention.v_proj):
            reordered(part, attention.head_dim, lambda heads: heads.roll(1, 0))


def interleaved(module: Module) -> None:
    """Rotated in neighbouring pairs where the model means halves."""
    for attention in attentions(module):
        order = torch.arange(attention.head_dim).view(2, -1).T.flatten()
        for part in (attention.q_proj, attention.k_proj):
            reordered(part, attention.head_dim, partial(torch.index_select, dim=1, index=order))


def no_cap(module: Module) -> None:
    module.config.final_logit_softcapping = None


def coarser_norms(module: Module) -> None:
    for part in module.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, getattr(part, name) * 1000)
    if hasattr(module.config, "rms_norm_eps"):
        module.config.rms_norm_eps *= 1000


def one_nan(module: Module) -> None:
    """In a weight of the last layer."""

    def spoilt(weight: torch.Tensor) -> torch.Tensor:
        weight.view(-1)[5] = float("nan")
        return weight

    matrices = [p for p in attentions(module)[-1].parameters() if p.dim() == 2]
    replaced(matrices[-1], spoilt)


def after_each_step(change: Callable[[Any, int, list[Any]], None]) -> Callable[[Any], None]:
    """What happens to the cache behind the runner's back: (runner, number of the step, its chunks)."""

    def put_into(runner: Any) -> None:
        original, steps = runner._forward, iter(range(1000))

        def forward(chunks: list[Any]) -> torch.Tensor:
            logits = original(chunks).clone()
            change(runner, next(steps), chunks)
            return logits

        runner._forward = forward

    return put_into


def tensors(runner: Any) -> list[torch.Tensor]:
    return [*runner.cache.keys, *runner.cache.values]


def token_elsewhere(runner: Any, step: int, chunks: list[Any]) -> None:
    """The keys and values of one token went to another sequence's slot: its own has what it had before."""
    if step == 2:  # a chunk of the first sequence that ends behind its token 12
        chunk = next(c for c in chunks if c.start <= 12 < c.start + c.length)
        size = runner.cache.block_tokens
        block = chunk.sequence.block_table[12 // size]
        for tensor in tensors(runner):
            tensor[block, :, 12 % size] = tensor[block - 1, :, 12 % size]


def stale_block(runner: Any, step: int, chunks: list[Any]) -> None:
    """The first block of a sequence holds what it held before, from the third step on."""
    if step == 0:
        runner._stale = [tensor.roll(1, 0) for tensor in tensors(runner)]
    if step == 2:
        block = chunks[-1].sequence.block_table[0]
        for tensor, old in zip(tensors(runner), runner._stale, strict=True):
            tensor[block] = old[block]


def in_batches(
    spans: Callable[[native.Spans], native.Spans], padded: Callable[[PaddedBatch], Any]
) -> Callable[[Any], None]:
    """A change of every batch: as the C++ kernels have it, or as torch's attention has it."""

    def put_into(runner: Any) -> None:
        if isinstance(runner, FusedRunner):
            forward = runner._forward

            def changed(chunks: list[Any]) -> torch.Tensor:
                with pytest.MonkeyPatch.context() as patch:
                    original = native.spans
                    patch.setattr(native, "spans", lambda parts, size: spans(original(parts, size)))
                    return forward(chunks)

            runner._forward = changed
            return
        batch = runner._batch

        def other(chunks: list[Any]) -> Any:
            made = batch(chunks)
            if isinstance(made, native.KernelBatch):
                return dataclasses.replace(made, step=spans(made.step))
            assert isinstance(made, PaddedBatch)
            return padded(made)

        runner._batch = other

    return put_into


def shorter_spans(step: native.Spans) -> native.Spans:
    """A decode does not see the newest token."""
    chunks = step.chunks.copy()
    chunks[(chunks[:, 1] == 1) & (chunks[:, 2] > 0), 2] -= 1
    return dataclasses.replace(step, chunks=chunks)


def shorter_mask(batch: PaddedBatch) -> PaddedBatch:
    """A decode does not see the first token."""
    slices = []
    for part in batch.decodes:
        mask = part.mask.clone()
        mask[mask.sum(-1) > 1, 0] = False
        slices.append(dataclasses.replace(part, mask=mask))
    return dataclasses.replace(batch, decodes=tuple(slices))


def all_seen_spans(step: native.Spans) -> native.Spans:
    """Every token of a chunk sees the whole chunk."""
    rows = [
        (first + i, 1, start + length - 1, table)
        for first, length, start, table in step.chunks.tolist()
        for i in range(length)
    ]
    return dataclasses.replace(step, chunks=np.array(rows, dtype=np.int32))


@dataclass(frozen=True)
class AllSeen:
    """A batch whose chunks are not causal."""

    batch: PaddedBatch

    def attend(self, layer: int, query: Any, key: Any, value: Any, scaling: Any) -> torch.Tensor:
        out = self.batch.attend(layer, query, key, value, scaling)
        cache = self.batch.cache
        for chunk in self.batch.prefills:
            rows = slice(chunk.first_row, chunk.first_row + chunk.length)
            context = chunk.start + chunk.length
            keys, values = (
                gather(whole[layer], chunk.blocks[None])[:, :, :context]
                for whole in (cache.keys, cache.values)
            )
            grouped = query.shape[1] != keys.shape[1]
            seen = sdpa(query[:, :, rows], keys, values, scale=scaling, enable_gqa=grouped)
            out[rows] = seen[0].transpose(0, 1)
        return out


def has_rope(module: Module) -> bool:
    return bool(rotaries(module))


def has_projections(module: Module) -> bool:
    return all(hasattr(attention, "k_proj") for attention in attentions(module))


FAULTS = (
    Fault("scale of attention by 1.02", model=more_scale),
    Fault("rope theta doubled", has_rope, model=scaled_frequencies(lambda share: 2.0**-share)),
    Fault("rope scaling of 2 left out", has_rope, model=scaled_frequencies(lambda share: 0 * share + 2)),
    Fault("positions off by one from token 24", model=later_positions),
    Fault("one token of the context lost", runner=in_batches(shorter_spans, shorter_mask)),
    Fault("one token in a wrong slot", runner=after_each_step(token_elsewhere)),
    Fault("one stale block", runner=after_each_step(stale_block)),
    Fault("a chunk that is not causal", runner=in_batches(all_seen_spans, AllSeen)),
    Fault("one head lost", model=lost_head),
    Fault("heads of keys mixed up", has_projections, model=mixed_heads),
    Fault("rope in pairs", lambda m: has_rope(m) and has_projections(m), model=interleaved),
    Fault("epsilon of norms by 1000", model=coarser_norms),
    Fault(
        "soft cap of logits left out", lambda m: bool(getattr(m.config, "final_logit_softcapping", 0)), no_cap
    ),
    Fault("NaN in a weight", model=one_nan),
)
