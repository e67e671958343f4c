"""Weight files: sharded ones, old ones, and all the ways in which some of them may be wrong."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway_engine.model_source import ModelError
from headway_engine.weights import check_whole, read_folder, stored_dtype, weight_files
from support import tiny_models


def read(folder: Path, told: list[str] | None = None) -> Any:
    heard: list[str] = [] if told is None else told
    return read_folder(folder, f"file://{folder}", torch.float32, "", heard.append)


def same(module: Any, other: Any) -> bool:
    pairs = zip(module.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == name2 and torch.equal(a, b) for (name, a), (name2, b) in pairs)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    tiny_models.plain("qwen2").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_models.plain("qwen2").save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def as_pickles(folder: Path) -> None:
    """The folder as it was saved before safetensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def test_shards_are_one_model_and_progress_is_told(sharded: Path) -> None:
    """Files and size first, then each tenth."""
    told: list[str] = []
    assert same(read(sharded, told), tiny_models.plain("qwen2"))
    files = len(list(sharded.glob("model-*.safetensors")))
    assert f"{files} files, 0.00 GiB" in told[0]
    assert "loading weights: 50 % of 0.00 GiB" in told


def test_a_missing_shard_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        read(sharded)


def test_a_shard_cut_short_is_named_with_both_sizes(sharded: Path) -> None:
    cut = sorted(sharded.glob("model-*.safetensors"))[1]
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"{cut.name} has {size - 100} bytes and should have {size}"):
        read(sharded)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 200, b"\x02" + b"\0" * 7 + b"[]", b"<html>" * 50])
def test_what_is_no_safetensors_file_is_named(whole: Path, content: bytes) -> None:
    """Empty, too short, an error page saved under its name."""
    (whole / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors .* fetch it anew"):
        read(whole)


def test_a_pointer_in_place_of_the_weights_is_recognised(whole: Path) -> None:
    """A clone without Git LFS."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n"
    (whole / "model.safetensors").write_text(text)
    with pytest.raises(ModelError, match="git lfs pull"):
        read(whole)


def test_an_index_that_is_none_is_named(whole: Path) -> None:
    (whole / "model.safetensors").unlink()
    (whole / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is not an index"):
        read(whole)


def test_a_folder_without_weights_says_what_it_has(whole: Path) -> None:
    (whole / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights: .* there is config\.json"):
        weight_files(whole)


def test_missing_weights_are_never_made_up(whole: Path) -> None:
    """transformers would warn and go on with random numbers."""
    file = whole / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lack 1 weights of the model, such as model\.layers\.1\.mlp\.up_proj"
    ):
        read(whole)


def test_weights_of_another_size_are_refused(whole: Path) -> None:
    """A configuration that belongs to another model."""
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        read(whole)


def test_weights_that_nobody_uses_do_no_harm(whole: Path) -> None:
    """Heads for training, positions saved with the weights."""
    file = whole / "model.safetensors"
    save_file(load_file(file) | {"extra.head": torch.ones(3)}, file, metadata={"format": "pt"})
    assert same(read(whole), tiny_models.plain("qwen2"))


def test_old_pickles_of_tensors_load(whole: Path) -> None:
    as_pickles(whole)
    assert same(read(whole), tiny_models.plain("qwen2"))


class Evil:
    """Would make a file if it were called while being read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["archive", "bare"])
def test_a_pickle_that_holds_more_than_tensors_runs_nothing(whole: Path, form: str) -> None:
    """Neither as torch writes it now, nor as a bare pickle."""
    as_pickles(whole)
    witness = whole / "it-ran"
    if form == "archive":
        torch.save({"a": Evil(witness)}, whole / "pytorch_model.bin")
    else:
        (whole / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Evil(witness)}))
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        read(whole)
    assert not witness.exists()


def test_code_in_a_repository_is_never_run(whole: Path) -> None:
    """auto_map names it; the way out is another engine."""
    (whole / "modeling_own.py").write_text("raise SystemExit('it ran')")
    auto_map = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    config = {"model_type": "own", "auto_map": auto_map}
    (whole / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="code of its own"):
        read(whole)


def test_an_adapter_is_refused_rather_than_ignored(whole: Path) -> None:
    (whole / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge it into its base model"):
        read(whole)


def test_a_configuration_that_is_no_json_is_named(whole: Path) -> None:
    (whole / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read(whole)


def test_a_whole_file_passes(whole: Path) -> None:
    check_whole(whole / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_type_of_the_weights_is_read_from_their_files(dtype: torch.dtype, sharded: Path) -> None:
    """Of all shards; what most of the weights are in counts, and not what config.json says."""
    assert stored_dtype(sharded) is torch.float32
    for file in sharded.glob("model-*.safetensors"):
        tensors = {n: t if t.dim() == 1 else t.to(dtype) for n, t in load_file(file).items()}
        save_file(tensors, file)
    assert stored_dtype(sharded) is dtype


def test_the_type_of_pickled_weights_is_what_the_configuration_says(whole: Path) -> None:
    """Under its new name and its old one; where it says nothing, nobody knows."""
    as_pickles(whole)
    assert stored_dtype(whole) is torch.float32
    config = json.loads((whole / "config.json").read_text())
    del config["dtype"]
    (whole / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert stored_dtype(whole) is torch.bfloat16
    (whole / "config.json").write_text(json.dumps(config))
    assert stored_dtype(whole) is None


def test_the_type_of_files_that_are_not_whole_is_nobodys_business(whole: Path) -> None:
    """Who reads them says what is wrong."""
    file = whole / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    assert stored_dtype(whole) is None
    file.unlink()
    assert stored_dtype(whole) is None
    save_file({"a": torch.zeros(4, dtype=torch.int8)}, file)
    assert stored_dtype(whole) is None, "codes of a quantization are no type to compute in"
