"""Digests of files: of every byte, remembered for large files, and never believed without proof."""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headway_engine import file_digest
from headway_engine.file_digest import Content, Identity, content_of, digest_of, disproof
from headway_engine.model_error import ModelError
from support.engine_server import wait_until

PIECE = 64 << 20


def settled(path: Path) -> Path:
    """The file, once its last change is long enough ago for its times to be trusted."""

    def is_settled() -> bool:
        if Identity.of(path).settled(time.time_ns()):
            return True
        if Identity.of(path).changed_ns % 1_000_000_000 == 0:
            os.utime(path)
        return False

    wait_until(is_settled, "times that can be trusted")
    return path


def remembered(path: Path, records: Path) -> Content:
    return content_of(path, records, lambda _: None, remember_from_bytes=0)


def forged(path: Path, records: Path, digest: str) -> Content:
    """What is remembered of a file whose bytes changed and whose inode, size and times did not."""
    record = records / f"{Identity.of(settled(path)).key}.json"
    records.mkdir(exist_ok=True)
    record.write_text(json.dumps({"digest": digest}))
    content = remembered(path, records)
    assert content.record == record
    assert content.digest == digest
    return content


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 1, PIECE, PIECE + 1, 3 * PIECE - 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_digest_is_of_the_pieces_in_order(size: int, threads: int, tmp_path: Path) -> None:
    """However many threads read them; written out here once more, since it names folders in caches."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(size)
        for at in range(0, size, 1 << 20):
            file.seek(at)
            file.write(at.to_bytes(8, "little")[: size - at])
    content = path.read_bytes()
    expected = hashlib.sha256(b"headway sha256 of sha256 of pieces of 64 MiB")
    for at in range(0, size, PIECE):
        expected.update(hashlib.sha256(content[at : at + PIECE]).digest())
    assert digest_of(path, threads=threads) == expected.hexdigest()


@pytest.mark.parametrize("at", [0, 1 << 20, PIECE - 1, PIECE, 2 * PIECE + 12345])
def test_every_byte_counts(at: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(3 * PIECE)
    before = digest_of(path)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"x")
    assert digest_of(path) != before


def test_a_large_file_is_read_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under another name: its inode and times say that it is the same file."""
    path = tmp_path / "file"
    path.write_text("weights")
    first = remembered(settled(path), tmp_path / "records")
    assert first.record is None
    with monkeypatch.context() as patch:
        patch.setattr(file_digest, "digest_of", lambda *_, **__: pytest.fail("read again"))
        again = remembered(path, tmp_path / "records")
        link = tmp_path / "link"
        link.symlink_to(path)
        linked = remembered(link, tmp_path / "records")
    assert again.record is not None
    assert again.digest == linked.digest == first.digest


