"""Connections to a service's address reach its ready endpoints, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway_local.proxy import Backend, Forwarder, backends_of


@asynccontextmanager
async def echo(name: str) -> AsyncIterator[Backend]:
    """A server that sends its name, then everything back until the client's end."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{name}:".encode())
        writer.write(await reader.read())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield ("127.0.0.1", server.sockets[0].getsockname()[1])


async def ask(port: int, text: bytes = b"hello") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_new_connections_go_round_and_the_end_of_a_side_is_passed_on() -> None:
    async with echo("a") as a, echo("b") as b:
        forwarder = Forwarder("127.0.0.1", 0, lambda: [a, b])
        port = await forwarder.start()
        answers = [await ask(port) for _ in range(4)]
        await forwarder.close()
    assert answers == [b"a:hello", b"b:hello", b"a:hello", b"b:hello"]


async def test_a_large_body_arrives_whole() -> None:
    body = bytes(range(256)) * 8192
    async with echo("a") as a:
        forwarder = Forwarder("127.0.0.1", 0, lambda: [a])
        port = await forwarder.start()
        assert await ask(port, body) == b"a:" + body
        await forwarder.close()


async def test_without_a_backend_or_with_a_dead_one_the_connection_is_cut(unused_tcp_port: int) -> None:
    backends: list[Backend] = []
    forwarder = Forwarder("127.0.0.1", 0, lambda: backends)
    port = await forwarder.start()
    for present in ([], [("127.0.0.1", unused_tcp_port)]):
        backends[:] = present
        try:
            answer = await ask(port)
        except ConnectionError:
            answer = b""
        assert answer == b""
    await forwarder.close()


async def test_open_connections_are_cut_when_it_closes() -> None:
    async with echo("a") as a:
        forwarder = Forwarder("127.0.0.1", 0, lambda: [a])
        reader, writer = await asyncio.open_connection("127.0.0.1", await forwarder.start())
        assert await reader.readexactly(2) == b"a:"
        await forwarder.close()
        try:
            assert await reader.read() == b""
        except ConnectionError:
            writer.close()


def test_only_ready_endpoints_of_the_named_port_count() -> None:
    slices = [
        {
            "ports": [{"name": "http", "port": 8000}, {"name": "management", "port": 8001}],
            "endpoints": [
                {"addresses": ["10.0.0.2"], "conditions": {"ready": True}},
                {"addresses": ["10.0.0.1"], "conditions": {}},
                {"addresses": ["10.0.0.3"], "conditions": {"ready": False}},
            ],
        },
        {"ports": [{"name": "http", "port": 8000}], "endpoints": None},
    ]
    assert backends_of({"name": "http", "port": 80}, slices) == [("10.0.0.1", 8000), ("10.0.0.2", 8000)]
    assert backends_of({"port": 80}, slices) == []
