"""`echo` with `logprobs` over HTTP: what a client that scores texts (lm-evaluation-harness, say) gets."""

import asyncio
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch

from headway_engine.model import default_cache_dir, load, resolve
from headway_engine.text import Tokeniser
from support import fake_engine
from support.engine_server import engine_server

MODELS = {
    "llama": "random://llama?hidden=32&heads=4&kv_heads=2&layers=2&vocab=300&context=400",
    "gpt2": "random://gpt2?hidden=32&heads=4&layers=2&vocab=300&context=400",
}
TEXT = "Grüße, 世界! And then some more, so that there are a few blocks and chunks of it. " * 2
ARGUMENTS = [
    "--kv-blocks",
    "120",
    "--capacity-max-batch-tokens",
    "512",
    "--capacity-max-batch-sequences",
    "8",
]


@pytest.fixture(scope="module", params=MODELS)
def served(request, tmp_path_factory):
    """An engine, the same weights in transformers, and the tokeniser."""
    source = resolve(MODELS[request.param], "main", default_cache_dir())
    plain = load(source, dtype="float32", device="cpu", max_model_len=0, progress=lambda _: None).module
    with engine_server(tmp_path_factory.mktemp("engine"), MODELS[request.param], ARGUMENTS) as engine:
        yield SimpleNamespace(engine=engine, plain=plain, tokeniser=Tokeniser(source.tokenizer_dir))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A toy whose prompt tokens have minus their position; it ends after a full stop."""
    with engine_server(tmp_path_factory.mktemp("toy"), command=fake_engine.COMMAND) as engine:
        yield engine


def client_of(engine):
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=120)


def score(engine, prompt, **fields):
    asked = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 0,
        "temperature": 0,
        "echo": True,
        "logprobs": 2,
    }
    return client_of(engine).completions.create(**{**asked, **fields})


def expected(served, ids):
    """Log-probability of each token but the first, by transformers."""
    with torch.inference_mode():
        table = torch.log_softmax(served.plain(torch.tensor([ids])).logits[0].float(), dim=-1)
    return [float(table[i, token]) for i, token in enumerate(ids[1:])]


def test_a_prompt_is_scored_as_transformers_scores_it(served):
    """Rows C.5 47 and 49: every token in its place, the first with null, offsets into the echoed text."""
    answer = score(served.engine, TEXT)
    (choice,) = answer.choices
    ids = served.tokeniser.encode(TEXT)
    logprobs = choice.logprobs
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(expected(served, ids), abs=2e-4)
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(ids)
    for own, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
        assert 2 <= len(top) <= 3
        assert own in top.values()
        assert own <= max(top.values())
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or TEXT[offset:].startswith(token)


def test_output_follows_the_prompt_in_text_and_values(served):
    """max_tokens over 0: the output's entries come after the prompt's, and are those without echo."""
    both = score(served.engine, TEXT, max_tokens=6).choices[0]
    alone = score(served.engine, TEXT, max_tokens=6, echo=False).choices[0]
    prompt = len(both.logprobs.tokens) - 6
    assert both.text == TEXT + alone.text
    assert both.logprobs.tokens[prompt:] == alone.logprobs.tokens
    assert both.logprobs.token_logprobs[prompt:] == pytest.approx(alone.logprobs.token_logprobs, abs=2e-4)
    assert both.logprobs.text_offset[prompt:] == [len(TEXT) + o for o in alone.logprobs.text_offset]


def test_a_stream_adds_up_to_the_whole_answer(served):
    """The prompt's part of a stream comes as it is computed."""
    whole = score(served.engine, TEXT, max_tokens=4).choices[0]
    chunks = [c.choices[0] for c in score(served.engine, TEXT, max_tokens=4, stream=True)]
    assert "".join(c.text for c in chunks) == whole.text
    parts = [c.logprobs for c in chunks if c.logprobs]
    values = [v for p in parts for v in p.token_logprobs]
    assert [t for p in parts for t in p.tokens] == whole.logprobs.tokens
    assert [o for p in parts for o in p.text_offset] == whole.logprobs.text_offset
    assert values[0] is None
    assert values[1:] == pytest.approx(whole.logprobs.token_logprobs[1:], abs=2e-4)
    assert chunks[-1].finish_reason == "length"


def test_scoring_takes_no_hits_and_what_it_computed_can_be_hit(served):
    """The prefix cache would leave values out; a plain request after it profits all the same."""
    prompt = "words that nobody has said before: " + TEXT
    assert score(served.engine, prompt).usage.prompt_tokens_details.cached_tokens == 0
    again = score(served.engine, prompt)
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    assert None not in again.choices[0].logprobs.token_logprobs[1:]
    plain = score(served.engine, prompt, echo=False, logprobs=None, max_tokens=1)
    assert plain.usage.prompt_tokens_details.cached_tokens > 0


