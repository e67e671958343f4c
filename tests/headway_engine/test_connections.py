"""Clients on a raw socket that do not behave, and the right kinds of unusual ones."""

import asyncio
import contextlib
import gzip
import json
import resource
import socket

import pytest
import uvicorn

from headway_engine import connections, server
from headway_engine.connections import KEEP_ALIVE_S, connection
from headway_engine.core_client import CoreClient
from headway_engine.protocol import Objectives
from headway_engine.server import MAX_BODY_BYTES, Front, public_app
from headway_engine.telemetry import Telemetry
from support import fake_engine
from support.engine_server import engine_server
from support.eventually import eventually

BODY = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with engine_server(tmp_path_factory.mktemp("engine"), command=fake_engine.COMMAND) as e:
        yield e


def request(*headers, path="/v1/completions", body=BODY, method="POST"):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answers(engine, sent):
    """Everything that comes until the engine closes. The last request should ask for that."""
    with socket.create_connection(("127.0.0.1", engine.port), timeout=30) as s:
        s.sendall(sent)
        return b"".join(iter(lambda: s.recv(1 << 16), b"")).decode("latin-1")


def status(answer):
    return int(answer.split(" ", 2)[1])


LAST = "Connection: close"


def test_pipelined_requests_are_answered_in_their_order(engine):
    """Three in one packet, of different kinds."""
    stream = json.dumps({"prompt": "xyz", "max_tokens": 2, "stream": True}).encode()
    told = answers(
        engine, request() + request(body=stream) + request(LAST, method="GET", path="/health", body=b"")
    )
    assert told.count("HTTP/1.1 200 OK") == 3
    assert told.index('"text":"def"') < told.index("data: [DONE]") < told.index('{"status":"ok"}')


def test_a_body_in_chunks_of_one_byte(engine):
    """With a trailer at the end."""
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\nX-Trailer: x\r\n\r\n"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert '"text":"def"' in answers(engine, head + chunks)


def test_a_client_that_waits_for_100_continue_gets_it_only_where_its_body_is_wanted(engine):
    """curl waits so with larger bodies."""
    expects = request("Expect: 100-continue", LAST)[: -len(BODY)]
    with socket.create_connection(("127.0.0.1", engine.port), timeout=30) as s:
        s.sendall(expects)
        assert s.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        s.sendall(BODY)
        assert s.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    large = expects.replace(b"Content-Length: %d" % len(BODY), b"Content-Length: 99999999")
    with socket.create_connection(("127.0.0.1", engine.port), timeout=30) as s:
        s.sendall(large)
        assert s.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("headers", "body", "wanted"),
    [
        (["Content-Encoding: gzip"], gzip.compress(BODY), 415),
        (["Content-Encoding: br"], BODY, 415),
        (["Content-Encoding: identity"], BODY, 200),
        (["Content-Type: application/x-www-form-urlencoded"], BODY, 415),
        (["Content-Type: text/plain"], BODY, 415),
        (["Content-Type: application/json; charset=utf-8"], BODY, 200),
        (["Content-Type: application/vnd.api+json"], BODY, 200),
        ([], BODY, 200),
        (["X-Forwarded-For: 1.2.3.4, \xff\xfe, unknown", 'Forwarded: for="[::'], BODY, 200),
        (["X-Forwarded-Proto: gopher"], BODY, 200),
        (["X-Long: " + "a" * 30_000], BODY, 200),
    ],
)
def test_what_headers_say_of_a_body(engine, headers, body, wanted):
    """A compressed one could be of any size; a form is what browsers send for anybody."""
    assert status(answers(engine, request(*headers, LAST, body=body))) == wanted


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\nabc",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x00" + b"\xff" * 200,
    ],
    ids=["no host", "negative length", "two lengths", "no chunk", "tls"],
)
def test_what_is_no_http_is_a_400_and_the_end_of_the_connection(engine, sent):
    """And not the start of something else's request."""
    assert status(answers(engine, sent)) == 400


