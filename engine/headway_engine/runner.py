"""Runners: a step's chunks in, one sampled token out for each chunk that asks for one.

`TransformersRunner` serves any model that takes transformers' attention interface; for Llama shapes, `fused`
holds the fast path on a CPU and `lean` the one on an accelerator. Knows nothing of queues, fairness or HTTP,
and never writes to a sequence.
"""

import ctypes
import dataclasses
import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch

from headway_engine import capacity as capacity_plan
from headway_engine.attention import PAGED, PagedBatch, register
from headway_engine.cgroup import usable_cores
from headway_engine.config import EngineConfig
from headway_engine.devices import dtype_name
from headway_engine.fused import build, native
from headway_engine.fused.llama import FusedRunner, why_not_fused
from headway_engine.fused.modules import take_over
from headway_engine.fused.sampler import KernelPicker
from headway_engine.lean import choice
from headway_engine.lean.batches import batch_of
from headway_engine.lean.graphs import CudaRecorder
from headway_engine.lean.kernels import PagedKernel
from headway_engine.lean.picker import DevicePicker
from headway_engine.lean.runner import LeanRunner
from headway_engine.llama_shape import why_not_llama
from headway_engine.logs import fields
from headway_engine.model import LoadedModel, ModelError
from headway_engine.model_error import ELSEWHERE
from headway_engine.paths import Path, PathMissing, Reload, Serving, first_right
from headway_engine.pooling import base_of
from headway_engine.protocol import Capacity
from headway_engine.sampling import Picker
from headway_engine.sequence import Chunk
from headway_engine.stepping import Runner, StepError, StepRunner, logit_rows

__all__ = ["Runner", "StepError", "TransformersRunner", "best_runner", "build_runner", "measure_capacity"]

log = logging.getLogger(__name__)

TORCH = "torch"
"""Kernels of a path that has none of ours."""


