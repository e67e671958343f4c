"""Logits to tokens: one row a sequence, each with its own parameters, no row aware of its neighbours.

A draw is the inverse of the cumulative distribution at a number made by hashing (seed, output position), so
it does not depend on what else is in the batch. The draw itself is a `Picker`'s; torch's is here. Where the
distribution is cut, a few hundred of the likeliest tokens are nearly always enough for it, and a full sort is
the rare way out. Log-probabilities are those of the model itself, before grammars, penalties, bias and
temperature. Knows nothing of keys, values and layers.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch

from headway_engine.grammar import Allowed
from headway_engine.sequence import SampledToken, SamplingParams, Sequence, TokenLogprob

_TIERS = (256, 4096)
"""How many of the likeliest tokens are looked at before the whole vocabulary is sorted."""

_GROUP = 16
_WIDE_GROUP = 64
"""Tokens in a group, where maxima or sums of groups are looked at first."""

_COLDEST = 1e-6
"""Temperatures below this one draw like it, which is all but greedy: one over them is no float32 any more."""

_MASK64 = (1 << 64) - 1


class NotFinite(ArithmeticError):
    """The model gave no usable logits for these sequences."""

    def __init__(self, ids: tuple[str, ...]) -> None:
        super().__init__(f"the model's output is not a number for {len(ids)} sequence(s)")
        self.ids = ids


class Picker(Protocol):
    """How tokens are picked from float32 logits [rows, vocabulary]; no row depends on another."""

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """The highest value of each row; not a number where any of its values is none."""
        ...

    def pick(self, logits: torch.Tensor, params: Seq[SamplingParams], uniforms: Seq[float]) -> list[int]:
        """A token for each row: the likeliest for temperature 0, else the one drawn at its number in [0, 1).

        Tokens rank by value, then by id. Of the ranks, top_k keeps the first, then top_p those up to its
        share of what top_k left, and min_p those with that share of the likeliest token's probability. A row
        with a cut is drawn in order of ranks, one without in order of ids.
        """
        ...


class TorchPicker:
    """A Picker for any device. Which of several equal values ranks first is torch's choice."""

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """See Picker."""
        return logits.amax(dim=-1)

    def pick(self, logits: torch.Tensor, params: Seq[SamplingParams], uniforms: Seq[float]) -> list[int]:
        """See Picker."""
        tokens = [0] * len(params)
        greedy = [row for row, p in enumerate(params) if p.temperature <= 0]
        drawn = [row for row, p in enumerate(params) if p.temperature > 0]
        if greedy:
            for row, token in zip(greedy, _argmax(_rows(logits, greedy)).tolist(), strict=True):
                tokens[row] = token
        if drawn:
            picks = _draw(
                _rows(logits, drawn), [params[row] for row in drawn], [uniforms[row] for row in drawn]
            )
            for row, token in zip(drawn, picks, strict=True):
                tokens[row] = token
        return tokens


def sample(
    logits: torch.Tensor,
    sequences: Seq[Sequence],
    allowed: Allowed | None = None,
    picker: Picker | None = None,
) -> list[SampledToken]:
    """The next token of each sequence, from logits [len(sequences), vocabulary]. Raises NotFinite.

    `allowed` says what the rows with a grammar may choose from. Without a `picker`, torch's.
    """
    if not sequences:
        return []
    picker = picker or TorchPicker()
    logits = logits.float()
    params = [s.request.sampling for s in sequences]
    highest = picker.highest(logits)
    if not bool(torch.isfinite(highest).all()):
        bad = (~torch.isfinite(highest)).nonzero().flatten().tolist()
        raise NotFinite(tuple(sequences[row].id for row in bad))
    asked = [row for row, p in enumerate(params) if p.logprobs >= 0]
    own = logits[asked].clone() if asked else logits[:0]
    uniforms = [
        uniform(p.seed, s.output_len) if p.temperature > 0 else 0.0
        for p, s in zip(params, sequences, strict=True)
    ]
    tokens = picker.pick(_edit(logits, sequences, allowed), params, uniforms)
    found: dict[int, TokenLogprob] = {}
    if asked:
        scores = _logprobs(own, [tokens[r] for r in asked], [params[r].logprobs for r in asked])
        found = dict(zip(asked, scores, strict=True))
    return [SampledToken(token=token, logprob=found.get(row)) for row, token in enumerate(tokens)]


