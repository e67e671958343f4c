"""The official client's surface, walked: all that is claimed of it works, and the rest is refused by name.

Against whole engine processes: a tiny random model for what only computing shows, and a toy that knows tools,
keys and a tenant without credit.
"""

import asyncio
import inspect
import json
from typing import Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from headway_engine.bodies import ChatBody, CompletionBody
from support.engine_server import TINY_MODEL, engine_server, wait_until
from support.fake_engine import COMMAND
from support.resources import Json

HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}Tools: {% for t in tools %}{{ t | tojson }}{% endfor %} Call as <tool_call></tool_call>. "
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
SAYS = 'Well.\n<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "unit": "C"}}\n</tool_call>'


class Weather(BaseModel):
    """How the weather is in a city."""

    city: str = Field(max_length=8)
    unit: Literal["C", "F"]


TOOL = pydantic_function_tool(Weather)
NAMED = {"type": "function", "function": {"name": "Weather"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A tiny random model."""
    folder = tmp_path_factory.mktemp("engine")
    model = TINY_MODEL.replace("context=512", "context=2048")
    arguments = ["--kv-blocks", "200", "--capacity-max-batch-tokens", "512"]
    with engine_server(folder, model, arguments) as e:
        yield e


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A toy with tools; key `secret` is served, key `poor` has one token to spend, and spends it."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "keys.json").write_text(json.dumps({"secret": "gold", "poor": "poor"}))
    poor = {"tokens_per_s": 0.001, "burst_tokens": 1}
    (folder / "tenants.json").write_text(json.dumps({"tenants": {"gold": {}, "poor": poor}}))
    arguments = ["--keys-file", str(folder / "keys.json"), "--tenants-file", str(folder / "tenants.json")]
    env = {"FAKE_SAYS": SAYS, "FAKE_TEMPLATE": TEMPLATE, "FAKE_STEP_S": "0.02"}
    with engine_server(folder, arguments=arguments, command=COMMAND, env=env) as e:
        yield e


@pytest.fixture(scope="module")
def client(engine):
    return OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def toys(toy):
    return OpenAI(base_url=f"{toy.url}/v1", api_key="secret", max_retries=0, timeout=120)


def chat(client, **fields):
    asked = {"model": "tiny", "messages": HI, "max_completion_tokens": 8, "temperature": 0}
    return client.chat.completions.create(**{**asked, **fields})


def complete(client, **fields):
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}
    return client.completions.create(**{**asked, **fields})


def idle(engine):
    m = engine.metrics()
    return all(
        m[f"headway_{name}"] == 0 for name in ("requests_in_flight", "requests_running", "kv_used_blocks")
    )


# Completions and chats, whole and streamed.

EVERYTHING: Json = {
    "temperature": 0.8,
    "top_p": 0.9,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "logit_bias": {"100": -5},
    "seed": 11,
    "stop": ["\u2603", "never said"],
    "user": "somebody",
    "extra_body": {
        "min_tokens": 2,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "stop_token_ids": [299],
        "ignore_eos": True,
        "priority": -1,
    },
}


def test_every_parameter_of_completions_at_once(client):
    """Row C.4 25: streamed and whole say the same: text, logprobs, reasons and counts, for every choice."""
    asked = {**EVERYTHING, "prompt": ["one", "two"], "n": 2, "best_of": 2, "logprobs": 2, "echo": True}
    whole = complete(client, **asked)
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    stream = list(complete(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert stream[-1].usage == whole.usage
    for choice in whole.choices:
        parts = [c.choices[0] for c in stream[:-1] if c.choices[0].index == choice.index]
        assert "".join(p.text for p in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason == "length"
        tokens = [t for p in parts if p.logprobs for t in p.logprobs.tokens]
        assert tokens == choice.logprobs.tokens
    assert whole.usage.completion_tokens == 4 * 8


def test_every_parameter_of_chats_at_once(client):
    """The same for chats, with top_logprobs and fields that ask for nothing that an engine does."""
    asked = {**EVERYTHING, "n": 2, "logprobs": True, "top_logprobs": 3, "modalities": ["text"]}
    asked |= {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"}
    asked |= {"prompt_cache_key": "k", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    whole = chat(client, **asked)
    stream = list(chat(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert stream[-1].usage.total_tokens == whole.usage.total_tokens
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        parts = [c.choices[0] for c in stream[:-1] if c.choices[0].index == choice.index]
        assert parts[0].delta.role == choice.message.role == "assistant"
        assert "".join(p.delta.content or "" for p in parts) == choice.message.content
        entries = [e for p in parts if p.logprobs for e in p.logprobs.content]
        assert [e.token for e in entries] == [e.token for e in choice.logprobs.content]
        assert all(len(e.top_logprobs) == 3 for e in choice.logprobs.content)
        assert b"".join(bytes(e.bytes) for e in choice.logprobs.content).decode(errors="replace")
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert chat(client, **asked).choices[0].message.content == whole.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ["text", "ids", "echo", "scored echo", "chat", "json"])
def test_stop_is_honoured_on_every_path(client, route, stream):
    """Row C.4 32: whatever way tokens come in and go out, text before the stop string and nothing more; the
    stop string is taken from what the path says without it."""
    paths = {
        "text": (complete, {}),
        "ids": (complete, {"prompt": [40, 41, 42, 43]}),
        "echo": (complete, {"echo": True}),
        "scored echo": (complete, {"echo": True, "logprobs": 1}),
        "chat": (chat, {}),
        "json": (chat, {"response_format": {"type": "json_object"}}),
    }
    ask, fields = paths[route]
    fields = {**fields, "max_tokens": 40, "max_completion_tokens": 40, "temperature": 1, "seed": 3}
    if ask is complete:
        del fields["max_completion_tokens"]

    def said(**more):
        answer = ask(client, **fields, **more, stream=stream)
        chunks = list(answer) if stream else [answer]
        texts = []
        for chunk in chunks:
            choice = chunk.choices[0]
            message = getattr(choice, "delta", None) or getattr(choice, "message", None)
            texts.append((message.content if message else choice.text) or "")
        return "".join(texts), chunks[-1].choices[0].finish_reason

    free, _ = said()
    prompt = "hello" if "echo" in route else ""
    output = free.removeprefix(prompt)
    stop = next(c for c in output[5:] if c != "\ufffd" and c not in prompt)
    text, reason = said(stop=stop)
    assert text == prompt + output[: output.index(stop)]
    assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_that_stops_leaves_its_siblings_alone(client, stream):
    """Row C.5 52: one of three is ended by a stop string, which the core hears as an abort; the others say
    what they say without it, under their own indices."""
    asked = {"n": 3, "temperature": 1, "seed": 21, "max_tokens": 24}

    def texts(**more):
        answer = complete(client, **asked, **more, stream=stream)
        said = {0: ["", None], 1: ["", None], 2: ["", None]}
        for choice in (c for chunk in (answer if stream else [answer]) for c in chunk.choices):
            said[choice.index][0] += choice.text
            said[choice.index][1] = choice.finish_reason or said[choice.index][1]
        return said

    free = texts()
    first, second, third = (free[i][0] for i in range(3))
    stop = next(c for c in second if c != "\ufffd" and c not in first + third)
    cut = texts(stop=stop)
    assert cut[1] == [second[: second.index(stop)], "stop"]
    assert [cut[0], cut[2]] == [free[0], free[2]]


@pytest.mark.parametrize("path", ["completions", "chat"])
def test_stop_token_ids_end_the_answer_on_every_path(client, path):
    """Row C.4 32, for ids: the token is counted and not shown."""
    ask = complete if path == "completions" else chat
    fields = {"logit_bias": {"70": 100}, "extra_body": {"stop_token_ids": [70]}}
    answer = ask(client, **fields)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 1


# Structured output and tools, with the client's own parsing.


def test_parse_gives_an_object_of_the_models_class(client):
    """client.chat.completions.parse with a pydantic class."""
    done = client.chat.completions.parse(model="tiny", messages=HI, response_format=Weather, max_tokens=200)
    assert done.choices[0].finish_reason == "stop"
    assert isinstance(done.choices[0].message.parsed, Weather)
    assert chat(client, response_format={"type": "json_object"}, max_completion_tokens=30).choices[0].message


def test_a_cut_object_is_the_clients_length_error(client):
    """An answer that max_tokens cuts is no object, and the client says so."""
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=HI, response_format=Weather, max_tokens=3)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_parse_gives_the_arguments_of_forced_calls(client, choice):
    """tools from pydantic classes, strict as the client makes them."""
    done = client.chat.completions.parse(
        model="tiny", messages=HI, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=200
    )
    (call,) = done.choices[0].message.tool_calls
    assert done.choices[0].finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_model_that_may_choose_calls_or_talks(toys):
    """tool_choice auto and none, through the client's parser."""
    done = toys.chat.completions.parse(model="tiny", messages=HI, tools=[TOOL], tool_choice="auto")
    (call,) = done.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Rome", unit="C")
    assert done.choices[0].message.content == "Well."
    silent = chat(toys, tools=[TOOL], tool_choice="none", max_completion_tokens=500)
    assert silent.choices[0].message.tool_calls is None
    assert silent.choices[0].message.content == SAYS


def test_the_stream_helper_adds_up_text(toys):
    """client.chat.completions.stream: events, and a final completion equal to the whole one."""
    asked = {"model": "tiny", "messages": HI, "logprobs": True, "top_logprobs": 2}
    with toys.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    whole = toys.chat.completions.create(**asked)
    assert final.choices[0].message.content == whole.choices[0].message.content == SAYS
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content
    kinds = {event.type for event in events}
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert "".join(e.delta for e in events if e.type == "content.delta") == whole.choices[0].message.content


def test_the_stream_helper_parses_objects_and_calls(client, toys):
    """With a pydantic class, and with tools."""
    with client.chat.completions.stream(
        model="tiny", messages=HI, response_format=Weather, max_tokens=200
    ) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    with toys.chat.completions.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [e.parsed_arguments for e in done] == [Weather(city="Rome", unit="C")]
    assert message.content == "Well."


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, of parsed objects
def test_answers_go_back_into_the_conversation_as_they_are(client, toys):
    """What users do: append the message object, whether parsed, streamed or plain, and the tool's result."""
    plain = chat(client).choices[0].message
    parsed = (
        client.chat.completions.parse(model="tiny", messages=HI, response_format=Weather, max_tokens=200)
        .choices[0]
        .message
    )
    for message in (plain, parsed):
        assert chat(client, messages=[*HI, message, *HI]).choices[0].message.role == "assistant"
    with toys.chat.completions.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:
        streamed = stream.get_final_completion().choices[0].message
    called = chat(toys, tools=[TOOL], max_completion_tokens=500).choices[0].message
    parsed = toys.chat.completions.parse(model="tiny", messages=HI, tools=[TOOL]).choices[0].message
    for message in (called, streamed, parsed):
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        assert chat(toys, messages=[*HI, message, result], tools=[TOOL]).choices


# Models, raw answers, errors.


def test_models(client):
    """List and retrieve; another name is not found."""
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "headway"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_raw_answers_have_headers_and_parse(client):
    """with_raw_response, with_streaming_response, and the id for support."""
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HI, max_tokens=2, extra_headers={"X-Request-Id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-7"
    assert raw.parse().choices[0].message.role == "assistant"
    assert chat(client)._request_id
    with client.completions.with_streaming_response.create(
        model="tiny", prompt="a", max_tokens=3, stream=True
    ) as raw_stream:
        lines = [line for line in raw_stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 9999}]}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, openai.BadRequestError, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
         openai.BadRequestError, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         openai.BadRequestError, "messages"),
        ({"modalities": ["audio"]}, openai.BadRequestError, "modalities"),
        ({"function_call": {"name": "x"}}, openai.BadRequestError, "functions"),
        ({"extra_body": {"guided_regex": "a"}}, openai.BadRequestError, "guided_regex"),
    ],
)  # fmt: skip
def test_refusals_are_the_clients_own_error_classes(client, fields, error, param):
    """Each with the field's name, so that a user knows what to change."""
    for stream in (False, True):
        with pytest.raises(error) as caught:
            chat(client, **fields, stream=stream)
        assert caught.value.param == param
        assert caught.value.message
        assert caught.value.request_id


