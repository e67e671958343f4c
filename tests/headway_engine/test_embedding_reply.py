"""Embeddings as clients meet them: the official client, an engine with a toy model, one with a real one."""

import asyncio
import json
import os
import signal
import socket
from array import array
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import torch

from headway_engine.embedding_reply import EmbeddingsReply
from headway_engine.embeddings import MOST_IN_FLIGHT, parse_embeddings
from headway_engine.messages import Abort, Drain, Gauges, Refused, Submit
from headway_engine.model import default_cache_dir, load, resolve
from headway_engine.protocol import Limits, Outcome
from headway_engine.sequence import (
    Finished,
    FinishReason,
    Pooling,
    Rejected,
    RejectReason,
    Request,
    SamplingParams,
    Started,
    VectorOut,
)
from headway_engine.tenants import Tenant
from headway_engine.text import Tokeniser
from support import fake_engine, toys
from support.core_line import Bench, settle
from support.engine_server import TINY_MODEL, engine_server, wait_until
from support.eventually import eventually

ONE = array("f", [1.0, 0.0]).tobytes()


# A reply on a line: what goes to the core, and when.


class Embedding:
    """A call of so many inputs on its way."""

    def __init__(self, inputs: int, **limits):
        self.bench = Bench()
        self.sends = []
        call = parse_embeddings(json.dumps({"input": ["x"] * inputs}).encode())
        requests = [
            Request(
                id=str(i),
                prompt=(1, 2),
                sampling=SamplingParams(max_tokens=0),
                arrival_s=100.0,
                pooling=Pooling.LAST,
            )
            for i in range(inputs)
        ]
        reply = EmbeddingsReply(
            self.bench.core,
            call,
            requests,
            limits=Limits(**limits),
            tenant=Tenant(),
            model_name="m",
            clock=lambda: self.bench.now_s,
        )
        self.leave = asyncio.Event()
        self.task = asyncio.ensure_future(reply({}, self.receive, self.send))

    async def receive(self):
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sends.append(message)

    def submitted(self):
        return [m.request.id for m in self.bench.line.sent if isinstance(m, Submit)]

    async def finish(self, *ids):
        for id in ids:
            events = (Started(id, 0), VectorOut(id, ONE), Finished(id, FinishReason.STOP))
            await self.bench.report(*events)
        await settle()

    async def refuse(self, id, reason=RejectReason.QUEUE_FULL, retry_after_s=0.0):
        refused = Refused(rejected=Rejected(id, reason, "full", retry_after_s), gauges=Gauges())
        await self.bench.core._take(refused)
        await settle()

    def counted(self):
        """Outcomes that are not 0; all that arrived is among them."""
        t = self.bench.telemetry
        assert t.arrived_total == sum(t.outcomes_total.values()) + t.in_flight
        return {outcome: count for outcome, count in t.outcomes_total.items() if count}

    async def answer(self):
        await asyncio.wait_for(self.task, 10)
        return self.sends[0]["status"], json.loads(self.sends[1]["body"])


async def test_portions_follow_as_others_end_and_wait_from_then_on():
    """The queue timeout counts from when an input is handed over, not from when the call came."""
    e = Embedding(MOST_IN_FLIGHT + 1)
    await settle()
    assert len(e.submitted()) == MOST_IN_FLIGHT
    e.bench.now_s = 170.0
    await e.finish("3")
    assert e.submitted()[-1] == str(MOST_IN_FLIGHT)
    assert e.bench.line.sent[-1].request.arrival_s == 170.0
    assert e.bench.line.sent[0].request.arrival_s == 100.0
    await e.finish(*(str(i) for i in range(MOST_IN_FLIGHT + 1) if i != 3))
    status, body = await e.answer()
    assert status == 200
    assert [d["index"] for d in body["data"]] == list(range(MOST_IN_FLIGHT + 1))
    assert body["usage"]["prompt_tokens"] == 2 * (MOST_IN_FLIGHT + 1)
    assert e.bench.core.in_flight == 0
    assert e.bench.core.stalled_s() == 0.0


