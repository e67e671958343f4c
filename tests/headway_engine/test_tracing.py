"""Traces of a running engine, as an OTLP collector gets them."""

import json
import socket
import threading

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from headway_engine import tracing
from headway_engine.tracing import TracingOff, wanted
from support import fake_engine
from support.collector import attributes, collector
from support.engine_server import engine_server, free_port, wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SECRET = "the-answer-is-forty-two"


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """An engine whose queue takes two requests and whose steps last a while, and its collector."""
    folder = tmp_path_factory.mktemp("traced")
    limits = folder / "limits.json"
    limits.write_text(json.dumps({"max_batch_sequences": 1, "max_queued_requests": 1}))
    with (
        collector() as c,
        engine_server(
            folder,
            arguments=["--limits-file", str(limits)],
            command=fake_engine.COMMAND,
            env=c.env(FAKE_STEP_S="0.05"),
        ) as engine,
    ):
        yield engine, c


def ask(engine, id, path="/v1/completions", headers=None, **body):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, **body}
    return httpx.post(
        engine.url + path, json=body, headers={"x-request-id": id, **(headers or {})}, timeout=60
    )


def test_a_request_is_one_span_under_its_callers_with_its_phases_inside(traced):
    """Parent, attributes by the conventions, times in order."""
    engine, c = traced
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-headway-tenant": "gold"}
    assert ask(engine, "one", headers=headers, temperature=0.5, top_p=0.9).status_code == 200
    span = c.of("one")
    assert span.name == "text_completion tiny"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    said = attributes(span)
    durations = {key: said.pop(key) for key in ("headway.queue_s", "headway.prefill_s", "headway.ttft_s")}
    assert all(0 <= seconds < 60 for seconds in durations.values())
    assert durations["headway.ttft_s"] == pytest.approx(
        durations["headway.queue_s"] + durations["headway.prefill_s"]
    )
    assert said.pop("gen_ai.response.id").startswith("cmpl-")
    assert said == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "headway.request_id": "one",
        "headway.tenant": "gold",
        "headway.outcome": "answered",
        "headway.preemptions": 0,
    }
    assert span.status.code == Status.STATUS_CODE_UNSET
    inside = c.inside(span)
    assert set(inside) == {"queue", "prefill", "decode"}
    times = [span.start_time_unix_nano]
    for name in ("queue", "prefill", "decode"):
        assert inside[name].trace_id == span.trace_id
        times += [inside[name].start_time_unix_nano, inside[name].end_time_unix_nano]
    times.append(span.end_time_unix_nano)
    assert times == sorted(times)
    assert inside["decode"].start_time_unix_nano < inside["decode"].end_time_unix_nano
    assert attributes(inside["decode"])["headway.output_tokens"] == 4


def test_a_stream_of_a_chat_is_traced_to_its_end(traced):
    """The span ends with the last event, and says that it was a stream."""
    engine, c = traced
    body = {"messages": [{"role": "user", "content": "abc"}], "prompt": None, "stream": True, "max_tokens": 3}
    body.pop("prompt")
    answer = httpx.post(
        engine.url + "/v1/chat/completions",
        json={"model": "tiny", **body},
        headers={"x-request-id": "stream"},
        timeout=60,
    )
    assert answer.text.endswith("data: [DONE]\n\n")
    said = attributes(c.of("stream"))
    assert (said["gen_ai.operation.name"], said["gen_ai.request.stream"]) == ("chat", True)
    assert not {"gen_ai.request.temperature", "gen_ai.request.top_p"} & said.keys(), "nobody asked for one"
    assert (said["gen_ai.usage.output_tokens"], said["headway.outcome"]) == (3, "answered")


def test_embeddings_are_traced_by_input(traced):
    """They have no first token: each input waits and is computed, and that is all."""
    engine, c = traced
    answer = httpx.post(
        engine.url + "/v1/embeddings",
        json={"model": "tiny", "input": ["abc", "defg"]},
        headers={"x-request-id": "embed"},
        timeout=60,
    )
    assert answer.status_code == 200
    span = c.of("embed")
    said = attributes(span)
    assert (span.name, said["gen_ai.usage.input_tokens"]) == ("embeddings tiny", 7)
    assert "gen_ai.request.choice.count" not in said
    assert "headway.ttft_s" not in said
    assert set(c.inside(span)) == {"queue", "prefill"}


def test_a_bad_request_is_a_span_without_phases(traced):
    """It never came to the core; the client's mistake is no error of the server's."""
    engine, c = traced
    assert ask(engine, "bad", temperature=9).status_code == 400
    span = c.of("bad")
    said = attributes(span)
    assert (said["http.response.status_code"], said["headway.outcome"]) == (400, "refused")
    assert said["error.type"] == "400"
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert c.inside(span) == {}


def test_requests_that_are_no_generation_have_spans_too(traced):
    """Named by their route, whatever the client wrote; a path that is no route names nothing."""
    engine, c = traced
    httpx.get(f"{engine.url}/v1/models/{SECRET}", headers={"x-request-id": "model"})
    httpx.get(f"{engine.url}/{SECRET}", headers={"x-request-id": "nowhere"})
    assert c.of("model").name == "GET /v1/models/{name:path}"
    assert c.of("nowhere").name == "GET"
    assert attributes(c.of("nowhere"))["error.type"] == "404"
    assert SECRET.encode() not in c.raw


