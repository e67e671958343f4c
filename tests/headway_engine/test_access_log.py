"""Logs of a running engine: JSON throughout, a line per request where asked for, nothing that was written."""

import json
import socket

import httpx
import pytest

from headway_engine.config import parse
from support import fake_engine
from support.engine_server import engine_server, wait_until

MARK = "thirty-three-pelicans"
KEY = "a-key-of-nine-lives"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """With everything on: JSON by the variable, every level, a line for each request, keys."""
    folder = tmp_path_factory.mktemp("logged")
    keys = folder / "keys.json"
    keys.write_text(json.dumps({KEY: "gold"}))
    with engine_server(
        folder,
        arguments=["--access-log", "--log-level", "debug", "--keys-file", str(keys)],
        command=fake_engine.COMMAND,
        env={"HEADWAY_LOG_FORMAT": "json"},
    ) as e:
        yield e


def lines(engine, message=None, **values):
    """The log, line by line; every line is an object."""
    said = [json.loads(line) for line in engine.log().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in said)
    return [s for s in said if message in (None, s["message"]) and values.items() <= s.items()]


def line(engine, message, **values):
    """The one line that says so; waits for it."""
    wait_until(lambda: lines(engine, message, **values), f"{message} {values}")
    (said,) = lines(engine, message, **values)
    return said


def post(engine, path, body, id, key=KEY):
    headers = {"x-request-id": id, "authorization": f"Bearer {key}", "content-type": "application/json"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(engine.url + path, content=content, headers=headers, timeout=60)


def test_a_request_is_one_line_when_it_is_over(engine):
    """Who, what, how much, how long; times in milliseconds."""
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "stream": True}
    assert post(engine, "/v1/completions", body, "one").status_code == 200
    said = line(engine, "request", request_id="one")
    for name in ("time", "queue_ms", "ttft_ms", "total_ms"):
        assert said.pop(name) is not None
    assert said == {
        "level": "info", "logger": "headway.access", "message": "request", "request_id": "one",
        "tenant": "gold", "method": "POST", "route": "/v1/completions", "status": 200, "outcome": "answered",
        "model": "tiny", "stream": True, "prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 4,
        "finish_reason": "length",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "status", "route"),
    [
        ("HEAD", "/health", 200, "/health"),
        ("HEAD", "/v1/models/tiny", 200, "/v1/models/{name:path}"),
        ("HEAD", "/v1/completions", 405, "/v1/completions"),
        ("OPTIONS", "/v1/completions", 405, "/v1/completions"),
        ("DELETE", "/v1/models/tiny", 405, "/v1/models/{name:path}"),
        ("GET", "/openapi.json", 200, "/openapi.json"),
        ("HEAD", "/nowhere", 404, None),
        ("PROPFIND", "/nowhere", 404, None),
    ],
)
def test_every_method_is_logged_with_its_route(engine, method, path, status, route):
    """As the client asked, HEAD included; a path that is no route has none."""
    id = f"{method}-{path}"
    headers = {"x-request-id": id, "authorization": f"Bearer {KEY}"}
    assert httpx.request(method, engine.url + path, headers=headers, timeout=60).status_code == status
    said = line(engine, "request", request_id=id)
    assert (said["method"], said.get("route"), said["status"]) == (method, route, status)


def test_limits_are_one_line_with_old_new_and_why(engine):
    """And another that changes nothing is none."""
    before = engine.limits()["max_batch_tokens"]
    for _ in range(2):
        assert engine.put_limits(max_batch_tokens=before - 1)[0] == 200
    said = line(engine, "limits")
    assert said["max_batch_tokens"] == {"old": before, "new": before - 1}
    assert said["why"] == "asked for"


def test_readiness_is_a_phase_that_moved(engine):
    """The line of the change itself says it."""
    assert line(engine, "ready")["phase"] == {"old": "starting", "new": "ready"}