def test_a_name_of_a_model_is_not_said_back_at_length(engine):
    """What a client makes up does not fill logs and answers."""
    told = answers(engine, request(LAST, method="GET", path="/v1/models/" + "a" * 20_000, body=b""))
    assert status(told) == 404
    assert len(told) < 2_000


def test_who_sends_too_much_is_told_so_and_not_cut_off(engine):
    """Closing at once would lose the answer on its way to a client that is still sending."""
    with socket.create_connection(("127.0.0.1", engine.port), timeout=30) as s:
        s.sendall(request(body=b" " * (MAX_BODY_BYTES + (1 << 20))))
        assert s.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        s.sendall(request(LAST))
        assert b'"text":"def"' in b"".join(iter(lambda: s.recv(1 << 16), b""))


async def test_a_body_that_does_not_come_is_a_408_and_the_end_of_the_connection(monkeypatch):
    """Whoever sends a part of it and waits."""
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.2)
    telemetry = Telemetry(Objectives(), start_time_s=0.0)
    core = CoreClient(telemetry)
    front = Front(core, telemetry, "tiny", created=0)
    monkeypatch.setattr(front, "serving", lambda: None)
    async with listening(public_app(front), headers_s=30) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
        told = await until_closed(reader)
        writer.close()
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b"did not come" in told


@contextlib.asynccontextmanager
async def listening(app, headers_s):
    """uvicorn with our connections, on a free port."""
    config = uvicorn.Config(
        app,
        port=0,
        http=connection(headers_s),
        lifespan="off",
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    running = uvicorn.Server(config)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(running.serve(sockets=[s]))
        await eventually(lambda: running.started)
        yield s.getsockname()[1], running.server_state.connections
        running.should_exit = True
        await serving


async def until_closed(reader):
    async with asyncio.timeout(30):
        return await reader.read()


async def hello(scope, receive, send):
    """Answers at once, and reads no body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.mark.parametrize(
    "first",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "],
    ids=["nothing", "part of a line", "part of the headers"],
)
async def test_headers_that_never_end_end_the_connection(first):
    """However little comes in time: more of it does not help."""
    async with listening(hello, headers_s=0.3) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        trickle = asyncio.create_task(trickling(writer))
        assert await until_closed(reader) == b""
        trickle.cancel()
        writer.close()


async def trickling(writer):
    """A byte now and then."""
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.02)


async def test_a_body_that_nobody_reads_does_not_hold_the_connection_for_ever():
    """The answer is out; what still trickles in has the time of headers."""
    async with listening(hello, headers_s=0.3) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        trickle = asyncio.create_task(trickling(writer))
        assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionError):  # a byte that comes after the end resets the connection
            await until_closed(reader)
        trickle.cancel()
        writer.close()


async def test_a_long_answer_and_a_pause_between_requests_are_no_slow_headers():
    """The deadline is off while a request is answered, and until the next one begins."""
    gate, asked = asyncio.Event(), asyncio.Event()

    async def slow(scope, receive, send):
        asked.set()
        await gate.wait()
        await hello(scope, receive, send)

    async with listening(slow, headers_s=30) as (port, connections_now):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            gate.clear()
            asked.clear()
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asked.wait()
            (connection_now,) = connections_now
            assert connection_now._deadline is None
            gate.set()
            assert b" 200 " in await reader.readuntil(b"hi")
            assert connection_now._deadline is None
            assert connection_now.timeout_keep_alive_task is not None
        writer.write(b"GET")
        await eventually(lambda: connection_now._deadline is not None)
        writer.close()


def test_the_limit_of_files_is_raised_and_never_lowered(monkeypatch):
    """As far as it may go, within reason."""
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert connections.allow_many_files() == 4096
    assert connections.allow_many_files() == 4096
    limits.append((1024, resource.RLIM_INFINITY))
    assert connections.allow_many_files() == connections.MAX_FILES
    limits.append((1 << 20, 1 << 20))
    assert connections.allow_many_files() == 1 << 20
    assert len(limits) == 5
