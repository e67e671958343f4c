"""Folders of the cache while they are made: whole or absent, and swept when their writer was killed."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway_engine import drafts
from headway_engine.drafts import DiskFull, once, sweep
from headway_engine.model_error import ModelError
from support.engine_server import wait_until

WRITER = """
import sys
from pathlib import Path
from headway_engine import drafts

target, kernel, lock = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if kernel:
    drafts._kernel = lambda: kernel
if lock:
    drafts._lock_file = lambda _: Path(lock)
drafts.TOUCH_EVERY_S = 0.02

def make(out):
    (out / "weights").write_bytes(bytes(1 << 20))
    print(out, flush=True)
    sys.stdin.readline()

drafts.once(target, make)
"""


@contextmanager
def writer(target: Path, kernel: str = "", lock: str = "") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process in the middle of making `target`, and its draft. A line to its input lets it finish."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target), kernel, lock],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def age(draft: Path, seconds: float) -> None:
    """The draft and what is in it, as if nobody had touched it for so long."""
    for path in (*draft.rglob("*"), draft):
        at_s = path.stat().st_mtime - seconds
        os.utime(path, (at_s, at_s))


def test_two_makers_of_one_folder_make_it_once(tmp_path: Path) -> None:
    """Whoever comes second waits and finds it; the folder appears whole."""
    made: list[int] = []
    inside = threading.Event()

    def make(out: Path) -> None:
        inside.set()
        made.append(1)
        (out / "a").write_text("x")
        (out / "b").write_text("y")

    target = tmp_path / "deep" / "folder"
    makers = [threading.Thread(target=once, args=(target, make)) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(30)
    assert inside.is_set()
    assert made == [1]
    assert sorted(p.name for p in target.iterdir()) == ["a", "b"]


def test_a_failed_maker_leaves_nothing_behind(tmp_path: Path) -> None:
    """A crash half-way must not look like a finished folder at the next start."""

    def make(out: Path) -> None:
        (out / "a").write_text("x")
        raise ModelError("model: torn")

    with pytest.raises(ModelError, match="torn"):
        once(tmp_path / "folder", make)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.lock"]


def test_a_folder_that_another_node_made_meanwhile_is_taken(tmp_path: Path) -> None:
    """Where a lock does not reach from node to node, both make it."""
    target = tmp_path / "folder"

    def make(out: Path) -> None:
        (out / "mine").write_text("x")
        target.mkdir()
        (target / "theirs").write_text("x")

    assert once(target, make) == target
    assert [p.name for p in target.iterdir()] == ["theirs"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "folder.lock"]


def test_a_cache_that_cannot_be_written_names_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"file.models cannot be written: .* set HEADWAY_CACHE"):
        once(tmp_path / "file" / "models" / "m", lambda _: None)


@pytest.mark.parametrize("place", ["models/digest/weights", "tokenizers/digest", "kernels/library.so"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_writers_draft_is_removed_at_the_next_start(
    place: str, number: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a crash loop each start would leave another one, until the volume is full."""
    with writer(tmp_path / place) as (process, draft):
        process.send_signal(number)
        process.wait(60)
    assert (draft / "weights").stat().st_size == 1 << 20
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        sweep(tmp_path)
    assert not draft.exists()
    assert [p.name for p in draft.parent.iterdir()] == [Path(place).name + ".lock"]
    assert f'draft-removed draft={draft} size="1.0 MiB"' in caplog.text


def test_a_living_writers_draft_is_left_alone_however_old(tmp_path: Path) -> None:
    """It may compute for an hour before it writes; its lock says that it lives."""
    target = tmp_path / "models" / "m" / "weights"
    with writer(target) as (process, draft):
        age(draft, 1e6)
        sweep(tmp_path)
        assert (draft / "weights").is_file()
        process.communicate("go on\n", timeout=60)
        assert process.returncode == 0
    assert [p.name for p in target.iterdir()] == ["weights"]


def test_who_waits_for_a_writer_that_is_killed_removes_its_draft_first(tmp_path: Path) -> None:
    """Two large drafts at once may be more than the volume holds."""
    target = tmp_path / "models" / "m" / "weights"
    seen: list[str] = []

    def make(out: Path) -> None:
        seen.extend(p.name for p in out.parent.glob("*/weights"))

    with writer(target) as (process, _):
        waiter = threading.Thread(target=once, args=(target, make))
        waiter.start()
        process.kill()
        process.wait(60)
        waiter.join(60)
    assert target.is_dir()
    assert seen == []


