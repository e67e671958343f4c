"""What every runner shares: errors, the order of rows, and sampling.

Knows nothing of how a forward pass is computed.
"""

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import torch

from headway_engine.attention import KeyValueCache
from headway_engine.grammar import GrammarFailed, Grammars
from headway_engine.logs import fields
from headway_engine.model import LoadedModel
from headway_engine.pooling import Pooler, hidden_rows
from headway_engine.protocol import Capacity
from headway_engine.sampling import NotFinite, Picker, sample, score
from headway_engine.sequence import (
    NO_TOKEN,
    Chunk,
    Request,
    SampledToken,
    Sequence,
    Step,
)

log = logging.getLogger(__name__)

LEAST_LOGIT_ROWS = 16
"""Rows of logits that a forward pass may have however few sequences it is made for: prompts that are scored
would be computed in slivers otherwise."""


def most_logit_rows(max_batch_tokens: int, max_batch_sequences: int) -> int:
    """Rows of the largest logits tensor, whatever is asked for: one for each sequence, as memory is reserved.
    Prompts that are scored share them, slice by slice."""
    return min(max_batch_tokens, max(max_batch_sequences, LEAST_LOGIT_ROWS))


class StepError(Exception):
    """A step could not be computed; its requests must be failed, and the process can go on.

    `out_of_memory` says that a smaller step may work. `sequence_ids` names the culprits when they are known;
    empty means the whole step. `lost_blocks` are those of the culprits' that hold what is no number.
    """

    def __init__(
        self,
        message: str,
        *,
        out_of_memory: bool = False,
        sequence_ids: tuple[str, ...] = (),
        lost_blocks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory
        self.sequence_ids = sequence_ids
        self.lost_blocks = lost_blocks


class Runner(Protocol):
    """Whatever computes steps. `run` may be called from one thread only, but from any."""

    @property
    def name(self) -> str:
        """In words, for logs and the Ready report."""
        ...

    def run(self, step: Step) -> dict[str, SampledToken]:
        """The outcome of every chunk that samples, scores or pools, by sequence id. Raises StepError."""
        ...

    @property
    def embedding_size(self) -> int:
        """Dimensions of a prompt's vector; 0: requests may not ask for one."""
        ...

    @property
    def follows_grammars(self) -> bool:
        """Requests may have a grammar."""
        ...

    def prepare(self, request: Request) -> None:
        """Do what can be done for a request ahead of its first step; from any thread."""
        ...


class StepRunner:
    """A runner but for its forward pass: subclasses give `name` and `_forward`, and maybe a faster picker."""

    name = ""
    weights = ""
    """The type that weights are held in, where it need not be the model's."""

    def __init__(self, model: LoadedModel, capacity: Capacity, picker: Picker | None = None) -> None:
        self._model = model
        self._most_rows = most_logit_rows(capacity.max_batch_tokens, capacity.max_batch_sequences)
        shapes = model.layer_shapes
        self._cache = KeyValueCache(
            [shapes[i] for i in range(len(shapes))],
            capacity.kv_blocks,
            capacity.block_tokens,
            model.dtype,
            model.device,
        )
        self._picker = picker
        self._pooler = Pooler()

    @property
    def cache(self) -> KeyValueCache:
        """Keys and values of the sequences that run."""
        return self._cache

    @property
    def embedding_size(self) -> int:
        """See Runner. Of runners that have `_forward_hidden`."""
        return 0

    @cached_property
    def _grammars(self) -> Grammars | None:
        # Made when a runner begins to serve: those that are only looked at need none.
        return _grammars(self._model)

    @property
    def follows_grammars(self) -> bool:
        """See Runner."""
        return self._grammars is not None

    def prepare(self, request: Request) -> None:
        """See Runner: compiles its grammar."""
        if self._grammars is not None and request.sampling.grammar:
            self._grammars.prepare(request.sampling.grammar)

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """Logits [rows, vocabulary] of `logit_rows`. Inference mode is on."""
        raise NotImplementedError

    def _forward_hidden(self, chunks: list[Chunk], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits as `_forward`, and the hidden states [rows, hidden] that the head reads, of these rows."""
        raise NotImplementedError

    def logits(self, chunks: list[Chunk]) -> torch.Tensor:
        """Logits [rows, vocabulary] of `logit_rows`, of chunks in row order. Good until the next call."""
        with torch.inference_mode():
            return self._forward(chunks)

    def _compute(self, chunks: list[Chunk]) -> dict[str, SampledToken]:
        """One forward pass, and what came of it."""
        rows = hidden_rows(chunks)
        if not rows:
            return outcomes(self._forward(chunks), chunks, self._grammars, self._picker)
        logits, hidden = self._forward_hidden(chunks, rows)
        return outcomes(logits, chunks, self._grammars, self._picker) | self._pooler.pool(chunks, hidden)

    def run(self, step: Step) -> dict[str, SampledToken]:
        """See Runner. Grad mode belongs to a thread, so it is left here and not where the thread began."""
        chunks = in_row_order(step)
        try:
            with torch.inference_mode():
                if step.wiped:
                    self._cache.wipe(step.wiped)
                out: dict[str, SampledToken] = {}
                for part in parts(chunks, self._most_rows):
                    merge(out, self._compute(part))
                return out
        except GrammarFailed as error:
            raise StepError(f"the grammar cannot be followed: {error}", sequence_ids=error.ids) from error
        except NotFinite as error:
            held = {block for c in chunks if c.sequence.id in error.ids for block in c.sequence.block_table}
            with torch.inference_mode():
                lost = self._cache.not_finite(sorted(held))
            raise StepError(str(error), sequence_ids=tuple(error.ids), lost_blocks=lost) from error
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise StepError(f"out of memory in a step of {step.tokens} tokens", out_of_memory=True) from error
        except Exception as error:
            if "can't allocate memory" in str(error):  # what torch's CPU allocator says
                raise StepError(
                    f"out of memory in a step of {step.tokens} tokens", out_of_memory=True
                ) from error
            raise StepError(f"the step failed: {type(error).__name__}: {error}") from error


def _grammars(model: LoadedModel) -> Grammars | None:
    """None for a model that cannot follow any: it is served all the same."""
    if model.tokenizer_dir is None or not model.eos_token_ids:
        why = "the model has no tokenizer, or no token that ends a text"
        log.warning(fields("no-structured-output", why=why))
        return None
    try:
        return Grammars.of_model(model.tokenizer_dir, model.eos_token_ids)
    except (OSError, ValueError) as error:
        log.warning(fields("no-structured-output", why=error))
        return None


def in_row_order(step: Step) -> list[Chunk]:
    """The step's chunks, single tokens first: they share one batched attention call."""
    return sorted(step.chunks, key=_is_long)


def parts(chunks: list[Chunk], most_rows: int) -> Iterator[list[Chunk]]:
    """The chunks in one or more forward passes, so that none has more than `most_rows` rows of logits, unless
    those that sample are more. Only prompts that are scored are ever cut."""
    scored = [c for c in chunks if c.scored]
    part = [c for c in chunks if not c.scored]
    room = most_rows - sum(c.samples for c in part)
    for chunk in scored:
        rest = chunk
        while (rows := len(rest.scored) + rest.samples) > room:
            if room > 0:
                length = rest.scored.start - rest.start + room
                part.append(Chunk(rest.sequence, rest.start, length, samples=False))
                rest = Chunk(rest.sequence, rest.start + length, rest.length - length, rest.samples)
            yield sorted(part, key=_is_long)
            part, room = [], most_rows
        part.append(rest)
        room -= rows
    yield sorted(part, key=_is_long) if scored else part


def _is_long(chunk: Chunk) -> bool:
    return chunk.length > 1


def logit_rows(chunks: list[Chunk]) -> list[int]:
    """Rows of the step that need logits: those that score, and the last of a chunk that samples."""
    rows: list[int] = []
    first = 0
    for chunk in chunks:
        if scored := chunk.scored:
            rows.extend(range(first + scored.start - chunk.start, first + scored.stop - chunk.start))
        first += chunk.length
        if chunk.samples:
            rows.append(first - 1)
    return rows


def outcomes(
    logits: torch.Tensor, chunks: list[Chunk], grammars: Grammars | None, picker: Picker | None
) -> dict[str, SampledToken]:
    """What came of a forward pass; `logits` has the rows of `logit_rows`."""
    if not any(chunk.scored for chunk in chunks):
        return sample_rows(logits, chunks, grammars, picker)
    sampling: list[int] = []
    scoring: list[int] = []
    sequences: list[Sequence] = []
    successors: list[int] = []
    for chunk in chunks:
        first = len(sampling) + len(scoring)
        scoring.extend(range(first, first + len(chunk.scored)))
        sequences.extend([chunk.sequence] * len(chunk.scored))
        successors.extend(chunk.sequence.tokens[position + 1] for position in chunk.scored)
        if chunk.samples:
            sampling.append(first + len(chunk.scored))
    # Rows picked from logits are a copy: not where nobody samples, as in most passes over a long prompt.
    out = sample_rows(logits[sampling], chunks, grammars, picker)
    scores = iter(score(logits[scoring] if sampling else logits, sequences, successors))
    for chunk in chunks:
        own = tuple(next(scores) for _ in chunk.scored)
        merge(out, {chunk.sequence.id: SampledToken(NO_TOKEN, scores=own)} if own else {})
    return out


def merge(out: dict[str, SampledToken], more: dict[str, SampledToken]) -> None:
    """Take the outcomes of another forward pass of the same step in."""
    for id, one in more.items():
        if (other := out.get(id)) is not None:
            said = one if one.token != NO_TOKEN else other
            one = SampledToken(said.token, said.logprob, other.scores + one.scores)
        out[id] = one


def sample_rows(
    logits: torch.Tensor,
    chunks: list[Chunk],
    grammars: Grammars | None = None,
    picker: Picker | None = None,
) -> dict[str, SampledToken]:
    """Sample the chunks that ask for it; `logits` has one row for each, in order."""
    sequences = [chunk.sequence for chunk in chunks if chunk.samples]
    # A device may still be computing the logits while the masks are made.
    allowed = grammars.allowed(sequences, logits.shape[1]) if grammars else None
    sampled = sample(logits, sequences, allowed, picker)
    return dict(zip((s.id for s in sequences), sampled, strict=True))
