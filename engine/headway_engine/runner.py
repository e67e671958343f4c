"""Runners: a step's chunks in, one sampled token out for each chunk that asks for one.

`TransformersRunner` serves any model that takes transformers' attention interface; for Llama shapes, `fused`
holds the fast path on a CPU and `lean` the one on an accelerator. Knows nothing of queues, fairness or HTTP,
and never writes to a sequence.
"""

import ctypes
import logging
from typing import Any

import torch

from headway_engine import capacity as capacity_plan
from headway_engine.attention import PAGED, PagedBatch, register
from headway_engine.cgroup import usable_cores
from headway_engine.config import EngineConfig
from headway_engine.fused import build, native
from headway_engine.fused.llama import FusedRunner, why_not_fused
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
from headway_engine.pooling import base_of
from headway_engine.protocol import Capacity
from headway_engine.sampling import Picker
from headway_engine.sequence import Chunk
from headway_engine.stepping import (
    CHECK_PROMPT,
    Runner,
    StepError,
    StepRunner,
    layer_shapes,
    logit_rows,
    plain_logits,
)

__all__ = ["Runner", "StepError", "TransformersRunner", "build_runner", "measure_capacity"]

log = logging.getLogger(__name__)


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
        """Attention is that of a `library` for the CPU or a `kernel` for an accelerator, or else torch's."""
        register()
        picker: Picker | None = KernelPicker(library, threads) if library else None
        if model.device.type != "cpu":
            picker = DevicePicker()
        super().__init__(model, capacity, picker)
        self._library = native.declare(library) if library else None
        self._threads = threads
        self._kernel = kernel
        plain = plain_logits(model, capacity)
        module: Any = model.module  # nn.Module types every attribute as a tensor
        self._base = base_of(module, CHECK_PROMPT[: capacity.kv_tokens], model.device)
        module.set_attn_implementation(PAGED)
        self._module = module
        self._compare(plain)
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


def build_runner(config: EngineConfig, model: LoadedModel, capacity: Capacity) -> Runner:
    """The runner that `config.runner` names; `auto` picks the fastest that serves this model right.

    Raises ModelError when what was asked for by name cannot be had.
    """
    torch.set_num_threads(config.threads or usable_cores())
    threads = torch.get_num_threads()
    library = None
    if model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16):
        library = build.kernels()
    not_fused = why_not_fused(model) or (None if library else "the C++ kernels are not there (see the log)")
    not_lean = why_not_llama(model)
    on_cpu = model.device.type == "cpu"
    wanted = config.runner
    if wanted == "auto":
        wanted = (
            ("transformers" if not_fused else "fused") if on_cpu else "transformers" if not_lean else "lean"
        )
    reasons = {"fused": not_fused, "lean": not_lean}
    if reason := reasons.get(wanted):
        raise ModelError(
            f"runner: no {wanted} path for {model.description}: {reason}; use auto or transformers"
        )
    if wanted == "fused" and library is not None:
        return FusedRunner(model, capacity, library, threads)
    kernel = attention_kernel(config, model)
    if wanted == "lean":
        recorder = CudaRecorder(model.device) if config.decode_graphs and not on_cpu else None
        return LeanRunner(model, capacity, kernel, recorder)
    log.info(fields("runner", runner="transformers", why=(not_fused if on_cpu else not_lean) or "asked for"))
    return TransformersRunner(model, capacity, library, threads, kernel)


def attention_kernel(config: EngineConfig, model: LoadedModel) -> PagedKernel | None:
    """The kernel of paged attention for the accelerator that the model is on; None for torch's own."""
    if model.device.type == "cpu":
        if config.attention not in ("auto", "torch"):
            raise ModelError(f"attention: {config.attention} is for accelerators, and the device is a CPU")
        return None
    shapes = frozenset(layer_shapes(model).values())
    needs = choice.needs_of(shapes, model.dtype, config.kv_block_tokens, model.device)
    try:
        return choice.pick(needs, model.device, asked=config.attention)
    except ValueError as error:
        raise ModelError(f"attention: {error}") from error


def measure_capacity(model: LoadedModel, config: EngineConfig) -> Capacity:
    """What fits in the memory that is free now, with the weights loaded. Raises ModelError with numbers."""
    return capacity_plan.plan(config, model, layer_shapes(model), capacity_plan.free_memory(model.device))


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
