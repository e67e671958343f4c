"""Grammars on a real (tiny, random) model: whatever it would like to say, what it says is valid.

A random model is the hardest one: it wants every token alike, so it goes everywhere a grammar lets it go.
"""

import dataclasses
import gc
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from headway_engine.fused import build
from headway_engine.grammar import GrammarFailed, Grammars
from headway_engine.loop import Loop
from headway_engine.messages import StepReport, Submit
from headway_engine.protocol import Capacity, Limits
from headway_engine.runner import Runner, build_runner
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import Finished, FinishReason, Request, TokenLogprob, TokenOut
from headway_engine.structured import json_grammar
from headway_engine.text import Tokeniser
from support import tiny_models
from support.hostile_schemas import ODD_BUT_FINE

END = 2
PROMPT = (40, 41, 42, 43, 44)
KINDS = ("transformers", "fused")
YES_NO = json_grammar({"enum": ["yes", "no"]})


@cache
def runner_of(kind: str) -> Runner:
    """Both runners share how they sample; the fused one needs a compiler."""
    if kind == "fused" and build.kernels() is None:
        pytest.skip("no C++ compiler here")
    return build_runner(tiny_models.engine_config(runner=kind), tiny_models.fresh("llama"), capacity(64))


@cache
def tokeniser() -> Tokeniser:
    folder = tiny_models.source("llama").tokenizer_dir
    assert folder is not None
    return Tokeniser(folder)


def capacity(blocks: int) -> Capacity:
    return Capacity(
        max_batch_tokens=64, max_batch_sequences=16, kv_blocks=blocks, block_tokens=4,
        max_model_tokens=min(97, blocks * 4),
    )  # fmt: skip


def asked(name: str, grammar: str = "", **sampling: Any) -> Request:
    """A request that samples at temperature 1 and ends with the model's end token."""
    values = {"max_tokens": 80, "temperature": 1.0, "stop_token_ids": (END,), "seed": sum(map(ord, name))}
    return tiny_models.request(name, PROMPT, **(values | sampling), grammar=grammar)