async def test_a_call_of_which_no_input_is_let_in_is_a_429():
    e = Embedding(2)
    await settle()
    await e.refuse("0")
    await e.refuse("1", retry_after_s=7.0)
    status, body = await e.answer()
    assert (status, body["error"]["code"]) == (429, "queue_full")
    assert (b"retry-after", b"7") in e.sends[0]["headers"]
    assert e.counted() == {Outcome.REJECTED: 2}


async def test_a_call_that_has_begun_is_carried_through():
    """What was refused comes again when another has ended, or after a while when nothing of it runs."""
    e = Embedding(3)
    await settle()
    await e.refuse("1")
    await e.refuse("2")
    await e.finish("0")
    assert sorted(e.submitted()) == ["0", "1", "1", "2", "2"]
    await e.refuse("1")
    await e.refuse("2")
    assert e.submitted()[5:] == ["2"], "one at a time, after the pause"
    await e.finish("2")
    await e.finish("1")
    assert (await e.answer())[0] == 200
    assert e.counted() == {Outcome.FINISHED: 3}, "the client saw no refusal"


@pytest.mark.parametrize(
    ("reason", "status", "param"), [(RejectReason.TOO_LONG, 400, "input"), (RejectReason.DRAINING, 503, None)]
)
async def test_a_refusal_for_good_ends_the_call(reason, status, param):
    """And the core forgets the other inputs."""
    e = Embedding(2)
    await settle()
    await e.refuse("1", reason)
    answered, body = await e.answer()
    assert (answered, body["error"]["param"]) == (status, param)
    assert Abort("0") in e.bench.line.sent
    assert e.bench.core.in_flight == 0
    assert e.counted() == {Outcome.REJECTED: 2}, "as the client sees it"


async def test_a_client_that_leaves_takes_its_inputs_along():
    e = Embedding(3)
    await settle()
    await e.finish("0")
    e.leave.set()
    await asyncio.wait_for(e.task, 10)
    assert [m for m in e.bench.line.sent if isinstance(m, Abort)] == [Abort("1"), Abort("2")]
    assert e.sends == []
    assert e.bench.telemetry.outcomes_total[Outcome.ABORTED] == 2


async def test_an_input_that_fails_fails_the_call():
    e = Embedding(2)
    await settle()
    await e.bench.report(Started("0", 0), Finished("0", FinishReason.ERROR, "secret"))
    status, body = await e.answer()
    assert status == 500
    assert "secret" not in body["error"]["message"]
    assert e.counted() == {Outcome.FAILED: 2}


async def test_an_old_refusal_holds_nothing_up_any_more():
    """One portion was refused for a minute; once another was answered, the rest follows at once."""
    e = Embedding(4)
    await settle()
    for id in ("1", "2", "3"):
        await e.refuse(id, retry_after_s=60.0)
    await e.finish("0")
    await e.finish("2", "3")  # nothing of the call is in the core now
    assert e.submitted()[-1] == "1"
    await e.finish("1")
    assert (await e.answer())[0] == 200


async def test_an_engine_that_ends_does_not_wait_for_a_refusal_to_pass():
    """The call sleeps until its next try; the end of the core or of a drain must not close its connection
    without an answer."""
    for end in ("cut off", "lose"):
        e = Embedding(3)
        await settle()
        await e.finish("0")
        await e.refuse("1", retry_after_s=3600.0)
        await e.refuse("2", retry_after_s=3600.0)
        if end == "lose":
            e.bench.core.lose("crashed")
        else:
            e.bench.core.cut_off("the engine is shutting down", "draining", 1.0)
        assert (await e.answer())[0] == 503
        assert e.counted() == {Outcome.FINISHED: 1, Outcome.FAILED: 2}


async def test_a_call_is_served_whole_in_a_drain():
    """It was taken in before: the core hears of the drain when it has all of it, and what was refused for the
    moment comes again soon."""
    e = Embedding(MOST_IN_FLIGHT + 2)
    await settle()
    e.bench.core.drain()
    await e.finish(*(str(i) for i in range(MOST_IN_FLIGHT)))
    await e.refuse(str(MOST_IN_FLIGHT))
    await e.refuse(str(MOST_IN_FLIGHT + 1))
    assert Drain() not in e.bench.line.sent
    assert e.bench.core.in_flight == 2
    await eventually(lambda: len(e.submitted()) == MOST_IN_FLIGHT + 3, what="one of them comes again")
    await e.finish(e.submitted()[-1])
    await e.finish(e.submitted()[-1])
    assert (await e.answer())[0] == 200
    assert e.bench.line.sent[-1] == Drain()
    assert e.counted() == {Outcome.FINISHED: MOST_IN_FLIGHT + 2}


