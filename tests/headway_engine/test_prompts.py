"""From calls to requests, with a tokeniser that says what a test wants."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from headway_engine import embeddings, openai, prompts
from headway_engine.answers import ApiError
from headway_engine.messages import Ready
from headway_engine.prompts import Serving
from headway_engine.protocol import Capacity, Limits

CAPACITY = Capacity(
    max_batch_tokens=64, max_batch_sequences=8, kv_blocks=64, block_tokens=4, max_model_tokens=97
)


def serving(**tokeniser):
    """What is there once the core is ready; bytes are tokens where nothing else is said."""
    values = {
        "vocab_size": 256,
        "longest_token_chars": 1,
        "encode": lambda text: list(text.encode()),
        "decode": lambda ids: bytes(ids).decode(),
        "piece": lambda id: (chr(id), bytes([id])),
    }
    ready = Ready(capacity=CAPACITY, limits=Limits(), model="", device="", dtype="", runner="")
    return Serving(ready, SimpleNamespace(**{**values, **tokeniser}), Limits())


def test_an_input_of_which_a_tokenizer_makes_nothing_is_a_400():
    """Some strip spaces; what has no tokens has no vector."""
    call = embeddings.parse_embeddings(json.dumps({"input": ["a", " "]}).encode())
    with pytest.raises(ApiError, match="has no tokens") as caught:
        asyncio.run(prompts.encode_inputs(call, serving(encode=lambda text: list(text.strip().encode()))))
    assert (caught.value.status, caught.value.param) == (400, "input")


def test_a_prompt_that_is_echoed_is_decoded_once_for_all_its_samples():
    """A long one takes milliseconds, and every stream waits."""
    decoded = []
    call = openai.parse_completion(json.dumps({"prompt": "abcdefghij", "echo": True, "n": 8}).encode())
    there = serving(decode=lambda ids: decoded.append(tuple(ids)) or bytes(ids).decode())
    prompt = list(b"abcdefghij")
    _, choices = prompts.build(call, [prompt], there, tenant="", arrival_s=0.0)
    assert [choice.echo for choice in choices] == ["abcdefghij"] * 8
    assert decoded.count(tuple(prompt)) == 1
