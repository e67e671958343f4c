"""A model's own defaults of sampling: they fill in what a client left open, and nothing else."""

import json

import pytest

from headway_engine import openai
from headway_engine.messages import Ready
from headway_engine.prompts import with_defaults
from headway_engine.protocol import Capacity, Limits

CAPACITY = Capacity(
    max_batch_tokens=64, max_batch_sequences=8, kv_blocks=64, block_tokens=4, max_model_tokens=97
)
RECOMMENDED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20.0, "repetition_penalty": 1.05}


def ready(**defaults: float) -> Ready:
    return Ready(
        capacity=CAPACITY,
        limits=Limits(),
        model="",
        device="",
        dtype="",
        runner="",
        sampling_defaults=defaults,
    )


def asked(**body: object) -> openai.Call:
    return openai.parse_completion(json.dumps({"prompt": "x"} | body).encode())


def test_what_is_left_open_is_the_models() -> None:
    """Null is the same as nothing."""
    found = with_defaults(asked(temperature=None), ready(**RECOMMENDED))
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (0.7, 0.8, 20, 1.05)
    assert type(found.top_k) is int
    assert found.min_p == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("repetition_penalty", 1.0)],
)
def test_what_is_said_is_the_clients(name: str, value: float) -> None:
    """Also when it is what would have been without a model's word."""
    assert getattr(with_defaults(asked(**{name: value}), ready(**RECOMMENDED)), name) == value


def test_a_model_without_recommendations_changes_nothing() -> None:
    call = asked(seed=1)
    assert with_defaults(call, ready()) == call.sampling
