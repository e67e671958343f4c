"""Tiny random models, their plain greedy output, and sequences to run on them.

The reference never uses our attention, cache or sampler: it is transformers alone.
"""

from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch

from headway_engine.config import EngineConfig
from headway_engine.model import LoadedModel, ModelSource, default_cache_dir, load, resolve
from headway_engine.sequence import Chunk, Request, SampledToken, SamplingParams, Sequence, Step

ARCHITECTURES = ("llama", "qwen2", "gpt2")

torch.set_num_threads(1)  # the suite shares its cores


def uri(architecture: str, seed: int = 1) -> str:
    """Two layers, grouped heads where the architecture has them, 97 tokens of context.

    `llama-wide` has heads of 64 (whole vectors on every CPU), and sizes that leave a rest everywhere else.
    """
    family, _, wide = architecture.partition("-")
    sizes = "hidden=32&heads=4" if family == "gpt2" else "hidden=32&heads=4&kv_heads=2"
    if wide:
        sizes = "hidden=192&heads=3&kv_heads=1&intermediate=107"
    vocabulary = 331 if wide else 300
    return f"random://{family}?{sizes}&layers=2&vocab={vocabulary}&context=97&seed={seed}"


def source(architecture: str, seed: int = 1) -> ModelSource:
    return resolve(uri(architecture, seed), "main", default_cache_dir())


def fresh(architecture: str, seed: int = 1, dtype: str = "float32") -> LoadedModel:
    """A new copy of the model, for a runner to take over."""
    return load(
        source(architecture, seed), dtype=dtype, device="cpu", max_model_len=0, progress=lambda _: None
    )


@cache
def plain(architecture: str, seed: int = 1) -> Any:
    """The transformers module alone, for reference; shared, never handed to a runner."""
    return fresh(architecture, seed).module


@cache
def greedy(architecture: str, prompt: tuple[int, ...], tokens: int, seed: int = 1) -> tuple[int, ...]:
    """`tokens` greedy tokens after `prompt`, by transformers' generate()."""
    return generated(plain(architecture, seed), prompt, tokens)


def generated(module: Any, prompt: Seq[int], tokens: int) -> tuple[int, ...]:
    """`tokens` greedy tokens after `prompt`, by this module's own generate(), whatever ends a text."""
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)])
        out = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=-1,
        )
    return tuple(out[0, len(prompt) :].tolist())


def engine_config(**changes: Any) -> EngineConfig:
    """A small engine on one thread."""
    values: dict[str, Any] = {
        "model": "random://llama",
        "runner": "transformers",
        "kv_blocks": 64,
        "kv_block_tokens": 4,
        "capacity_max_batch_tokens": 64,
        "capacity_max_batch_sequences": 16,
        "threads": 1,
    }
    return EngineConfig(**(values | changes))


def request(name: str, prompt: Seq[int], **sampling: Any) -> Request:
    values: dict[str, Any] = {"max_tokens": 8} | sampling
    return Request(id=name, prompt=tuple(prompt), sampling=SamplingParams(**values), arrival_s=0.0)


def sequence(name: str, prompt: Seq[int], blocks: Seq[int] = (), **sampling: Any) -> Sequence:
    """A sequence that holds `blocks`, nothing computed yet."""
    return Sequence(request=request(name, prompt, **sampling), tokens=list(prompt), block_table=list(blocks))


def advance(runner: Any, *parts: tuple[Sequence, int]) -> dict[str, SampledToken]:
    """Run one step of (sequence, tokens) and write its outcome back, as the scheduler would."""
    chunks = [
        Chunk(s, s.computed, length, samples=s.computed + length == len(s.tokens)) for s, length in parts
    ]
    out: dict[str, SampledToken] = runner.run(Step(tuple(chunks)))
    for chunk in chunks:
        chunk.sequence.computed += chunk.length
        if chunk.samples:
            chunk.sequence.tokens.append(out[chunk.sequence.id].token)
    return out
