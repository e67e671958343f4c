"""Becomes the container's process: mounts its volumes in a mount namespace of its own, then execs.

Run as a script by `pod` (`python -I -S launch.py SPEC`), so that no Python code runs between fork and exec in
the runner, which has threads. Standard library only; imports nothing of Headway. SPEC is JSON:
{"argv": [...], "cwd": str, "parent": pid, "mounts": [[source, path, read_only], ...]}.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile

CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
EXIT_CANNOT_RUN = 127


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """mount(2); raises OSError with the paths in its text."""
    result = _libc().mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    _check(result, f"mount {source} at {target}")


def die_with(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies; leave now if it has died already."""
    if sys.platform == "linux":
        _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_CANNOT_RUN)


def mirror(path: str) -> str:
    """A writable stand-in for a folder: a tmpfs whose entries are bind mounts of the real ones; its path.

    New mount points can be made in it without touching the machine's own folder.
    """
    stand_in = tempfile.mkdtemp(dir=_staging())
    for entry in os.scandir(path):
        new = os.path.join(stand_in, entry.name)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), new)
        elif entry.is_dir():
            os.mkdir(new)
            mount(entry.path, new, "none", MS_BIND | MS_REC)
        else:
            os.close(os.open(new, os.O_CREAT | os.O_WRONLY))
            mount(entry.path, new, "none", MS_BIND)
    return stand_in


_staging_folder = ""
_stood_in: set[str] = set()


def _staging() -> str:
    global _staging_folder
    if not _staging_folder:
        _staging_folder = _empty_folder()
        mount("tmpfs", _staging_folder, "tmpfs", 0)  # seen in this namespace only
    return _staging_folder


def _empty_folder(candidates: tuple[str, ...] = ("/mnt", "/media", "/srv", "/opt")) -> str:
    """A folder that holds nothing, so that nobody misses what the tmpfs hides (a work tree in /mnt, say)."""
    for path in candidates:
        if os.path.isdir(path) and not os.listdir(path):
            return path
    return tempfile.mkdtemp(prefix="headway-mounts-")


def make_mount_point(path: str, *, is_file: bool) -> None:
    """Let `path` exist in this namespace, on stand-ins where it does not exist on the machine."""
    path = os.path.realpath(path)
    if os.path.exists(path):
        return
    ancestor = os.path.dirname(path)
    while not os.path.isdir(ancestor):
        ancestor = os.path.dirname(ancestor)
    if ancestor not in _stood_in:
        stand_in = mirror(ancestor)
        if ancestor == "/":
            os.chroot(stand_in)
            os.chdir("/")
        else:
            mount(stand_in, ancestor, "none", MS_BIND | MS_REC)
        _stood_in.add(ancestor)
    if is_file:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    else:
        os.makedirs(path)


def enter_mounts(mounts: list[tuple[str, str, bool]]) -> None:
    """A mount namespace of our own, with every source seen at its path."""
    _check(_libc().unshare(CLONE_NEWNS), "unshare")
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    for source, path, read_only in mounts:
        make_mount_point(path, is_file=os.path.isfile(source))
        mount(source, path, "none", MS_BIND | MS_REC)
        if read_only:
            mount("none", path, "none", MS_BIND | MS_REMOUNT | MS_RDONLY)


def main() -> None:
    """Exec, or say on standard error why not and leave with 127."""
    spec = json.loads(sys.argv[1])
    die_with(spec["parent"])
    try:
        if spec["mounts"]:
            enter_mounts([(source, path, bool(read_only)) for source, path, read_only in spec["mounts"]])
        os.chdir(spec["cwd"])
        os.execvp(spec["argv"][0], spec["argv"])
    except OSError as error:
        sys.stderr.write(f"cannot run {spec['argv'][0]}: {error}\n")
        sys.stderr.flush()
        os._exit(EXIT_CANNOT_RUN)


if __name__ == "__main__":
    main()
