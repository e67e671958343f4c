"""Tools of a chat: what is offered, what is forced, and how a model that knows no tools is told of them."""

import json

import pytest

from headway_engine import openai
from headway_engine.answers import ApiError
from headway_engine.grammar import GrammarError, check
from headway_engine.tools import told
from support.grammars import accepts
from support.hostile_schemas import COSTLY, OVERSIZED, WRONG

MESSAGES = [{"role": "user", "content": "hi"}]


def tool(name="weather", parameters=None, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def chat(**fields):
    return openai.parse_chat(json.dumps({"messages": MESSAGES, **fields}).encode())


def refused(**fields):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value.param


def test_the_model_may_choose_when_nothing_is_said():
    for choice in (None, "auto"):
        call = chat(tools=[tool()], tool_choice=choice)
        assert not call.tools.forced
        assert call.sampling.grammar == ""
    assert chat(tools=[tool()], tool_choice="none").tools is None
    assert chat(tools=[]).tools is None


def test_required_forces_one_or_more_calls_of_any_function():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = chat(tools=[tool("f", schema), tool("g")], tool_choice="required").sampling.grammar
    check(grammar)
    f, g = '{"name": "f", "arguments": {"a": 5}}', '{"name": "g", "arguments": {}}'
    assert accepts(grammar, f"[{f}]")
    assert accepts(grammar, f"[{g}, {f}, {g}]")
    for wrong in (
        "[]",
        f,
        f"[{f}",
        '[{"name": "h", "arguments": {}}]',
        '[{"name": "f", "arguments": {}}]',
        "no",
    ):
        assert not accepts(grammar, wrong), wrong
    assert not accepts(grammar, "[" + ", ".join([g] * 17) + "]")


def test_a_named_function_is_called_once():
    tools = [tool("f"), tool("g")]
    call = chat(tools=tools, tool_choice=named("g"))
    assert accepts(call.sampling.grammar, '{"name": "g", "arguments": {}}')
    assert not accepts(call.sampling.grammar, '{"name": "f", "arguments": {}}')
    assert call.grammar_field == "tools"
    assert len(call.tools.functions) == 2, "the model is told of all of them"


def test_parallel_tool_calls_false_means_one_call():
    call = chat(tools=[tool("f")], tool_choice="required", parallel_tool_calls=False)
    assert accepts(call.sampling.grammar, '{"name": "f", "arguments": {}}')
    assert call.tools.one_call
    assert chat(tools=[tool("f")], parallel_tool_calls=False).tools.one_call


def test_references_inside_parameters_stay_inside_them():
    """Each function's schema is a document of its own."""
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}},
        "required": ["p"],
        "$defs": {"point": {"type": "integer"}},
    }
    grammar = chat(tools=[tool("f", schema), tool("g", schema)], tool_choice="required").sampling.grammar
    assert accepts(grammar, '[{"name": "g", "arguments": {"p": 1}}]')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [tool("a b")]}, "tools"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [tool("f", colour=1)]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(200)]}, "tools"),
        ({"tools": [tool("f")], "tool_choice": named("g")}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("f"), "tools": []}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [tool("f")], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_makes_no_sense_is_a_400_that_names_the_field(fields, param):
    assert refused(**fields) == param


@pytest.mark.parametrize("name", OVERSIZED)
def test_oversized_parameters_are_refused_unread(name):
    """Row C.8 79."""
    assert refused(tools=[tool("f", OVERSIZED[name])], tool_choice="required") == "tools"


@pytest.mark.parametrize("name", WRONG | COSTLY)
def test_parameters_that_cannot_be_followed_are_told_so(name):
    """Row C.8 79."""
    with pytest.raises(GrammarError):
        check(chat(tools=[tool("f", (WRONG | COSTLY)[name])], tool_choice="required").sampling.grammar)


def test_earlier_calls_have_their_arguments_as_objects_for_the_template():
    """The API has them as text, and a template that writes JSON would write that text in quotes."""
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "f", "arguments": "not JSON"}},
    ]
    body = {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": calls}]}
    read = openai.parse_chat(json.dumps(body).encode()).messages[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in read] == [{"x": 1}, "not JSON"]


def test_a_model_that_knows_no_tools_is_told_in_words():
    functions = chat(tools=[tool("weather", description="of a city")]).tools.functions
    first = told(({"role": "user", "content": "hi"},), functions)
    assert [m["role"] for m in first] == ["system", "user"]
    assert "weather" in first[0]["content"]
    assert "of a city" in first[0]["content"]
    both = told(({"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}), functions)
    assert [m["role"] for m in both] == ["system", "user"]
    assert both[0]["content"].startswith("Be kind.")


def test_earlier_calls_and_results_become_words_too():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "a"},
    )
    said, result = told(messages)
    assert json.loads(said["content"]) == {"name": "f", "arguments": {"x": 1}}
    assert (result["role"], "42" in result["content"]) == ("user", True)
