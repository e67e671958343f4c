"""What a file holds, as a digest of every byte; remembered, so that a restart need not read a large file.

The memory is keyed by what the file system says of the file (inode, size, times). That is no proof, so
whoever relies on it has the file read again beside the work (`disproof`), by a process of low priority:
`python -m headway_engine.file_digest PATH` prints the digest. Knows nothing of models.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headway_engine import drafts
from headway_engine.cgroup import usable_cores
from headway_engine.logs import fields
from headway_engine.model_error import ModelError

log = logging.getLogger(__name__)

REMEMBER_FROM_BYTES = 256 << 20
"""Smaller files are read at every start, which takes a second at most."""
SETTLED_AFTER_NS = 2_000_000_000
"""A file that changed less than this before it was read may change again and keep its time: file systems tell
times in ticks of some milliseconds, and a server's clock is not quite ours."""
COMMAND = (sys.executable, "-m", "headway_engine.file_digest")

_PIECE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_MOST_THREADS = 8
_REST_PER_WORK = 3.0
"""The process beside the work rests this many times as long as it computes: a quarter of a core."""
_FORM = b"headway sha256 of sha256 of pieces of 64 MiB"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file system says of a file, which every ordinary write to it changes.

    Without the device's number: a network volume has another one after each mount.
    """

    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "Identity":
        """Raises OSError. Opens the file, because a network file system asks its server again then."""
        with path.open("rb") as file:
            told = os.fstat(file.fileno())
        return cls(told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns)

    def settled(self, now_ns: int) -> bool:
        """Another content would have another identity: the last change is not of just now, and its time is
        finer than a second (images and object stores have coarse times, or the same for every file)."""
        return self.changed_ns % 1_000_000_000 != 0 and self.changed_ns + SETTLED_AFTER_NS <= now_ns

    @property
    def key(self) -> str:
        numbers = (self.inode, self.size_bytes, self.modified_ns, self.changed_ns)
        return hashlib.sha256(" ".join(map(str, numbers)).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a file. With a `record` it was not read now: the digest is what the record remembers."""

    path: Path
    identity: Identity
    settled: bool
    digest: str
    record: Path | None = None


