"""Hidden states to one vector a prompt: the last token's, or the mean over all of them, made one long.

The hidden states are those that the language-model head reads, after the final norm. The sums of prompts
that are computed in chunks live here, and nobody needs to care for them: they begin anew with the first
chunk, and a chunk that is computed again counts once. Knows nothing of how hidden states are computed.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from headway_engine.float32_pass import plain_attention
from headway_engine.sampling import NotFinite
from headway_engine.sequence import NO_TOKEN, Chunk, Pooling, SampledToken, Sequence


@dataclass(frozen=True, slots=True)
class _Sum:
    """Of the hidden states of a prompt's beginning, [size] float32: before its latest chunk, and with it."""

    start: int
    before: torch.Tensor
    end: int
    total: torch.Tensor


class Pooler:
    """Makes vectors of the chunks of one runner."""

    def __init__(self) -> None:
        self._sums: WeakKeyDictionary[Sequence, _Sum] = WeakKeyDictionary()

    def pool(self, chunks: Seq[Chunk], hidden: torch.Tensor) -> dict[str, SampledToken]:
        """Vectors of the prompts that end in these chunks; `hidden` has the rows of `hidden_rows`.

        Raises NotFinite.
        """
        ids: list[str] = []
        vectors: list[torch.Tensor] = []
        row = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.request.pooling is Pooling.MEAN:
                # The mean's direction is the sum's.
                vector = self._add(chunk, hidden[row : row + chunk.length])
                row += chunk.length
            elif chunk.pools:
                vector = hidden[row].float()
                row += 1
            if chunk.pools:
                ids.append(sequence.id)
                vectors.append(vector)
        if not ids:
            return {}
        lengths = (stacked := torch.stack(vectors)).norm(dim=1, keepdim=True)
        if not bool((fine := torch.isfinite(lengths[:, 0])).all()):
            raise NotFinite(tuple(id for id, one in zip(ids, fine.tolist(), strict=True) if not one))
        rows = (stacked / lengths.clamp(min=1e-12)).cpu().numpy().astype("<f4")
        return {id: SampledToken(NO_TOKEN, vector=one.tobytes()) for id, one in zip(ids, rows, strict=True)}

    def _add(self, chunk: Chunk, hidden: torch.Tensor) -> torch.Tensor:
        """The sum up to the end of the chunk."""
        part = hidden.sum(dim=0, dtype=torch.float32)
        known = self._sums.get(chunk.sequence)
        if chunk.start == 0:
            before = torch.zeros_like(part)
        elif known is not None and known.end == chunk.start:
            before = known.total
        elif known is not None and known.start == chunk.start:
            before = known.before  # the step was run again after an error
        else:
            raise ValueError(f"the hidden states before token {chunk.start} are not there to be averaged")
        total = before + part
        self._sums[chunk.sequence] = _Sum(chunk.start, before, chunk.start + chunk.length, total)
        return total


def hidden_rows(chunks: Seq[Chunk]) -> list[int]:
    """Rows of the step whose hidden states are pooled: all of a prompt for its mean, else its last."""
    rows: list[int] = []
    first = 0
    for chunk in chunks:
        end = first + chunk.length
        if chunk.sequence.request.pooling is Pooling.MEAN:
            rows.extend(range(first, end))
        elif chunk.pools:
            rows.append(end - 1)
        first = end
    return rows


@dataclass(frozen=True, slots=True)
class Base:
    """The part of a model whose first output [1, tokens, size] is what its language-model head reads."""

    module: torch.nn.Module
    size: int


def base_of(module: Any, device: torch.device) -> Base | None:
    """The base of a model; None when it has none.

    Seen in a forward pass of four tokens and not guessed: some models scale or project in between. (Of one
    token it could not be seen: that of padding may be all zeros.)
    """
    base, head = getattr(module, "base_model", None), module.get_output_embeddings()
    if base is None or base is module or head is None:
        return None
    given: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    hooks = (
        base.register_forward_hook(lambda _module, _inputs, out: given.append(out[0])),
        head.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0])),
    )
    try:
        with torch.inference_mode(), plain_attention(module):
            module(input_ids=torch.arange(4, device=device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    same = len(given) == len(read) == 1 and torch.equal(given[0], read[0])
    return Base(base, given[0].shape[-1]) if same else None