def test_a_small_file_is_read_at_every_start(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("weights")
    settled(path)
    for _ in range(2):
        assert content_of(path, tmp_path / "records", lambda _: None).record is None
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("restore_times", [True, False])
def test_other_bytes_in_the_same_size_are_another_content(restore_times: bool, tmp_path: Path) -> None:
    """Overwritten in the middle; whoever restores the time of modification cannot restore that of change."""
    path = tmp_path / "file"
    path.write_bytes(b"a" * 5000)
    first = remembered(settled(path), tmp_path / "records")
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(2000)
        file.write(b"b" * 1000)
    if restore_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns
    second = remembered(settled(path), tmp_path / "records")
    assert second.record is None
    assert second.digest != first.digest


def test_a_file_that_was_renamed_over_is_another_content(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"a" * 5000)
    first = remembered(settled(path), tmp_path / "records")
    other.write_bytes(b"b" * 5000)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.rename(path)
    assert remembered(settled(path), tmp_path / "records").digest != first.digest


@pytest.mark.parametrize(
    ("changed_ns", "trusted"),
    [
        (10_000_000_001, True),
        (10_000_000_000, False),  # a whole second: an image's or an object store's
        (0, False),
        (98_500_000_001, False),  # of just now: it may change again within the same tick
        (123_000_000_001, False),  # a server's clock that goes before ours
    ],
)
def test_times_are_trusted_when_another_content_would_have_others(changed_ns: int, trusted: bool) -> None:
    now_ns = 100_000_000_000
    assert Identity(1, 1, changed_ns, changed_ns).settled(now_ns) is trusted


def test_a_file_whose_times_cannot_be_trusted_is_never_remembered(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("weights")
    just_now = path.stat().st_ctime_ns
    for _ in range(2):
        content = content_of(
            path, tmp_path / "records", lambda _: None, remember_from_bytes=0, clock_ns=lambda: just_now
        )
        assert content.record is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": 7}', '{"digest": "short"}'])
def test_a_record_that_is_torn_is_no_record(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("weights")
    digest = remembered(settled(path), tmp_path / "records").digest
    (record,) = (tmp_path / "records").glob("*.json")
    record.write_text(text)
    content = remembered(path, tmp_path / "records")
    assert (content.record, content.digest) == (None, digest)
    assert remembered(path, tmp_path / "records").record == record


def test_a_cache_that_cannot_be_written_costs_a_reading_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is a record of it believed, which could not be removed when it is wrong."""
    path = tmp_path / "file"
    path.write_text("weights")
    (tmp_path / "records").write_text("in the way")
    content = remembered(settled(path), tmp_path / "records")
    assert content.digest == digest_of(path)
    assert "digest-not-kept" in caplog.text


def test_processes_that_start_at_once_read_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("weights")
    settled(path)
    readings: list[Path] = []
    all_there = threading.Barrier(4)
    really = file_digest.digest_of

    def counted(path: Path, *others: object) -> str:
        readings.append(path)
        return really(path)

    def start() -> None:
        all_there.wait(30)
        digests.append(remembered(path, tmp_path / "records").digest)

    digests: list[str] = []
    monkeypatch.setattr(file_digest, "digest_of", counted)
    starts = [threading.Thread(target=start) for _ in range(4)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join(30)
    assert len(digests) == 4
    assert len(set(digests)) == 1
    assert len(readings) == 1


def test_a_file_that_is_written_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that is not finished: its digest would be of nothing that ever was."""
    path = tmp_path / "file"
    path.write_text("weights")
    really = file_digest.digest_of

    def slowly(path: Path, *others: object) -> str:
        with path.open("a") as file:
            file.write("more")
        return really(path)

    monkeypatch.setattr(file_digest, "digest_of", slowly)
    with pytest.raises(ModelError, match=r"file changed while it was read; start again when it is whole"):
        remembered(path, tmp_path / "records")


def test_a_record_that_is_right_is_proved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a process that reads every byte."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(5 << 20))
    remembered(settled(path), tmp_path / "records")
    content = remembered(path, tmp_path / "records")
    assert content.record is not None
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        assert disproof(content) == ""
    assert "model-file-checked" in caplog.text
    assert content.record.exists()


def test_a_record_that_is_wrong_is_disproved_and_removed(tmp_path: Path) -> None:
    """The next start reads the file."""
    path = tmp_path / "file"
    path.write_text("weights")
    content = forged(path, tmp_path / "records", "0" * 64)
    assert "holds other bytes than when it was read last" in disproof(content)
    assert remembered(path, tmp_path / "records").digest == digest_of(path)


def test_a_file_that_is_replaced_while_it_serves_is_told_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was served is what the file held at the start; the new one takes a restart, as ever."""
    path = tmp_path / "file"
    path.write_text("weights")
    content = forged(path, tmp_path / "records", "0" * 64)
    path.write_text("WEIGHTS")
    assert disproof(content) == ""
    assert "model-file-changed" in caplog.text
    path.unlink()
    assert disproof(content) == ""
    assert "model-file-unread" in caplog.text


def test_a_check_that_fails_proves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    path.write_text("weights")
    content = forged(path, tmp_path / "records", "0" * 64)
    broken = [sys.executable, "-c", "import sys; sys.exit('no such disk')"]
    assert disproof(content, broken) == ""
    assert 'error="no such disk"' in caplog.text


def test_the_checking_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """It would go on reading for minutes, for nobody."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: hours of zeros
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([{sys.executable!r}, '-m', 'headway_engine.file_digest', {str(path)!r}])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child = int(starter.stdout.readline())
    try:
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, child) == 19, "the process at work")
        starter.kill()
        starter.wait(60)
        wait_until(lambda: not Path(f"/proc/{child}").exists() or is_zombie(child), "its end")
    finally:
        if Path(f"/proc/{child}").exists():
            os.kill(child, signal.SIGKILL)
        starter.kill()
        starter.communicate()


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
