"""OpenAI's bodies: what is understood, what is refused and with which field named, how answers look."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine import bodies, openai
from headway_engine.answers import ApiError

PROMPT = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**fields):
    return openai.parse_completion(json.dumps({**PROMPT, **fields}).encode())


def chat(**fields):
    return openai.parse_chat(json.dumps({**CHAT, **fields}).encode())


BAD_FIELDS = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True),
    ("top_p", 0), ("top_p", 1.1), ("top_p", -1), ("top_k", -2), ("top_k", 1.5), ("top_k", 1 << 40),
    ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
    ("repetition_penalty", 0), ("repetition_penalty", 101), ("seed", 1 << 70), ("seed", "x"), ("seed", 0.5),
    ("n", 0), ("n", -1), ("n", 129), ("n", 10**30),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.5),
    ("max_tokens", "5"), ("max_tokens", 10**30), ("min_tokens", -1), ("stop", 5), ("stop", ""),
    ("stop", ["a", ""]), ("stop", ["a"] * 17), ("stop", "x" * 2000), ("stop", [1]), ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": None}), ("logit_bias", []),
    ("stream", "yes"), ("stream_options", {"include_usage": True}), ("priority", 1001),
    ("priority", "high"), ("ignore_eos", 3), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
    ("stop_token_ids", list(range(bodies.MAX_STOP_TOKEN_IDS + 1))),
    ("no_such_field", 1), ("user", 5),
]  # fmt: skip


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_a_bad_value_is_a_400_that_names_its_field(parse, field, value):
    """Row C.5 44: out of range, huge, wrong type, unknown."""
    with pytest.raises(ApiError) as caught:
        parse(**{field: value})
    assert caught.value.status == 400
    assert caught.value.param == field
    assert field in json.loads(caught.value.body())["error"]["message"]


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"nan"', b"-1e999"])
def test_numbers_that_are_none_get_a_400_with_a_valid_body(number):
    """Row C.5 44: NaN must pass neither the range check nor into the error's own body."""
    with pytest.raises(ApiError) as caught:
        openai.parse_completion(b'{"prompt": "x", "temperature": ' + number + b"}")
    assert caught.value.status == 400
    assert json.loads(caught.value.body())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1.5]]}, "prompt"),
        ({"prompt": [[True]]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ],
)
def test_bad_completions(fields, param):
    """Prompts in none of the four forms, and combinations that cannot work. (An empty text is seen later, as
    it may still become a token.)"""
    if param is None:
        assert completion(**fields).prompts == ("",)
        return
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"messages": CHAT["messages"] * (bodies.MAX_MESSAGES + 1)}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": None}}, "chat_template_kwargs"),
    ],
)
def test_bad_chats(fields, param):
    """What is not served is refused, and never ignored."""
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"prompt": "x"', b"null", b"[" * 10_000]
)
def test_bodies_that_are_no_object(body):
    """Always a 400, whatever the bytes."""
    with pytest.raises(ApiError) as caught:
        openai.parse_completion(body)
    assert caught.value.status == 400


def test_more_ids_than_are_worth_decoding_are_refused():
    """A decode of millions would hold up every stream."""
    many = {"tokens": [1] * (bodies.MAX_DETOKENIZE + 1)}
    with pytest.raises(ApiError) as caught:
        openai.decode(json.dumps(many).encode(), bodies.DetokenizeBody)
    assert (caught.value.status, caught.value.param) == (400, "tokens")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_understood_or_refused(body):
    """No other exception gets out."""
    for parse in (openai.parse_completion, openai.parse_chat):
        try:
            parse(body)
        except ApiError as error:
            assert error.status == 400  # noqa: PT017 - both outcomes are fine


def test_defaults_are_openais():
    """Temperature 1; 16 tokens for completions; chats run to the end of the context."""
    assert completion().sampling.temperature == 1.0
    assert completion().sampling.max_tokens == openai.COMPLETION_MAX_TOKENS
    assert chat().sampling.max_tokens == 0
    assert chat(max_completion_tokens=7, max_tokens=9).sampling.max_tokens == 7


def test_null_is_the_same_as_absent():
    """Clients send null for what they do not set."""
    assert completion(temperature=None, stop=None, n=None, logit_bias=None).n == 1
    assert chat(tools=None, response_format={"type": "text"}, tool_choice="none").stops == ()


def test_prompts_in_all_four_forms():
    """A text, texts, token ids, lists of token ids."""
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))


def test_text_parts_become_one_text():
    """OpenAI's content in parts."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "ab"


def test_seeds_of_siblings_differ_and_are_reproducible():
    """Row C.5 52."""
    one, two = completion(seed=5, n=3), completion(seed=5, n=3)
    seeds = [openai.seed_of(one, i) for i in range(3)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert seeds == [openai.seed_of(two, i) for i in range(3)]
    assert 0 <= openai.seed_of(completion(seed=-1), 0) < 1 << 63
    assert completion().sampling.seed != completion().sampling.seed
