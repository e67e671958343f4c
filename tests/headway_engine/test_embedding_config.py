"""What a model's folder says of its embeddings."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway_engine.core_process import load_model
from headway_engine.embedding_config import embeddings_of
from headway_engine.messages import Embeddings, NoEmbeddings
from headway_engine.sequence import Pooling
from support import tiny_models

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def folder(path: Path, **files: Any) -> Path:
    """Files by name: modules, pooling, config."""
    places = {"modules": "modules.json", "pooling": "1_Pooling/config.json", "config": "config.json"}
    (path / "1_Pooling").mkdir()
    for name, content in files.items():
        (path / places[name]).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def pooling_of(found: Embeddings | NoEmbeddings) -> Pooling:
    assert isinstance(found, Embeddings), found
    return found.pooling


def test_a_folder_that_says_nothing_means_the_last_token(tmp_path: Path) -> None:
    """And so does no folder at all, and a GGUF file, and a file that cannot be read."""
    assert embeddings_of(None, "auto", 64) == Embeddings(pooling=Pooling.LAST, dimensions=64)
    assert pooling_of(embeddings_of(folder(tmp_path), "auto", 64)) is Pooling.LAST
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert pooling_of(embeddings_of(tmp_path / "x.gguf", "auto", 64)) is Pooling.LAST
    (tmp_path / "modules.json").write_text("{")
    assert pooling_of(embeddings_of(tmp_path, "auto", 64)) is Pooling.LAST


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": "lasttoken", "word_embedding_dimension": 64}, Pooling.LAST),
        ({"word_embedding_dimension": 64}, Pooling.LAST),
    ],
)
def test_sentence_transformers_file_decides(tmp_path: Path, said: dict[str, Any], pooling: Pooling) -> None:
    place = folder(tmp_path, modules=[TRANSFORMER, POOLING, NORMALIZE], pooling=said)
    assert pooling_of(embeddings_of(place, "auto", 64)) is pooling


def test_the_option_is_stronger_than_the_folder(tmp_path: Path) -> None:
    place = folder(tmp_path, modules=[TRANSFORMER, POOLING], pooling={"pooling_mode_mean_tokens": True})
    assert pooling_of(embeddings_of(place, "last", 64)) is Pooling.LAST
    assert pooling_of(embeddings_of(None, "mean", 64)) is Pooling.MEAN


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        ({"pooling_mode": "max"}, "max"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
    ],
)
def test_a_pooling_that_is_not_handled_is_named_with_a_way_out(
    tmp_path: Path, said: dict[str, Any], named: str
) -> None:
    """Vectors that are pooled in another way than the model was trained for are noise."""
    place = folder(tmp_path, pooling=said)
    found = embeddings_of(place, "auto", 64)
    assert isinstance(found, NoEmbeddings)
    assert named in found.reason
    assert "--pooling" in found.reason
    assert pooling_of(embeddings_of(place, "mean", 64)) is Pooling.MEAN


def test_layers_after_the_pooling_are_not_skipped_silently(tmp_path: Path) -> None:
    """A Dense layer makes the vectors: without it they are others. No option can change that."""
    place = folder(tmp_path, modules=[TRANSFORMER, POOLING, DENSE], pooling={"pooling_mode": "mean"})
    for wanted in ("auto", "mean"):
        found = embeddings_of(place, wanted, 64)
        assert isinstance(found, NoEmbeddings)
        assert "Dense" in found.reason


def test_a_runner_without_hidden_states_gives_none() -> None:
    assert isinstance(embeddings_of(None, "mean", 0), NoEmbeddings)


def test_only_a_model_that_says_so_has_vectors_that_may_be_cut(tmp_path: Path) -> None:
    """`matryoshka_dimensions` lists sizes; `is_matryoshka` alone allows any."""
    place = folder(tmp_path, config={"matryoshka_dimensions": [16, 32]})
    some = embeddings_of(place, "auto", 64)
    assert isinstance(some, Embeddings)
    assert (some.cuts, some.any_cut) == ((16, 32), False)
    (tmp_path / "config.json").write_text(json.dumps({"is_matryoshka": True}))
    free = embeddings_of(tmp_path, "auto", 64)
    assert isinstance(free, Embeddings)
    assert (free.cuts, free.any_cut) == ((), True)


@pytest.mark.parametrize(
    ("runner", "option", "pooling"),
    [("transformers", "auto", Pooling.MEAN), ("auto", "auto", Pooling.MEAN), ("auto", "last", Pooling.LAST)],
)
def test_a_loaded_core_says_how_it_pools(tmp_path: Path, runner: str, option: str, pooling: Pooling) -> None:
    """The whole way from a folder, and from the option, to what the front end hears."""
    model: Any = tiny_models.fresh("llama")
    model.module.save_pretrained(tmp_path)
    assert model.tokenizer_dir is not None
    shutil.copytree(model.tokenizer_dir, tmp_path, dirs_exist_ok=True)
    place = folder(tmp_path, pooling={"pooling_mode_mean_tokens": True})
    settings = tiny_models.engine_config(model=place.as_uri(), runner=runner, pooling=option, dtype="float32")
    core = load_model(settings, lambda _: None)
    assert core.ready.embeddings == Embeddings(pooling=pooling, dimensions=32)
