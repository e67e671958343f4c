"""What a model's file holds decides what is served: another name changes nothing, other bytes everything."""

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from headway_engine import drafts, file_digest, gguf_model, model_source
from headway_engine.file_digest import Identity
from headway_engine.model_error import ModelError
from headway_engine.model_source import ModelSource, resolve, weights_folder
from support import tiny_gguf


def quiet(_: str) -> None:
    """Progress that nobody reads."""


def resolved(path: Path, tmp_path: Path) -> ModelSource:
    return resolve(f"file://{path}", "main", tmp_path / "cache", quiet)


def served(path: Path, tmp_path: Path) -> dict[str, Any]:
    """The weights that an engine would load for this file."""
    folder = weights_folder(resolved(path, tmp_path), quiet)
    return dict(load_file(folder / "model.safetensors"))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def remember_all(monkeypatch: pytest.MonkeyPatch, from_bytes: int = 0) -> None:
    """Digests of small files are remembered too, and of files that were written just now."""
    monkeypatch.setitem(file_digest.content_of.__kwdefaults__, "remember_from_bytes", from_bytes)
    monkeypatch.setattr(Identity, "settled", lambda *_: True)


def never_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("write_weights", "write_tokenizer"):
        monkeypatch.setattr(gguf_model, name, lambda *_: pytest.fail("converted again"))


def overwrite_the_middle(path: Path, other: Path) -> None:
    """All but the first and the last KiB, in place."""
    middle = other.read_bytes()[1024:-1024]
    with path.open("r+b") as file:
        file.seek(1024)
        file.write(middle)


def overwrite_and_restore_times(path: Path, other: Path) -> None:
    before = path.stat()
    overwrite_the_middle(path, other)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def rename_over(path: Path, other: Path) -> None:
    copy = path.with_suffix(".new")
    shutil.copy(other, copy)
    os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    copy.rename(path)