async def test_echo_beside_other_options_in_one_batch_changes_nobody(served):
    """Row C.5 46: logprobs 0, 1, 5 and none, with echo and without, together as alone."""
    options = [
        {"echo": echo, "logprobs": logprobs, "max_tokens": 3}
        for echo in (True, False)
        for logprobs in (0, 1, 5, None)
    ]
    async with openai.AsyncOpenAI(base_url=f"{served.engine.url}/v1", api_key="none", timeout=120) as client:

        async def ask(fields):
            asked = {"model": "tiny", "prompt": TEXT[:60], "temperature": 0, **fields}
            return (await client.completions.create(**asked)).choices[0]

        alone = [await ask(fields) for fields in options]
        together = await asyncio.gather(*(ask(fields) for fields in options))
    for one, other, fields in zip(alone, together, options, strict=True):
        assert one.text == other.text
        if fields["logprobs"] is None:
            assert one.logprobs is other.logprobs is None
            continue
        skip = int(fields["echo"])
        assert one.logprobs.tokens == other.logprobs.tokens
        assert one.logprobs.token_logprobs[skip:] == pytest.approx(
            other.logprobs.token_logprobs[skip:], abs=2e-4
        )


def test_a_harness_finds_the_continuations_values_by_its_own_arithmetic(served):
    """As lm-evaluation-harness asks and reads: token ids of context and continuation, several at a time, one
    token of output, and the entries from the context's end to the last but one."""
    encode = served.tokeniser.encode
    pairs = [("The sky is", " blue"), ("One and one", " is three"), ("", "alone")]
    rows = [(encode("x" + context), encode(rest)) for context, rest in pairs]
    answer = score(served.engine, [a + b for a, b in rows], max_tokens=1, logprobs=1, seed=1234)
    for (context, rest), choice in zip(rows, sorted(answer.choices, key=lambda c: c.index), strict=True):
        values = choice.logprobs.token_logprobs[len(context) : -1]
        tops = choice.logprobs.top_logprobs[len(context) : -1]
        wanted = expected(served, context + rest)[-len(rest) :]
        assert values == pytest.approx(wanted, abs=2e-4)
        assert all(value <= max(top.values()) for value, top in zip(values, tops, strict=True))


def test_the_end_of_sequence_is_counted_where_entries_are_counted_from_the_end(toy):
    """When the one token of output is the mark that ends the text, it has an entry: the prompt's last one
    must not be taken for it."""
    choice = score(toy, "end.", max_tokens=1).choices[0]
    assert (choice.text, choice.finish_reason) == ("end.", "stop")
    assert choice.logprobs.tokens == ["e", "n", "d", ".", "<|im_end|>"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0, -3.0, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]


def test_samples_of_a_scored_prompt_each_have_its_values(toy):
    """n and several prompts together."""
    answer = score(toy, ["ab", "xyz"], n=2, max_tokens=1)
    assert [c.text for c in answer.choices] == ["abc", "abc", "xyza", "xyza"]
    assert [c.logprobs.token_logprobs for c in answer.choices] == [[None, -1.0, -0.5]] * 2 + [
        [None, -1.0, -2.0, -0.5]
    ] * 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)


def test_a_prompt_is_scored_once_for_all_its_samples(served):
    """Their values are the same to the last bit; without output all samples are one sequence."""
    before = served.engine.metrics()["headway_requests_arrived_total"]
    scored = [c.logprobs.token_logprobs for c in score(served.engine, [TEXT, "x" + TEXT], n=3).choices]
    assert scored == [scored[0]] * 3 + [scored[3]] * 3
    assert served.engine.metrics()["headway_requests_arrived_total"] - before == 2
    answer = score(served.engine, TEXT, n=3, max_tokens=3, temperature=1, seed=3)
    prompt = len(scored[0])
    assert [c.logprobs.token_logprobs[:prompt] for c in answer.choices] == [
        pytest.approx(scored[0], abs=2e-4)
    ] * 3
    assert (
        answer.choices[0].logprobs.token_logprobs[:prompt]
        == (answer.choices[2].logprobs.token_logprobs[:prompt])
    )


def test_an_echo_of_nothing_more_needs_no_logprobs(toy):
    """max_tokens 0 with echo alone gives the prompt back; a prompt may then fill the whole context."""
    limit = fake_engine.CAPACITY.max_model_tokens
    choice = score(toy, "a" * limit, logprobs=None).choices[0]
    assert (choice.text, choice.logprobs, choice.finish_reason) == ("a" * limit, None, "length")
    assert len(score(toy, "a" * limit).choices[0].logprobs.tokens) == limit
    with pytest.raises(openai.BadRequestError) as caught:
        score(toy, "a" * (limit + 1))
    assert caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as caught:
        score(toy, "a" * limit, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_a_request_for_millions_of_values_is_refused(toy):
    """Each costs memory of everybody's: the product of tokens, samples and alternatives is bounded."""
    with pytest.raises(openai.BadRequestError, match="more than 524288") as caught:
        score(toy, ["a" * 1000] * 32, logprobs=20)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_tokens_at_all_is_refused_where_the_answer_would_be_empty(toy, path):
    """max_tokens 0 means something with echo only."""
    start = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    answer = httpx.post(toy.url + path, json={**start, "max_tokens": 0}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_the_books_balance_after_scoring(toy):
    """A request without output is finished like any other."""
    before = toy.metrics()
    score(toy, "abc")
    after = toy.metrics()
    finished = 'headway_requests_total{outcome="finished"}'
    assert after[finished] - before[finished] == 1
    assert after["headway_requests_running"] == after["headway_kv_used_blocks"] == 0
