"""The sampler against slow, obvious references that handle one row at a time with a full sort."""

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway_engine import sampling
from headway_engine.fused import isa
from headway_engine.fused.sampler import KernelPicker
from headway_engine.sampling import NotFinite, Picker, TorchPicker, sample, uniform
from headway_engine.sequence import SamplingParams, Sequence
from support import kernels
from support.tiny_models import sequence

VOCABULARY = 600  # more than the first tier, so that a wide cut has to look further


PICKERS = ("torch", *kernels.SETS)


def picker_of(name: str, threads: int = 2) -> Picker:
    """The torch path, or the kernels of one instruction set where this machine has them."""
    return TorchPicker() if name == "torch" else KernelPicker(kernels.loaded(name), threads)


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


@pytest.mark.parametrize("name", PICKERS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(parameters, st.lists(st.integers(0, VOCABULARY - 1), max_size=6)), min_size=1, max_size=5
    ),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.05, 1.0, 4.0]),
)
def test_each_row_is_what_the_slow_reference_draws(
    name: str, rows: list[tuple[dict[str, float], list[int]]], seed: int, spread: float
) -> None:
    """Any mixture of parameters in one batch: every row as if it were alone."""
    logits = peaked(seed, len(rows), spread)
    sequences = []
    for number, (params, said) in enumerate(rows):
        s = sequence(str(number), [3, 4, 5], **params)
        s.tokens.extend(said)
        sequences.append(s)
    got = [out.token for out in sample(logits.clone(), sequences, picker=picker_of(name))]
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


@pytest.mark.parametrize("name", PICKERS)
@pytest.mark.parametrize("place", [0, 5, 64, VOCABULARY - 1])
def test_rows_that_are_no_numbers_are_named(name: str, place: int) -> None:
    """NaN, +inf and a row of -inf name their sequences and nobody else's, wherever in the row it is."""
    logits = peaked(9, 4)
    logits[1, place] = torch.nan
    logits[2] = -torch.inf
    logits[3, place] = torch.inf
    with pytest.raises(NotFinite) as caught:
        sample(
            logits,
            [sequence(id, [1]) for id in ("good", "nan", "empty", "infinite")],
            picker=picker_of(name),
        )
    assert caught.value.ids == ("nan", "empty", "infinite")


def test_bfloat16_logits_are_widened_first() -> None:
    """The result is that of the same numbers in float32."""
    logits = peaked(10).bfloat16()
    s = sequence("a", [1], temperature=1.0, top_p=0.8, seed=3, logprobs=1)
    assert sample(logits, [s]) == sample(logits.float(), [s])


@pytest.mark.parametrize("name", PICKERS)
@pytest.mark.parametrize("temperature", [1e-9, 1e-39, 5e-324])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_next_to_no_temperature_is_greedy_and_not_noise(
    name: str, temperature: float, cut: dict[str, float]
) -> None:
    """One over it is infinite in float32, and nothing times infinity is no number."""
    logits = peaked(seed=5)
    s = sequence("a", (1, 2), (0,), temperature=temperature, seed=3, **cut)
    assert sample(logits.clone(), [s], picker=picker_of(name))[0].token == int(logits.argmax())


@dataclass(frozen=True)
class Exact:
    """What may be drawn from a row, in float64 with a full sort. `slack`: what rounding may move."""

    values: np.ndarray  # float32
    params: SamplingParams
    slack: float = 1e-6

    def allows(self, token: int, uniform: float) -> bool:
        """Whether this token is the draw, or would be with cut and draw moved by `slack`."""
        p = self.params
        x = self.values.astype(np.float64)
        with np.errstate(under="ignore"):
            mass = np.exp((x - x.max()) * sampling.warmth(p))
        if p.top_k == 0 and p.top_p >= 1 and p.min_p <= 0:
            order, low, high = np.arange(x.size), x.size, x.size
        else:
            order = np.lexsort((np.arange(x.size), -x))
            low, high = self._kept(mass[order], -self.slack), self._kept(mass[order], self.slack)
        sums = mass[order].cumsum()
        place = int(np.flatnonzero(order == token)[0])
        room = self.slack * sums[-1]
        before = sums[place] - mass[token]
        least, most = uniform * sums[low - 1] - room, uniform * sums[high - 1] + room
        return bool(mass[token] > 0 and place < high and before <= most and sums[place] >= least)

    def _kept(self, mass: np.ndarray, move: float) -> int:
        """How many of the ranks are left, with the cuts moved."""
        p = self.params
        count = min(p.top_k or mass.size, mass.size)
        before = mass.cumsum() - mass
        left = mass[:count].sum()
        nucleus = before[:count] < (p.top_p + move) * left if p.top_p < 1 else np.ones(count, bool)
        near = mass[:count] >= p.min_p * (1 - move)
        return max(1, int((nucleus & near).sum()))


