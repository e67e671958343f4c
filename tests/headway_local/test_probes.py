"""Probes: what counts as an answer, and when answers make a verdict."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_local.objects import PodConfigError
from headway_local.probes import Answer, Counter, Exec, HttpGet, Probe, TcpSocket, check, parse

TCP = TcpSocket("127.0.0.1", 1)
CONTAINER = {"ports": [{"name": "http", "containerPort": 8000}]}


async def no_command(command: list[str], timeout_s: float) -> tuple[int, str]:
    raise AssertionError("not asked for")


@given(st.lists(st.booleans()), st.integers(1, 4), st.integers(1, 4))
def test_a_verdict_needs_its_threshold_of_equal_answers_in_a_row(
    answers: list[bool], successes: int, failures: int
) -> None:
    counter = Counter(Probe(TCP, success_threshold=successes, failure_threshold=failures))
    for index, ok in enumerate(answers):
        verdict = counter.observe(ok)
        needed = successes if ok else failures
        run = answers[max(0, index + 1 - needed) : index + 1]
        assert verdict == (ok if len(run) == needed and set(run) == {ok} else None)


def test_defaults_are_those_of_the_api() -> None:
    probe = parse({"httpGet": {"port": "http"}}, CONTAINER, "10.0.0.1")
    assert probe == Probe(HttpGet("10.0.0.1", 8000, "/", {}), 0.0, 10.0, 1.0, 1, 3, None)
    assert parse(None, CONTAINER, "10.0.0.1") is None


def test_an_unknown_port_name_or_kind_is_refused() -> None:
    with pytest.raises(PodConfigError, match="admin"):
        parse({"tcpSocket": {"port": "admin"}}, CONTAINER, "10.0.0.1")
    with pytest.raises(PodConfigError, match="grpc"):
        parse({"grpc": {"port": 1}}, CONTAINER, "10.0.0.1")


async def served(status: str) -> tuple[asyncio.Server, int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("status", "ok"), [("200 OK", True), ("302 Found", True), ("404 No", False), ("503 No", False)]
)
async def test_http_answers_from_200_to_399_are_good(status: str, ok: bool) -> None:
    server, port = await served(status)
    async with server:
        answer = await check(Probe(HttpGet("127.0.0.1", port, "/", {})), no_command)
    assert answer.ok is ok


async def test_a_server_that_says_nothing_fails_when_time_is_up() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        answer = await check(Probe(HttpGet("127.0.0.1", port, "/", {}), timeout_s=0.05), no_command)
    assert answer == Answer(False, "probe timed out after 0.05 s")


async def test_tcp_asks_for_a_connection_only(unused_tcp_port: int) -> None:
    server, port = await served("200 OK")
    async with server:
        assert (await check(Probe(TcpSocket("127.0.0.1", port)), no_command)).ok
    assert not (await check(Probe(TcpSocket("127.0.0.1", unused_tcp_port)), no_command)).ok


async def test_a_command_is_judged_by_its_exit_code() -> None:
    async def run(command: list[str], timeout_s: float) -> tuple[int, str]:
        return int(command[0]), "said"

    assert (await check(Probe(Exec(("0",))), run)).ok
    assert await check(Probe(Exec(("3",))), run) == Answer(False, "said")