async def test_a_drain_wakes_a_call_that_waits_for_its_next_try():
    """Room comes sooner when nobody else does."""
    e = Embedding(2)
    await settle()
    await e.finish("0")
    await e.refuse("1", retry_after_s=3600.0)
    assert e.submitted() == ["0", "1"]
    e.bench.core.drain()
    await settle()
    assert e.submitted() == ["0", "1", "1"]
    await e.finish("1")
    assert (await e.answer())[0] == 200


async def test_a_call_that_comes_in_a_drain_is_refused_whole():
    """It was on its way to the core when the drain began; nothing of it runs."""
    e = Embedding(MOST_IN_FLIGHT + 2)
    e.bench.core.drain()
    status, body = await e.answer()
    assert (status, body["error"]["code"]) == (503, "draining")
    assert e.submitted() == []
    assert e.counted() == {Outcome.REJECTED: MOST_IN_FLIGHT + 2}


async def test_what_waits_here_is_not_a_stall_of_the_core():
    """A tenant's rate may make an input wait for a minute: the core owes nothing meanwhile."""
    e = Embedding(2)
    await settle()
    await e.finish("0")
    await e.refuse("1", retry_after_s=3600.0)
    e.bench.now_s += 600.0
    assert e.bench.core.stalled_s() == 0.0
    e.bench.core.drain()
    await settle()
    e.bench.now_s += 5.0
    assert e.bench.core.stalled_s() == 5.0, "it is there again"
    await e.finish("1")
    await e.answer()


async def test_a_timeout_in_the_queue_is_a_429():
    e = Embedding(1)
    await settle()
    await e.bench.report(Finished("0", FinishReason.TIMEOUT, "waited"))
    assert (await e.answer())[0] == 429


async def test_a_timeout_in_the_queue_does_not_end_a_call_that_has_begun():
    """What comes between two portions may wait long: what was computed is not for nothing."""
    e = Embedding(2, max_queued_requests=0, max_batch_sequences=1)
    await settle()
    await e.finish("0")
    await e.bench.report(Finished("1", FinishReason.TIMEOUT, "waited"))
    await eventually(lambda: len(e.submitted()) == 3, what="it comes again")
    assert e.submitted() == ["0", "1", "1"]
    await e.finish("1")
    assert (await e.answer())[0] == 200
    assert e.counted() == {Outcome.FINISHED: 2}


async def test_nobody_waits_for_a_core_that_is_gone():
    e = Embedding(1)
    await settle()
    e.bench.core.lose("crashed")
    status, body = await e.answer()
    assert (status, body["error"]["code"]) == (503, "engine_gone")


# Over HTTP, with the toy.


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


def post(engine, body, **headers):
    return httpx.post(engine.url + "/v1/embeddings", json=body, headers=headers, timeout=30)


def toy(text):
    return list(array("f", fake_engine.toy_vector(text.encode())))


def idle(engine):
    m = engine.metrics()
    names = ("requests_running", "requests_waiting", "queued_tokens", "kv_used_blocks")
    return all(m[f"headway_{name}"] == 0 for name in names)