def test_a_key_that_is_none_is_an_authentication_error(toy, toys):
    """401 everywhere; the right key is served."""
    wrong = toys.with_options(api_key="wrong")
    for ask in (wrong.models.list, lambda: chat(wrong), lambda: complete(wrong)):
        with pytest.raises(openai.AuthenticationError) as caught:
            ask()
        assert caught.value.code == "invalid_api_key"
    assert [m.id for m in toys.models.list()] == ["tiny"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tenant_without_credit_is_a_rate_limit_error_that_says_when(toys, stream):
    """Retry-After is what the client's own retries wait for."""
    poor = toys.with_options(api_key="poor")

    def spend():
        """The first request may still be let in."""
        for _ in range(2):
            list(chat(poor, stream=stream))

    with pytest.raises(openai.RateLimitError) as caught:
        spend()
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.type == "rate_limit_error"
    assert "poor" in caught.value.message


def test_a_request_that_fails_is_an_internal_server_error(toys):
    """And its neighbours are served after it."""
    with pytest.raises(openai.InternalServerError) as caught:
        complete(toys, prompt="a \u2620 in the prompt")
    assert caught.value.status_code == 500
    assert complete(toys).choices


def test_an_engine_that_loads_is_an_internal_server_error_that_says_when(tmp_path):
    """503 with Retry-After until the model is there, for every route that needs it."""
    with engine_server(tmp_path, command=COMMAND, env={"FAKE_LOAD": "slow"}, wait_ready=False) as e:

        def listens():
            try:
                return e.get("/readyz")[0] == 503
            except OSError:
                return False

        wait_until(listens, "the port is open")
        client = OpenAI(base_url=f"{e.url}/v1", api_key="none", max_retries=0)
        for ask in (client.models.list, lambda: chat(client), lambda: complete(client)):
            with pytest.raises(openai.InternalServerError) as caught:
                ask()
            assert (caught.value.status_code, caught.value.code) == (503, "starting")
            assert int(caught.value.response.headers["retry-after"]) >= 1


def test_nobody_at_the_port_is_a_connection_error(client):
    """The client's own class for what never reached an engine."""
    with pytest.raises(openai.APIConnectionError):
        chat(client.with_options(base_url="http://127.0.0.1:9/v1"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_gives_up_waiting_frees_what_it_held(toy, toys, stream):
    """Row C.3 19: the client's timeout is shorter than any step of this toy; its work is forgotten."""
    hasty = toys.with_options(timeout=0.005)
    with pytest.raises(openai.APITimeoutError):
        list(chat(hasty, max_completion_tokens=500, stream=stream))
    assert chat(toys).choices  # whatever the hasty one still sent has been taken in before this
    wait_until(lambda: idle(toy), "nothing is computed for nobody")


# The asynchronous client.


async def test_the_asynchronous_client_says_the_same(engine, client):
    """Whole, streamed, parsed and with the stream helper."""
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=120) as c:
        expected = chat(client).choices[0].message.content
        assert (await chat(c)).choices[0].message.content == expected
        texts = [p.choices[0].delta.content or "" async for p in await chat(c, stream=True)]
        assert "".join(texts) == expected
        assert (await complete(c)).choices[0].text == complete(client).choices[0].text
        assert [m.id async for m in c.models.list()] == ["tiny"]
        parsed = await c.chat.completions.parse(
            model="tiny", messages=HI, response_format=Weather, max_tokens=200
        )
        assert isinstance(parsed.choices[0].message.parsed, Weather)
        async with c.chat.completions.stream(
            model="tiny", messages=HI, response_format=Weather, max_tokens=200
        ) as stream:
            final = await stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Weather)
        with pytest.raises(openai.BadRequestError):
            await chat(c, top_p=0)


@pytest.mark.parametrize("when", ["in mid-prefill", "decoding", "streaming"])
async def test_a_cancelled_task_frees_what_it_held(toy, when):
    """Rows C.3 19 and 20: asyncio's cancel closes the connection, and the engine notices in any state. Steps
    of one token keep a long prompt in prefill for twenty seconds, and nothing else ends the others."""
    limits = toy.limits()
    slow = {"max_batch_tokens": 1, "max_batch_sequences": 1, "prefill_chunk_tokens": 1}
    endless = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
    before = toy.metrics()
    async with AsyncOpenAI(base_url=f"{toy.url}/v1", api_key="secret", max_retries=0, timeout=120) as c:
        if when == "in mid-prefill":
            assert toy.put_limits(**slow)[0] == 200
            task = asyncio.create_task(complete(c, prompt="a" * 1000))
            await asyncio.to_thread(
                wait_until, lambda: toy.metrics()["headway_kv_used_blocks"] > 0, "it runs"
            )
        elif when == "decoding":
            task = asyncio.create_task(complete(c, **endless))
            tokens = "headway_output_tokens_total"
            await asyncio.to_thread(
                wait_until, lambda: toy.metrics()[tokens] > before[tokens], "the first token is there"
            )
        else:
            stream = await complete(c, **endless, stream=True)
            await anext(aiter(stream))
            task = asyncio.create_task(asyncio.sleep(60))
            await stream.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: idle(toy), "all blocks are free")
    after = toy.metrics()
    if when == "in mid-prefill":
        assert toy.put_limits(**{name: limits[name] for name in slow})[0] == 200
        assert after["headway_output_tokens_total"] == before["headway_output_tokens_total"]
    aborted = 'headway_requests_total{outcome="aborted"}'
    assert after[aborted] - before[aborted] == 1


