"""How OpenAI's answers look: chunks, whole ones, errors."""

import json

from headway_engine import answers
from headway_engine.answers import ApiError, Head, Kind
from headway_engine.generation import Delta, TokenInfo, Usage

HEAD = Head(Kind.CHAT, "chatcmpl-1", 5, "m")
TEXT_HEAD = Head(Kind.COMPLETION, "cmpl-1", 5, "m")
INFO = TokenInfo("a", b"a", -0.5, (("a", b"a", -0.5), ("b", b"b", float("-inf"))), 0)


def event(raw):
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    return json.loads(raw[6:])


def test_chat_chunks_begin_with_the_role_and_end_with_the_reason():
    """Other chunks carry usage null when usage was asked for. Row C.4 26."""
    first = event(answers.chunk(HEAD, Delta(0, "a", (), None, True), usage=None, usage_field=True))
    last = event(answers.chunk(HEAD, Delta(0, "", (), "stop", False), usage=None, usage_field=False))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert first["usage"] is None
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert "usage" not in last


def test_the_usage_chunk_has_no_choices():
    """Row C.4 26."""
    body = event(answers.usage_chunk(TEXT_HEAD, Usage(3, 4, 2)))
    assert body["choices"] == []
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_logprobs_are_finite_in_both_forms():
    """JSON has no infinity."""
    delta = Delta(0, "a", (INFO,), "stop", True)
    whole = json.loads(answers.answer(HEAD, [delta], Usage(1, 1, 0), logprobs=True))
    (entry,) = whole["choices"][0]["logprobs"]["content"]
    assert entry["bytes"] == [97]
    assert [t["logprob"] for t in entry["top_logprobs"]] == [-0.5, -9999.0]
    text = json.loads(answers.answer(TEXT_HEAD, [delta], Usage(1, 1, 0), logprobs=True))
    assert text["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -9999.0}]


def test_parts_of_characters_are_named_by_their_bytes():
    """Two of them as keys of one object would otherwise be one."""
    halves = tuple(("\ufffd", bytes([byte]), -1.0) for byte in (0xE2, 0x82))
    delta = Delta(0, "", (TokenInfo("\ufffd", b"\xe2", -1.0, halves, 0),), "stop", True)
    logprobs = json.loads(answers.answer(TEXT_HEAD, [delta], Usage(1, 1, 0), logprobs=True))["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"] == ["bytes:\\xe2"]
    assert list(logprobs["top_logprobs"][0]) == ["bytes:\\xe2", "bytes:\\x82"]


def test_retry_after_is_whole_seconds_and_at_least_one():
    """As HTTP wants it."""
    assert ApiError(429, "x", retry_after_s=0.2).headers() == {"retry-after": "1"}
    assert ApiError(400, "x").headers() == {}


def test_a_prompts_first_token_has_null_and_the_chosen_one_is_among_the_alternatives():
    """As OpenAI has it: one more than `logprobs` when the chosen token is not among the likeliest."""
    first = TokenInfo("a", b"a", None, (), 0)
    rare = TokenInfo("c", b"c", -7.0, (("b", b"b", -0.5),), 1)
    delta = Delta(0, "ac", (first, rare, INFO), "length", True)
    body = json.loads(answers.answer(TEXT_HEAD, [delta], Usage(2, 0, 0), logprobs=True))
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -7.0, -0.5]
    assert logprobs["top_logprobs"] == [None, {"b": -0.5, "c": -7.0}, {"a": -0.5, "b": -9999.0}]
