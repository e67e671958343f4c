"""What quantization and dtype cost in accuracy: the perplexity of one text, by the runner that serves.

    python bench/perplexity.py [--reference URI] [--tokens 4096] [--window 512] [MODEL ...]

The text is documentation of the Python language that every Python installation has (`pydoc_data.topics`, PSF
licence), in windows that know nothing of each other; each token but the first of a window counts. The
reference is computed four times: its weights unpacked and in the blocks of its file, each in float32 and in
bfloat16. Every other MODEL (a URI, or the path of a GGUF file) is computed in float32 and bfloat16 as the
engine keeps its weights; one without blocks also as `--quantization int8wo` packs it. All must have the
reference's vocabulary.

The last columns compare with the reference, unpacked and in float32: the ratio of the perplexities, and how
far the logits are from its logits (length of the difference over the length, median over tokens). That says
how much a model differs from the reference, and not which of them is better.
"""

import argparse
import math
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import conditions
from tokenizers import Tokenizer
from workload import MODEL

from headway_engine.config import EngineConfig
from headway_engine.devices import dtype_name
from headway_engine.fused.llama import stored_type, why_not_fused
from headway_engine.model import LoadedModel, default_cache_dir, load, resolve
from headway_engine.packed_weights import block_types, put_into_blocks
from headway_engine.protocol import Capacity
from headway_engine.runner import build_runner
from headway_engine.sequence import Chunk, Request, SamplingParams, Sequence
from headway_engine.start_check import relative_errors

BLOCK = 16
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Row:
    """One way of keeping and computing a model."""

    model: str
    dtype: str
    kept_in: str
    perplexity: float
    distance: float  # of its logits from those of the reference


def tokens(folder: Path, most: int) -> list[int]:
    """The beginning of the text, in the tokens of a model's folder."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    topics: Any = pydoc_data.topics
    text = "\n".join(topics.topics.values())[: 16 * most]
    return list(tokenizer.encode(text, add_special_tokens=False).ids[:most])


def windows(model: LoadedModel, ids: list[int], size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits [tokens, vocabulary] of each window, by the runner that would serve, and its ids."""
    capacity = Capacity(
        max_batch_tokens=size,
        max_batch_sequences=1,
        kv_blocks=-(-size // BLOCK) + 1,
        block_tokens=BLOCK,
        max_model_tokens=size,
    )
    runner: Any = build_runner(EngineConfig(model=""), model, capacity)
    print(f"  {model.description}, {runner.name}, weights in {runner.weights or model.dtype}", flush=True)
    for first in range(0, len(ids) - size + 1, size):
        part = ids[first : first + size]
        every_row = SamplingParams(max_tokens=1, prompt_logprobs=0)
        request = Request(id="a", prompt=tuple(part), sampling=every_row, arrival_s=0.0)
        sequence = Sequence(request=request, tokens=part, block_table=list(range(capacity.kv_blocks)))
        logits = runner.logits([Chunk(sequence, 0, size, samples=True)])
        yield logits.float().clone(), torch.tensor(part)


def read(uri: str, dtype: str, keep_blocks: bool) -> LoadedModel:
    return load(
        resolve(uri, "main", default_cache_dir()),
        dtype=dtype,
        device="cpu",
        max_model_len=0,
        progress=lambda _: None,
        keep_blocks=keep_blocks,
    )


def kept_in(model: LoadedModel) -> str:
    """Words for the table; to be asked before a runner takes the weights over."""
    if model.in_blocks:
        return "blocks, " + "+".join(block_types(model.module))
    stored = stored_type(model) if why_not_fused(model) is None else model.dtype
    return f"plain, {dtype_name(stored)}"


def measured(name: str, model: LoadedModel, ids: list[int], size: int, reference: list[torch.Tensor]) -> Row:
    """Fills `reference` with logits where it is empty."""
    kept, dtype = kept_in(model), dtype_name(model.dtype)
    loss, counted, distances = 0.0, 0, []
    fill = not reference
    for number, (logits, part) in enumerate(windows(model, ids, size)):
        said = logits[:-1].log_softmax(-1)
        loss -= float(said[torch.arange(size - 1), part[1:]].double().sum())
        counted += size - 1
        if fill:
            reference.append(logits)
        distances.append(relative_errors(logits, reference[number]))
    return Row(name, dtype, kept, math.exp(loss / counted), float(torch.cat(distances).median()))


def rows(reference: str, others: list[str], most: int, size: int) -> Iterator[Row]:
    folder = resolve(reference, "main", default_cache_dir()).tokenizer_dir
    if folder is None:
        raise SystemExit(f"{reference} has no tokenizer")
    ids = tokens(folder, most)
    print(f"{len(ids) // size * (size - 1)} tokens count, in windows of {size}", flush=True)
    truth: list[torch.Tensor] = []
    name = short(reference)
    for keep in (False, True):
        for dtype in DTYPES:
            model = read(reference, dtype, keep)
            if not keep or model.in_blocks:
                yield measured(name, model, ids, size, truth)
    for uri in others:
        other = resolve(uri, "main", default_cache_dir()).tokenizer_dir
        if other is None or tokens(other, most) != ids:
            raise SystemExit(f"{uri}: its tokens are others than those of {reference}; perplexities differ")
        for int8 in (False, True):
            for dtype in DTYPES:
                model = read(uri, dtype, keep_blocks=True)
                if int8 and model.in_blocks:
                    continue
                if int8:
                    put_into_blocks(model.module)
                yield measured(short(uri) + (", int8wo" if int8 else ""), model, ids, size, truth)


def short(uri: str) -> str:
    """A model's name without where it lies."""
    return Path(uri).name.removesuffix(".gguf")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="*", metavar="MODEL")
    p.add_argument("--reference", default=MODEL)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--window", type=int, default=512)
    a = p.parse_args()
    others = [m if "://" in m else f"file://{Path(m).resolve()}" for m in a.models]
    found = list(rows(a.reference, others, a.tokens, a.window))
    print(conditions(short(a.reference)))
    print("| model | dtype | weights kept in | perplexity | ratio | distance of logits |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in found:
        ratio = row.perplexity / found[0].perplexity
        print(
            f"| {row.model} | {row.dtype} | {row.kept_in} | {row.perplexity:.3f} | {ratio:.4f} "
            f"| {row.distance:.2g} |"
        )


if __name__ == "__main__":
    main()