@pytest.mark.parametrize("change", [overwrite_the_middle, overwrite_and_restore_times, rename_over])
@pytest.mark.parametrize("remember_from_bytes", [0, file_digest.REMEMBER_FROM_BYTES])
def test_other_weights_in_a_file_of_the_same_name_and_size_are_served(
    change: Callable[[Path, Path], None],
    remember_from_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that was trained further has the same size and often the same beginning and end. Whether its
    digest is read at every start or remembered."""
    remember_all(monkeypatch, remember_from_bytes)
    path = tiny_gguf.write(tmp_path / "m.gguf", seed=1)
    other = tiny_gguf.write(tmp_path / "other.gguf", seed=2)
    before = served(path, tmp_path)
    change(path, other)
    assert path.stat().st_size == other.stat().st_size
    after = served(path, tmp_path)
    assert not same(before, after)
    assert same(after, served(path, tmp_path / "another cache"))


def test_the_same_bytes_elsewhere_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name, another folder, a link: one place in the cache."""
    path = tiny_gguf.write(tmp_path / "m.gguf")
    first = served(path, tmp_path)
    never_converted(monkeypatch)
    (tmp_path / "deep").mkdir()
    copy = Path(shutil.copy(path, tmp_path / "deep" / "another-name.gguf"))
    link = tmp_path / "link.gguf"
    link.symlink_to(copy)
    for elsewhere in (copy, link):
        assert same(served(elsewhere, tmp_path), first)
        assert resolved(elsewhere, tmp_path).name == elsewhere.stem
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


@pytest.mark.parametrize("part", ["write_tokenizer", "write_weights"])
@pytest.mark.parametrize("change", [overwrite_the_middle, overwrite_and_restore_times, rename_over])
def test_a_file_that_changes_while_it_is_converted_leaves_nothing_in_the_cache(
    part: str, change: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of it may be half of each. The next start serves what the file holds then."""
    path = tiny_gguf.write(tmp_path / "m.gguf", seed=1)
    other = tiny_gguf.write(tmp_path / "other.gguf", seed=2)
    really = getattr(gguf_model, part)

    def meanwhile(gguf: Path, out: Path) -> None:
        change(path, other)
        really(gguf, out)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_model, part, meanwhile)
        with pytest.raises(ModelError, match=r"m.gguf changed while it was read, and nothing .* kept"):
            served(path, tmp_path)
    made = {p.name for p in (tmp_path / "cache" / "models").glob("*/*") if p.is_dir()}
    assert made == ({"tokenizer"} if part == "write_weights" else set())
    after = served(path, tmp_path)
    assert same(after, served(Path(shutil.copy(path, tmp_path / "copy.gguf")), tmp_path / "elsewhere"))


def test_a_record_that_is_wrong_puts_nothing_wrong_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where something has to be converted, the file is read, whatever is remembered of it; the record goes,
    so that the start after serves."""
    remember_all(monkeypatch)
    path = tiny_gguf.write(tmp_path / "m.gguf")
    records = tmp_path / "cache" / "digests"
    records.mkdir(parents=True)
    record = records / f"{Identity.of(path).key}.json"
    record.write_text('{"digest": "' + "0" * 64 + '"}')
    with pytest.raises(ModelError, match="changed while it was read"):
        resolved(path, tmp_path)
    assert not record.exists()
    assert len(served(path, tmp_path)) > 10


def test_a_start_with_everything_in_the_cache_reads_and_converts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 GB take minutes."""
    remember_all(monkeypatch)
    path = tiny_gguf.write(tmp_path / "m.gguf")
    first = served(path, tmp_path)
    never_converted(monkeypatch)
    monkeypatch.setattr(file_digest, "digest_of", lambda *_, **__: pytest.fail("read again"))
    assert same(served(path, tmp_path), first)
    content = resolved(path, tmp_path).content
    assert content is not None
    assert content.record is not None, "so that the engine has it read again beside its work"


def test_what_would_not_fit_is_refused_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four-bit weights grow to four times their size; a quarter of an hour later is late to hear of it."""
    path = tiny_gguf.write(tmp_path / "m.gguf")
    source = resolved(path, tmp_path)
    needed = gguf_model.unpacked_bytes(path)
    monkeypatch.setattr(gguf_model, "write_weights", lambda *_: pytest.fail("converted"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": needed - 1}))
    with pytest.raises(
        drafts.DiskFull, match=r"^the cache is too small: m.gguf.* takes 0.1 MiB in .*HEADWAY"
    ):
        weights_folder(source, quiet)


def test_unpacked_bytes_are_those_of_the_files_that_are_written(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", wide=4096)
    folder = weights_folder(resolved(path, tmp_path), quiet)
    written = sum(file.stat().st_size for file in folder.iterdir())
    assert 0 <= written - gguf_model.unpacked_bytes(path) < 10_000


CONVERTS = """
import sys, time
from pathlib import Path
from headway_engine import gguf_model
from headway_engine.model_source import resolve, weights_folder

def write_weights(gguf, out):
    (out / "model.safetensors").write_bytes(bytes(1 << 20))
    print("written", flush=True)
    if sys.argv[3] == "stuck":
        time.sleep(600)

gguf_model.write_tokenizer = lambda gguf, out: None
gguf_model.unpacked_bytes = lambda gguf: 1 << 20
gguf_model.write_weights = write_weights
print(weights_folder(resolve(sys.argv[1], "main", Path(sys.argv[2])), lambda _: None))
"""


def test_a_crash_loop_does_not_fill_the_volume(tmp_path: Path) -> None:
    """Killed each time with the weights written and not yet in place: the drafts do not add up."""
    path = tiny_gguf.write(tmp_path / "m.gguf")
    cache = tmp_path / "cache"

    def start(how: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CONVERTS, f"file://{path}", str(cache), how],
            stdout=subprocess.PIPE,
            text=True,
        )

    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = start("stuck")
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            assert len(list(cache.glob("models/*/.*"))) == 1
            process.send_signal(number)
            process.wait(60)
        finally:
            process.kill()
            process.communicate()
        assert len(list(cache.glob("models/*/.*/model.safetensors"))) == 1, "what a kill leaves"
    last = start("")
    output, _ = last.communicate(timeout=120)
    assert (Path(output.splitlines()[-1]) / "model.safetensors").is_file()
    assert [p for p in cache.rglob("*") if drafts.SUFFIX in p.name] == []


def test_every_start_sweeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever kind of model it serves."""
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    left = folder / f".library.so.{drafts._here(folder)}.abcd1234{drafts.SUFFIX}"
    left.mkdir()
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        model_source.resolve("random://llama", "main", tmp_path / "cache")
    assert not left.exists()
    assert "draft-removed" in caplog.text
