"""GGUF files as models whose matrices stay in blocks: logits as unpacked, and what is not kept so."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils

from headway_engine import gguf_packed
from headway_engine.check_steps import compute
from headway_engine.float32_pass import logits
from headway_engine.fused import isa
from headway_engine.gguf_packed import read_index, read_packed, write_index
from headway_engine.model import LoadedModel, load
from headway_engine.model_error import ModelError
from headway_engine.model_source import resolve
from headway_engine.packed_weights import BlockedLinear, block_types, is_packed
from headway_engine.runner import build_runner
from headway_engine.start_check import relative_errors
from support import kernels, runners, tiny_gguf, tiny_models

SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
ARCHITECTURES = ("llama", "qwen2", "qwen3")

EXACT = 2e-5
"""Most that a row may differ, as a share of its length, where nothing is rounded but sums in float32."""

HALF_SCALES = 6e-3
"""The same for the K types, whose products of scales are kept in half precision: 2^-11 of scale and offset,
which mostly cancel each other. Seen: 5e-4 to 3.6e-3."""

KERNELS = 1e-4
"""The same for the kernels, which may add in another order and keep keys and values elsewhere."""

TOKENS = torch.tensor(
    [[3, 77, 104, 9, 201, 55, 0, 13, 250, 31, 31, 8, 99, 140, 17, 6, 222, 180, 44, 2, 91, 5]]
)


def name_of(types: object) -> str:
    return str(getattr(types, "__name__", types))


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M: some matrices in more bits than others, and embeddings in half precision."""
    if "token_embd" in name:
        return "F16"
    return "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"


def mixed_simple(name: str) -> str:
    """The same with types of 32 weights; one whole matrix is plain."""
    if "attn_q" in name:
        return "F32"
    return "Q8_0" if "attn_v" in name or "output.weight" in name else "Q4_1" if "ffn_up" in name else "Q4_0"


def file_of(
    folder: Path, types: str | Callable[[str], str], architecture: str = "llama", **more: Any
) -> Path:
    """Sizes that are whole blocks of these types."""
    of = types if callable(types) else lambda _: types
    if any(of(name).endswith("_K") for name in ("token_embd", "attn_q", "attn_v")):
        more = {"hidden": tiny_gguf.WIDE, "wide": tiny_gguf.WIDE, **more}
    return tiny_gguf.write(folder / "m.gguf", architecture=architecture, types=of, **more)


def packed(gguf: Path, dtype: torch.dtype = torch.float32) -> Any:
    folder = gguf.parent / "index"
    folder.mkdir(exist_ok=True)
    write_index(gguf, folder)
    return read_packed(gguf, folder, dtype)


def unpacked(gguf: Path) -> Any:
    """By transformers' own reading, which has gguf dequantize every tensor to float32."""
    auto: Any = transformers
    reader: Any = modeling_gguf_pytorch_utils
    config = auto.AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    module = auto.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parsed = reader.load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=module, torch_dtype=torch.float32
    )
    tensors = {name: torch.as_tensor(value) for name, value in parsed["tensors"].items()}
    lacking = module.load_state_dict(tensors, strict=False).missing_keys
    assert lacking == (["lm_head.weight"] if config.tie_word_embeddings else [])
    module.tie_weights()
    return module


def loaded(gguf: Path, dtype: str = "float32") -> LoadedModel:
    source = resolve(f"file://{gguf}", "main", gguf.parent / "cache")
    return load(source, dtype=dtype, device="cpu", max_model_len=0, progress=lambda _: None, keep_blocks=True)