def score(logits: torch.Tensor, sequences: Seq[Sequence], tokens: Seq[int]) -> list[TokenLogprob]:
    """Log-probability of the given token under each row, with as many of the likeliest as the row's sequence
    asks of its prompt. Raises NotFinite."""
    logits = logits.float()
    fine = torch.isfinite(logits.amax(dim=-1))
    if not bool(fine.all()):
        bad = (~fine).nonzero().flatten().tolist()
        raise NotFinite(tuple({sequences[row].id: None for row in bad}))
    return _logprobs(logits, tokens, [s.request.sampling.prompt_logprobs for s in sequences])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for output `position` under `seed`: two rounds of the SplitMix64 finaliser."""
    x = _mix(_mix(seed & _MASK64) ^ ((position * 0x9E3779B97F4A7C15) & _MASK64))
    return (x >> 11) / float(1 << 53)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _edit(logits: torch.Tensor, sequences: Seq[Sequence], allowed: Allowed | None) -> torch.Tensor:
    """Penalties, bias, grammars and the ban of stop tokens; only rows that ask for one are touched, in a
    copy."""
    masks: dict[int, torch.Tensor] = {}
    if allowed is not None:
        masks = dict(zip(allowed.rows, torch.from_numpy(allowed.mask).to(logits.device), strict=True))
    rows = [row for row, s in enumerate(sequences) if row in masks or _edits(s)]
    if not rows:
        return logits
    edited = logits.clone()
    _penalise_repeats(edited, sequences)
    for row in rows:
        _edit_row(edited[row], sequences[row], masks.get(row))
    return edited


def _edits(sequence: Sequence) -> bool:
    p = sequence.request.sampling
    return bool(
        p.presence_penalty
        or p.frequency_penalty
        or p.repetition_penalty != 1.0
        or p.logit_bias
        or (p.stop_token_ids and sequence.output_len < p.min_tokens)
    )


def _penalise_repeats(edited: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """The repetition penalty of all rows at once, in place: models that ask for it by default ask for it in
    every row, over the whole context. Writing one value twice is harmless, so repeats need no counting."""
    penalties = [s.request.sampling.repetition_penalty for s in sequences]
    rows = [row for row, penalty in enumerate(penalties) if penalty != 1.0]
    if not rows:
        return
    seen = [np.array(sequences[row].tokens, dtype=np.int64) for row in rows]
    lengths = [len(tokens) for tokens in seen]
    row_of = torch.from_numpy(np.repeat(rows, lengths)).to(edited.device)
    token = torch.from_numpy(np.concatenate(seen)).to(edited.device)
    by = torch.from_numpy(np.repeat(np.array([penalties[r] for r in rows], np.float32), lengths))
    by = by.to(edited.device)
    score = edited[row_of, token]
    edited[row_of, token] = torch.where(score > 0, score / by, score * by)


def _edit_row(row: torch.Tensor, sequence: Sequence, mask: torch.Tensor | None) -> None:
    """In place, all but the repetition penalty. Writing the same value twice is harmless, so repeated tokens
    need no counting where a penalty does not count them."""
    p = sequence.request.sampling
    said = sequence.tokens[sequence.prompt_len :]
    if said and (p.presence_penalty or p.frequency_penalty):
        index = torch.tensor(said, device=row.device)
        if p.presence_penalty:
            row[index] = row[index] - p.presence_penalty
        if p.frequency_penalty:
            row.index_add_(0, index, torch.full_like(row[index], -p.frequency_penalty))
    if p.logit_bias:
        index = torch.tensor([token for token, _ in p.logit_bias], device=row.device)
        row.index_add_(0, index, row.new_tensor([bias for _, bias in p.logit_bias]))
    if mask is not None:
        row.masked_fill_(~mask, -torch.inf)
    if p.stop_token_ids and sequence.output_len < p.min_tokens:
        row[torch.tensor(p.stop_token_ids, device=row.device)] = -torch.inf


def _draw(logits: torch.Tensor, params: Seq[SamplingParams], uniforms: Seq[float]) -> list[int]:
    """Temperature, then top_k, then top_p of what is left, then min_p; the cut distribution at `uniforms`."""
    whole = [row for row, p in enumerate(params) if p.top_k == 0 and p.top_p >= 1.0 and p.min_p <= 0.0]
    cut = [row for row in range(len(params)) if row not in set(whole)]
    tokens = [0] * len(params)
    if whole:
        picks = _draw_whole(_rows(logits, whole), [params[r] for r in whole], [uniforms[r] for r in whole])
        for row, token in zip(whole, picks, strict=True):
            tokens[row] = token
    vocabulary = logits.shape[1]
    pending = cut
    for tier in (*(k for k in _TIERS if k < vocabulary), vocabulary):
        if not pending:
            break
        picks = _draw_cut(
            _rows(logits, pending), [params[r] for r in pending], [uniforms[r] for r in pending], tier
        )
        for row, token in zip(pending, picks, strict=True):
            tokens[row] = token
        pending = [row for row, token in zip(pending, picks, strict=True) if token < 0]
    return tokens


def warmth(params: SamplingParams) -> float:
    """One over the temperature, as far as float32 goes."""
    return 1 / max(params.temperature, _COLDEST)


def _masses(logits: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Probabilities up to a factor, the likeliest token's being 1. One new tensor; the rest is in place:
    fresh memory of this size costs more than the arithmetic."""
    warmths = logits.new_tensor([warmth(p) for p in params])[:, None]
    mass: torch.Tensor = (logits - logits.amax(dim=-1, keepdim=True)).mul_(warmths).exp_()
    return mass