class TransformersRunner(StepRunner):
    """Steps through the model's own transformers code, with paged attention put in by name."""

    name = "transformers"

    def __init__(
        self,
        model: LoadedModel,
        capacity: Capacity,
        library: ctypes.CDLL | None = None,
        threads: int = 1,
        kernel: PagedKernel | None = None,
    ) -> None:
        """Attention and linear layers are those of a `library` for the CPU, which takes the weights over;
        attention that of a `kernel` for an accelerator; or else torch's."""
        register()
        picker: Picker | None = KernelPicker(library, threads) if library else None
        if model.device.type != "cpu":
            picker = DevicePicker()
        super().__init__(model, capacity, picker)
        self._library = native.declare(library) if library else None
        self._threads = threads
        self._kernel = kernel
        module: Any = model.module  # nn.Module types every attribute as a tensor
        self._base = base_of(module, model.device)
        module.set_attn_implementation(PAGED)
        self._module = module
        if library is not None and (stored := take_over(module, library, threads)) is not None:
            self.weights = dtype_name(stored)
        self._cache.warm()

    @property
    def embedding_size(self) -> int:
        """See Runner."""
        return self._base.size if self._base else 0

    def _forward_hidden(self, chunks: list[Chunk], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._base is not None, "the front end refuses embeddings of this model"
        seen: list[torch.Tensor] = []
        # The base is not called by itself: what some models do to logits after the head must not be lost.
        hook = self._base.module.register_forward_hook(lambda _module, _inputs, out: seen.append(out[0]))
        try:
            logits = self._forward(chunks)
        finally:
            hook.remove()
        return logits, seen[0][0, rows]

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        ids, positions, sampled = flatten(chunks, self._model.device)
        out = self._module(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=sampled,
            paged=self._batch(chunks),
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _batch(self, chunks: list[Chunk]) -> PagedBatch:
        if self._library is not None:
            parts = [(c.start, c.length, c.sequence.block_table) for c in chunks]
            spans = native.spans(parts, self._cache.block_tokens)
            return native.KernelBatch(self._library, self._cache, spans, self._threads)
        return batch_of(chunks, self._cache, self._kernel, self._model.device)


def build_runner(config: EngineConfig, model: LoadedModel, capacity: Capacity) -> StepRunner:
    """The runner of `best_runner`, for a model that is not to be loaded twice."""
    return best_runner(config, model, capacity).runner


def best_runner(
    config: EngineConfig, model: LoadedModel, capacity: Capacity, reload: Reload | None = None
) -> Serving:
    """The fastest way of computing this model right, of those that `config.runner` allows.

    Raises ModelError when what was asked for by name cannot be had, and for a model that nothing computes
    right. `reload` is for the case that a runner is found wrong after it took the weights over.
    """
    torch.set_num_threads(config.threads or usable_cores())
    on_cpu = model.device.type == "cpu"
    not_fused, not_lean = why_not_fused(model), why_not_llama(model)
    fast, reason = ("fused", not_fused) if on_cpu else ("lean", not_lean)
    wanted: tuple[str, ...] = (config.runner,)
    if config.runner == "auto":
        wanted = ("transformers",) if reason else (fast, "transformers")
    if refused := {"fused": not_fused, "lean": not_lean}.get(wanted[0]):
        raise ModelError(
            f"runner: no {wanted[0]} path for {model.description}: {refused}; use auto or transformers"
        )
    paths = _cpu_paths(config, model, wanted) if on_cpu else _accelerator_paths(config, model, wanted)
    way_out = ELSEWHERE if config.runner == "auto" else f"use --runner auto, or {ELSEWHERE}"
    serving = first_right(paths, model, capacity, reload=reload, way_out=way_out)
    path, why = serving.path, reason if config.runner == "auto" else "asked for"
    weights = serving.runner.weights or None
    log.info(fields("runner", runner=path.runner, kernels=path.kernels, weights=weights, why=why))
    return serving


def _cpu_paths(config: EngineConfig, model: LoadedModel, wanted: Seq[str]) -> Iterator[Path]:
    """Each runner in each instruction set, best first, then on torch alone; of weights in blocks, only those
    that compute with blocks."""
    if config.attention not in ("auto", "torch"):
        raise ModelError(f"attention: {config.attention} is for accelerators, and the device is a CPU")
    sets = build.usable() if model.dtype in (torch.float32, torch.bfloat16) else ()
    threads = torch.get_num_threads()
    missing: dict[str, str] = {}

    def library(name: str) -> ctypes.CDLL:
        try:
            return build.load(name)
        except build.KernelsMissing as error:
            missing[name] = str(error)
            raise PathMissing(str(error)) from error

    def fused(name: str, model: LoadedModel, capacity: Capacity) -> StepRunner:
        return FusedRunner(model, capacity, library(name), threads)

    def transformers(name: str, model: LoadedModel, capacity: Capacity) -> StepRunner:
        return TransformersRunner(model, capacity, library(name) if name != TORCH else None, threads)

    if "fused" in wanted:
        yield from (Path("fused", name, partial(fused, name), empties=True) for name in sets)
    if "lean" in wanted and not model.in_blocks:
        yield Path("lean", TORCH, LeanRunner, empties=True)
    if "transformers" in wanted and not model.in_blocks:
        for name in (*sets, TORCH):
            if name not in missing:
                yield Path("transformers", name, partial(transformers, name), empties=name != TORCH)


def _accelerator_paths(config: EngineConfig, model: LoadedModel, wanted: Seq[str]) -> Iterator[Path]:
    """Each runner with each kernel of attention that can be had, best first; torch's own is the last."""
    kernels = _Kernels(config, model)

    def lean(kernel: PagedKernel | None, model: LoadedModel, capacity: Capacity) -> StepRunner:
        recorder = CudaRecorder(model.device) if config.decode_graphs else None
        return LeanRunner(model, capacity, kernels.for_type(kernel, model.dtype), recorder)

    def transformers(kernel: PagedKernel | None, model: LoadedModel, capacity: Capacity) -> StepRunner:
        return TransformersRunner(model, capacity, kernel=kernels.for_type(kernel, model.dtype))

    for runner, build_with in (("lean", lean), ("transformers", transformers)):
        if runner in wanted:
            for kernel in kernels:
                name = kernel.name if kernel else TORCH
                yield Path(runner, name, partial(build_with, kernel), empties=runner == "lean")


class _Kernels:
    """The kernels of attention for a model on an accelerator, each tried once."""

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        shapes = frozenset(model.layer_shapes.values())
        self._needs = choice.needs_of(shapes, model.dtype, config.kv_block_tokens, model.device)
        self._found: list[PagedKernel | None] = []
        self._rest = choice.kernels(self._needs, model.device, asked=config.attention)

    def __iter__(self) -> Iterator[PagedKernel | None]:
        yield from self._found
        try:
            for kernel in self._rest:
                self._found.append(kernel)
                yield kernel
        except ValueError as error:
            raise ModelError(f"attention: {error}") from error

    def for_type(self, kernel: PagedKernel | None, dtype: torch.dtype) -> PagedKernel | None:
        """The kernel, or None for torch's own attention where it does not take this type: the small copy in
        float32 shows what is around it."""
        needs = dataclasses.replace(self._needs, dtype=dtype)
        return kernel if kernel is not None and choice.takes(kernel, needs) else None


def measure_capacity(model: LoadedModel, config: EngineConfig) -> Capacity:
    """What fits in the memory that is free now, with the weights loaded. Raises ModelError with numbers."""
    return capacity_plan.plan(config, model, model.layer_shapes, capacity_plan.free_memory(model.device))


def flatten(chunks: list[Chunk], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [tokens], positions [tokens], and indices of the rows that need logits."""
    ids: list[int] = []
    positions: list[int] = []
    for chunk in chunks:
        end = chunk.start + chunk.length
        ids.extend(chunk.sequence.tokens[chunk.start : end])
        positions.extend(range(chunk.start, end))
    return (
        torch.tensor(ids, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(logit_rows(chunks), dtype=torch.long, device=device),
    )