def twins(values: np.ndarray, token: int) -> list[int]:
    """Tokens of the same value: torch ranks them as it likes."""
    return [int(i) for i in np.flatnonzero(values == values[token])]


VOCABULARIES = (1, 2, 15, 16, 17, 63, 64, 65, 130, 600, 1000, 4099)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> np.ndarray:
    """Float32 rows as models give them, and as they do not: ties, bans, giants, next to nothing."""
    size = draw(st.sampled_from(VOCABULARIES))
    if size < 20:
        number = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.just(-math.inf)
        row = np.array(draw(st.lists(number, min_size=size, max_size=size)), dtype=np.float32)
    else:
        chance = np.random.default_rng(draw(st.integers(0, 10_000)))
        row = chance.standard_normal(size).astype(np.float32)
        row *= np.float32(draw(st.sampled_from([0.0, 1e-30, 1e-6, 0.01, 0.3, 2.5, 4.0, 40.0, 1e4, 1e37])))
        row += np.float32(draw(st.sampled_from([0.0, -3.0, 1000.0])))
        if step := draw(st.sampled_from([0.0, 0.125, 2.0])):  # many of one value
            with np.errstate(over="ignore"):
                row = np.clip(np.round(row / np.float32(step)) * np.float32(step), -3e38, 3e38)
        banned = chance.random(size) < draw(st.sampled_from([0.0, 0.0, 0.1, 0.9, 1.0]))
        row[banned] = -np.inf
        if draw(st.booleans()):
            row[chance.integers(size)] = draw(st.sampled_from([3.0e38, 20.0, 0.0, -20.0, -3.0e38]))
    if not np.isfinite(row).any():
        row[draw(st.integers(0, size - 1))] = draw(st.sampled_from([0.0, -5.0, 3.0e38]))
    return row


