"""Tokenizers in older forms: converted once, into the cache, and saying what the original says."""

import io
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from headway_engine import tokenizer_files
from headway_engine.model_source import ModelError, resolve
from headway_engine.text import Tokeniser
from support import tiny_models

TEXT = "the lowest newest widest river in the north\n" * 3


def folder_with_model(path: Path) -> Path:
    tiny_models.plain("llama").save_pretrained(path)
    return path


def byte_pairs(path: Path) -> None:
    """vocab.json and merges.txt, as GPT-2 has them."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT], vocab_size=290, special_tokens=["<|endoftext|>"])
    trained.save_model(str(path))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def sentence_pieces(path: Path) -> None:
    """tokenizer.model, as Llama has it."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20),
        model_writer=model,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        hard_vocab_limit=False,
    )
    (path / "tokenizer.model").write_bytes(model.getvalue())
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("make", [byte_pairs, sentence_pieces])
def test_an_older_form_is_converted_and_says_the_same(make, tmp_path: Path) -> None:
    """The front end reads the outcome; the folder itself is left as it was."""
    folder = folder_with_model(tmp_path / "model")
    make(folder)
    before = sorted(path.name for path in folder.iterdir())
    source = resolve(f"file://{folder}", "main", tmp_path / "cache")
    assert source.tokenizer_dir is not None
    assert source.tokenizer_dir.is_relative_to(tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == before
    ours = Tokeniser(source.tokenizer_dir)
    for text in ("the lowest river", "naïve 日本 🚂", " two  spaces\nand a line"):
        expected = AutoTokenizer.from_pretrained(folder).encode(text)
        assert ours.encode(text) == expected
        assert Tokenizer.from_file(str(source.tokenizer_dir / "tokenizer.json")).decode(expected).strip()


def test_sentence_pieces_are_those_of_the_original_library(tmp_path: Path) -> None:
    """Not only of transformers' own conversion."""
    import sentencepiece

    folder = folder_with_model(tmp_path / "model")
    sentence_pieces(folder)
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    source = resolve(f"file://{folder}", "main", tmp_path / "cache")
    assert source.tokenizer_dir is not None
    ours = Tokenizer.from_file(str(source.tokenizer_dir / "tokenizer.json"))
    for text in ("the lowest river", "naïve 日本", "newest widest north"):
        assert ours.encode(text, add_special_tokens=False).ids == original.encode(text)


def test_it_is_converted_once_and_again_when_it_changes(tmp_path: Path, monkeypatch) -> None:
    """A start reads the cache; another file of the same name is another tokenizer."""
    folder = folder_with_model(tmp_path / "model")
    byte_pairs(folder)
    first = resolve(f"file://{folder}", "main", tmp_path / "cache").tokenizer_dir
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_files, "convert", lambda *_: pytest.fail("converted again"))
        assert resolve(f"file://{folder}", "main", tmp_path / "cache").tokenizer_dir == first
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "note": "new"}')
    assert resolve(f"file://{folder}", "main", tmp_path / "cache").tokenizer_dir != first


def test_a_further_chat_template_is_part_of_the_content(tmp_path: Path) -> None:
    """It lies in a folder of its own, which a conversion reads too."""
    folder = folder_with_model(tmp_path / "model")
    byte_pairs(folder)
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    found = set()
    for text in ("one", "two"):
        (templates / "tool_use.jinja").write_text(text)
        converted = resolve(f"file://{folder}", "main", tmp_path / "cache").tokenizer_dir
        assert converted is not None
        assert (converted / "additional_chat_templates" / "tool_use.jinja").read_text() == text
        found.add(converted)
    assert len(found) == 2


def test_the_same_tokenizer_in_another_folder_is_converted_once(tmp_path: Path) -> None:
    """Weights are no part of it."""
    folder = folder_with_model(tmp_path / "model")
    byte_pairs(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "another name"))
    (copy / "model.safetensors").write_bytes(b"other weights")
    one, other = (
        resolve(f"file://{place}", "main", tmp_path / "cache").tokenizer_dir for place in (folder, copy)
    )
    assert one == other


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "vocab.bpe", "source.spm", "tokens.vocab"])
def test_every_file_that_may_be_read_counts(name: str, tmp_path: Path) -> None:
    """Tokenizers' files have many names; two files never look like one."""
    (tmp_path / name).write_text("ab")
    first = tokenizer_files.digest(tmp_path)
    (tmp_path / name).write_text("ac")
    second = tokenizer_files.digest(tmp_path)
    (tmp_path / name).write_text("a")
    (tmp_path / f"{name}c").write_text("")
    assert len({first, second, tokenizer_files.digest(tmp_path)}) == 3


def test_a_folder_that_changes_while_it_is_converted_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    folder = folder_with_model(tmp_path / "model")
    byte_pairs(folder)
    really = tokenizer_files.convert

    def meanwhile(folder: Path, out: Path) -> None:
        really(folder, out)
        (folder / "merges.txt").write_text("#version: 0.2\n")

    monkeypatch.setattr(tokenizer_files, "convert", meanwhile)
    with pytest.raises(ModelError, match=r"model changed while it was read"):
        resolve(f"file://{folder}", "main", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "tokenizers").iterdir() if path.is_dir()]


def test_a_folder_that_has_one_is_used_as_it_is(tmp_path: Path) -> None:
    folder = folder_with_model(tmp_path)
    tokenizer = tiny_models.source("llama").tokenizer_dir
    assert tokenizer is not None
    shutil.copy(tokenizer / "tokenizer.json", folder)
    assert resolve(f"file://{folder}", "main", tmp_path / "cache").tokenizer_dir == folder


def test_a_tokenizer_that_cannot_be_read_names_its_folder(tmp_path: Path) -> None:
    """And leaves nothing in the cache that would look like one."""
    folder = folder_with_model(tmp_path / "model")
    (folder / "tokenizer.model").write_bytes(b"not a model")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ModelError, match=r"the tokenizer in .*model cannot be"):
        resolve(f"file://{folder}", "main", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache" / "tokenizers").iterdir() if path.is_dir()]
