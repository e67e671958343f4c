"""Folders of the cache while they are made: a draft beside the place, one rename when it is whole, and a
sweep of drafts whose writer is dead.

A draft is written under a lock, which the system drops when the writer dies. Several nodes may share a cache
over a network file system, where a lock may hold within one node only; so a draft also says in its name where
it is written, and its writer touches it as long as it lives. Knows nothing of what is made.
"""

import errno
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from headway_engine.logs import fields
from headway_engine.model_error import ModelError

log = logging.getLogger(__name__)

SUFFIX = ".draft"
TOUCH_EVERY_S = 20.0
STALE_AFTER_S = 600.0
"""A draft of another node that nobody touched for so long was left behind. Its writer touches it thirty times
in that time, and other clients of a network file system see that within a minute or two."""

_MORE_ROOM = (
    "give the cache a larger volume (HEADWAY_CACHE names its folder; in a resource, spec.podTemplate mounts "
    "a volume at /cache)"
)
_FULL = ("no space left on device", "disk quota exceeded")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DiskFull(ModelError):
    """The volume of the cache is full, or too small for what is to be written."""


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` if it is not there yet. Whole or absent, also after a crash half-way.

    Raises ModelError for a cache that cannot be written, DiskFull, and what `make` raises.
    """
    if folder.is_dir():
        return folder
    with room_for(folder.name, folder.parent), ExitStack() as stack:
        try:
            draft = stack.enter_context(draft_of(folder))
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ModelError(
                f"the cache folder {folder.parent} cannot be written: {error}; set HEADWAY_CACHE to a "
                "writable one"
            ) from error
        if folder.is_dir():  # somebody else made it while we waited
            return folder
        make(draft)
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Made twice, where locks do not reach from node to node. The two are alike.
    return folder


@contextmanager
def draft_of(target: Path) -> Iterator[Path]:
    """A new folder on the target's file system, removed at the end, unless it was renamed. Whoever wants to
    make the same target waits. Raises OSError where it cannot be made."""
    with ExitStack() as stack:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context(_lock_file(target).open("a"))
        locked = _take(lock, target)
        for left in target.parent.glob(f".*{SUFFIX}"):
            if _target_of(left) == target:
                _remove_if_dead(left, lock, locked)
        here = _here(target.parent)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.{here}.", suffix=SUFFIX, dir=target.parent))
        stack.callback(shutil.rmtree, draft, ignore_errors=True)
        stack.enter_context(_touched(draft))
        yield draft


def sweep(cache: Path) -> None:
    """Remove the drafts that killed processes left in the cache: in a crash loop each start leaves another
    one, and a large model fills the volume. Never one that a living process writes."""
    for draft in sorted([*cache.glob(f"*/.*{SUFFIX}"), *cache.glob(f"models/*/.*{SUFFIX}")]):
        try:
            with _lock_file(_target_of(draft)).open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked = True
                except BlockingIOError:  # its writer lives
                    continue
                except OSError:  # a file system without locks
                    locked = False
                _remove_if_dead(draft, lock, locked)
        except OSError as error:
            log.warning(fields("draft-kept", draft=draft, error=error))


@contextmanager
def room_for(what: str, folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Raise DiskFull, with the numbers and the way out, before `needed_bytes` are written where they do not
    fit, and for a volume that fills up while something is written."""
    if needed_bytes and (free := shutil.disk_usage(folder).free) < needed_bytes:
        raise DiskFull(
            f"the cache is too small: {what} takes {_size(needed_bytes)} in {folder}, and {_size(free)} is "
            f"free there; {_MORE_ROOM}"
        )
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        takes = f" ({_size(needed_bytes)})" if needed_bytes else ""
        raise DiskFull(f"the cache is full: {what}{takes} did not fit in {folder}; {_MORE_ROOM}") from error


def is_disk_full(error: BaseException | None) -> bool:
    """The error, or one that caused it, says so. Libraries written in Rust say it in words only."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(error).lower() for words in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def _size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def _lock_file(target: Path) -> Path:
    """Stays for ever: whoever removed it could remove the one that somebody has just locked."""
    return target.with_name(target.name + ".lock")


def _take(lock: IO[str], target: Path) -> bool:
    """Wait for the lock; False on a file system without locks, where work is done twice at worst."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info(fields("draft-awaited", target=target, why="another process is making it"))
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        log.warning(fields("no-locks", folder=target.parent, error=error))
        return False
    return True


def _target_of(draft: Path) -> Path:
    return draft.with_name(draft.name[1 : -len(SUFFIX)].rsplit(".", 2)[0])


def _remove_if_dead(draft: Path, lock: IO[str], locked: bool) -> None:
    """Remove a draft unless its writer may live. `locked`: this process holds the lock of its target."""
    if not (locked and f".{_here(draft.parent)}." in draft.name):
        # Written by another node, or before this one booted: the lock alone proves nothing. Both times are of
        # the file system's own clock.
        os.utime(lock.fileno())
        if os.fstat(lock.fileno()).st_mtime - _last_touched_s(draft) < STALE_AFTER_S:
            return
    target = _target_of(draft)
    grave = draft.with_name(f".{target.name}.{_here(draft.parent)}.{uuid.uuid4().hex[:8]}{SUFFIX}")
    draft.rename(grave)  # a writer that lives after all fails, and cannot put half a folder in place
    freed = sum(path.lstat().st_size for path in grave.rglob("*"))
    shutil.rmtree(grave)
    log.info(fields("draft-removed", draft=draft, size=_size(freed), why="its writer is dead"))


def _last_touched_s(draft: Path) -> float:
    return max(path.lstat().st_mtime for path in (draft, *draft.rglob("*")))


def _here(folder: Path) -> str:
    """Where a lock is sure to be seen by everybody who says the same: one kernel, one mount."""
    return hashlib.sha256(f"{_kernel()} {folder.stat().st_dev}".encode()).hexdigest()[:12]


@functools.cache
def _kernel() -> str:
    """Which kernel runs us, since when; a name that nobody else has, where it does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return uuid.uuid4().hex


@contextmanager
def _touched(draft: Path) -> Iterator[None]:
    """Show other nodes that the writer lives."""
    over = threading.Event()

    def touch() -> None:
        while not over.wait(TOUCH_EVERY_S):
            try:
                os.utime(draft)
            except OSError:  # renamed into place, or taken from us: the writer will hear of it
                return

    toucher = threading.Thread(target=touch, name="draft-touch", daemon=True)
    toucher.start()
    try:
        yield
    finally:
        over.set()
        toucher.join()
