"""Architectures as folders on disk: each answers as generate() does, or is refused in words before it starts.

Tiny models with random weights, spread wide so that answers vary. Nothing may load and answer wrongly.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway_engine import architecture, listening, model
from headway_engine.model_source import ModelError
from headway_engine.runner import build_runner
from support import runners, tiny_models
from support.architectures import BOTH_KINDS, EXPERTS, LONGROPE, SERVED, loaded, names, saved

NO_INTERFACE = "does not take transformers' attention interface"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 32}, "maxModelLen (--max-model-len) to at most 32"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "at most 16"),
    ("gemma2", {"head_dim": 8, "sliding_window": 128}, "attn_logit_softcapping"),
    ("gemma3_text", {"head_dim": 8, "sliding_window": 8, "layer_types": BOTH_KINDS}, "window of 8 tokens"),
    ("cohere2", {"sliding_window": 8, "layer_types": BOTH_KINDS}, "window of 8 tokens"),
    ("gpt_oss", {"head_dim": 8, "sliding_window": 128, **EXPERTS}, "attention sinks"),
    ("phi3", {"original_max_position_embeddings": 16, "rope_scaling": LONGROPE}, "to at most 16"),
    ("bloom", {}, NO_INTERFACE),  # alibi
    ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, NO_INTERFACE),  # alibi
    ("falcon", {}, NO_INTERFACE),
    ("stablelm", {}, NO_INTERFACE),
    ("doge", {"head_dim": 8}, "an attention mask of its own"),
    ("diffllama", {"head_dim": 8}, "more than once in a layer"),
    ("bert", {}, "in both directions"),
    ("mamba", {}, "state-space or hybrid"),
    ("jamba", {"num_experts": 2, "mamba_dt_rank": 4}, "state-space or hybrid"),
    ("llama4_text", {"head_dim": 8, "intermediate_size_mlp": 64, **EXPERTS}, "chunked_attention"),
    ("bart", {}, NO_INTERFACE),
]

CAPACITY = runners.capacity()
PROMPT = tuple((i * 37) % 290 + 3 for i in range(30))
NEIGHBOUR = tuple((i * 53) % 290 + 3 for i in range(41))
TOKENS = 16


def generated(folder: Path) -> tuple[int, ...]:
    """What transformers alone says, from the same folder."""
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return tiny_models.generated(module, PROMPT, TOKENS)


@pytest.mark.parametrize(("kind", "changes"), SERVED, ids=names(SERVED))
def test_it_says_what_generate_says(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """From a folder, in chunks, beside a longer neighbour: token for token."""
    folder = saved(tmp_path, kind, changes)
    expected = generated(folder)
    assert len(set(expected)) > 3, "it says one thing only, so this test could not fail"
    runner = build_runner(tiny_models.engine_config(runner="auto"), loaded(folder), CAPACITY)
    ours = tiny_models.sequence("ours", PROMPT, range(16))
    neighbour = tiny_models.sequence("neighbour", NEIGHBOUR, range(16, 40))
    tiny_models.advance(runner, (neighbour, 41), (ours, 11))
    tiny_models.advance(runner, (neighbour, 1), (ours, 19))
    while ours.output_len < TOKENS:
        tiny_models.advance(runner, (ours, 1), (neighbour, 1))
    assert tuple(ours.tokens[len(PROMPT) :]) == expected


@pytest.mark.parametrize(("kind", "changes", "words"), REFUSED, ids=names(REFUSED))
def test_it_is_refused_before_it_starts(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """The sentence says why, and what to do instead."""
    folder = saved(tmp_path, kind, changes)
    with pytest.raises(ModelError, match="another engine") as caught:
        build_runner(tiny_models.engine_config(runner="auto"), loaded(folder), CAPACITY)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["t5", "qwen2_vl"])
def test_what_is_no_causal_language_model_is_refused_by_its_configuration(kind: str, tmp_path: Path) -> None:
    """Without a list of the two hundred classes that would do."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(ModelError, match=f"has none of model_type '{kind}'") as caught:
        loaded(tmp_path)
    assert len(str(caught.value)) < 400


def test_bfloat16_refuses_what_float32_refuses(tmp_path: Path) -> None:
    """Rounding hides small differences of logits; what the layers ask for is the same in every dtype."""
    folder = saved(tmp_path, "diffllama", {"head_dim": 8})
    with pytest.raises(ModelError, match="more than once in a layer"):
        loaded(folder, "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": 32}),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 8, "layer_types": BOTH_KINDS}),
        ("gemma2", {"head_dim": 8, "sliding_window": 128, "attn_logit_softcapping": 5.0}),
        ("gpt_oss", {"head_dim": 8, "sliding_window": 128, **EXPERTS}),
        ("phi3", {"original_max_position_embeddings": 16, "rope_scaling": LONGROPE}),
        ("diffllama", {"head_dim": 8}),
        ("bert", {}),
    ],
    ids=["window", "window in some layers", "soft cap", "sinks", "longrope", "twice", "both directions"],
)
def test_what_configuration_and_calls_did_not_tell_the_check_at_start_sees(
    kind: str, changes: dict[str, Any], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third witness does not need the first two, in any type."""
    monkeypatch.setattr(model, "refusal", lambda *_: None)
    monkeypatch.setattr(model, "unheard", lambda *_: None)
    folder = saved(tmp_path, kind, changes)
    with pytest.raises(ModelError, match=r"is not computed right by .* than rounding explains"):
        build_runner(tiny_models.engine_config(runner="auto"), loaded(folder, dtype), CAPACITY)


def call(**changes: Any) -> dict[str, Any]:
    plain = {"layer": 0, "attention_mask": None, "is_causal": True, "dropout": 0.0, "use_cache": False}
    return plain | {"position_ids": torch.arange(2), "sliding_window": None} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"sliding_window": 97, "output_attentions": False, "softcap": None}, None),
        ({"sliding_window": 96}, "at most 96"),
        ({"softcap": 50.0}, "soft-capped"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"position_bias": torch.zeros(4)}, "position bias"),
        ({"attention_mask": torch.zeros(2, 2)}, "mask of its own"),
        ({"is_causal": False}, "both directions"),
        ({"next_years_invention": 3}, "asks for next_years_invention"),
    ],
)
def test_what_a_layer_asks_for_is_never_lost_without_a_word(changes: dict[str, Any], words: str) -> None:
    """Only what is known to be harmless passes."""
    reason = architecture.unheard([call(), call(layer=1, **changes)], 97)
    assert reason is None if words is None else words in (reason or "")


def test_a_model_without_attention_calls_is_not_guessed_at() -> None:
    assert "do not call" in (architecture.unheard([], 97) or "")


def test_listening_leaves_the_model_as_it_was() -> None:
    """One call a layer, and the attention it had before."""
    module = tiny_models.plain("qwen2")
    before = module.config._attn_implementation
    calls = listening.listen(module, torch.device("cpu")).calls
    assert [c["layer"] for c in calls] == [0, 1]
    assert module.config._attn_implementation == before