def content_of(
    path: Path,
    records: Path,
    progress: Callable[[str], None],
    *,
    remember_from_bytes: int = REMEMBER_FROM_BYTES,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Content:
    """The content of a file, read whole, or remembered in the folder `records`. Raises ModelError.

    Two processes that want to know the same at once read it once.
    """
    try:
        identity = Identity.of(path)
    except OSError as error:
        raise ModelError(f"model: {path} cannot be read: {error}") from error
    settled = identity.settled(clock_ns())
    if not settled or identity.size_bytes < remember_from_bytes:
        return _read(path, identity, settled, progress)
    record = records / f"{identity.key}.json"
    found: Content | None = None
    try:
        with drafts.draft_of(record) as draft:
            if digest := _remembered(record):
                # Only where a record can be removed: one that is wrong would be believed at every start.
                return Content(path, identity, settled, digest, record)
            found = _read(path, identity, settled, progress)
            told = {"digest": found.digest, "path": str(path), "size_bytes": identity.size_bytes}
            (draft / "record").write_text(json.dumps(told))
            (draft / "record").replace(record)
    except OSError as error:
        log.warning(fields("digest-not-kept", file=path, error=error, next="the next start reads it again"))
    return found or _read(path, identity, settled, progress)


def unchanged(content: Content) -> bool:
    """The file still holds what it held when it was read now, as far as its identity tells; where that is
    not enough, or it was not read now, it is read again."""
    if content.record is not None or not content.settled:
        return same_bytes(content)
    return _same_identity(content)


def untouched(content: Content) -> bool:
    """As `unchanged`, for what is not kept: of a file that was not read now, only its identity is asked,
    since `disproof` reads it later."""
    return unchanged(content) if content.record is None else _same_identity(content)


def same_bytes(content: Content) -> bool:
    """The file, read again, holds what it held, and nobody wrote to it meanwhile. Where a record says
    something else, the record is removed."""
    try:
        digest = digest_of(content.path)
    except OSError:
        return False
    if not _same_identity(content):
        return False
    if digest != content.digest and content.record is not None:
        content.record.unlink(missing_ok=True)
    return digest == content.digest


def _same_identity(content: Content) -> bool:
    """The file is there, and the file system says of it what it said before."""
    try:
        return Identity.of(content.path) == content.identity
    except OSError:
        return False


def disproof(content: Content, command: Sequence[str] = COMMAND) -> str:
    """Why what was made from a remembered content must not be used; empty if the file holds what the record
    says. Reads the whole file, slowly, in a process of its own. A record that is wrong is removed."""
    if content.record is None:
        return ""
    began_s = time.monotonic()
    done = subprocess.run([*command, str(content.path)], capture_output=True, text=True, check=False)
    try:
        now = Identity.of(content.path)
    except OSError as error:
        log.warning(fields("model-file-unread", file=content.path, error=error))
        return ""
    if now != content.identity:
        why = (
            "it changed after the start, and what it held then is served; restart to serve what it holds now"
        )
        log.warning(fields("model-file-changed", file=content.path, why=why))
        return ""
    if done.returncode:
        log.warning(fields("model-file-unread", file=content.path, error=done.stderr.strip()[-300:]))
        return ""
    if done.stdout.strip() == content.digest:
        took_s = round(time.monotonic() - began_s, 1)
        log.info(fields("model-file-checked", file=content.path, seconds=took_s))
        return ""
    why = (
        f"model: {content.path} holds other bytes than when it was read last, though its inode, size and "
        "times are the same; what was served came from the old ones"
    )
    try:
        content.record.unlink(missing_ok=True)
    except OSError as error:
        return f"{why}. Remove {content.record} by hand: {error}"
    return f"{why}. The next start reads the file anew"


def digest_of(
    path: Path,
    told: Callable[[int, int], None] = lambda done_bytes, size_bytes: None,
    *,
    threads: int = 0,
    rest: Callable[[], None] = lambda: None,
    forget_pages: bool = False,
) -> str:
    """A digest of a file's content, of pieces that are read by several threads (0: as many as cores help).

    `told` hears of bytes read and all bytes; `rest` is called after each MiB. Raises OSError.
    """
    size = path.stat().st_size
    offsets = range(0, size, _PIECE_BYTES)
    whole = hashlib.sha256(_FORM)
    with ThreadPoolExecutor(threads or min(usable_cores(), _MOST_THREADS)) as pool:
        pieces = pool.map(lambda offset: _piece(path, offset, rest, forget_pages), offsets)
        for offset, digest in zip(offsets, pieces, strict=True):
            whole.update(digest)
            told(min(offset + _PIECE_BYTES, size), size)
    return whole.hexdigest()


def _piece(path: Path, offset: int, rest: Callable[[], None], forget_pages: bool) -> bytes:
    """The digest of at most 64 MiB from `offset`."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        for _ in range(_PIECE_BYTES // _BLOCK_BYTES):
            filled = 0
            while filled < _BLOCK_BYTES and (got := file.readinto(block[filled:])):
                filled += got
            digest.update(block[:filled])
            rest()
            if filled < _BLOCK_BYTES:
                break
        if forget_pages and hasattr(os, "posix_fadvise"):
            # What the engine reads, its weights, should stay in memory, and not this.
            os.posix_fadvise(file.fileno(), offset, _PIECE_BYTES, os.POSIX_FADV_DONTNEED)
    return digest.digest()


def _read(path: Path, identity: Identity, settled: bool, progress: Callable[[str], None]) -> Content:
    told_s = time.monotonic()

    def told(done_bytes: int, size_bytes: int) -> None:
        nonlocal told_s
        if (now_s := time.monotonic()) - told_s >= 5:
            told_s = now_s
            of = f"{done_bytes / (1 << 30):.2f} of {size_bytes / (1 << 30):.2f} GiB"
            progress(f"reading {path.name}, to know it by its content: {of}")

    try:
        content = Content(path, identity, settled, digest_of(path, told))
        changed = Identity.of(path) != identity
    except OSError as error:
        raise ModelError(f"model: {path} cannot be read: {error}") from error
    if changed:
        raise ModelError(f"model: {path} changed while it was read; start again when it is whole")
    return content


def _remembered(record: Path) -> str:
    """The digest in a record; empty where there is none, or something else."""
    try:
        digest = json.loads(record.read_text())["digest"]
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    return digest if isinstance(digest, str) and len(digest) == 64 else ""


def main(argv: Sequence[str]) -> int:
    """Print the digest of a file, out of everybody's way. Ends with the process that started it."""
    if len(argv) != 1:
        print("usage: python -m headway_engine.file_digest PATH", file=sys.stderr)
        return 2
    os.nice(19)
    parent = os.getppid()
    worked_s = time.process_time()

    def rest() -> None:
        nonlocal worked_s
        if os.getppid() != parent:
            os._exit(1)
        time.sleep((time.process_time() - worked_s) * _REST_PER_WORK)
        worked_s = time.process_time()

    print(digest_of(Path(argv[0]), threads=1, rest=rest, forget_pages=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
