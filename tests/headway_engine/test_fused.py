"""The kernels in every instruction set, their build, and who may use the lean path."""

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway_engine.fused import build, isa, llama, native
from headway_engine.fused.llama import FusedRunner, why_not_fused
from headway_engine.fused.sampler import KernelPicker
from headway_engine.model import LoadedModel, default_cache_dir, load, resolve
from headway_engine.protocol import Capacity
from headway_engine.runner import TransformersRunner, best_runner, build_runner
from support import kernels, tiny_models

SMALL = Capacity(
    max_batch_tokens=128, max_batch_sequences=32, kv_blocks=160, block_tokens=4, max_model_tokens=97
)

needs_compiler = kernels.needs_compiler


def crowd(runner: Any, architecture: str) -> None:
    """30 sequences of different lengths, prefilled in one step and decoded together for eight tokens."""
    prompts = [tuple((i * 37 + j * 11) % 290 + 3 for j in range(1 + i % 4)) for i in range(30)]
    sequences = [
        tiny_models.sequence(str(i), prompt, range(i * 5, i * 5 + 5)) for i, prompt in enumerate(prompts)
    ]
    tiny_models.advance(runner, *((s, s.prompt_len) for s in sequences))
    for _ in range(8):
        tiny_models.advance(runner, *((s, 1) for s in sequences))
    for s, prompt in zip(sequences, prompts, strict=True):
        assert tuple(s.tokens[s.prompt_len :]) == tiny_models.greedy(architecture, prompt, 9)


@needs_compiler
@pytest.mark.parametrize("architecture", ["llama", "llama-wide"])
@pytest.mark.parametrize("chosen", kernels.SETS)
def test_every_instruction_set_says_what_generate_says(chosen: str, architecture: str) -> None:
    """Wide batches, so that whole tiles and every rest of one are used; what this CPU lacks is skipped."""
    library = kernels.loaded(chosen)
    crowd(FusedRunner(tiny_models.fresh(architecture), SMALL, library, threads=2), architecture)