def test_a_failed_request_says_whose_it_is(engine):
    """The line of the error carries what the client knows, and what the core calls it."""
    assert post(engine, "/v1/completions", {"model": "tiny", "prompt": "☠"}, "poisoned").status_code == 500
    said = line(engine, "request-failed", level="error")
    assert (said["request_id"], said["tenant"], said["error"]) == (
        "poisoned", "gold", "RuntimeError: a poisoned prompt",
    )  # fmt: skip
    assert said["id"] != said["request_id"]


def test_no_log_tells_what_was_written(engine):
    """Prompts, answers, keys, bad JSON, names of models, schemas, tools, paths: at every level, nowhere."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": MARK}], "max_tokens": 3}
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"properties": {MARK: {"type": "no"}}}},
    }
    bodies = {
        "prompt": ("/v1/completions", {"model": "tiny", "prompt": f"{MARK} abc", "max_tokens": 3}),
        "poison": ("/v1/completions", {"model": "tiny", "prompt": f"{MARK} ☠", "max_tokens": 3}),
        "chat": ("/v1/chat/completions", chat),
        "stop": ("/v1/completions", {"model": "tiny", "prompt": "abc", "stop": [MARK], "user": MARK}),
        "type": ("/v1/completions", {"model": "tiny", "prompt": "abc", "temperature": MARK}),
        "field": ("/v1/completions", {"model": "tiny", "prompt": "abc", MARK: 1}),
        "model": ("/v1/completions", {"model": MARK, "prompt": "abc"}),
        "schema": ("/v1/chat/completions", {**chat, "response_format": schema}),
        "tools": (
            "/v1/chat/completions",
            {**chat, "tools": [{"type": "function", "function": {"name": MARK}}]},
        ),
        "json": ("/v1/completions", f'{{"prompt": "{MARK}" '.encode()),
        "bytes": ("/v1/completions", MARK.encode() + b"\xff\xfe"),
        "tokenize": ("/tokenize", {"prompt": MARK}),
        "path": (f"/v1/{MARK}", {"model": "tiny"}),
        "query": (f"/v1/completions?q={MARK}", {"model": "tiny", "prompt": "abc", "max_tokens": 1}),
    }
    for id, (path, body) in bodies.items():
        assert post(engine, path, body, f"mark-{id}").status_code
    assert post(engine, "/v1/completions", chat, "mark-key", key=MARK).status_code == 401
    engine.request("PUT", "/control/limits", f'{{"{MARK}'.encode())
    engine.get("/control/limits", headers={"authorization": f"Bearer {MARK}"})
    with socket.create_connection(("127.0.0.1", engine.port), timeout=60) as garbage:
        garbage.sendall(f"{MARK}\r\n\r\n".encode())
        assert garbage.recv(1000)
    for id in (*bodies, "key"):
        line(engine, "request", request_id=f"mark-{id}")
    wait_until(lambda: lines(engine, logger="uvicorn.error"), "uvicorn says so, in our form")
    log = engine.log()
    assert MARK not in log
    assert KEY not in log
    assert engine.key not in log


def test_draining_is_one_line_of_the_front_end(tmp_path):
    """With why; and without --access-log there is no line for a request."""
    with engine_server(tmp_path, command=fake_engine.COMMAND, arguments=["--log-format", "json"]) as e:
        post(e, "/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 1}, "quiet")
        assert e.terminate() == 0
        said = line(e, "draining")
        assert (said["phase"], said["why"]) == ({"old": "ready", "new": "draining"}, "a signal")
        assert lines(e, "request") == []


def test_the_options_are_off_by_default_and_a_wrong_variable_is_refused(monkeypatch, capsys):
    """Text for people; the option beats the variable."""
    settings = parse(["--model", "m"])
    assert (settings.log_format, settings.access_log) == ("text", False)
    monkeypatch.setenv("HEADWAY_LOG_FORMAT", "json")
    assert parse(["--model", "m"]).log_format == "json"
    assert parse(["--model", "m", "--log-format", "text"]).log_format == "text"
    monkeypatch.setenv("HEADWAY_LOG_FORMAT", "xml")
    with pytest.raises(SystemExit):
        parse(["--model", "m"])
    assert "xml" in capsys.readouterr().err