def _draw_whole(logits: torch.Tensor, params: Seq[SamplingParams], uniforms: Seq[float]) -> list[int]:
    """No cut: the distribution in order of token ids needs neither sort nor top-k. First the group, then the
    token in it."""
    mass = _masses(logits, params)
    if rest := -mass.shape[1] % _WIDE_GROUP:
        mass = torch.nn.functional.pad(mass, (0, rest))
    groups = mass.view(len(params), -1, _WIDE_GROUP)
    sums = groups.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = sums.new_tensor(uniforms)[:, None] * sums[:, -1:]
    group = torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(group > 0, sums.gather(1, (group - 1).clamp(min=0)), 0.0)
    inside = groups[torch.arange(len(params), device=mass.device), group[:, 0]].double().cumsum(dim=-1)
    # Rounding may leave the target a hair past the group's last sum: then it is its last token with any mass.
    last = (inside < inside[:, -1:]).sum(dim=-1, keepdim=True)
    place = torch.minimum(torch.searchsorted(inside, target - before, right=True), last)
    picks: list[int] = (group * _WIDE_GROUP + place)[:, 0].tolist()
    return picks


def _draw_cut(
    logits: torch.Tensor, params: Seq[SamplingParams], uniforms: Seq[float], tier: int
) -> list[int]:
    """Draw among the `tier` likeliest tokens; -1 for a row whose cut does not fall among them."""
    vocabulary = logits.shape[1]
    values, tokens = _largest(logits, tier)
    total = _masses(logits, params).sum(dim=-1, keepdim=True, dtype=torch.float64)
    warmths = total.new_tensor([warmth(p) for p in params])[:, None]
    mass = ((values - values[:, :1]) * warmths).exp() / total
    sums = mass.cumsum(dim=-1)
    rank = torch.arange(tier, device=logits.device)
    top_k = torch.tensor([p.top_k or vocabulary for p in params], device=logits.device)
    # What top_p is a share of: the mass that top_k left.
    last = top_k.clamp(max=tier)[:, None] - 1
    left = torch.where(top_k[:, None] > tier, 1.0, sums.gather(1, last))
    top_p = sums.new_tensor([p.top_p for p in params])[:, None]
    min_p = sums.new_tensor([p.min_p for p in params])[:, None]
    keep = (rank < top_k[:, None]) & (sums - mass < top_p * left) & (mass >= min_p * mass[:, :1])
    kept = keep.sum(dim=-1).clamp(min=1)  # a prefix of the ranks, always at least the likeliest token
    target = sums.new_tensor(uniforms)[:, None] * sums.gather(1, kept[:, None] - 1)
    places = torch.searchsorted(sums, target, right=True).flatten()
    places = torch.minimum(places, kept - 1)
    picks = tokens.gather(1, places[:, None]).flatten()
    share_known = (top_k <= tier) | (top_k >= vocabulary) | (top_p[:, 0] >= 1.0)
    complete = ((kept < tier) & share_known) | (top_k <= tier) | (tier == vocabulary)
    chosen: list[int] = torch.where(complete, picks, -1).tolist()
    return chosen