cuts = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.2, 0.8, 1.0, 5.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 50, 600, 2**31, 10**12]),
        "top_p": st.sampled_from([1.0, 0.999999, 0.9, 0.5, 0.01, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
    }
)
uniforms = st.sampled_from([0.0, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize("name", PICKERS)
@settings(max_examples=150, deadline=None)
@given(row=rows_of_logits(), cut=cuts, number=uniforms)
@example(row=np.zeros(600, np.float32), cut={"temperature": 1.0, "top_p": 0.5}, number=1 - 2**-53)
@example(row=np.array([0, -np.inf] * 50, np.float32), cut={"temperature": 1.0, "top_k": 99}, number=0.999)
@example(row=np.array([-1e4, 0] * 50, np.float32), cut={"temperature": 1.0}, number=0.0)
def test_a_draw_is_the_one_of_the_full_sort(
    name: str, row: np.ndarray, cut: dict[str, float], number: float
) -> None:
    """Whatever the row looks like; only within rounding of a boundary may its neighbour come."""
    params = SamplingParams(max_tokens=1, **cut)
    token = picker_of(name).pick(torch.from_numpy(row)[None], [params], [number])[0]
    assert np.isfinite(row[token])
    if params.temperature == 0:
        assert token == int(row.argmax())
        return
    same = twins(row, token) if name == "torch" else [token]
    assert any(Exact(row, params).allows(one, number) for one in same), (token, row[token])


@pytest.mark.parametrize("name", PICKERS[1:])
@pytest.mark.parametrize(
    ("cut", "kept"), [({"top_p": 0.5}, 300), ({"top_k": 70}, 70), ({"top_k": 100, "top_p": 0.25}, 25)]
)
@pytest.mark.parametrize("others", [None, -math.inf, -50.0])
def test_equal_values_rank_by_token_id(
    name: str, cut: dict[str, float], kept: int, others: float | None
) -> None:
    """Masses of equal tokens are whole numbers, so cut and draw are exact, whatever lies between them."""
    if others is None:
        row, ids = torch.zeros(600), range(600)
    else:
        row, ids = torch.full((1800,), others), range(1, 1800, 3)
        row[1::3] = 0.0
    params = SamplingParams(max_tokens=1, temperature=0.7, **cut)
    numbers = [(rank + 0.5) / kept for rank in range(kept)] + [0.0, 1 - 2**-53]
    found = picker_of(name).pick(row.repeat(len(numbers), 1), [params] * len(numbers), numbers)
    assert found == [ids[rank] for rank in (*range(kept), 0, kept - 1)]


@pytest.mark.parametrize("name", PICKERS[1:])
@pytest.mark.parametrize("cut", [{"top_k": 64}, {"top_k": 128, "top_p": 0.5}, {"top_k": 64, "min_p": 1.0}])
def test_a_draw_on_a_boundary_is_of_the_token_behind_it(name: str, cut: dict[str, float]) -> None:
    """64 tokens alike are left, and a number of n/64 has passed n of them exactly."""
    row = torch.full((300,), -torch.inf)
    row[::2] = 2.0
    params = SamplingParams(max_tokens=1, temperature=1.0, **cut)
    numbers = [rank / 64 for rank in range(64)]
    found = picker_of(name).pick(row.repeat(64, 1), [params] * 64, numbers)
    assert found == list(range(0, 128, 2))


@pytest.mark.parametrize("name", PICKERS)
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    chosen=st.lists(cuts, min_size=2, max_size=12),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    order=st.randoms(use_true_random=False),
)
def test_no_draw_depends_on_its_place_its_neighbours_or_the_threads(
    name: str, seed: int, chosen: list[dict[str, float]], spread: float, order: Random
) -> None:
    """To the bit: each row alone, all together, and shuffled with another number of threads."""
    logits = peaked(seed, len(chosen), spread)
    params = [SamplingParams(max_tokens=1, **cut) for cut in chosen]
    numbers = [uniform(seed, row) for row in range(len(chosen))]
    together = picker_of(name, threads=2).pick(logits, params, numbers)
    places = list(range(len(chosen)))
    order.shuffle(places)
    shuffled = picker_of(name, threads=3).pick(
        logits[places], [params[i] for i in places], [numbers[i] for i in places]
    )
    alone = [picker_of(name).pick(logits[i : i + 1], [params[i]], [numbers[i]])[0] for i in places]
    assert shuffled == alone == [together[i] for i in places]


@pytest.mark.parametrize("spread", [4.0, 2.5, 0.3])
def test_both_paths_draw_the_same_from_a_real_vocabulary(spread: float) -> None:
    """49,152 tokens, peaked to flat: the same token, or both within rounding of the same boundary."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn((16, 49_152), generator=generator) * spread
    params = [
        SamplingParams(max_tokens=1, temperature=0.8, **cut)
        for cut in ({"top_p": 0.9}, {}, {"top_k": 40, "top_p": 0.95}, {"min_p": 0.05})
        for _ in range(4)
    ]
    numbers = [uniform(5, row) for row in range(16)]
    ours = picker_of(isa.available()[0]).pick(logits, params, numbers)
    torchs = TorchPicker().pick(logits, params, numbers)
    for row, p, number, mine, theirs in zip(logits, params, numbers, ours, torchs, strict=True):
        exact = Exact(row.numpy(), p)
        assert exact.allows(mine, number)
        assert mine == theirs or exact.allows(theirs, number)
    assert sum(mine == theirs for mine, theirs in zip(ours, torchs, strict=True)) >= 12


def test_the_kernels_refuse_logits_they_cannot_read() -> None:
    """C is not reached with another type, or with numbers for other rows."""
    picker = picker_of(isa.available()[0])
    params = SamplingParams(max_tokens=1)
    with pytest.raises(ValueError, match="bfloat16"):
        picker.pick(torch.zeros(1, 8).bfloat16(), [params], [0.0])
    with pytest.raises(ValueError, match="2 rows of logits for 1 sequences"):
        picker.pick(torch.zeros(2, 8), [params], [0.0])
    assert picker.pick(torch.zeros(0, 8), [], []) == []
    assert picker.highest(torch.zeros(0, 8)).tolist() == []


def test_logits_that_do_not_lie_row_by_row_are_read_right() -> None:
    """A slice of a wider tensor, and one that is turned over."""
    picker = picker_of(isa.available()[0])
    params = [SamplingParams(max_tokens=1)] * 3
    wide = peaked(21, 3)
    expected = wide[:, 100:300].argmax(dim=-1).tolist()
    assert picker.pick(wide[:, 100:300], params, [0.0] * 3) == expected
    assert picker.highest(wide[:, 100:300].T).tolist() == wide[:, 100:300].amax(dim=0).tolist()
