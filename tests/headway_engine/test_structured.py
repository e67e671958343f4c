"""The form of an answer: what becomes a grammar, and what is refused before any work is spent on it."""

import json

import pytest

from headway_engine import openai
from headway_engine.answers import ApiError
from headway_engine.grammar import GrammarError, check
from headway_engine.structured import json_grammar
from support.grammars import accepts
from support.hostile_schemas import COSTLY, OVERSIZED, WRONG, deep, response_format

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return openai.parse_chat(json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields):
    return openai.parse_completion(json.dumps({"prompt": "hi", **fields}).encode())


@pytest.mark.parametrize("parse", [chat, completion])
def test_both_routes_take_a_response_format(parse):
    call = parse(response_format=response_format({"type": "integer"}))
    assert call.grammar_field == "response_format"
    check(call.sampling.grammar)
    check(parse(response_format={"type": "json_object"}).sampling.grammar)
    assert parse(response_format={"type": "text"}).sampling.grammar == ""


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"type": "yaml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": []}},
        {"type": "json_object", "colour": 1},
        "json_object",
    ],
)
def test_a_wrong_form_is_a_400_that_names_the_field(form):
    with pytest.raises(ApiError) as caught:
        chat(response_format=form)
    assert (caught.value.status, caught.value.param) == (400, "response_format")


def test_what_cannot_go_together_is_a_400():
    for name in ("ignore_eos", "min_tokens"):
        with pytest.raises(ApiError) as caught:
            chat(response_format={"type": "json_object"}, **{name: 1 if name == "min_tokens" else True})
        assert caught.value.param == name
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(ApiError) as caught:
        chat(response_format={"type": "json_object"}, tools=[tool])
    assert caught.value.param == "response_format"
    assert chat(response_format={"type": "json_object"}, tools=[tool], tool_choice="none").tools is None


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        ({"regex": "[a-c]{2}/\\d+"}, "ab/17", "ab/"),
        ({"choice": ["yes", "no (really)", "a|b", "ü\n"]}, "no (really)", "a"),
        ({"json": {"type": "integer"}}, "5", "x"),
    ],
)
def test_a_regex_a_choice_or_a_schema_in_vllms_field(wanted, right, wrong):
    for parse in (chat, completion):
        call = parse(structured_outputs=wanted)
        assert call.grammar_field == "structured_outputs"
        check(call.sampling.grammar)
        assert accepts(call.sampling.grammar, right)
        assert not accepts(call.sampling.grammar, wrong)


def test_every_choice_can_be_made():
    choices = ["yes", "no (really)", "a|b", "ü\n", "tab\there", "[x]*", "/slash/", '"', "\\"]
    grammar = chat(structured_outputs={"choice": choices}).sampling.grammar
    assert all(accepts(grammar, text) for text in choices)


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"choice": [""]},
        {"grammar": "start: x"},
        {"regex": "x" * 100_000},
        {"json": OVERSIZED["deep nesting"]},
    ],
)
def test_what_is_wrong_in_vllms_field_is_a_400(wanted):
    with pytest.raises(ApiError) as caught:
        chat(structured_outputs=wanted)
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("name", OVERSIZED)
def test_an_oversized_schema_is_refused_unread(name):
    """Row C.8 79: by size, by depth, by width."""
    with pytest.raises(ApiError) as caught:
        chat(response_format=response_format(OVERSIZED[name]))
    assert (caught.value.status, caught.value.param) == (400, "response_format")


def test_thirty_objects_in_each_other_are_fine():
    check(chat(response_format=response_format(deep(30))).sampling.grammar)


@pytest.mark.parametrize("name", WRONG | COSTLY)
def test_a_schema_that_cannot_be_followed_is_told_so(name):
    """Row C.8 79: wrong, contradictory, endless and costly schemas; every keyword is enforced or refused."""
    with pytest.raises(GrammarError) as caught:
        check(json_grammar((WRONG | COSTLY)[name]))
    assert 0 < len(str(caught.value)) <= 300


def test_a_schemas_own_wishes_for_spaces_are_not_followed():
    """A model that may write spaces anywhere may write nothing else."""
    schema = {"type": "integer", "x-guidance": {"whitespace_flexible": True}}
    assert "true" not in json_grammar(schema)