@dataclass
class Said:
    """What came of one request."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    reason: FinishReason | None = None
    message: str = ""

    @property
    def text(self) -> str:
        return tokeniser().decode(self.tokens)


def play(runner: Runner, requests: list[Request], blocks: int = 64) -> tuple[dict[str, Said], Scheduler]:
    """Run all of them together through the real loop, to their ends."""
    limits = Limits(max_batch_sequences=16, max_batch_tokens=64, prefill_chunk_tokens=16)
    scheduler = Scheduler(capacity(blocks), limits)
    said = {r.id: Said([], []) for r in requests}

    def report(message: object) -> None:
        for event in message.events if isinstance(message, StepReport) else ():
            if isinstance(event, TokenOut):
                said[event.id].tokens.append(event.token)
                said[event.id].logprobs.append(event.logprob)
            elif isinstance(event, Finished):
                said[event.id].reason, said[event.id].message = event.reason, event.message

    loop = Loop(scheduler, runner.run, report, limits=limits, clock=lambda: 0.0)
    for request in requests:
        runner.prepare(request)
        loop.post(Submit(request))
    for _ in range(3_000):
        loop.turn()
        if all(s.reason for s in said.values()):
            return said, scheduler
    raise AssertionError("the requests do not end")


def alone(runner: Runner, request: Request) -> Said:
    return play(runner, [request])[0][request.id]


scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-1000, 1000),
        st.integers(0, 1000),
    ),
    st.just({"type": "string", "maxLength": 4}),
    st.just({"type": "string", "pattern": "^[a-f]{2,4}$"}),
    st.lists(
        st.sampled_from(["a", "\u00fc\u4e16", 'quo"te', 7, None]), min_size=1, max_size=3, unique=True
    ).map(lambda values: {"enum": values}),
    st.just({"const": {"k": [1, "x"]}}),
)
schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.builds(
            lambda items, most: {"type": "array", "items": items, "minItems": 1, "maxItems": most},
            inner,
            st.integers(1, 2),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda many: {"anyOf": many}),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:required],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b c"]), inner, min_size=1, max_size=2),
            st.integers(0, 2),
        ),
    ),
    max_leaves=3,
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_under_a_schema_is_valid_and_neighbours_do_not_matter(kind: str) -> None:
    """Different schemas and free text in one batch: every whole answer is valid, and all that is said is what
    each says alone."""
    finished: list[FinishReason | None] = []

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(chosen=st.lists(schemas, min_size=1, max_size=4))
    @example(chosen=[{"type": "string", "maxLength": 4}] * 4)
    def answers(chosen: list[dict[str, Any]]) -> None:
        requests = [asked("free one"), asked("free two", logprobs=2)]
        requests += [asked(f"r{i}", json_grammar(schema)) for i, schema in enumerate(chosen)]
        said, _ = play(runner_of(kind), requests)
        for i, schema in enumerate(chosen):
            answer = said[f"r{i}"]
            finished.append(answer.reason)
            if answer.reason is FinishReason.STOP:
                assert answer.tokens[-1] == END
                jsonschema.validate(json.loads(answer.text), schema)
            else:
                assert (answer.reason, len(answer.tokens)) == (FinishReason.LENGTH, 80)
        for request in (requests[0], requests[-1]):
            assert alone(runner_of(kind), request).tokens == said[request.id].tokens

    answers()
    assert finished.count(FinishReason.STOP) > 0.8 * len(finished)


def test_a_greedy_model_obeys_too_and_ends_with_stop() -> None:
    answer = alone(runner_of("transformers"), asked("a", YES_NO, temperature=0.0))
    assert answer.text in {'"yes"', '"no"'}
    assert answer.reason is FinishReason.STOP


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}, {"logit_bias": ((END, 100.0),)}]
)
def test_the_other_rules_of_sampling_choose_among_what_is_allowed(cut: dict[str, Any]) -> None:
    """Cutting comes after the mask, or nothing would be left of it; a bias does not lift it."""
    assert alone(runner_of("transformers"), asked("a", YES_NO, **cut)).text in {'"yes"', '"no"'}


def test_log_probabilities_are_the_models_own() -> None:
    """Finite for what was said; the likeliest alternative may be a token that was not allowed."""
    free = alone(runner_of("transformers"), asked("a", logprobs=1, max_tokens=1))
    bound = alone(runner_of("transformers"), asked("a", YES_NO, logprobs=1))
    assert free.logprobs[0] is not None
    assert bound.logprobs[0] is not None
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert all(p is not None and torch.isfinite(torch.tensor(p.logprob)) for p in bound.logprobs)


def test_a_cut_answer_is_the_beginning_of_a_valid_one() -> None:
    schema = json_grammar({"const": {"key": "a long value that does not fit"}})
    answer = alone(runner_of("transformers"), asked("a", schema, max_tokens=12))
    assert answer.reason is FinishReason.LENGTH
    assert '{"key": "a long value that does not fit"}'.startswith(answer.text)


def test_preempted_answers_go_on_where_they_were() -> None:
    """A cache that is too small for all: sequences lose their blocks in the middle of an answer and are
    computed again. All they say is what they say alone."""
    schema = json_grammar({"type": "array", "items": {"enum": [11, 22, 33]}, "minItems": 9, "maxItems": 12})
    requests = [asked(f"r{i}", schema) for i in range(6)]
    runner = runner_of("transformers")
    said, scheduler = play(runner, requests, blocks=26)
    assert scheduler.preemptions_total > 0
    for request in requests:
        assert said[request.id].tokens == alone(runner, request).tokens
        assert 9 <= len(json.loads(said[request.id].text)) <= 12


def test_a_grammar_that_fails_fails_its_request_alone() -> None:
    """Row C.6 61 for grammars: whatever got past the check."""
    requests = [
        asked("bad", '{"grammars": [{"lark_grammar": "start: /(/"}]}'),
        asked("nonsense", "no grammar at all"),
        asked("good", YES_NO),
        asked("free"),
    ]
    said, _ = play(runner_of("transformers"), requests)
    assert {name: s.reason for name, s in said.items() if name != "free"} == {
        "bad": FinishReason.ERROR,
        "nonsense": FinishReason.ERROR,
        "good": FinishReason.STOP,
    }
    assert "grammar" in said["bad"].message
    assert said["free"].tokens == alone(runner_of("transformers"), requests[3]).tokens


@pytest.mark.parametrize("name", ODD_BUT_FINE)
def test_schemas_that_look_like_bombs_are_followed(name: str) -> None:
    """Or fail alone, but never take the core with them."""
    requests = [asked("odd", json_grammar(ODD_BUT_FINE[name]), max_tokens=20), asked("good", YES_NO)]
    said, _ = play(runner_of("transformers"), requests)
    assert said["good"].reason is FinishReason.STOP
    assert said["odd"].reason in {FinishReason.STOP, FinishReason.LENGTH}


def grammars() -> Grammars:
    folder = tiny_models.source("llama").tokenizer_dir
    assert folder is not None
    return Grammars.of_model(folder, (END, 3))


def sequence_under(grammar: str, text: str = "") -> Any:
    """A sequence that has said `text`."""
    s = tiny_models.sequence("a", PROMPT, grammar=grammar)
    s.tokens += tokeniser().encode(text, add_special_tokens=False)
    return s


def test_a_place_in_a_grammar_is_found_from_the_output_alone() -> None:
    """Asked twice for the same step, or only after many tokens: the same mask."""
    step_by_step, at_once = sequence_under(YES_NO), sequence_under(YES_NO, '"ye')
    g = grammars()
    for token in at_once.tokens[len(PROMPT) :]:
        g.allowed([step_by_step], 300)
        step_by_step.tokens.append(token)
    masks = [g.allowed([s], 300) for s in (step_by_step, at_once, step_by_step)]
    allowed = [mask.mask[0].nonzero()[0].tolist() for mask in masks if mask]
    assert allowed == [tokeniser().encode("s", add_special_tokens=False)] * 3


def test_every_end_token_is_allowed_at_the_end_and_no_other_token() -> None:
    mask = grammars().allowed([sequence_under(YES_NO, '"no"')], 300)
    assert mask is not None
    assert mask.mask[0].nonzero()[0].tolist() == [END, 3]


def test_logits_may_be_wider_or_narrower_than_the_tokenizer() -> None:
    """Padded weights have no names; a mask that leaves nothing is a failure of that sequence."""
    mask = grammars().allowed([sequence_under(YES_NO)], 512)
    assert mask is not None
    assert mask.mask.shape == (1, 512)
    assert not mask.mask[0, 300:].any()
    with pytest.raises(GrammarFailed) as caught:
        grammars().allowed([sequence_under(YES_NO)], 4)
    assert caught.value.ids == ("a",)


def test_rows_without_a_grammar_get_no_mask() -> None:
    free, bound = sequence_under(""), sequence_under(YES_NO)
    assert grammars().allowed([free, free], 300) is None
    mask = grammars().allowed([free, bound, free], 300)
    assert mask is not None
    assert mask.rows == (1,)


def test_a_sequence_that_is_gone_is_forgotten() -> None:
    """However it ended: the runner is not told."""
    g, s = grammars(), sequence_under(YES_NO)
    g.allowed([s], 300)
    assert len(g._places) == 1
    del s
    gc.collect()
    assert len(g._places) == 0


def test_compiled_grammars_are_kept_but_not_all() -> None:
    g = grammars()
    for i in range(100):
        g.prepare(json_grammar({"const": i}))
    assert len(g._compiled) == 32


def test_a_model_whose_tokens_are_not_understood_is_served_without_grammars(tmp_path: Path) -> None:
    """A tokenizer of an unusual kind is no reason not to start."""
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    model = dataclasses.replace(tiny_models.fresh("llama"), tokenizer_dir=tmp_path)
    runner = build_runner(tiny_models.engine_config(runner="transformers"), model, capacity(64))
    assert not runner.follows_grammars
    assert runner_of("transformers").follows_grammars
    runner.prepare(asked("a", YES_NO))
    assert alone(runner, asked("free", max_tokens=3)).reason is FinishReason.LENGTH