def worst(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float(relative_errors(found, truth).max())


def allowed(types: str | Callable[[str], str]) -> float:
    return HALF_SCALES if types in K_TYPES or types is mixed else EXACT


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("types", [*SIMPLE, *K_TYPES, mixed, mixed_simple], ids=name_of)
def test_logits_are_those_of_the_unpacked_model(
    types: str | Callable[[str], str], architecture: str, tmp_path: Path
) -> None:
    """Of every type of block and every architecture: names, order of rows, biases and norms."""
    gguf = file_of(tmp_path, types, architecture)
    module = packed(gguf)
    assert is_packed(module)
    assert worst(logits(module, TOKENS), logits(unpacked(gguf), TOKENS)) < allowed(types)


@pytest.mark.parametrize("types", ["Q4_0", mixed], ids=name_of)
def test_a_head_that_is_not_in_the_file_is_tied_to_the_embeddings(
    types: str | Callable[[str], str], tmp_path: Path
) -> None:
    """In blocks or plain: in memory once."""
    gguf = file_of(tmp_path, types, tied=True)
    module = packed(gguf)
    assert worst(logits(module, TOKENS), logits(unpacked(gguf), TOKENS)) < allowed(types)
    if types is mixed:
        assert module.lm_head.weight is module.model.embed_tokens.weight
    else:
        assert module.lm_head.matrix is module.model.embed_tokens.matrix
    (tmp_path / "untied").mkdir()
    other = file_of(tmp_path / "untied", types, tied=False)
    assert worst(logits(packed(other), TOKENS), logits(module, TOKENS)) > 0.1, "it has a head of its own"


def test_bfloat16_is_the_type_of_what_is_no_block_and_of_what_is_computed(tmp_path: Path) -> None:
    gguf = file_of(tmp_path, mixed_simple, "qwen2")
    module = packed(gguf, torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    found = module(input_ids=TOKENS, use_cache=False).logits
    assert found.dtype is torch.bfloat16
    assert 1e-4 < worst(found.float(), logits(unpacked(gguf), TOKENS)) < 0.1


@kernels.needs_compiler
@pytest.mark.parametrize("chosen", kernels.SETS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("types", [*SIMPLE, *K_TYPES, mixed, mixed_simple], ids=name_of)
def test_the_kernels_give_the_same_logits(
    types: str | Callable[[str], str],
    architecture: str,
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the runner that serves: prompts in chunks, decodes, pages in no order. As the module that was
    compared with the unpacked one above."""
    kernels.loaded(chosen)
    monkeypatch.setenv(isa.ISA_ENV, chosen)
    gguf = file_of(tmp_path, types, architecture, tied=architecture == "llama")
    model = loaded(gguf)
    kinds = block_types(model.module)
    runner = build_runner(tiny_models.engine_config(runner="fused"), model, runners.capacity())
    assert runner.weights == "+".join(kinds)
    assert {*runner.weights.split("+")} <= {*SIMPLE, *K_TYPES}
    truth = logits(packed(gguf), TOKENS).expand(2, -1, -1)
    rows = compute(runner, TOKENS.expand(2, -1), torch.arange(truth.shape[-1]), 64)
    assert worst(rows.logits, truth[rows.sequences, rows.positions]) < KERNELS


def plain_embeddings(name: str) -> str:
    return "F16" if "token_embd" in name else "Q4_1"


def plain_inner(name: str) -> str:
    return "BF16" if "ffn_down" in name else "Q8_0"


@pytest.mark.parametrize("types", ["Q4_1", plain_embeddings, plain_inner, mixed_simple], ids=name_of)
@pytest.mark.parametrize("chosen", kernels.SETS)
def test_blocks_beside_plain_matrices_are_computed_in_bfloat16(
    types: str | Callable[[str], str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens go as integers through blocks, which plain matrices cannot follow: a core ended by SIGFPE.
    Blocks that share a product with a plain matrix of few bits keep all of theirs in float32."""
    kernels.loaded(chosen)
    monkeypatch.setenv(isa.ISA_ENV, chosen)
    gguf = file_of(tmp_path, types)
    model, wide = loaded(gguf, "bfloat16"), loaded(gguf)
    assert is_packed(model.module)
    truth = logits(wide.module, TOKENS).expand(2, -1, -1)
    runner = build_runner(tiny_models.engine_config(runner="fused"), model, runners.capacity())
    rows = compute(runner, TOKENS.expand(2, -1), torch.arange(truth.shape[-1]), 64)
    assert worst(rows.logits, truth[rows.sequences, rows.positions]) < 0.1


@pytest.mark.parametrize(("types", "architecture"), [("F16", "llama"), ("BF16", "llama"), ("F32", "qwen2")])
def test_a_file_without_blocks_is_unpacked(types: str, architecture: str, tmp_path: Path) -> None:
    """Its index has no tensors, and the model is read as it was before."""
    gguf = file_of(tmp_path, types, architecture)
    write_index(gguf, tmp_path)
    assert read_index(tmp_path) == gguf_packed.Index(architecture)
    model = loaded(gguf)
    assert not model.in_blocks
    assert worst(logits(model.module, TOKENS), logits(unpacked(gguf), TOKENS)) < 2e-3  # kept in float16


def test_blocks_of_a_type_that_is_not_kept_are_unpacked_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others that are kept; and where there are no others, the whole file is."""
    gguf = file_of(tmp_path, mixed_simple)
    truth = logits(unpacked(gguf), TOKENS)
    kept = gguf_packed.kept_packed
    monkeypatch.setattr(gguf_packed, "kept_packed", lambda name: kept(name) and name != "Q4_0")
    module = packed(gguf)
    assert {*block_types(module)} == {"Q4_1", "Q8_0"}
    assert isinstance(module.model.layers[0].mlp.gate_proj, torch.nn.Linear)
    assert worst(logits(module, TOKENS), truth) < EXACT
    monkeypatch.setattr(gguf_packed, "kept_packed", lambda _: False)
    write_index(gguf, tmp_path)
    assert read_index(tmp_path).tensors == ()


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "gpt2", "phi3", "starcoder2"])
def test_an_architecture_that_is_not_llama_shaped_has_no_index(architecture: str, tmp_path: Path) -> None:
    """transformers may change the numbers of its tensors, which blocks do not allow: unpacked as before."""
    gguf = file_of(tmp_path, "Q8_0", architecture)
    write_index(gguf, tmp_path)
    assert read_index(tmp_path) == gguf_packed.Index(architecture)


@pytest.mark.parametrize(
    ("architecture", "lacking", "name"),
    [
        ("llama", "blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "output_norm.weight", "model.norm.weight"),
        ("llama", "token_embd.weight", "model.embed_tokens.weight"),
        ("qwen2", "blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
    ],
)
def test_a_file_that_lacks_a_tensor_is_refused_by_its_name(
    architecture: str, lacking: str, name: str, tmp_path: Path
) -> None:
    """Left out, it would be no numbers at all."""
    gguf = file_of(tmp_path, "Q4_0", architecture, without={lacking})
    with pytest.raises(ModelError, match=rf"m\.gguf lacks weights of {architecture}: \['{name}'\]"):
        packed(gguf)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    """While its index is made, before anything reads past its end."""
    gguf = file_of(tmp_path, "Q4_0")
    os.truncate(gguf, gguf.stat().st_size - 100)
    with pytest.raises(ModelError, match=r"m\.gguf cannot be read as a GGUF model"):
        packed(gguf)


def test_a_file_whose_tensors_are_of_other_sizes_than_its_metadata_says_is_refused(
    tmp_path: Path,
) -> None:
    """Not read as if they had those: rows would be cut in other places."""
    gguf = tiny_gguf.write(tmp_path / "m.gguf", types=lambda _: "Q8_0", said_wide=128)
    with pytest.raises(
        ModelError, match=r"blk\.0\.ffn_gate\.weight has the shape \(64, 32\), .* \(128, 32\)"
    ):
        packed(gguf)


def test_an_index_is_written_once_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing takes seconds. Files of other contents have indices of their own."""
    gguf = file_of(tmp_path, "Q4_0")
    first = logits(loaded(gguf).module, TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_packed, "write_index", lambda *_: pytest.fail("parsed again"))
        assert torch.equal(logits(loaded(gguf).module, TOKENS), first)
    other = tiny_gguf.write(tmp_path / "m.gguf", seed=1, types=lambda _: "Q4_0")
    assert worst(logits(loaded(other).module, TOKENS), first) > 0.1


def test_a_file_that_changes_while_its_index_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index of half of each would have every matrix in the wrong place."""
    gguf = file_of(tmp_path, "Q4_0")
    really = gguf_packed.write_index

    def meanwhile(path: Path, out: Path) -> None:
        really(path, out)
        file_of(tmp_path, "Q4_0", seed=1)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_packed, "write_index", meanwhile)
        with pytest.raises(ModelError, match=r"m\.gguf changed while it was read"):
            loaded(gguf)
    assert not list((tmp_path / "cache").glob("models/*/index"))
    assert worst(logits(loaded(gguf).module, TOKENS), logits(unpacked(gguf), TOKENS)) < EXACT


def test_matrices_that_are_not_reordered_stay_in_the_file(tmp_path: Path) -> None:
    """Mapped: they take no memory of the process until the kernels have their own copy. Queries and keys of a
    Llama are reordered, and so copied; those of a Qwen are not."""
    for architecture, copied in (("llama", {"q_proj", "k_proj"}), ("qwen2", set())):
        module = packed(file_of(tmp_path, "Q4_0", architecture))
        linear = {n: part for n, part in module.named_modules() if isinstance(part, BlockedLinear)}
        found = {name.rpartition(".")[2] for name, part in linear.items() if not part.matrix.mapped}
        assert found == copied
