"""The sampler against a slow, obvious reference that handles one row at a time with a full sort."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine import sampling
from headway_engine.sampling import NotFinite, sample, uniform
from headway_engine.sequence import Sequence
from support.tiny_models import sequence

VOCABULARY = 600  # more than the first tier, so that a wide cut has to look further


def peaked(seed: int, rows: int = 1, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, VOCABULARY), generator=generator) * spread


def reference(logits: list[float], s: Sequence, shift: float = 0.0, nudge: float = 0.0) -> int:
    """One row in plain Python, in the documented order; `shift` and `nudge` move the draw and the cuts."""
    p = s.request.sampling
    row = list(logits)
    if p.repetition_penalty != 1.0:
        for token in set(s.tokens):
            score = row[token]
            row[token] = score / p.repetition_penalty if score > 0 else score * p.repetition_penalty
    said = s.tokens[s.prompt_len :]
    for token in set(said):
        row[token] -= p.presence_penalty + p.frequency_penalty * said.count(token)
    for token, bias in p.logit_bias:
        row[token] += bias
    if s.output_len < p.min_tokens:
        for token in p.stop_token_ids:
            row[token] = -math.inf
    if p.temperature == 0:
        return max(range(len(row)), key=row.__getitem__)
    row = [score / p.temperature for score in row]
    top = max(row)
    mass = [math.exp(score - top) for score in row]
    cut = bool(p.top_k) or p.top_p < 1 or p.min_p > 0
    order = sorted(range(len(row)), key=lambda i: -row[i]) if cut else list(range(len(row)))
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1:
        total, before, kept = sum(mass[i] for i in order), 0.0, []
        for i in order:
            if before < (p.top_p + nudge) * total:
                kept.append(i)
            before += mass[i]
        order = kept
    order = [i for i in order if mass[i] >= (p.min_p + nudge) * mass[order[0]] or i == order[0]]
    target = (uniform(p.seed, s.output_len) + shift) * sum(mass[i] for i in order)
    walked = 0.0
    for i in order:
        walked += mass[i]
        if walked > target:
            return i
    return order[-1]


parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "top_k": st.sampled_from([0, 1, 5, 255, 256, 400, 10_000]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "logit_bias": st.sampled_from([(), ((5, 4.0), (9, -100.0))]),
        "min_tokens": st.sampled_from([0, 3]),
        "stop_token_ids": st.sampled_from([(), (2, 7)]),
        "seed": st.integers(0, 2**63 - 1),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(parameters, st.lists(st.integers(0, VOCABULARY - 1), max_size=6)), min_size=1, max_size=5
    ),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.05, 1.0, 4.0]),
)
def test_each_row_is_what_the_slow_reference_draws(
    rows: list[tuple[dict[str, float], list[int]]], seed: int, spread: float
) -> None:
    """Any mixture of parameters in one batch: every row as if it were alone."""
    logits = peaked(seed, len(rows), spread)
    sequences = []
    for number, (params, said) in enumerate(rows):
        s = sequence(str(number), [3, 4, 5], **params)
        s.tokens.extend(said)
        sequences.append(s)
    got = [out.token for out in sample(logits.clone(), sequences)]
    expected = [reference(row.tolist(), s) for row, s in zip(logits, sequences, strict=True)]
    for s, row, mine, theirs in zip(sequences, logits, got, expected, strict=True):
        assert mine == theirs or borderline(row.tolist(), s, mine), (s.request.sampling, mine, theirs)


def borderline(row: list[float], s: Sequence, token: int) -> bool:
    """True when only float32 rounding decides: one millionth more or less gives the same token."""
    nudges = (-1e-6, 0.0, 1e-6)
    return any(reference(row, s, shift, cut) == token for shift in nudges for cut in nudges)


def test_a_seeded_draw_does_not_depend_on_its_neighbours() -> None:
    """The same request alone, first of three and last of three gives the same tokens."""
    logits = peaked(1, 3, 1.0)
    mine = sequence("mine", [1], temperature=1.0, top_p=0.9, seed=42)
    others = [sequence(str(i), [1], temperature=1.3, seed=i) for i in range(2)]
    alone = sample(logits[:1], [mine])[0]
    first = sample(logits[[0, 1, 2]], [mine, *others])[0]
    last = sample(logits[[1, 2, 0]], [*others, mine])[2]
    assert alone == first == last


def test_the_draws_follow_the_distribution() -> None:
    """Over 4,000 seeds the share of each token is its probability, within four standard errors."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    n = 4000
    rows = [sequence(str(i), [1], temperature=1.0, seed=i) for i in range(n)]
    counts = [0] * 4
    for out in sample(logits.repeat(n, 1), rows):
        counts[out.token] += 1
    for count, p in zip(counts, torch.softmax(logits[0], -1).tolist(), strict=True):
        assert abs(count / n - p) < 4 * math.sqrt(p * (1 - p) / n)


