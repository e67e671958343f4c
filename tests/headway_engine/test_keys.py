"""API keys: whose they are, as files and folders say it, and what a change of them does."""

import json
import logging
import os
import time
from pathlib import Path

import pytest

from headway_engine.keys import LOOK_EVERY_S, KeyRing, KeysError


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_a_look(self) -> None:
        self.now_s += LOOK_EVERY_S


@pytest.fixture
def clock() -> Clock:
    return Clock()


def mounted(folder: Path, **files: str) -> None:
    """Swap the content of a folder as the kubelet does: links through `..data` to a folder of its own."""
    fresh = folder / f"..{time.time_ns()}"
    fresh.mkdir(parents=True)
    for name, text in files.items():
        (fresh / name).write_text(text)
    (folder / "..data_tmp").symlink_to(fresh.name)
    (folder / "..data_tmp").replace(folder / "..data")
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in files:
            entry.unlink()
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


def test_a_file_is_an_object_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"k1": "gold", "k2": "gold", "k3": "batch"}))
    ring = KeyRing(path)
    assert [ring.tenant(key) for key in ("k1", "k2", "k3", "k4")] == ["gold", "gold", "batch", None]


def test_a_folder_has_a_file_of_keys_for_each_tenant(tmp_path: Path) -> None:
    """A key on each line; blank lines and blanks at the ends are nobody's key."""
    mounted(tmp_path, gold="k1\n\n  k2  \n", batch="k3")
    ring = KeyRing(tmp_path)
    assert [ring.tenant(key) for key in ("k1", "k2", "k3", "k1\n", "  k2  ")] == [
        "gold",
        "gold",
        "batch",
        None,
        None,
    ]


@pytest.mark.parametrize("content", ["", "\n\n", "  "])
def test_no_key_is_not_a_key(tmp_path: Path, content: str) -> None:
    """A request without a key asks with the empty one; an empty file must not let it in."""
    mounted(tmp_path, gold=content)
    assert KeyRing(tmp_path).tenant("") is None
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"": "gold"}))
    assert KeyRing(path).tenant("") is None


def test_a_folder_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    assert ring.tenant("k") is None


def test_a_key_of_two_tenants_is_refused_and_not_shown(tmp_path: Path) -> None:
    mounted(tmp_path, gold="secret-key", batch="secret-key")
    with pytest.raises(KeysError, match="'batch' and 'gold' have a key in common") as caught:
        KeyRing(tmp_path)
    assert "secret-key" not in str(caught.value)


@pytest.mark.parametrize("content", [b"[1]", b"{", b'{"k": 1}', b"\xff"])
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    with pytest.raises(KeysError, match=r"keys\.json"):
        KeyRing(path)


def test_keys_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gold").write_bytes(b"\xff\xfe")
    with pytest.raises(KeysError, match="utf-8"):
        KeyRing(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="no-such"):
        KeyRing(tmp_path / "no-such.json")


def test_a_changed_secret_is_followed(tmp_path: Path, clock: Clock) -> None:
    """A new tenant, a new key, a revoked key: all in force at the next look, and not a look earlier."""
    mounted(tmp_path, gold="old\nkept")
    ring = KeyRing(tmp_path, clock=clock)
    assert ring.tenant("old") == "gold"
    mounted(tmp_path, gold="kept\nnew", batch="b")
    assert ring.tenant("new") is None
    clock.pass_a_look()
    assert [ring.tenant(key) for key in ("old", "kept", "new", "b")] == [None, "gold", "gold", "batch"]


def test_a_tenant_that_is_taken_away_is_refused(tmp_path: Path, clock: Clock) -> None:
    mounted(tmp_path, gold="g", batch="b")
    ring = KeyRing(tmp_path, clock=clock)
    mounted(tmp_path, gold="g")
    clock.pass_a_look()
    assert (ring.tenant("g"), ring.tenant("b")) == ("gold", None)


def test_a_changed_file_is_followed(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"a": "gold"}))
    ring = KeyRing(path, clock=clock)
    path.write_text(json.dumps({"b": "gold"}))
    os.utime(path, ns=(1, 1))  # another time of change, however coarse the file system's clock is
    clock.pass_a_look()
    assert (ring.tenant("a"), ring.tenant("b")) == (None, "gold")


def test_a_slip_in_a_changed_secret_locks_nobody_out_and_is_logged_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    mounted(tmp_path, gold="g", batch="b")
    ring = KeyRing(tmp_path, clock=clock)
    mounted(tmp_path, gold="same-key", batch="same-key")
    with caplog.at_level(logging.INFO, "headway.keys"):
        for _ in range(3):
            clock.pass_a_look()
            assert (ring.tenant("g"), ring.tenant("same-key")) == ("gold", None)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "same-key" not in caplog.text
    mounted(tmp_path, gold="g2", batch="b")
    clock.pass_a_look()
    assert (ring.tenant("g"), ring.tenant("g2")) == (None, "gold")


def test_keys_that_did_not_change_are_not_read_again(tmp_path: Path, clock: Clock) -> None:
    mounted(tmp_path, gold="g")
    ring = KeyRing(tmp_path, clock=clock)
    tenants = ring._tenants
    for _ in range(3):
        clock.pass_a_look()
        assert ring.tenant("g") == "gold"
    assert ring._tenants is tenants
