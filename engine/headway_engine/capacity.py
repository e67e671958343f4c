"""How much fits: KV blocks from the memory that is really free, on the device or under the cgroup.

Knows what a layer's keys and values weigh (by asking the model) and what a step needs beside them; nothing
of scheduling.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from headway_engine import cgroup
from headway_engine.attention import gather_cap_bytes
from headway_engine.config import EngineConfig
from headway_engine.listening import LayerShape
from headway_engine.model import LoadedModel, ModelError
from headway_engine.protocol import Capacity
from headway_engine.stepping import most_logit_rows

_GIB = 1 << 30

_GRAPHS_BYTES = 256 << 20
"""What recorded launches take: about twenty graphs of some hundreds of kernels."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Free memory in bytes, and the words for where the number came from."""

    free_bytes: int
    source: str


def plan(
    config: EngineConfig, model: LoadedModel, shapes: Mapping[int, LayerShape], memory: Memory
) -> Capacity:
    """The capacity that `memory` allows, after the weights are loaded. Raises ModelError with the numbers.

    The cache gets kv_memory_percent of weights plus free memory, less the weights and the room of the largest
    step; never more than max_batch_sequences whole contexts, which is all that could be used. What a runner
    will still take for weights in blocks counts as weights, and not as free.
    """
    weights = model.serving_bytes
    free = max(0, memory.free_bytes - model.bytes_to_come)
    size = config.kv_block_tokens
    context = model.max_model_tokens
    block_bytes = size * sum(shape.bytes_per_token(model.dtype) for shape in shapes.values())
    blocks_of_context = -(-context // size)
    useful = config.capacity_max_batch_sequences * blocks_of_context
    if config.kv_blocks:
        blocks = config.kv_blocks
        reason = f"--kv-blocks is {config.kv_blocks}"
        if blocks * block_bytes > free:
            raise ModelError(
                f"--kv-blocks: {blocks} blocks of {size} tokens take {blocks * block_bytes / _GIB:.2f} GiB, "
                f"and {memory.source} leaves {free / _GIB:.2f} GiB, which is "
                f"{free // block_bytes} blocks. Ask for fewer, or leave --kv-blocks out to have "
                "the engine measure what fits"
            )
    else:
        share = (free + weights) * config.kv_memory_percent // 100
        largest_step = step_bytes(config, model, shapes)
        budget = share - weights - largest_step
        blocks = min(useful, max(0, budget) // block_bytes)
        reason = (
            f"{memory.source} leaves {max(0, budget) / _GIB:.2f} GiB for keys and values at "
            f"kvCache.memoryPercent {config.kv_memory_percent}, after {weights / _GIB:.2f} GiB "
            f"of weights and {largest_step / _GIB:.2f} GiB for the largest step"
        )
    if blocks < blocks_of_context:
        if config.max_model_len or blocks < 1:
            raise ModelError(
                f"maxModelLen: one sequence of {context} tokens needs {blocks_of_context} KV blocks of "
                f"{size} tokens ({blocks_of_context * block_bytes / _GIB:.2f} GiB), and there are {blocks}: "
                f"{reason}. Lower maxModelLen or capacity.maxBatchTokens, or give the engine more memory"
            )
        context = blocks * size
    return Capacity(
        max_batch_tokens=config.capacity_max_batch_tokens,
        max_batch_sequences=config.capacity_max_batch_sequences,
        kv_blocks=blocks,
        block_tokens=size,
        max_model_tokens=context,
    )


def step_bytes(config: EngineConfig, model: LoadedModel, shapes: Mapping[int, LayerShape]) -> int:
    """A bound, on the safe side, of what the largest step allocates beside the cache."""
    text = model.config
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    inner = int(getattr(text, "intermediate_size", 0) or getattr(text, "n_inner", 0) or 4 * hidden)
    vocab = int(text.vocab_size)
    per_token = (8 * hidden + 3 * inner) * model.dtype.itemsize
    per_row = vocab * (model.dtype.itemsize + 3 * 4)  # logits, and their float32 copies while sampling
    tokens = config.capacity_max_batch_tokens
    rows = most_logit_rows(tokens, config.capacity_max_batch_sequences)
    copied = gather_bytes(rows, config, model, shapes)
    step = tokens * per_token + rows * per_row + copied + _unpacked_bytes(model)
    if model.device.type != "cuda" or not config.decode_graphs:
        return step
    # Graphs of decodes have memory of their own: for one step of them, and where its logits are found.
    return step + rows * (per_token + 2 * vocab * model.dtype.itemsize) + _GRAPHS_BYTES


def _unpacked_bytes(model: LoadedModel) -> int:
    """The widest matrix of a quantized model, which is widened while it is used; 0 for a plain one."""
    if getattr(model.module, "hf_quantizer", None) is None:
        return 0
    sizes = (
        getattr(module, "in_features", 0) * getattr(module, "out_features", 0)
        for module in model.module.modules()
    )
    return max(sizes, default=0) * model.dtype.itemsize


def gather_bytes(
    rows: int, config: EngineConfig, model: LoadedModel, shapes: Mapping[int, LayerShape]
) -> int:
    """What attention by torch alone copies of a layer's keys and values at a time.

    Nobody knows yet whether kernels that copy nothing can be built; on a CPU it is little. One context that
    alone is more than the cap is left to the spare memory.
    """
    token = max((shape.bytes_per_token(model.dtype) for shape in shapes.values()), default=0)
    size = config.kv_block_tokens
    context = -(-model.max_model_tokens // size) * size * token
    copied = min(rows * context, gather_cap_bytes(model.device))
    # While blocks are put in order they are there twice; while attention computes, also as float32.
    return copied + max(copied, copied * 4 // model.dtype.itemsize)


def free_memory(device: torch.device) -> Memory:
    """What this process may still take on `device`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return Memory(free, f"{torch.cuda.get_device_name(device)}")
    choices = [Memory(_available_bytes(), "free memory of the machine")]
    if (limit := cgroup.free_memory_bytes()) is not None:
        choices.append(Memory(limit, "the container's memory limit"))
    return min(choices, key=lambda memory: memory.free_bytes)


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
