"""Runners: a step's chunks in, one sampled token out for each chunk that asks for one.

`TransformersRunner` serves any model that takes transformers' attention interface; `fused` holds the lean
path for Llama shapes on a CPU. Knows nothing of queues, fairness or HTTP, and never writes to a sequence.
"""

import ctypes
import logging
import os
from typing import Any

import torch

from headway_engine import capacity as capacity_plan
from headway_engine.attention import PAGED, PagedBatch, make_batch, register
from headway_engine.config import EngineConfig
from headway_engine.fused import build, native
from headway_engine.fused.llama import FusedRunner, why_not_fused
from headway_engine.fused.sampler import KernelPicker
from headway_engine.model import LoadedModel, ModelError
from headway_engine.protocol import Capacity
from headway_engine.sequence import Chunk
from headway_engine.stepping import (
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
        self, model: LoadedModel, capacity: Capacity, library: ctypes.CDLL | None = None, threads: int = 1
    ) -> None:
        """With a `library` of kernels, its attention is used; without, torch's own."""
        register()
        super().__init__(model, capacity, KernelPicker(library, threads) if library else None)
        self._library = native.declare(library) if library else None
        self._threads = threads
        plain = plain_logits(model, capacity)
        module: Any = model.module  # nn.Module types every attribute as a tensor
        module.set_attn_implementation(PAGED)
        self._module = module
        self._compare(plain)

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
        singles = sum(1 for chunk in chunks if chunk.length == 1)
        return make_batch(
            self._cache,
            [(c.start + 1, c.sequence.block_table) for c in chunks[:singles]],
            [(c.start, c.length, c.sequence.block_table) for c in chunks[singles:]],
            self._model.device,
        )


def build_runner(config: EngineConfig, model: LoadedModel, capacity: Capacity) -> Runner:
    """The runner that `config.runner` names; `auto` picks the fastest that serves this model right."""
    torch.set_num_threads(config.threads or usable_cores())
    threads = torch.get_num_threads()
    library = None
    if model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16):
        library = build.kernels()
    reason = why_not_fused(model) or (None if library else "the C++ kernels are not there (see the log)")
    if config.runner == "transformers" or (config.runner == "auto" and reason):
        log.info("runner: transformers (%s)", reason or "asked for")
        return TransformersRunner(model, capacity, library, threads)
    if library is None or reason:
        raise ModelError(f"runner: no fused path for {model.description}: {reason}; use auto or transformers")
    return FusedRunner(model, capacity, library, threads)


def measure_capacity(model: LoadedModel, config: EngineConfig) -> Capacity:
    """What fits in the memory that is free now, with the weights loaded. Raises ModelError with numbers."""
    return capacity_plan.plan(config, model, layer_shapes(model), capacity_plan.free_memory(model.device))


def usable_cores() -> int:
    """Cores this process may run on, by affinity and by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


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