def test_the_uniform_numbers_of_one_seed_are_spread_evenly() -> None:
    """Ten bins over 10,000 positions, and no repeats from seed to seed."""
    numbers = [uniform(7, i) for i in range(10_000)]
    assert all(0 <= x < 1 for x in numbers)
    bins = [0] * 10
    for x in numbers:
        bins[int(x * 10)] += 1
    assert min(bins) > 850
    assert max(bins) < 1150
    assert len({uniform(seed, 0) for seed in range(1000)}) == 1000


@pytest.mark.parametrize("vocabulary", [1024, 20_011, 49_152])
def test_the_group_wise_search_finds_what_a_full_one_finds(vocabulary: int) -> None:
    """Largest values and their places in wide rows, also where the width is no multiple of a group."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randperm(3 * vocabulary, generator=generator).view(3, vocabulary).float()
    logits[1, -1] = 1e9  # in the rest behind the last whole group
    values, places = sampling._largest(logits, 256)
    expected = torch.topk(logits, 256, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)
    assert torch.equal(sampling._argmax(logits), logits.argmax(dim=-1))
    assert sampling._argmax(torch.zeros(2, vocabulary)).tolist() == [0, 0]


def test_a_flat_distribution_reaches_past_the_first_tier() -> None:
    """With nearly equal logits a nucleus of 0.99 is wider than 256 tokens; tokens beyond them do come."""
    logits = peaked(3, 1, 0.01)
    order = torch.argsort(logits[0], descending=True).tolist()
    rank = {token: i for i, token in enumerate(order)}
    rows = [sequence(str(i), [1], temperature=1.0, top_p=0.99, seed=i) for i in range(100)]
    ranks = [rank[out.token] for out in sample(logits.repeat(100, 1), rows)]
    assert max(ranks) > 400
    assert max(ranks) < 0.99 * VOCABULARY + 1


def test_logprobs_are_those_of_the_model_itself() -> None:
    """Exact log-softmax of the raw logits, whatever bias and temperature did to the choice."""
    logits = peaked(5, 2)
    biased = sequence("a", [1], logprobs=3, temperature=0.5, logit_bias=((17, 100.0),))
    plain = sequence("b", [1], logprobs=0)
    exact = torch.log_softmax(logits.double(), dim=-1)
    first, second = sample(logits.clone(), [biased, plain])
    assert first.token == 17
    assert first.logprob is not None
    assert second.logprob is not None
    assert first.logprob.logprob == pytest.approx(exact[0, 17].item(), abs=1e-5)
    values, ids = torch.topk(exact[0], 3)
    assert [token for token, _ in first.logprob.top] == ids.tolist()
    assert [value for _, value in first.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert second.token == logits[1].argmax().item()
    assert second.logprob.top == ()
    assert second.logprob.logprob == pytest.approx(exact[1].max().item(), abs=1e-5)


def test_no_logprobs_are_made_for_who_did_not_ask() -> None:
    """Neighbours of a request with logprobs get none."""
    first, second = sample(peaked(6, 2), [sequence("a", [1]), sequence("b", [1], logprobs=2)])
    assert first.logprob is None
    assert second.logprob is not None


def test_stop_tokens_are_banned_until_min_tokens_are_out() -> None:
    """The ban ends with the min_tokens-th token."""
    logits = torch.zeros((1, 10))
    logits[0, 4] = 5.0
    logits[0, 6] = 1.0
    s = sequence("a", [1], min_tokens=2, stop_token_ids=(4,))
    chosen = []
    for _ in range(3):
        chosen.append(sample(logits.clone(), [s])[0].token)
        s.tokens.append(chosen[-1])
    assert chosen == [6, 6, 4]


def test_the_callers_logits_are_left_as_they_were() -> None:
    """Editing happens in a copy: float32 logits come in without one being made."""
    logits = peaked(8)
    before = logits.clone()
    sample(logits, [sequence("a", [1, 2], temperature=0.7, repetition_penalty=1.5, logprobs=1)])
    assert torch.equal(logits, before)


def test_rows_that_are_no_numbers_are_named() -> None:
    """NaN and a row of -inf name their sequences and nobody else's."""
    logits = peaked(9, 3)
    logits[1, 5] = torch.nan
    logits[2] = -torch.inf
    with pytest.raises(NotFinite) as caught:
        sample(logits, [sequence(name, [1]) for name in ("good", "nan", "empty")])
    assert caught.value.ids == ("nan", "empty")


def test_bfloat16_logits_are_widened_first() -> None:
    """The result is that of the same numbers in float32."""
    logits = peaked(10).bfloat16()
    s = sequence("a", [1], temperature=1.0, top_p=0.8, seed=3, logprobs=1)
    assert sample(logits, [s]) == sample(logits.float(), [s])


@pytest.mark.parametrize("temperature", [1e-9, 1e-39, 5e-324])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_next_to_no_temperature_is_greedy_and_not_noise(temperature: float, cut: dict[str, float]) -> None:
    """One over it is infinite in float32, and nothing times infinity is no number."""
    logits = peaked(seed=5)
    s = sequence("a", (1, 2), (0,), temperature=temperature, seed=3, **cut)
    assert sample(logits.clone(), [s])[0].token == int(logits.argmax())
