"""A step's computation: chunks of tokens in, one sampled token out for each chunk that asks for one.

`TransformersRunner` serves any model that takes transformers' attention interface. Knows nothing of queues,
fairness or HTTP, and never writes to a sequence.
"""

import logging
import os
from typing import Any, Protocol

import torch

from headway_engine import capacity as capacity_plan
from headway_engine.attention import (
    PAGED,
    PROBE,
    KeyValueCache,
    LayerShape,
    PagedBatch,
    make_batch,
    register,
)
from headway_engine.config import EngineConfig
from headway_engine.model import LoadedModel, ModelError
from headway_engine.protocol import Capacity
from headway_engine.sampling import NotFinite, sample
from headway_engine.sequence import Chunk, Request, SampledToken, SamplingParams, Sequence, Step

log = logging.getLogger(__name__)


class StepError(Exception):
    """A step could not be computed; its requests must be failed, and the process can go on.

    `out_of_memory` says that a smaller step may work. `sequence_ids` names the culprits when they are known;
    empty means the whole step.
    """

    def __init__(
        self, message: str, *, out_of_memory: bool = False, sequence_ids: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory
        self.sequence_ids = sequence_ids


class Runner(Protocol):
    """Whatever computes steps. `run` may be called from one thread only, but from any."""

    @property
    def name(self) -> str:
        """In words, for logs and the Ready report."""
        ...

    def run(self, step: Step) -> dict[str, SampledToken]:
        """The sampled token of every chunk with `samples`, by sequence id. Raises StepError."""
        ...


class TransformersRunner:
    """Steps through the model's own transformers code, with paged attention put in by name."""

    def __init__(self, model: LoadedModel, capacity: Capacity) -> None:
        self._module: Any = model.module
        self._device = model.device
        shapes = layer_shapes(model)
        self._cache = KeyValueCache(
            [shapes[i] for i in range(len(shapes))],
            capacity.kv_blocks,
            capacity.block_tokens,
            model.dtype,
            model.device,
        )
        module: Any = model.module  # nn.Module types every attribute as a tensor
        module.set_attn_implementation(PAGED)
        self._compare_with_plain_attention(model)

    @property
    def name(self) -> str:
        return "transformers"

    def run(self, step: Step) -> dict[str, SampledToken]:
        """See Runner. Grad mode belongs to a thread, so it is left here and not where the thread began."""
        chunks = in_row_order(step)
        try:
            with torch.inference_mode():
                logits = self._forward(chunks)
                return sample_rows(logits, chunks)
        except NotFinite as error:
            culprits = [c for c in chunks if c.samples and c.sequence.id in error.ids]
            with torch.inference_mode():
                self._cache.scrub([block for c in culprits for block in c.sequence.block_table])
            raise StepError(str(error), sequence_ids=tuple(error.ids)) from error
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise StepError(f"out of memory in a step of {step.tokens} tokens", out_of_memory=True) from error
        except Exception as error:
            if "can't allocate memory" in str(error):  # what torch's CPU allocator says
                raise StepError(
                    f"out of memory in a step of {step.tokens} tokens", out_of_memory=True
                ) from error
            raise StepError(f"the step failed: {type(error).__name__}: {error}") from error

    def _compare_with_plain_attention(self, model: LoadedModel) -> None:
        """Refuse a model whose paged logits are not its plain ones: it has a feature not handled here."""
        length = min(6, model.max_model_tokens, self._cache.keys[0].shape[0] * self._cache.block_tokens)
        prompt = tuple(range(3, 3 + length))
        request = Request(id="check", prompt=prompt, sampling=SamplingParams(max_tokens=1), arrival_s=0.0)
        blocks = list(range(-(-length // self._cache.block_tokens)))
        sequence = Sequence(request=request, tokens=list(prompt), block_table=blocks)
        half = length // 2
        with torch.inference_mode():
            plain = plain_logits(model, prompt)
            for start, size in ((0, half), (half, length - half - 1), (length - 1, 1)):
                if size > 0:
                    paged = self._forward([Chunk(sequence, start, size, samples=start + size == length)])
        tolerance = 1e-3 if model.dtype is torch.float32 else 0.1
        scale = plain.abs().max().clamp(min=1e-6)
        difference = float((plain - paged[0]).abs().max() / scale)
        if not difference <= tolerance:
            raise ModelError(
                f"model: {model.description}: paged attention differs from the model's own by "
                f"{difference:.2g} of the largest logit, so some feature of it is not handled; run it on the "
                "vllm runtime"
            )

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """Logits [sampling chunks, vocabulary], in row order."""
        ids, positions, sampled, batch = flatten(chunks, self._cache, self._device)
        out = self._module(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=sampled,
            paged=batch,
        )
        logits: torch.Tensor = out.logits[0]
        return logits


def build_runner(config: EngineConfig, model: LoadedModel, capacity: Capacity) -> Runner:
    """The runner that `config.runner` names; `auto` picks the fastest that serves this model right."""
    torch.set_num_threads(config.threads or usable_cores())
    if config.runner == "fused":
        raise ModelError(f"runner: no fused path for {model.description} here; use auto or transformers")
    return TransformersRunner(model, capacity)


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


def layer_shapes(model: LoadedModel) -> dict[int, LayerShape]:
    """Shape of each layer's keys and values, seen in a forward pass of two tokens, not guessed from names."""
    register()
    module: Any = model.module
    before = module.config._attn_implementation
    shapes: dict[int, LayerShape] = {}
    try:
        module.set_attn_implementation(PROBE)
        with torch.inference_mode():
            ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
            positions = torch.arange(2, device=model.device)[None]
            out = module(
                input_ids=ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=torch.ones(1, dtype=torch.long, device=model.device),
                probe=shapes,
            )
    except Exception as error:
        raise ModelError(
            f"model: {type(module).__name__} does not run with a registered attention function: {error}"
        ) from error
    finally:
        module.set_attn_implementation(before)
    if out.logits.shape[1] != 1:
        raise ModelError(
            f"model: {type(module).__name__} does not take logits_to_keep; run it on the vllm runtime"
        )
    if sorted(shapes) != list(range(len(shapes))) or not shapes:
        raise ModelError(
            f"model: {type(module).__name__} calls attention in layers {sorted(shapes)}, which cannot be "
            "paged; run it on the vllm runtime"
        )
    return shapes


def plain_logits(model: LoadedModel, prompt: tuple[int, ...]) -> torch.Tensor:
    """Logits [vocabulary] after `prompt`, with the attention that transformers itself would choose."""
    module: Any = model.module
    before = module.config._attn_implementation
    try:
        module.set_attn_implementation("sdpa" if type(module)._supports_sdpa else "eager")
        ids = torch.tensor([prompt], device=model.device)
        logits: torch.Tensor = module(input_ids=ids, use_cache=False).logits[0, -1]
        return logits
    finally:
        module.set_attn_implementation(before)


def in_row_order(step: Step) -> list[Chunk]:
    """The step's chunks, single tokens first: they share one batched attention call."""
    return sorted(step.chunks, key=lambda chunk: chunk.length > 1)


def flatten(
    chunks: list[Chunk], cache: KeyValueCache, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """Token ids [tokens], positions [tokens], indices of the rows that sample, and the paged batch."""
    ids: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    for chunk in chunks:
        end = chunk.start + chunk.length
        ids.extend(chunk.sequence.tokens[chunk.start : end])
        positions.extend(range(chunk.start, end))
        if chunk.samples:
            sampled.append(len(ids) - 1)
    singles = sum(1 for chunk in chunks if chunk.length == 1)
    batch = make_batch(
        cache,
        [(c.start + 1, c.sequence.block_table) for c in chunks[:singles]],
        [(c.start, c.length, c.sequence.block_table) for c in chunks[singles:]],
        device,
    )
    return (
        torch.tensor(ids, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(sampled, dtype=torch.long, device=device),
        batch,
    )


def sample_rows(logits: torch.Tensor, chunks: list[Chunk]) -> dict[str, SampledToken]:
    """Sample the chunks that ask for it; `logits` has one row for each, in order."""
    sequences = [chunk.sequence for chunk in chunks if chunk.samples]
    return dict(zip((s.id for s in sequences), sample(logits, sequences), strict=True))