def test_the_official_client_gets_the_same_floats_in_both_encodings(client, engine):
    """It asks for base64 when it is left to it."""
    left = client.embeddings.create(model="tiny", input="abc")
    plain = client.embeddings.create(model="tiny", input="abc", encoding_format="float", user="me")
    coded = post(engine, {"input": "abc", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert isinstance(coded, str)
    assert left.data[0].embedding == plain.data[0].embedding
    assert len(plain.data[0].embedding) == 3
    assert plain.object == "list"
    assert plain.model == "tiny"
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (3, 3)


def test_every_form_of_input(client, engine):
    """Strings and token ids give the same vectors."""
    ids = httpx.post(engine.url + "/tokenize", json={"prompt": "abc"}, timeout=30).json()["tokens"]
    text = client.embeddings.create(model="tiny", input="abc").data[0].embedding
    for given in (["abc"], ids, [ids]):
        (found,) = client.embeddings.create(model="tiny", input=given).data
        assert found.embedding == text


def test_a_batch_keeps_its_order(client):
    """One hundred inputs of different lengths."""
    inputs = ["x" * (1 + i * 7 % 100) for i in range(100)]
    answer = client.embeddings.create(model="tiny", input=inputs, encoding_format="float")
    assert [d.index for d in answer.data] == list(range(100))
    assert answer.usage.prompt_tokens == sum(map(len, inputs))
    lengths = [d.embedding[1] / d.embedding[0] for d in answer.data]
    assert lengths == pytest.approx([len(one) for one in inputs], rel=1e-4)


def test_a_batch_larger_than_the_queue_is_answered(slow_engine):
    """Three times as many inputs as could wait; with an idle engine none of them is refused."""
    before = slow_engine.metrics()
    assert len(post(slow_engine, {"input": ["abc"] * 18}).json()["data"]) == 18
    after = slow_engine.metrics()
    key = 'headway_requests_total{outcome="rejected"}'
    assert after[key] == before[key]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input"),
        ({"input": [999_999]}, 400, "input"),
        ({"input": "a" * 1025}, 400, "input"),
        ({"input": ["a", "a" * 102_400]}, 400, "input"),
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": "a", "dimensions": 2}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "max_tokens": 1}, 400, "max_tokens"),
        ({"input": ["a" * 1000] * 301}, 400, "input"),
        ({"input": ["a" * 5_000_000]}, 400, "input"),
        ({"input": [[5] * 1000] * 301}, 400, "input"),
    ],
)
def test_what_can_never_work_names_the_field(engine, body, status, param):
    answer = post(engine, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error


def test_the_longest_input_fills_the_context(client):
    """Nothing is generated, so there need be no room for it."""
    longest = fake_engine.CAPACITY.max_model_tokens
    answer = client.embeddings.create(model="tiny", input="a" * longest)
    assert answer.usage.prompt_tokens == longest


def test_a_poisoned_input_fails_its_call_and_the_engine_lives(client):
    with pytest.raises(openai.InternalServerError, match="failed to compute"):
        client.embeddings.create(model="tiny", input=["fine", "☠"])
    assert len(client.embeddings.create(model="tiny", input="fine").data) == 1


def test_a_full_queue_is_a_429_that_says_when_to_come_back(slow_engine):
    """As for completions."""
    with httpx.Client(base_url=slow_engine.url, timeout=60) as http:
        body = {"prompt": ["a"] * 4, "max_tokens": 900, "stream": True}  # longer than the test takes
        with http.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()  # kept: when it goes, the stream is closed
            next(lines)
            assert slow_engine.put_limits(max_queued_requests=2)[0] == 200
            answer = http.post("/v1/embeddings", json={"input": ["b", "c"]})
    slow_engine.put_limits(max_queued_requests=4)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    wait_until(lambda: idle(slow_engine), "the stream's requests are gone")


def test_hanging_up_frees_everything(slow_engine):
    """Running, waiting and not handed over yet."""
    before = slow_engine.metrics()
    payload = json.dumps({"input": ["a" * 1000] * 200}).encode()
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", slow_engine.port), timeout=30) as s:
        s.sendall(head.encode() + payload)
        wait_until(lambda: slow_engine.metrics()["headway_requests_running"] > 0, "an input runs")
    wait_until(lambda: idle(slow_engine), "all blocks are free")
    after = slow_engine.metrics()
    key = 'headway_requests_total{outcome="aborted"}'
    assert after[key] > before[key]
    ended = sum(after[k] for k in after if k.startswith("headway_requests_total"))
    assert after["headway_requests_arrived_total"] == ended


def test_a_call_is_answered_whole_after_sigterm(tmp_path):
    """Also what has not been handed to the core yet when the signal comes: six inputs go at a time."""
    with toys.slow(tmp_path) as e, ThreadPoolExecutor(1) as pool:
        core = e.core_pid
        os.kill(core, signal.SIGSTOP)  # so that the drain comes in the middle
        try:
            call = pool.submit(post, e, {"input": ["abc"] * 40})
            wait_until(lambda: e.metrics()["headway_requests_in_flight"] == 40, "the call is taken in")
            e.process.send_signal(signal.SIGTERM)
            wait_until(lambda: e.get("/readyz")[0] == 503, "it drains")
            assert post(e, {"input": "late"}).status_code == 503
        finally:
            os.kill(core, signal.SIGCONT)
        answer = call.result(60)
        assert e.process.wait(30) == 0
    assert (answer.status_code, len(answer.json()["data"])) == (200, 40)


def test_a_tenants_own_caps_are_no_refusals_of_its_call(tmp_path):
    """Of thirty inputs in a queue of two, none is refused, in the metrics neither."""
    tenants = tmp_path / "tenants.json"
    tenants.write_text(
        json.dumps({"tenants": {"small": {"max_queued_requests": 2, "max_queued_tokens": 20}}})
    )
    arguments = ["--tenants-file", str(tenants)]
    with engine_server(tmp_path, arguments=arguments, command=fake_engine.COMMAND) as e:
        answer = post(e, {"input": ["abc"] * 30}, **{"x-headway-tenant": "small"})
        m = e.metrics()
    assert (answer.status_code, len(answer.json()["data"])) == (200, 30)
    assert m["headway_requests_arrived_total"] == m['headway_requests_total{outcome="finished"}'] == 30
    assert m['headway_requests_total{outcome="rejected"}'] == 0


def test_vectors_count_as_requests_and_not_as_first_tokens(tmp_path):
    """The tuner's latencies are about generation; prompt tokens and outcomes count like any request's."""
    with engine_server(tmp_path, command=fake_engine.COMMAND) as e:
        assert post(e, {"input": ["abc", "de"]}, **{"x-headway-tenant": "gold"}).status_code == 200
        m = e.metrics()
    assert m["headway_requests_arrived_total"] == m['headway_requests_total{outcome="finished"}'] == 2
    assert m["headway_prompt_tokens_total"] == 5
    assert m['headway_tenant_tokens_total{kind="prompt",tenant="gold"}'] == 5
    assert m["headway_output_tokens_total"] == 0
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "request_latency"):
        assert m[f"headway_{name}_seconds_count"] == 0
    assert m["headway_embedding_latency_seconds_count"] == m["headway_queue_time_seconds_count"] == 2


