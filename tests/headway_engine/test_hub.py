"""hf:// against a hub on loopback: pinned revisions, broken connections, refusals in words, secrets kept."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway_engine import hub as hub_module
from headway_engine.model import load
from headway_engine.model_source import ModelError, SourceKind, resolve, weights_folder
from support import tiny_models
from support.engine_server import wait_until
from support.fake_hub import REPOSITORY, TOKEN, FakeHub, fake_hub

URI = f"hf://{REPOSITORY}"
FETCH = """
import sys
from pathlib import Path
from headway_engine.model_source import resolve, weights_folder
source = resolve(sys.argv[1], "main", Path(sys.argv[2]))
print(weights_folder(source, lambda what: print(what, file=sys.stderr, flush=True)))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its tokenizer, as a repository has them, with copies in other forms beside."""
    folder = tmp_path_factory.mktemp("repository")
    tiny_models.plain("llama").save_pretrained(folder)
    tokenizer = tiny_models.source("llama").tokenizer_dir
    assert tokenizer is not None
    for path in tokenizer.iterdir():
        shutil.copy(path, folder)
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"the same again")
    (folder / "pytorch_model.bin").write_bytes(b"the same again")
    return folder


@pytest.fixture
def hub(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The hub that this process talks to, with an empty cache and no token."""
    copy = tmp_path / "repository"
    shutil.copytree(files, copy)
    with fake_hub(copy) as running:
        files_at = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", running.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files_at)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


def fetched(tmp_path: Path, revision: str = "main") -> Path:
    return weights_folder(resolve(URI, revision, tmp_path / "cache"), lambda _: None)


