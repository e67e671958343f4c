"""The public port over real HTTP: the whole front end, channel, loop and scheduler, with a toy model."""

import asyncio
import json
import re
import socket
import threading

import httpx
import openai
import pytest

from headway_engine.server import INLINE_BODY_BYTES, parsed
from support import fake_engine, toys
from support.engine_server import engine_server, wait_until
from support.hostile_schemas import deep

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with engine_server(tmp_path_factory.mktemp("engine"), command=fake_engine.COMMAND) as e:
        yield e


@pytest.fixture(scope="module")
def slow_engine(tmp_path_factory):
    with toys.slow(tmp_path_factory.mktemp("slow")) as e:
        yield e


@pytest.fixture(scope="module")
def client(engine):
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)


def complete(client, prompt="abc", **fields):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 5, **fields})


def post(engine, path, body, **headers):
    return httpx.post(engine.url + path, json=body, headers=headers, timeout=30)


def idle(engine):
    m = engine.metrics()
    names = ("requests_running", "requests_waiting", "queued_tokens", "kv_used_blocks")
    return all(m[f"headway_{name}"] == 0 for name in names)


# Answers.


def test_a_completion_with_its_usage(client):
    """Text, reason and counts of a whole answer."""
    answer = complete(client)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("defgh", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 5)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_says_what_the_whole_answer_says(client):
    """Row C.4 31."""
    chunks = list(complete(client, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "defgh"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_usage_comes_last_in_a_stream_and_only_when_asked_for(client):
    """Row C.4 26: the last chunk has no choices, the others a null."""
    plain = list(complete(client, stream=True))
    assert all(c.usage is None and c.choices for c in plain)
    asked = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert asked[-1].choices == []
    assert asked[-1].usage.completion_tokens == 5
    assert all(c.usage is None for c in asked[:-1])
    options = {"continuous_usage_stats": True}
    counted = list(complete(client, stream=True, stream_options=options))
    assert [c.usage.completion_tokens for c in counted][-2:] == [5, 5]


def test_a_stream_ends_with_done(engine):
    """Row C.4 35."""
    answer = post(engine, "/v1/completions", {"prompt": "abc", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")


def test_a_chat(client):
    """The template's last line decides what the toy says next: a newline, for ever."""
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "\n\n\n"


@pytest.mark.parametrize("name", ["self", "tokeniser", "values", "args", "bos_token"])
def test_a_value_for_the_chat_template_may_have_any_name(engine, name):
    """Names of our own arguments are no secret way to a 500."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = post(engine, "/v1/chat/completions", {**body, "chat_template_kwargs": {name: "x"}})
    assert answer.status_code == 200, answer.text


def test_end_of_sequence_is_a_stop(client):
    """The toy ends after a full stop; the mark is counted and not shown."""
    answer = complete(client, "end.")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1


def test_ignore_eos_and_min_tokens_go_on(client):
    """Rows C.5 40 and 41."""
    assert complete(client, "end.", extra_body={"ignore_eos": True}).choices[0].text == "!!!!!"
    assert complete(client, "end.", extra_body={"min_tokens": 3}).choices[0].text == "!!!!!"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, engine, stream):
    """Row C.4 28, over HTTP; the core is told, and nothing goes on running."""
    answer = complete(client, max_tokens=900, stop=["hij", "zzz"], stream=stream)
    if stream:
        chunks = list(answer)
        text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == 7
    assert (text, reason) == ("defg", "stop")
    wait_until(lambda: idle(engine), "the core forgets the request")


def test_characters_are_never_split(client):
    """UTF-8 in a stream: each piece is whole."""
    chunks = [c.choices[0].text for c in complete(client, "x€", max_tokens=30, stream=True)]
    assert "".join(chunks) == "€" * 10
    assert not any("\ufffd" in c for c in chunks)


def test_several_prompts_and_samples_are_numbered_in_order(client):
    """Row C.5 52: index = prompt times n plus sample, streaming or not."""
    answer = complete(client, ["abc", "xyz"], n=2, max_tokens=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "de"), (1, "de"), (2, "ab"), (3, "ab")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 8)
    texts = {}
    for chunk in complete(client, ["abc", "xyz"], n=2, max_tokens=2, stream=True):
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert texts == {0: "de", 1: "de", 2: "ab", 3: "ab"}


def test_echo_begins_with_the_prompt(client):
    """OpenAI's echo."""
    assert complete(client, echo=True).choices[0].text == "abcdefgh"


def test_logprobs_of_completions_and_chats(client):
    """One entry per token, with as many alternatives as asked for."""
    logprobs = complete(client, logprobs=2, max_tokens=3).choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["d", "e", "f"], [0, 1, 2])
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=3,
    )
    assert [len(t.top_logprobs) for t in chat.choices[0].logprobs.content] == [3, 3]


def test_models_tokenize_and_detokenize(client, engine):
    """The small routes."""
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    tokens = post(engine, "/tokenize", {"prompt": "abc"}).json()
    assert tokens["count"] == 3
    assert post(engine, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "abc"}
    chat = post(engine, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] > 5


def test_a_prefix_seen_before_is_counted_as_cached(client):
    """Usage of cached tokens: whole blocks of sixteen."""
    prompt = "the same words again and again " * 2
    complete(client, prompt)
    assert complete(client, prompt).usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16


def test_no_tenant_sees_what_another_has_cached(engine):
    """Row C.7 67: a hit across tenants would be a timing channel between them."""
    body = {"prompt": "a secret that one tenant has asked about before", "max_tokens": 1}

    def cached(tenant):
        answer = post(engine, "/v1/completions", body, **{"x-headway-tenant": tenant})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("gold") == 0
    assert cached("gold") == 32
    assert cached("batch") == 0
    assert engine.metrics()['headway_tenant_tokens_total{kind="prompt",tenant="gold"}'] == 2 * 47
    bad = post(engine, "/v1/completions", body, **{"x-headway-tenant": "no spaces"})
    assert bad.status_code == 400


def test_request_ids_are_echoed_or_made(engine):
    """Row C.6 59: an id of the client's is echoed and used for nothing else."""
    given = post(engine, "/v1/completions", {"prompt": "abc"}, **{"x-request-id": "mine-1"})
    made = post(engine, "/v1/completions", {"prompt": "abc"})
    assert given.headers["x-request-id"] == "mine-1"
    assert len(made.headers["x-request-id"]) == 32
    bad = post(engine, "/v1/completions", {"prompt": "abc"}, **{"x-request-id": "x" * 500})
    assert len(bad.headers["x-request-id"]) == 32


async def test_ten_requests_with_one_id_all_complete(engine):
    """Row C.6 59."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=30, headers={"x-request-id": "same"}) as http:
        body = {"prompt": "abc", "max_tokens": 20}
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(10)))
    assert {a.json()["choices"][0]["text"] for a in answers} == {"defghijklmnopqrstuvw"}
    assert len({a.json()["id"] for a in answers}) == 10


def test_api_keys_say_who_asks(tmp_path):
    """With a keys file: 401 without one of them, everywhere but in probes."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"secret-a": "gold", "secret-b": "batch"}))
    with engine_server(tmp_path, arguments=["--keys-file", str(keys)], command=fake_engine.COMMAND) as e:
        for key in ("", "wrong", "secret-a "):
            answer = post(e, "/v1/completions", {"prompt": "abc"}, authorization=f"Bearer {key}x")
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert httpx.get(e.url + "/v1/models", timeout=30).status_code == 401
        client = openai.OpenAI(base_url=f"{e.url}/v1", api_key="secret-a", max_retries=0)
        assert complete(client).choices[0].text == "defgh"


# Refusals.


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": [999_999]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a" * 1024}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a" * 102_400}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [2, 99_999]}, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 9999}]}, 400, "messages"),
        ("/v1/rerank", {"query": "a"}, 404, None),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": [deep(250)]}]}, 400, "messages"),
        ("/detokenize", {"tokens": [99_999]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
    ],
)
def test_what_can_never_work_is_refused_in_openais_form(engine, path, body, status, param):
    """Row C.6 53 and the table of bad input, over HTTP."""
    answer = post(engine, path, body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"]


def test_the_longest_prompt_is_served_and_one_more_token_is_not(client):
    """Row C.6 53: limit 200, limit + 1 400."""
    limit = fake_engine.CAPACITY.max_model_tokens - 1
    assert complete(client, "a" * limit).choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="at most"):
        complete(client, "a" * (limit + 1))


def test_max_tokens_past_the_context_is_cut_and_says_length(client):
    """Row C.6 55: prompt and max_tokens over the limit are clamped; a chat without runs to the end."""
    answer = complete(client, "a" * 1000, max_tokens=1000)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (24, "length")
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a" * 900}])
    assert chat.usage.total_tokens == fake_engine.CAPACITY.max_model_tokens


async def test_only_large_bodies_leave_the_event_loop():
    """A small one is not worth a thread; a large one would hold up every stream."""

    def thread_of(body):
        return threading.get_ident()

    assert await parsed(thread_of, b" " * INLINE_BODY_BYTES) == threading.get_ident()
    assert await parsed(thread_of, b" " * (INLINE_BODY_BYTES + 1)) != threading.get_ident()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
def test_what_is_wrong_with_a_large_body_is_said_like_of_a_small_one(engine, path):
    """The error comes out of the thread as the same 400."""
    body = {"prompt": "a", "tokens": [1], "no_such_field": "x" * INLINE_BODY_BYTES}
    answer = post(engine, path, {**body, "temperature": "hot"})
    small = post(engine, path, {**body, "temperature": "hot", "no_such_field": "x"})
    assert answer.status_code == small.status_code == 400
    assert answer.json() == small.json()


def test_a_large_body_that_is_good_is_answered(engine):
    """Token ids of a prompt, with much space between them."""
    ids = post(engine, "/tokenize", {"prompt": "abc"}).json()["tokens"]
    body = json.dumps({"prompt": ids, "max_tokens": 5}) + " " * INLINE_BODY_BYTES
    answer = httpx.post(engine.url + "/v1/completions", content=body, timeout=30)
    assert answer.json()["choices"][0]["text"] == "defgh"


def test_a_large_top_k_harms_nobody(client):
    """Row C.5 43: cut to the vocabulary."""
    assert complete(client, extra_body={"top_k": 1 << 31}).choices[0].text == "defgh"


async def test_megabytes_of_prompt_do_not_hold_up_the_others(engine):
    """Part 2: 5 MB prompts are refused without tokenising, and probes are answered meanwhile."""
    huge = json.dumps({"prompt": "word " * 1_000_000}).encode()
    async with httpx.AsyncClient(timeout=60) as http:
        floods = [
            asyncio.create_task(http.post(engine.url + "/v1/completions", content=huge)) for _ in range(3)
        ]
        health = [await http.get(engine.management_url + "/healthz") for _ in range(5)]
        answers = await asyncio.gather(*floods)
    assert [a.status_code for a in answers] == [400] * 3
    assert [h.status_code for h in health] == [200] * 5


def test_a_body_past_all_measure_is_refused_by_its_length(engine):
    """Before it is read."""
    with socket.create_connection(("127.0.0.1", engine.port), timeout=30) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in s.recv(4096)


def test_a_full_queue_is_a_429_that_says_when_to_come_back(slow_engine):
    """Rows C.2 17 and C.6 58: which limit, and Retry-After; also for a stream, which has not begun yet."""
    with httpx.Client(base_url=slow_engine.url, timeout=60) as http:
        body = {"prompt": ["a"] * 4, "max_tokens": 900, "stream": True}  # longer than the test takes
        with http.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()
            next(lines)
            assert slow_engine.put_limits(max_queued_requests=2)[0] == 200
            answer = http.post("/v1/completions", json={"prompt": "b", "max_tokens": 1})
            streamed = http.post("/v1/completions", json={"prompt": "b", "stream": True})
    slow_engine.put_limits(max_queued_requests=4)
    assert (answer.status_code, streamed.status_code) == (429, 429)
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert "max_queued_requests" in answer.json()["error"]["message"]
    wait_until(lambda: idle(slow_engine), "the stream's requests are gone")


def test_a_flood_is_stopped_before_it_reaches_the_core(slow_engine):
    """More than could ever be let in: the front end refuses at once."""
    answer = post(slow_engine, "/v1/completions", {"prompt": ["a"] * 100})
    assert answer.status_code == 429


def test_a_poisoned_request_fails_and_the_engine_lives(client, engine):
    """Row C.6 61, over HTTP, and again and again."""
    for _ in range(5):
        with pytest.raises(openai.InternalServerError, match="failed to compute") as caught:
            complete(client, "☠")
        assert "poisoned" not in str(caught.value)
        (id,) = re.findall(r"request id (\w+)", str(caught.value))
        lines = [line for line in engine.log().splitlines() if f"request-failed id={id} " in line]
        assert lines  # of the front end, and of the core where others were in the same step
        assert all("a poisoned prompt" in line for line in lines)
    assert complete(client).choices[0].text == "defgh"
    assert engine.get("/healthz")[0] == 200


def test_a_failure_in_mid_stream_is_an_event_and_then_the_end(slow_engine):
    """Row C.4 35: an error event, no [DONE], no hang; the client's library raises."""
    answer = post(slow_engine, "/v1/completions", {"prompt": "☠☠a", "stream": True, "max_tokens": 50})
    assert answer.status_code == 200
    events = [line for line in answer.text.splitlines() if line]
    assert "failed to compute" in json.loads(events[-1][6:])["error"]["message"]
    text = "".join(json.loads(e[6:])["choices"][0]["text"] for e in events[:-1])
    assert "bcdef".startswith(text)
    client = openai.OpenAI(base_url=f"{slow_engine.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIError, match="failed to compute"):
        list(complete(client, "☠☠a", max_tokens=50, stream=True))


async def test_counts_are_exact_while_sequences_are_preempted(engine):
    """Row C.4 25: more tokens than the cache holds at once; usage and text are those of a quiet engine.

    One body brings all 48 sequences, which need 800 blocks of the 512, so that they run together however
    slowly connections are taken.
    """
    before = engine.metrics()
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        body = {"prompt": ["abc"] * 6, "max_tokens": 260, "n": 8}
        answer = (await http.post("/v1/completions", json=body)).json()
    assert {c["text"] for c in answer["choices"]} == {(ALPHABET * 11)[3:263]}
    assert len(answer["choices"]) == 6 * 8
    assert answer["usage"]["completion_tokens"] == 6 * 8 * 260
    assert answer["usage"]["prompt_tokens"] == 6 * 3
    after = engine.metrics()
    assert after["headway_preemptions_total"] > before["headway_preemptions_total"]
    made = after["headway_output_tokens_total"] - before["headway_output_tokens_total"]
    assert made == 6 * 8 * 260


# Leaving.


def start_and_leave(engine, body, after_bytes):
    """Open a raw connection, send a request, and hang up once some bytes have come."""
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", engine.port), timeout=30) as s:
        s.sendall(head.encode() + payload)
        if after_bytes:
            s.recv(after_bytes)
        else:
            wait_until(lambda: engine.metrics()["headway_requests_running"] > 0, "the request runs")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_hanging_up_frees_everything(slow_engine, stream):
    """Rows C.3 19 and 20: streaming or not, running or waiting; gauges are 0 a scrape later (row C.8 70)."""
    before = slow_engine.metrics()
    body = {"prompt": ["a"] * 4, "max_tokens": 900, "stream": stream}
    start_and_leave(slow_engine, body, 10 if stream else 0)
    wait_until(lambda: idle(slow_engine), "all blocks are free")
    after = slow_engine.metrics()
    key = 'headway_requests_total{outcome="aborted"}'
    assert after[key] - before[key] == 4


def test_closing_the_openai_clients_stream_cancels(slow_engine):
    """What users do: leave the loop."""
    client = openai.OpenAI(base_url=f"{slow_engine.url}/v1", api_key="none", max_retries=0)
    with complete(client, max_tokens=900, stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: idle(slow_engine), "all blocks are free")


def test_the_books_balance(engine, slow_engine):
    """Row C.8 71: after all that went before."""
    for e in (engine, slow_engine):
        wait_until(lambda e=e: idle(e), "nothing is in flight")
        m = e.metrics()
        outcomes = sum(value for key, value in m.items() if key.startswith("headway_requests_total"))
        assert m["headway_requests_arrived_total"] == outcomes


async def test_a_thousand_streams_at_once(engine):
    """Row C.8 80: every one is whole. Raw sockets: a thousand of httpx's cost more than the engine."""
    engine.put_limits(max_queued_requests=5000, queue_timeout_ms=0)
    body = json.dumps({"prompt": "abc", "max_tokens": 8, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"

    async def one() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(head.encode() + body)
        answer = (await reader.read()).decode()
        writer.close()
        events = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
        assert "data: [DONE]" in answer, answer
        return "".join(json.loads(e)["choices"][0]["text"] for e in events)

    texts = await asyncio.gather(*(one() for _ in range(1000)))
    assert set(texts) == {"defghijk"}
