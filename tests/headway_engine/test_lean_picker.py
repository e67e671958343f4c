"""Picking on an accelerator: the tokens of torch's picker, and one look at the logits where that will do."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.lean.picker import DevicePicker
from headway_engine.sampling import NotFinite, TorchPicker, sample
from headway_engine.sequence import Sequence
from support import tiny_models

PARAMETERS = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"repetition_penalty": 1.5},
    {"logit_bias": ((5, 100.0),)},
    {"logprobs": 3},
)


def sequences(kinds: list[int]) -> list[Sequence]:
    return [
        tiny_models.sequence(str(row), [1, 2, 3], seed=row, **PARAMETERS[kind])
        for row, kind in enumerate(kinds)
    ]


@settings(max_examples=60, deadline=None)
@given(kinds=st.lists(st.integers(0, len(PARAMETERS) - 1), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_every_token_is_torchs(kinds: list[int], seed: int) -> None:
    """Likeliest and drawn, cut and whole, edited or not, in any company."""
    logits = torch.randn(len(kinds), 3000, generator=torch.Generator().manual_seed(seed)) * 3
    rows = sequences(kinds)
    assert sample(logits, rows, picker=DevicePicker()) == sample(logits, rows, picker=TorchPicker())


def test_the_likeliest_come_with_the_highest_in_one_copy() -> None:
    """Nothing is asked of the logits again: here they are not the same any more, and nobody notices."""
    picker = DevicePicker()
    logits = torch.zeros(2, 300)
    logits[0, 7] = logits[1, 299] = 2.0
    assert picker.highest(logits).tolist() == [2.0, 2.0]
    logits.fill_(math.nan)
    params = [s.request.sampling for s in sequences([0, 0])]
    assert picker.pick(logits, params, [0.0, 0.0]) == [7, 299]


def test_logits_of_an_earlier_step_are_not_taken_for_those_of_this_one() -> None:
    """The same memory serves every replay: what was seen is forgotten once it is used."""
    picker = DevicePicker()
    logits = torch.zeros(1, 300)
    logits[0, 7] = 2.0
    params = [s.request.sampling for s in sequences([0])]
    picker.highest(logits)
    assert picker.pick(logits, params, [0.0]) == [7]
    logits[0, 9] = 3.0
    assert picker.pick(logits, params, [0.0]) == [9]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_named(wrong: float) -> None:
    """The sequence whose logits hold it, and no other."""
    logits = torch.randn(3, 300)
    logits[1, 5] = wrong
    with pytest.raises(NotFinite) as caught:
        sample(logits, sequences([0, 0, 0]), picker=DevicePicker())
    assert caught.value.ids == ("1",)