def rounded(architecture: str, dtype: torch.dtype) -> LoadedModel:
    """A float32 model whose weights a file of `dtype` could have held, tiny ones among them."""
    model = tiny_models.fresh(architecture)
    parameters = dict(model.module.named_parameters())
    with torch.no_grad():
        for weight in parameters.values():
            weight.copy_(weight.to(dtype).float())
        parameters["model.layers.0.mlp.down_proj.weight"][0, :3] = torch.tensor([6e-8, -1.8e-7, 0.0]).to(
            dtype
        )
    return model


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "llama-wide"])
@pytest.mark.parametrize("chosen", kernels.SETS)
def test_weights_in_their_files_type_change_no_bit(
    chosen: str, architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows, where wide panels are kept for the next tile, and one row, where they are not."""
    library = kernels.loaded(chosen)
    narrow = FusedRunner(rounded(architecture, dtype), SMALL, library, threads=2)
    monkeypatch.setattr(llama, "stored_type", lambda model: model.dtype)
    wide = FusedRunner(rounded(architecture, dtype), SMALL, library, threads=2)
    for length in (1, 8, 31, 70):
        said = []
        for runner in (narrow, wide):
            prompt = [(i * 37) % 290 + 3 for i in range(length)]
            s = tiny_models.sequence("a", prompt, range(24), logprobs=20)
            said.append(tiny_models.advance(runner, (s, length))["a"])
        assert said[0] == said[1]


@needs_compiler
def test_a_wide_model_and_a_long_step_say_what_generate_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in several groups of tiles, and panels too large to be kept wide."""
    shape = "hidden=704&heads=11&kv_heads=1&intermediate=4200&layers=1&vocab=300&context=300&seed=1"
    source = resolve(f"random://llama?{shape}", "main", default_cache_dir())

    def fresh() -> LoadedModel:
        model = load(source, dtype="float32", device="cpu", max_model_len=0, progress=lambda _: None)
        for weight in model.module.parameters():
            weight.data = weight.data.half().float()
        return model

    capacity = Capacity(
        max_batch_tokens=300, max_batch_sequences=4, kv_blocks=20, block_tokens=16, max_model_tokens=300
    )
    prompt = [(i * 37) % 290 + 3 for i in range(280)]
    library = build.kernels()
    assert library is not None
    said = []
    for narrowest in (llama.stored_type, lambda model: model.dtype):
        monkeypatch.setattr(llama, "stored_type", narrowest)
        runner = FusedRunner(fresh(), capacity, library, threads=2)
        s = tiny_models.sequence("a", prompt, range(20), logprobs=20)
        said.append(tiny_models.advance(runner, (s, len(prompt)))["a"])
        for _ in range(3):
            tiny_models.advance(runner, (s, 1))
        assert tuple(s.tokens[len(prompt) :]) == tiny_models.generated(fresh().module, prompt, 4)
    assert said[0] == said[1]


def test_weights_are_narrowed_only_when_nothing_is_lost() -> None:
    """Both half types when they hold every matrix, bfloat16 first; one odd or infinite weight forbids it."""
    assert llama.stored_type(rounded("llama", torch.bfloat16)) is torch.bfloat16
    assert llama.stored_type(rounded("llama", torch.float16)) is torch.float16
    assert llama.stored_type(tiny_models.fresh("llama")) is torch.float32
    assert llama.stored_type(tiny_models.fresh("llama", dtype="bfloat16")) is torch.bfloat16
    for odd in (1.0001, float("inf"), float("nan")):
        model = rounded("llama", torch.float16)
        dict(model.module.named_parameters())["model.layers.1.self_attn.o_proj.weight"].data[3, 5] = odd
        assert llama.stored_type(model) is torch.float32


@needs_compiler
def test_bfloat16_weights_and_cache_stay_close_to_float32() -> None:
    """Same weights, widened: logits differ by bfloat16's rounding and no more."""
    library = build.kernels()
    assert library is not None
    results = []
    for dtype in ("bfloat16", "float32"):
        runner = FusedRunner(tiny_models.fresh("llama-wide", dtype=dtype), SMALL, library, threads=1)
        s = tiny_models.sequence("a", range(10, 40), range(10), logprobs=5)
        tiny_models.advance(runner, (s, 17))
        out = tiny_models.advance(runner, (s, 13))["a"].logprob
        assert out is not None
        results.append(out)
    assert results[0].logprob == pytest.approx(results[1].logprob, abs=0.15)


@needs_compiler
def test_bfloat16_through_the_kernel_serves_transformers_too() -> None:
    """The attention kernel under a bfloat16 module: close to torch's own attention."""
    library = build.kernels()
    found = []
    for used in (library, None):
        runner = TransformersRunner(tiny_models.fresh("qwen2", dtype="bfloat16"), SMALL, used)
        s = tiny_models.sequence("a", range(10, 40), range(10), logprobs=0)
        tiny_models.advance(runner, (s, 17))
        out = tiny_models.advance(runner, (s, 13))["a"].logprob
        assert out is not None
        found.append(out.logprob)
    assert found[0] == pytest.approx(found[1], abs=0.15)


@needs_compiler
def test_with_kernels_every_runner_draws_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runners that have the library use it, torch's path is for who has none; all draw the same."""
    library = build.kernels()
    assert library is not None
    rows: list[int] = []
    pick = KernelPicker.pick

    def counted(self: KernelPicker, logits: torch.Tensor, *others: Any) -> list[int]:
        rows.append(len(logits))
        return pick(self, logits, *others)

    monkeypatch.setattr(KernelPicker, "pick", counted)
    said = []
    for make in (
        lambda: FusedRunner(tiny_models.fresh("llama"), SMALL, library, threads=2),
        lambda: TransformersRunner(tiny_models.fresh("llama"), SMALL, library),
        lambda: TransformersRunner(tiny_models.fresh("llama"), SMALL),
    ):
        runner = make()
        pair = [
            tiny_models.sequence(str(i), [5, 6, 7], range(i * 5, i * 5 + 5), seed=i, **cut)
            for i, cut in enumerate(({"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.8}))
        ]
        tiny_models.advance(runner, *((s, 3) for s in pair))
        for _ in range(6):
            tiny_models.advance(runner, *((s, 1) for s in pair))
        said.append([s.tokens for s in pair])
    assert said[0] == said[1] == said[2]
    assert rows == [2] * 14


@needs_compiler
def test_the_module_gives_its_weights_up() -> None:
    """They are in memory once: packed."""
    model = tiny_models.fresh("llama")
    before = model.weight_bytes
    assert build.kernels() is not None
    runner = build_runner(tiny_models.engine_config(runner="auto"), model, SMALL)
    assert runner.name == "fused"
    assert model.weight_bytes < before / 10


@needs_compiler
def test_a_token_outside_the_vocabulary_is_an_error_and_no_wild_read() -> None:
    """C code must not be reached with it."""
    from headway_engine.stepping import StepError

    runner = build_runner(tiny_models.engine_config(runner="fused"), tiny_models.fresh("llama"), SMALL)
    s = tiny_models.sequence("a", [5, 300], range(2))
    with pytest.raises(StepError, match="outside the vocabulary of 300"):
        tiny_models.advance(runner, (s, 2))


def test_spans_say_whose_rows_are_whose() -> None:
    """Slots follow the block table; tables of a step lie one after the other."""
    found = native.spans([(5, 1, [7, 3, 9]), (2, 4, [1, 8])], block_tokens=4)
    assert found.tokens == 5
    assert found.chunks.tolist() == [[0, 1, 5, 0], [1, 4, 2, 2]]
    assert found.tables.tolist() == [7, 3, 1, 8]
    assert found.slots.tolist() == [3 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 8 * 4 + 0, 8 * 4 + 1]
    assert found.positions.tolist() == [5, 2, 3, 4, 5]


def test_without_a_compiler_everything_works_on_torch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings say why it is slower; auto falls back to transformers; the answer is the same."""
    with monkeypatch.context() as patch:
        patch.setenv("HEADWAY_CACHE", str(tmp_path))
        patch.setenv("CXX", str(tmp_path / "no-such-compiler"))
        with caplog.at_level(logging.WARNING, logger="headway_engine"):
            assert build.kernels() is None
            found = best_runner(tiny_models.engine_config(runner="auto"), tiny_models.fresh("llama"), SMALL)
    assert "torch's own attention is used" in caplog.text
    assert found.path.name == "transformers on torch"
    assert {left.reason for left in found.fallbacks} == {"unavailable"}
    assert all("no-such-compiler" in left.why for left in found.fallbacks)
    crowd(found.runner, "llama")


@needs_compiler
@pytest.mark.parametrize("content", [b"no library", b"\x7fELF", None])
def test_a_library_that_is_not_whole_is_built_anew(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A foreign file, or a library that a full disk cut short: loading that one would end the process."""
    path = tmp_path / "kernels" / build.library_name("baseline")
    path.parent.mkdir()
    if content is None:
        whole = (build.default_cache_dir() / "kernels" / path.name).read_bytes()
        content = whole[: len(whole) // 2]
    path.write_bytes(content)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        assert build.load("baseline").hw_panel_columns() > 0
    assert "kernels-broken" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        build.load("baseline")
    assert caplog.text == ""


@needs_compiler
def test_an_instruction_set_that_cannot_be_built_yields_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An older compiler does not know the newest instructions: that is a slower engine, and one line."""
    best = isa.available()[0]
    if len(isa.available()) < 2:
        pytest.skip(f"this CPU runs {best} only")
    compiler = tmp_path / "cxx"
    refused = isa.INSTRUCTION_SETS[best].compiler_flags[-1]
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *{refused}*) echo "unknown {refused}" >&2; exit 1;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.WARNING, logger="headway_engine"):
        library = build.kernels()
    assert library is not None
    assert "kernels-fallback" in caplog.text
    assert f"unknown {refused}" in caplog.text


def test_a_compiler_that_fails_leaves_no_library_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last words are in the error."""
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'error: no registers left' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match="no registers left"):
        build.compile_into(tmp_path / "kernels", "baseline")
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".lock"]


def test_processes_that_start_at_once_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, and takes what that made: a minute of every core, spent once."""
    compiler, runs, started = tmp_path / "cxx", tmp_path / "runs", tmp_path / "started"
    os.mkfifo(started)
    compiler.write_text(
        f"#!/bin/sh\necho run >> {runs}\necho > {started}\n"
        'while [ "$1" != -o ]; do shift; done\nread line < {go} && echo library > "$2"\n'.replace(
            "{go}", str(tmp_path / "go")
        )
    )
    compiler.chmod(0o755)
    os.mkfifo(tmp_path / "go")
    monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "kernels"
    builders = [threading.Thread(target=build.compile_into, args=(folder, "baseline", 0)) for _ in range(2)]
    builders[0].start()
    assert started.read_text() == "\n"
    builders[1].start()
    (tmp_path / "go").write_text("on\n")
    for builder in builders:
        builder.join(60)
        assert not builder.is_alive()
    assert runs.read_text() == "run\n"
    assert (folder / build.library_name("baseline")).read_bytes().startswith(b"library\n")
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@needs_compiler
def test_a_library_built_beforehand_is_used_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How a container image without g++ gets the kernels."""
    name = build.library_name(isa.available()[0])
    shutil.copy(build.default_cache_dir() / "kernels" / name, tmp_path / name)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv(build.KERNELS_ENV, str(tmp_path))
    library = build.kernels()
    assert library is not None
    assert library._name == os.fspath(tmp_path / name)
    monkeypatch.setenv(build.KERNELS_ENV, "off")
    assert build.kernels() is None


def test_a_change_in_any_source_gives_the_library_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library in the cache is used by its name alone, so the name must follow every header."""
    names = {build.library_name("baseline")}
    for header in build.HEADERS:
        changed = tmp_path / header.name
        changed.write_bytes(header.read_bytes() + b"// changed\n")
        others = tuple(changed if h == header else h for h in build.HEADERS)
        with monkeypatch.context() as patch:
            patch.setattr(build, "HEADERS", others)
            names.add(build.library_name("baseline"))
    assert len(names) == 1 + len(build.HEADERS)
    included = {line.split('"')[1] for line in build.SOURCE.read_text().splitlines() if '#include "' in line}
    assert included <= {header.name for header in build.HEADERS}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation"),
        ({"mlp_bias": True}, "biases"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type dynamic",
        ),
    ],
)
def test_what_the_lean_path_cannot_compute_it_leaves_alone(changes: dict[str, Any], reason: str) -> None:
    """Judged before any weight is taken over."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(
        "llama", vocab_size=300, num_key_value_heads=2, max_position_embeddings=64, **(sizes | changes)
    )
    module = AutoModelForCausalLM.from_config(config).eval()
    model = LoadedModel(module, config, None, torch.device("cpu"), torch.float32, 64, "a test", ())
    assert reason in (why_not_fused(model) or "")


def test_other_architectures_are_told_why() -> None:
    assert "GPT2LMHeadModel is not one of" in (why_not_fused(tiny_models.fresh("gpt2")) or "")
    assert "float16" in (why_not_fused(tiny_models.fresh("llama", dtype="float16")) or "")
    assert why_not_fused(tiny_models.fresh("qwen2")) is None
