"""What the check at start computes: two texts, in uneven chunks beside decodes, in blocks in no order.

The first sequence is asked for the logits of every token, the second for those of each chunk's last, so that
both ways of choosing rows are used. Blocks hold other numbers before, so that what is read in the wrong place
is seen. Knows nothing of what the logits should be.
"""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from headway_engine.model import LoadedModel
from headway_engine.sequence import Chunk, Request, SamplingParams, Sequence
from headway_engine.stepping import StepRunner

TEXTS = (
    "The harbour master counted eleven ships that morning, and wrote their names in the blue book beside "
    'the window. "None of them is ours," he said. By noon the wind had turned to the north-west; 3 boats '
    "left for the islands, and the price of salt fell from 4.20 to 3.95. Nobody in the market could "
    "explain why, although everybody tried.",
    "To repair a bicycle wheel, loosen the nuts first and lift the wheel out of the frame. Press the tyre "
    "together with both thumbs until one side slips over the rim, then pull the tube out and fill it with "
    "air: a hole as small as 0.5 mm can be heard, or seen under water. Dry it, roughen it, and wait five "
    "minutes before the patch goes on.",
)
"""One for each sequence. Ordinary text: special tokens alone make a model's numbers ill-conditioned, and what
rounding does to them says nothing of what it does to answers."""

_BEGINNING = ((9, 4), (1, 12), (12, 1), (1, 1), (1, 6))
"""Tokens of each sequence in each step: chunks that begin and end inside blocks, beside decodes, and decodes
alone. What is left is read in two large chunks, and the last token is a decode."""

_OTHER_NUMBERS = 3.0
"""How large the numbers are that blocks hold before: about as large as keys and values. They are finite,
because attention by torch multiplies what it masks by zero."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits that came of the steps."""

    logits: torch.Tensor  # [rows, columns] float32
    sequences: torch.Tensor  # [rows] which sequence a row is of
    positions: torch.Tensor  # [rows] and which of its tokens


def texts(model: LoadedModel, tokens: int) -> torch.Tensor:
    """Ids [2, tokens] of the two texts, over and over where they are too short; of a model without a
    tokenizer, ids from all over its vocabulary."""
    vocabulary = int(model.config.vocab_size)
    rows = _encoded(model, vocabulary)
    rows = [row or [(i * 37 + 11 * n + 11) % vocabulary for i in range(tokens)] for n, row in enumerate(rows)]
    return torch.tensor([(row * (tokens // len(row) + 1))[:tokens] for row in rows], device=model.device)


def _encoded(model: LoadedModel, vocabulary: int) -> list[list[int]]:
    if model.tokenizer_dir is None:
        return [[] for _ in TEXTS]
    tokenizer = Tokenizer.from_file(str(model.tokenizer_dir / "tokenizer.json"))
    return [[id for id in tokenizer.encode(text).ids if id < vocabulary] for text in TEXTS]


def sizes(tokens: int) -> list[tuple[int, int]]:
    """Tokens of the two sequences in each step, `tokens` of each altogether."""
    rest = tokens - sum(first for first, _ in _BEGINNING)
    plan = [*_BEGINNING, (rest - 2, 1), (1, rest - 2), (1, 1)] if rest > 2 else [*_BEGINNING, (2, 2)]
    left = [tokens, tokens]
    found = []
    for first, second in plan:
        taken = (max(0, min(first, left[0])), max(0, min(second, left[1])))
        left = [left[0] - taken[0], left[1] - taken[1]]
        if any(taken):
            found.append(taken)
    return found


def compute(runner: StepRunner, ids: torch.Tensor, columns: torch.Tensor, blocks: int) -> Rows:
    """The rows of all steps over `ids` [sequences, tokens], in the first `blocks` of the runner's cache."""
    cache = runner.cache
    _, tokens = ids.shape
    needed = -(-tokens // cache.block_tokens)
    order = random.Random(5).sample(range(min(blocks, 2 * needed + 3)), 2 * needed)
    _scribble(runner, order)
    sequences = [
        _sequence(str(number), row, order[number::2], every_row=number == 0)
        for number, row in enumerate(ids.tolist())
    ]
    done = [0, 0]
    logits: list[torch.Tensor] = []
    places: list[tuple[int, int]] = []
    for step in sizes(tokens):
        chunks = [
            Chunk(sequences[n], done[n], size, samples=n == 1 or done[n] + size == tokens)
            for n, size in enumerate(step)
            if size
        ]
        chunks.sort(key=lambda chunk: chunk.length > 1)  # as steps are: single tokens first
        logits.append(runner.logits(chunks)[:, columns].float())  # a copy
        for chunk in chunks:
            n, last = int(chunk.sequence.id), chunk.start + chunk.length - 1
            places.extend((n, position) for position in ([last] if n else range(chunk.start, last + 1)))
        done = [begun + size for begun, size in zip(done, step, strict=True)]
    cache.wipe(order)
    at = torch.tensor(places, device=ids.device)
    return Rows(torch.cat(logits), at[:, 0], at[:, 1])


def _sequence(name: str, ids: list[int], table: list[int], every_row: bool) -> Sequence:
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0 if every_row else -1)
    request = Request(id=name, prompt=tuple(ids), sampling=sampling, arrival_s=0.0)
    return Sequence(request=request, tokens=ids, block_table=table)


def _scribble(runner: StepRunner, blocks: Seq[int]) -> None:
    """Other numbers in these blocks, the same at every start."""
    index = torch.tensor(list(blocks), device=runner.cache.keys[0].device)
    chance = torch.Generator(index.device).manual_seed(5)
    with torch.inference_mode():
        for tensor in (*runner.cache.keys, *runner.cache.values):
            shape = (len(blocks), *tensor.shape[1:])
            numbers = torch.randn(shape, generator=chance, device=index.device) * _OTHER_NUMBERS
            tensor[index] = numbers.to(tensor.dtype)