def test_keys_say_who_asks_and_ids_are_echoed(tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"secret": "gold"}))
    with engine_server(tmp_path, arguments=["--keys-file", str(keys)], command=fake_engine.COMMAND) as e:
        assert post(e, {"input": "a"}, authorization="Bearer wrong").status_code == 401
        answer = post(e, {"input": "abc"}, authorization="Bearer secret", **{"x-request-id": "mine"})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "mine"
        assert e.metrics()['headway_tenant_tokens_total{kind="prompt",tenant="gold"}'] == 3


# With a real model.


@pytest.fixture(scope="module")
def real_engine(tmp_path_factory):
    with engine_server(
        tmp_path_factory.mktemp("real"), arguments=["--kv-blocks", "200", "--pooling", "mean"]
    ) as e:
        yield e


async def test_vectors_of_a_real_model_amid_generation(real_engine):
    """Those of transformers, and the neighbours' text is what it is alone."""
    source = resolve(TINY_MODEL, "main", default_cache_dir())
    model = load(source, dtype="float32", device="cpu", max_model_len=0, progress=lambda _: None)
    tokeniser = Tokeniser(source.tokenizer_dir)
    texts = ["one", "two words", "a third, longer text " * 9, "x" * 300]
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 0}
    url = real_engine.url + "/v1"
    async with httpx.AsyncClient(timeout=60) as http, openai.AsyncOpenAI(base_url=url, api_key="x") as c:
        alone = (await http.post(f"{url}/completions", json=body)).json()["choices"][0]["text"]
        together, answer = await asyncio.gather(
            http.post(f"{url}/completions", json=body), c.embeddings.create(model="tiny", input=texts)
        )
    assert together.json()["choices"][0]["text"] == alone
    for text, found in zip(texts, answer.data, strict=True):
        ids = tokeniser.encode(text)
        with torch.inference_mode():
            hidden = model.module.base_model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
        expected = (hidden / hidden.norm()).numpy()
        np.testing.assert_allclose(np.array(found.embedding), expected, atol=2e-5)
    wait_until(lambda: idle(real_engine), "all blocks are free")