def started(hub: FakeHub, tmp_path: Path, *, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Another process that fetches into the same cache."""
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, URI, str(tmp_path / "cache")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
            **(env or {}),
        },
    )


def test_a_repository_loads_and_only_what_is_needed_is_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizer first, weights later, in one form; then everything without the hub."""
    source = resolve(URI, "main", tmp_path / "cache")
    assert source.kind is SourceKind.HUB
    assert source.name == "tiny"
    assert source.tokenizer_dir is not None
    assert not hub.bodies("model.safetensors")
    model = load(source, dtype="float32", device="cpu", max_model_len=0, progress=lambda _: None)
    assert model.max_model_tokens == 97
    assert len(hub.bodies("model.safetensors")) == 1
    fetched_names = {path.rsplit("/", 1)[1] for method, path, _, _ in hub.seen if "/resolve/" in path}
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & fetched_names
    asked = len(hub.seen)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetched(tmp_path).name == hub.commit
    assert len(hub.seen) == asked


def test_the_weights_are_of_the_tokenizers_commit(hub: FakeHub, tmp_path: Path) -> None:
    """The branch moves between the two fetches."""
    source = resolve(URI, "main", tmp_path / "cache")
    first, hub.branch = hub.commit, "elsewhere"
    assert weights_folder(source, lambda _: None).name == first


def test_a_commit_can_be_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    assert fetched(tmp_path, hub.commit).name == hub.commit


def test_weights_that_are_there_as_pickles_only_are_fetched_as_such(hub: FakeHub, tmp_path: Path) -> None:
    """They are read as tensors only."""
    (hub.folder / "model.safetensors").unlink()
    assert (fetched(tmp_path) / "pytorch_model.bin").is_file()


def test_a_broken_connection_is_taken_up_where_it_broke(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, and the rest is asked for by range; the bytes are those of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.break_after["model.safetensors"] = [50_000, 30_000]
    folder = fetched(tmp_path)
    assert hub.bodies("model.safetensors") == [None, "bytes=50000-", "bytes=80000-"]
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()


def test_progress_is_told_in_bytes(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What /readyz and the log show while a model is fetched."""
    monkeypatch.setattr(hub_module, "PROGRESS_EVERY_S", 0.0)
    told: list[str] = []
    folder = hub_module.snapshot(REPOSITORY, "main", ("*.safetensors",), told.append, progress_every_s=0.0)
    assert folder.is_dir()
    assert told
    assert told[-1].startswith(f"fetching {REPOSITORY}: 0.00 of 0.00 GiB")


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        ({"gated": True}, "is gated; accept its terms on the hub and set HF_TOKEN (hfTokenSecretRef)"),
        ({"needs_token": True}, "the hub knows no someone/tiny, or the token may not see it"),
        ({"branch": "trunk"}, "has no revision 'main'"),
        ({"status": 503}, "HTTP 503"),
        ({"status": 403}, "refused the token for someone/tiny (HTTP 403)"),
    ],
)
def test_a_refusal_is_a_sentence(hub: FakeHub, mood: dict[str, object], words: str, tmp_path: Path) -> None:
    """It names the setting to change."""
    for name, value in mood.items():
        setattr(hub, name, value)
    with pytest.raises(ModelError) as caught:
        resolve(URI, "main", tmp_path / "cache")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_wrong_token_is_refused_without_being_shown(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right one is sent, and opens the door."""
    hub.needs_token = True
    monkeypatch.setenv("HF_TOKEN", "hf_wrongbutstillsecret")
    with pytest.raises(ModelError, match="check HF_TOKEN") as caught:
        resolve(URI, "main", tmp_path / "cache")
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetched(tmp_path).name == hub.commit


def test_a_hub_that_is_not_there_is_named_with_the_ways_out(hub: FakeHub, tmp_path: Path) -> None:
    """Connection refused."""
    hub.shutdown()
    hub.server_close()
    with pytest.raises(ModelError, match="HF_ENDPOINT and HF_HOME, or use file:///PATH"):
        resolve(URI, "main", tmp_path / "cache")


def test_a_volume_that_fills_up_is_named_with_what_to_set(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the network, which did its part."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(ModelError, match=r"someone/tiny did not fit in .*hub; .*HF_HOME") as caught:
        resolve(URI, "main", tmp_path / "cache")
    assert "network" not in str(caught.value)


def test_half_a_model_without_the_hub_is_not_taken_for_whole(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is in the cache, the weights are not, and nothing may be fetched."""
    source = resolve(URI, "main", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not in the hub cache"):
        weights_folder(source, lambda _: None)


def test_a_fetch_that_was_killed_is_done_again_by_the_next(hub: FakeHub, tmp_path: Path) -> None:
    """kill -9 in mid-download: nothing of it is taken for whole, and its part is cleared when it is old."""
    hub.hold["model.safetensors"] = 40_000
    killed = started(hub, tmp_path)
    assert hub.holding.wait(60)
    blobs = tmp_path / "hub" / "models--someone--tiny" / "blobs"
    wait_until(lambda: any(blobs.glob("*.incomplete")), "a part of the weights")
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    hub.hold.clear()
    hub.go_on.set()
    (part,) = blobs.glob("*.incomplete")
    hub_module.clear_stale(tmp_path / "hub", REPOSITORY)
    assert part.exists(), "it might still be written to"
    hub_module.clear_stale(tmp_path / "hub", REPOSITORY, now_s=part.stat().st_mtime + 601)
    assert not part.exists()
    folder = fetched(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()


def test_a_part_that_somebody_is_writing_is_left_alone(tmp_path: Path) -> None:
    """Its lock is held, however old it looks."""
    import fcntl

    blobs, locks = tmp_path / "models--a--b" / "blobs", tmp_path / ".locks" / "models--a--b"
    blobs.mkdir(parents=True)
    locks.mkdir(parents=True)
    part = blobs / "abc.1234.incomplete"
    part.write_bytes(b"x")
    with (locks / "abc.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        hub_module.clear_stale(tmp_path, "a/b", older_than_s=-1)
        assert part.exists()
    hub_module.clear_stale(tmp_path, "a/b", older_than_s=-1)
    assert not part.exists()


def test_two_processes_that_fetch_at_once_both_get_it_whole(hub: FakeHub, tmp_path: Path) -> None:
    """The second comes while the first one is in the middle; no byte of the weights is fetched twice."""
    hub.hold["model.safetensors"] = 40_000
    first = started(hub, tmp_path)
    assert hub.holding.wait(60)
    second = started(hub, tmp_path)
    requests = len(hub.seen)
    wait_until(lambda: len(hub.seen) > requests, "the second one asks the hub")
    hub.go_on.set()
    folders = {process.communicate(timeout=60)[0].strip() for process in (first, second)}
    assert len(folders) == 1
    (folder,) = folders
    whole = (hub.folder / "model.safetensors").read_bytes()
    assert (Path(folder) / "model.safetensors").read_bytes() == whole
    assert len(hub.bodies("model.safetensors")) == 1


def test_a_process_shows_its_token_to_the_hub_alone(hub: FakeHub, tmp_path: Path) -> None:
    """In neither of its outputs, when it fetches and when it fails."""
    hub.needs_token = True
    for token in (TOKEN, "hf_wrongbutstillsecret"):
        shutil.rmtree(tmp_path / "hub", ignore_errors=True)
        process = started(hub, tmp_path, env={"HF_TOKEN": token, "HF_DEBUG": "1"})
        out, err = process.communicate(timeout=60)
        assert (process.returncode == 0) is (token == TOKEN), err
        assert token not in out + err
    assert any(authorization == f"Bearer {TOKEN}" for _, _, _, authorization in hub.seen)


def test_a_sharded_repository_with_a_shard_missing_names_it(hub: FakeHub, tmp_path: Path) -> None:
    """As after an upload that broke off."""
    (hub.folder / "model.safetensors").unlink()
    (hub.folder / "pytorch_model.bin").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (hub.folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    source = resolve(URI, "main", tmp_path / "cache")
    with pytest.raises(ModelError, match=r"not there: model-00002-of-00002\.safetensors"):
        load(source, dtype="float32", device="cpu", max_model_len=0, progress=lambda _: None)
