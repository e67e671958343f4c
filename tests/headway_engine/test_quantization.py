"""Weights in fewer bits: packed while they are read, or by the checkpoint; refused where a library lacks."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway_engine import config as engine_config
from headway_engine.capacity import step_bytes
from headway_engine.model import LoadedModel, load
from headway_engine.model_source import ModelError, resolve
from headway_engine.quantization import named_method, on_the_fly
from headway_engine.runner import build_runner
from support import runners, tiny_models

CAPACITY = runners.capacity()
PROMPT = tuple(range(40, 52))

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed (it is in no extra: it makes every start slower)",
)


def loaded(folder: Path, quantize: str = "", dtype: str = "float32") -> LoadedModel:
    source = resolve(f"file://{folder}", "main", folder / "cache")
    return load(
        source, dtype=dtype, device="cpu", max_model_len=0, progress=lambda _: None, quantize=quantize
    )


def continued(model: LoadedModel, tokens: int) -> tuple[str, list[int]]:
    """What the engine says with this model, and through which runner."""
    runner = build_runner(tiny_models.engine_config(runner="auto"), model, CAPACITY)
    s = tiny_models.sequence("a", PROMPT, range(16))
    tiny_models.advance(runner, (s, 7))
    tiny_models.advance(runner, (s, 5))
    while s.output_len < tokens:
        tiny_models.advance(runner, (s, 1))
    return runner.name, s.tokens[len(PROMPT) :]


def generated(module: Any, tokens: int) -> list[int]:
    return list(tiny_models.generated(module, PROMPT, tokens))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.plain("llama-wide").save_pretrained(tmp_path)
    return tmp_path


def packed(folder: Path) -> Any:
    """The model as transformers and torchao pack it."""
    packing = on_the_fly("int8wo", {})
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=packing
    ).eval()


@needs_torchao
def test_int8_weights_say_what_transformers_says_with_them(folder: Path) -> None:
    """Packed while read: a fraction of the memory, and the fused path, which has no kernel for them, left."""
    plain_bytes = loaded(folder).weight_bytes
    model = loaded(folder, "int8wo")
    assert model.weight_bytes < plain_bytes / 2
    assert continued(model, 12) == ("transformers", generated(packed(folder), 12))


@needs_torchao
def test_a_checkpoint_that_torchao_wrote_loads_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Its config.json names the method; asking for another packing on top is refused."""
    there = tmp_path / "packed"
    module = packed(folder)
    module.save_pretrained(there)
    assert continued(loaded(there), 12) == ("transformers", generated(module, 12))
    with pytest.raises(ModelError, match=r"quantized already \(torchao\); leave --quantization out"):
        loaded(there, "int8wo")


@needs_torchao
def test_capacity_counts_packed_weights_unpacked_one_at_a_time(folder: Path) -> None:
    """A matrix is widened while it is used."""
    config = tiny_models.engine_config()
    plain, int8 = loaded(folder), loaded(folder, "int8wo")
    widest = 192 * 331 * 4  # hidden size, vocabulary, bytes
    extra = step_bytes(config, int8, int8.layer_shapes) - step_bytes(config, plain, plain.layer_shapes)
    assert extra == widest


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("bitsandbytes", "bitsandbytes"),
        ("gptq", "optimum"),
        ("awq", "gptqmodel"),
        ("compressed-tensors", "compressed-tensors"),
        ("hqq", "hqq"),
    ],
)
def test_a_method_whose_library_is_not_installed_names_it(folder: Path, method: str, package: str) -> None:
    """At start, with the package to install."""
    settings: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": 32, "load_in_8bit": True}
    if method != "bitsandbytes":
        del settings["load_in_8bit"]
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    with pytest.raises(ModelError) as caught:
        loaded(folder)
    assert f"quantized with {method}" in str(caught.value)
    assert package in str(caught.value)


def test_an_older_bitsandbytes_configuration_is_understood() -> None:
    assert named_method({"quantization_config": {"load_in_4bit": True}}) == "bitsandbytes"
    assert named_method({}) == ""
    with pytest.raises(ModelError, match="is not an object"):
        named_method({"quantization_config": "int8"})


def test_packing_without_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="pip install torchao"):
        on_the_fly("int8wo", {})


def test_a_random_model_cannot_be_packed(tmp_path: Path) -> None:
    source = resolve(tiny_models.uri("llama"), "main", tmp_path)
    with pytest.raises(ModelError, match="leave --quantization out"):
        load(
            source, dtype="float32", device="cpu", max_model_len=0, progress=lambda _: None, quantize="int8wo"
        )


def test_packed_weights_without_a_configuration_are_refused(folder: Path) -> None:
    """Scales beside the weights and no word of them: numbers without meaning."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(3)}, file)
    with pytest.raises(ModelError, match="says nothing of it"):
        loaded(folder)


def test_the_command_line_knows_the_packings() -> None:
    parsed = engine_config.parse(["--model", "m", "--quantization", "int8wo"])
    assert parsed.quantization == "int8wo"
    assert engine_config.parse(["--model", "m"]).quantization == ""
    with pytest.raises(SystemExit):
        engine_config.parse(["--model", "m", "--quantization", "int3"])


def test_bfloat16_through_the_fused_path_is_float32_with_rounded_weights(folder: Path) -> None:
    """Weights are stored in 16 bits and widened while they are read; everything else is float32."""
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().float()
    expected = generated(module, 12)
    model = loaded(folder, dtype="bfloat16")
    assert continued(model, 12) == ("fused", expected)