# What is not claimed.

PLAUSIBLE: Json = {
    "audio": {"format": "mp3", "voice": "alloy"},
    "best_of": 2,
    "moderation": {"model": "x"},
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_options": {"ttl": "1h"},
    "reasoning_effort": "low",
    "suffix": "after",
    "verbosity": "low",
    "web_search_options": {},
}
OF_THE_CLIENT = {"extra_headers", "extra_query", "extra_body", "timeout", "self"}


@pytest.mark.parametrize(("ask", "body"), [(complete, CompletionBody), (chat, ChatBody)])
def test_every_parameter_of_the_client_is_claimed_or_refused_by_its_name(client, ask, body):
    """Nothing that would change the answer is ignored: what this version of the client can send is a field
    of the body, or a 400 that names it. A new parameter of a new client fails here until it is decided on."""
    create = client.completions.create if ask is complete else client.chat.completions.create
    names = set(inspect.signature(create).parameters) - OF_THE_CLIENT
    unclaimed = names - set(body.__struct_fields__)
    for name in sorted((unclaimed | PLAUSIBLE.keys()) & names):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **{name: PLAUSIBLE[name]})
        assert caught.value.param == name


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.responses.create(model="tiny", input="hi"),
        lambda c: c.responses.retrieve("resp_1"),
        lambda c: c.conversations.create(),
        lambda c: c.images.generate(prompt="a cat"),
        lambda c: c.audio.speech.create(model="tiny", voice="alloy", input="hi"),
        lambda c: c.moderations.create(input="hi"),
        lambda c: c.files.list(),
        lambda c: c.batches.list(),
        lambda c: c.fine_tuning.jobs.list(),
        lambda c: c.vector_stores.list(),
        lambda c: c.beta.assistants.list(),
        lambda c: c.chat.completions.retrieve("chatcmpl-1"),
    ],
)
@pytest.mark.filterwarnings("ignore:deprecated")
def test_routes_that_are_not_there_are_not_found(client, ask):
    """In OpenAI's form: the client's NotFoundError with a type and a message that names the route."""
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client)
    assert caught.value.type == "not_found_error"
    assert "/v1/" in caught.value.message


@pytest.mark.parametrize(
    "ask", [lambda c: c.models.delete("tiny"), lambda c: c.chat.completions.list()], ids=["delete", "list"]
)
def test_methods_that_are_not_there_are_errors_in_openais_form(client, ask):
    """A route that is there, asked in another way: 405."""
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client)
    assert caught.value.status_code == 405
    assert caught.value.type == "invalid_request_error"