def test_who_comes_to_a_full_queue_and_who_leaves_it(traced):
    """One runs, one waits, one is refused; then both clients hang up: each span says how far it came."""
    engine, c = traced
    with open_stream(engine, "runs") as running:
        assert running.recv(1)  # it has the only slot
        with open_stream(engine, "waits"):
            wait_until(lambda: engine.metrics()["headway_requests_waiting"] == 1, "one waits")
            assert ask(engine, "refused").status_code == 429
            said = attributes(c.of("refused"))
            assert (said["error.type"], said["headway.outcome"]) == ("queue_full", "refused")
            assert said["gen_ai.request.model"] == "tiny"
        waited = c.of("waits")
    ran = c.of("runs")
    assert attributes(waited)["headway.outcome"] == attributes(ran)["headway.outcome"] == "aborted"
    assert "http.response.status_code" not in attributes(waited)
    assert set(c.inside(waited)) == {"queue"}
    assert set(c.inside(ran)) == {"queue", "prefill", "decode"}
    assert attributes(ran)["gen_ai.usage.output_tokens"] > 0


def open_stream(engine, id):
    """A request of more tokens than the test waits for; the socket is the client."""
    body = json.dumps({"model": "tiny", "prompt": "1", "max_tokens": 1000, "stream": True}).encode()
    client = socket.create_connection(("127.0.0.1", engine.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {id}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def test_the_service_is_named_and_nothing_that_was_written_is_told(traced):
    """Resource attributes; prompts, answers, stop strings, schemas, users and keys stay here."""
    engine, c = traced
    answer = ask(
        engine,
        "secret",
        prompt=f"{SECRET} abc",
        stop=[SECRET],
        user=SECRET,
        headers={"authorization": f"Bearer {SECRET}"},
    )
    assert answer.json()["choices"][0]["text"] == "defg"
    c.of("secret")
    assert c.resources[-1]["service.name"] == "headway-engine"
    assert c.resources[-1]["service.version"]
    assert SECRET.encode() not in c.raw
    assert b"defg" not in c.raw


def test_spans_of_the_last_moment_leave_before_the_engine_ends(tmp_path):
    """And a caller's decision not to sample is kept; a service name of the environment is taken."""
    slowly = {
        "OTEL_BSP_SCHEDULE_DELAY": "600000",
        "OTEL_SERVICE_NAME": "chat",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    slowly |= {"OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {SECRET}"}
    with (
        collector() as c,
        engine_server(tmp_path, command=fake_engine.COMMAND, env=c.env(**slowly)) as engine,
    ):
        ask(engine, "unsampled", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        ask(engine, "last")
        assert c.spans == []
        assert engine.terminate() == 0
        assert [attributes(span)["headway.request_id"] for span in c.servers()] == ["last"]
        assert c.resources[0]["service.name"] == "chat"
        assert c.headers[0]["authorization"] == f"Bearer {SECRET}"
        assert SECRET not in engine.log()


def test_a_dead_collector_is_told_of_once_and_slows_nothing(tmp_path):
    """Requests are answered; the exit does not wait for the collector."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_BSP_SCHEDULE_DELAY": "10"}
    env |= {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with engine_server(tmp_path, command=fake_engine.COMMAND, env=env) as engine:
        for number in range(20):
            assert ask(engine, f"r{number}").status_code == 200
        wait_until(lambda: "collector-lost" in engine.log(), "the log says so")
        assert ask(engine, "more").status_code == 200
        assert engine.terminate() == 0
        assert engine.log().count("collector-lost") == 1
        assert "Traceback" not in engine.log()


def test_without_the_extra_the_engine_says_so_and_serves(tmp_path):
    """The variables ask for traces, and OpenTelemetry's SDK cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    env = {"OTEL_TRACES_EXPORTER": "otlp", "PYTHONPATH": str(tmp_path)}
    with engine_server(tmp_path, command=fake_engine.COMMAND, env=env) as engine:
        assert ask(engine, "one").status_code == 200
        (line,) = [line for line in engine.log().splitlines() if "tracing" in line]
        assert "tracing-off" in line
        assert "not installed" in line
        assert "headway[otel]" in line


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_TRACES_EXPORTER": "otlp"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        ({"OTEL_TRACES_EXPORTER": " otlp ", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}, True),
    ],
)
def test_the_standard_variables_say_whether_requests_are_traced(environment, expected):
    """Off unless asked for."""
    assert wanted(environment) is expected


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "zipkin"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
    ],
)
def test_what_is_not_known_here_is_said_and_nothing_is_traced(environment, word, caplog):
    """One line, and the engine serves on."""
    with pytest.raises(TracingOff, match=word):
        wanted(environment)
    assert tracing.tracer(environment) is None
    assert len(caplog.records) == 1
    assert word in caplog.text


def test_closing_has_a_bound(caplog):
    """A tracer that hangs, as one with a collector that never answers, is left behind."""
    hung = threading.Event()

    class Hangs:
        def over(self, exchange):
            raise AssertionError("nothing is traced here")

        def close(self):
            hung.wait()

    tracing.close(Hangs(), timeout_s=0.01)
    hung.set()
    assert "traces-cut-short" in caplog.text
