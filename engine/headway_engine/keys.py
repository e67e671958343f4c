"""API keys: which tenant a key belongs to, read from a file or a folder and followed while the engine runs.

A file is a JSON object, key to tenant. A folder has a file for each tenant, named as it, with a key on each
line: what a Kubernetes Secret looks like where it is mounted. Knows nothing of HTTP, nor of what tenants may
have.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headway_engine.logs import fields

log = logging.getLogger("headway.keys")

LOOK_EVERY_S = 1.0
"""A look costs one system call a file, so not every request pays for it."""

_Mark = tuple[tuple[str, int, int, int], ...]  # name, inode, time of change, size


class KeysError(Exception):
    """Keys that cannot be used; the text names the file and never a key."""


class KeyRing:
    """The keys of one file or folder. Raises KeysError where they cannot be read at first.

    A later change is taken in within a second. One that cannot be read changes nothing and is logged once: a
    slip in a Secret must not lock everybody out. Keys are kept and looked up by digest, so that how long a
    look-up takes says nothing about them.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._mark = _mark(path)
        self._tenants = _read(path)
        self._looked_s = clock()

    def tenant(self, key: str) -> str | None:
        """The tenant that a key belongs to; None for a key that nobody has."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._follow()
        return self._tenants.get(_digest(key))

    def _follow(self) -> None:
        mark = _mark(self._path)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._tenants = _read(self._path)
        except KeysError as error:
            log.warning(fields("keys-kept", error=str(error)))
            return
        log.info(fields("keys-read", keys=len(self._tenants), tenants=len(set(self._tenants.values()))))


def _mark(path: Path) -> _Mark:
    """What changes whenever the keys do. A mounted Secret is swapped behind a link, so links are followed."""
    marks = []
    for file in _files(path):
        try:
            found = file.stat()
        except OSError:  # gone between the listing and the look: seen as such
            continue
        marks.append((file.name, found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(marks)


def _files(path: Path) -> list[Path]:
    """The files that hold keys. Names with a dot in front are the kubelet's own business."""
    try:
        return sorted(file for file in path.iterdir() if not file.name.startswith("."))
    except OSError:
        return [path]


def _read(path: Path) -> dict[bytes, str]:
    """Digest of a key to its tenant."""
    try:
        if not path.is_dir():
            keys = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
            return {_digest(key): tenant for key, tenant in keys.items() if key}
        found: dict[bytes, str] = {}
        for file in _files(path):
            for key in filter(None, map(str.strip, file.read_text("utf-8").splitlines())):
                other = found.setdefault(_digest(key), file.name)
                if other != file.name:
                    raise KeysError(f"{path}: tenants {other!r} and {file.name!r} have a key in common")
        return found
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise KeysError(f"{path}: {error}") from error


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