def _rows(tensor: torch.Tensor, rows: Seq[int]) -> torch.Tensor:
    """These rows, in order; the tensor itself when they are all of it."""
    return tensor if len(rows) == tensor.shape[0] else tensor[list(rows)]


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """x.argmax(-1) for wide rows, by maxima of groups: torch's own is ten times slower than amax on a CPU."""
    whole = x.shape[1] - x.shape[1] % _WIDE_GROUP
    if whole < 16 * _WIDE_GROUP:
        return x.argmax(dim=-1)
    maxima = x[:, :whole].view(x.shape[0], -1, _WIDE_GROUP).amax(dim=-1)
    places = maxima.argmax(dim=-1, keepdim=True) * _WIDE_GROUP + torch.arange(_WIDE_GROUP, device=x.device)
    tail = torch.arange(whole, x.shape[1], device=x.device).expand(x.shape[0], -1)
    places = torch.cat([places, tail], dim=1)
    return places.gather(1, x.gather(1, places).argmax(dim=-1, keepdim=True))[:, 0]


def _largest(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.topk(x, k): the k largest lie in the k groups of largest maxima, so most is never sorted."""
    whole = x.shape[1] - x.shape[1] % _GROUP
    if 2 * k * _GROUP > whole:
        found = torch.topk(x, k, dim=-1)
        return found.values, found.indices
    stride = whole // _GROUP  # a group is every stride-th token: its maximum is a plain maximum of rows
    maxima = x[:, :whole].view(x.shape[0], _GROUP, stride).amax(dim=1)
    groups = torch.topk(maxima, k, dim=-1).indices
    places = (groups[:, :, None] + stride * torch.arange(_GROUP, device=x.device)).flatten(1)
    tail = torch.arange(whole, x.shape[1], device=x.device).expand(x.shape[0], -1)
    places = torch.cat([places, tail], dim=1)
    values, order = torch.topk(x.gather(1, places), k, dim=-1)
    return values, places.gather(1, order)


def _logprobs(logits: torch.Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
    """Of one token a row, with the `counts` likeliest ones."""
    total = torch.logsumexp(logits, dim=-1)
    chosen = (logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0] - total).tolist()
    most = min(max(counts), logits.shape[1])
    values, ids = torch.topk(logits, most, dim=-1)
    top_values, top_ids = (values - total[:, None]).tolist(), ids.tolist()
    return [
        TokenLogprob(
            logprob=chosen[row],
            top=tuple(zip(top_ids[row][:count], top_values[row][:count], strict=True)),
        )
        for row, count in enumerate(counts)
    ]
