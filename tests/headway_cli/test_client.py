"""One streamed request: what is measured, and how every way to end is told."""

import asyncio

import aiohttp
import pytest

from headway_cli import client
from headway_cli.client import Api, Ending, Endpoint
from support.openai_fake import fake_endpoint


@pytest.mark.parametrize("api", list(Api))
async def test_a_stream_is_read_to_its_end(api: Api) -> None:
    """Text, usage, a first token and the gaps between the others; the event with the role is no token."""
    async with fake_endpoint(first_s=0.02) as fake, aiohttp.ClientSession() as session:
        pieces: asyncio.Queue[str] = asyncio.Queue()
        answer = await client.ask(
            session,
            Endpoint(fake.url, "fake", api),
            "hello",
            3,
            exact_length=True,
            keep_text=True,
            on_text=pieces,
        )
    assert answer.ending is Ending.FINISHED
    assert answer.text == "w0 w1 w2 "
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 3)
    assert answer.ttft_s is not None
    assert 0.02 <= answer.ttft_s <= answer.e2e_s
    assert len(answer.gaps_s) <= 2
    assert pieces.qsize() >= 1
    (body,) = fake.bodies
    assert body["stream"] is True
    assert body["ignore_eos"] is True
    assert ("messages" in body) == (api is Api.CHAT)


async def test_a_refusal_is_rejected_and_keeps_the_servers_words() -> None:
    """429 is an answer in good order."""
    async with fake_endpoint(refuse_after=0) as fake, aiohttp.ClientSession() as session:
        answer = await client.ask(session, Endpoint(fake.url, "fake"), "hello", 3)
    assert (answer.ending, answer.http_status, answer.error) == (Ending.REJECTED, 429, "the queue is full")
    assert answer.ttft_s is None


@pytest.mark.parametrize("error_event", [True, False])
async def test_a_broken_stream_has_failed(error_event: bool) -> None:
    """However it breaks; what came before the break is still known."""
    async with (
        fake_endpoint(cut_after=2, error_event=error_event) as fake,
        aiohttp.ClientSession() as session,
    ):
        answer = await client.ask(session, Endpoint(fake.url, "fake"), "hello", 9)
    assert answer.ending is Ending.FAILED
    assert answer.http_status == 200
    assert answer.ttft_s is not None
    assert answer.error


async def test_nobody_there_has_failed_without_a_status() -> None:
    """A refused connection is told, not raised."""
    async with fake_endpoint() as fake:
        url = fake.url
    async with aiohttp.ClientSession() as session:
        answer = await client.ask(session, Endpoint(url, "fake"), "hello", 3)
    assert (answer.ending, answer.http_status) == (Ending.FAILED, 0)
    assert answer.error


async def test_an_unknown_path_has_failed() -> None:
    """404 is not a polite no."""
    async with fake_endpoint() as fake, aiohttp.ClientSession() as session:
        answer = await client.ask(session, Endpoint(f"{fake.url}/nowhere", "fake"), "hello", 3)
    assert (answer.ending, answer.http_status) == (Ending.FAILED, 404)


async def test_the_served_model_is_asked_for() -> None:
    """The first that is listed."""
    async with fake_endpoint() as fake, aiohttp.ClientSession() as session:
        assert await client.served_model(session, fake.url) == "fake"