def test_another_nodes_draft_is_removed_only_when_nobody_touches_it(tmp_path: Path) -> None:
    """On a shared volume a free lock may mean that locks hold on one node only: here the living writer's lock
    is out of sight, as it is there. The times of the file system decide."""
    target = tmp_path / "models" / "m" / "weights"
    unseen = str(tmp_path / "unseen.lock")
    with writer(target, kernel="another node", lock=unseen) as (process, draft):
        age(draft, 1e6)
        wait_until(lambda: draft.stat().st_mtime > (draft / "weights").stat().st_mtime + 1e5, "a touch")
        sweep(tmp_path)
        assert (draft / "weights").is_file(), "its writer lives"
        process.kill()
        process.wait(60)
    sweep(tmp_path)
    assert draft.is_dir(), "its writer may live"
    age(draft, drafts.STALE_AFTER_S + 1)
    sweep(tmp_path)
    assert not draft.exists()


def test_a_writer_that_was_taken_for_dead_puts_nothing_in_place(tmp_path: Path) -> None:
    """A node that stood still for long comes back: half a folder must not look like a whole one."""
    target = tmp_path / "models" / "m" / "weights"

    def make(out: Path) -> None:
        (out / "first-half").write_text("x")
        age(out, drafts.STALE_AFTER_S + 1)
        swept = out.with_name(out.name.replace(drafts._here(out.parent), "0" * 12))
        out.rename(swept)  # another node's, as the sweep sees it
        with (tmp_path / "lock").open("a") as lock:
            drafts._remove_if_dead(swept, lock, locked=True)
        assert not swept.exists()

    with pytest.raises(OSError):
        once(target, make)
    assert not target.exists()


def test_the_sweep_leaves_everything_else_alone(tmp_path: Path) -> None:
    """Whole folders, locks, other programs' files; a cache that is not there is no error."""
    once(tmp_path / "models" / "m" / "weights", lambda out: (out / "a").touch())
    (tmp_path / "kube").mkdir()
    (tmp_path / "kube" / ".hidden").touch()
    before = sorted(tmp_path.rglob("*"))
    sweep(tmp_path)
    sweep(tmp_path / "absent")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_does_not_fit_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it takes, what is there, where, and what to set."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 3 << 30}))
    with drafts.room_for("m.gguf", tmp_path, 3 << 30):
        pass
    with (
        pytest.raises(DiskFull, match=r"m.gguf takes 5.00 GiB in .*, and 3.00 GiB is free .*HEADWAY_CACHE"),
        drafts.room_for("m.gguf", tmp_path, 5 << 30),
    ):
        pytest.fail("written all the same")


FILLS = """
import sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from headway_engine import drafts

def by_python(out):
    (out / "weights").write_bytes(bytes(4 << 20))

def by_rust(out):
    save_file({"w": np.zeros(4 << 20, np.uint8)}, out / "model.safetensors")

for make in (by_python, by_rust):
    try:
        drafts.once(Path(sys.argv[1]) / "models" / make.__name__, make)
    except drafts.DiskFull as error:
        print(error)
drafts.once(Path(sys.argv[1]) / "models" / "small", lambda out: (out / "a").write_bytes(bytes(1 << 20)))
print("room again")
"""


def test_a_volume_that_fills_up_says_what_did_not_fit_and_what_to_set(tmp_path: Path) -> None:
    """A real one, of 2 MiB. What was written so far is removed."""
    in_namespace = ["unshare", "--user", "--map-root-user", "--mount", "--"]
    if not shutil.which("unshare") or subprocess.run([*in_namespace, "true"], check=False).returncode:
        pytest.skip("this system gives us no mount namespace, and so no small file system")
    script = f'mount -t tmpfs -o size=2m none "{tmp_path}" && exec "$@"'
    done = subprocess.run(
        [*in_namespace, "sh", "-c", script, "sh", sys.executable, "-c", FILLS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    first, second, third = done.stdout.splitlines()
    for line, name in ((first, "by_python"), (second, "by_rust")):
        assert line.startswith(f"the cache is full: {name} did not fit in {tmp_path}/models; ")
        assert "HEADWAY_CACHE" in line
    assert third == "room again"
