"""Build the kernels for this CPU and load them: once per machine, into the cache, or not at all.

One shared library per instruction set (`isa`), compiled from one file and its headers. A library that a
container image brings along (built by `python -m headway_engine.fused.build FOLDER`, named by
HEADWAY_KERNELS) is used before anything is compiled. Knows nothing of models.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from headway_engine import drafts
from headway_engine.fused import isa
from headway_engine.logs import fields
from headway_engine.model_source import default_cache_dir

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
KERNELS_ENV = "HEADWAY_KERNELS"
"""A folder of libraries built beforehand; `off` turns the kernels off."""

COMPILER_FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
)
"""Of every instruction set; each adds its own."""

_BUILD_TIMEOUT_S = 300
_SEAL_BYTES = 32


class KernelsMissing(Exception):
    """There is no library for an instruction set, and none can be made; the message says why."""


def kernels() -> ctypes.CDLL | None:
    """The library of the best instruction set that can be had; None (with one log line) where none can.

    Raises ModelError for a HEADWAY_CPU_ISA that means nothing here.
    """
    names = usable()
    failures: list[str] = []
    for name in names:
        try:
            library = load(name)
        except KernelsMissing as error:
            failures.append(f"{name}: {error}")
            continue
        if failures:
            log.warning(fields("kernels-fallback", used=name, why="; ".join(failures)))
        return library
    if names:
        why = "torch's own attention is used instead, which is slower"
        log.warning(fields("kernels-missing", why=why, error="; ".join(failures)))
    return None


def usable() -> tuple[str, ...]:
    """The instruction sets to try, best first; none (with a log line) when they are turned off. Raises
    ModelError."""
    for variable, word in ((KERNELS_ENV, "off"), (isa.ISA_ENV, isa.NO_KERNELS)):
        if os.environ.get(variable) == word:
            log.info(fields("kernels", why=f"turned off by {variable}"))
            return ()
    return isa.available()


def load(name: str) -> ctypes.CDLL:
    """The library for one instruction set, built if need be. Raises KernelsMissing.

    One that is not whole, or cannot be loaded, is built anew once: it may have been cut short by a full disk,
    or lack OpenMP's runtime here.
    """
    file = library_name(name)
    place = os.environ.get(KERNELS_ENV, "")
    cached = default_cache_dir() / "kernels" / file
    seen_ns = _made_at_ns(cached)
    for path in ([Path(place) / file] if place else []) + [cached]:
        if not path.is_file():
            continue
        try:
            return _opened(path)
        except OSError as error:
            log.warning(fields("kernels-broken", file=path, error=error, next="building it again"))
    try:
        return _opened(compile_into(cached.parent, name, seen_ns))
    except (OSError, RuntimeError) as error:
        raise KernelsMissing(str(error)) from error


@cache
def _opened(path: Path) -> ctypes.CDLL:
    """Raises OSError for a file that is no whole library of ours, or that the system does not let us use."""
    content = path.read_bytes()
    if content[-_SEAL_BYTES:] != _seal(content[:-_SEAL_BYTES]):  # loading it could end the process by SIGBUS
        raise OSError(f"{path} is not whole, or was not built by Headway")
    library = ctypes.CDLL(str(path))  # OSError where OpenMP's runtime is missing, say
    if library.hw_ready():
        raise OSError("the system does not let this process use the instruction set")
    return library


def _seal(content: bytes) -> bytes:
    """What stands at the end of a library, behind what the loader reads."""
    return hashlib.sha256(b"headway kernels" + content).digest()


def library_name(chosen: str) -> str:
    """Named by what is in it: sources, flags, machine."""
    digest = hashlib.sha256()
    for source in (SOURCE, *HEADERS):
        digest.update(f"{source.name} {source.stat().st_size} ".encode() + source.read_bytes())
    digest.update(" ".join((*COMPILER_FLAGS, *isa.INSTRUCTION_SETS[chosen].compiler_flags)).encode())
    return f"headway-kernels-{os.uname().machine}-{chosen}-{digest.hexdigest()[:16]}.so"


def compile_into(folder: Path, chosen: str, seen_ns: int | None = None) -> Path:
    """Compile for one instruction set; the file appears by one rename. RuntimeError says what is missing.

    Of several processes that want the same at once, one compiles and the others take what it made: a library
    that is there and was not when they looked. `seen_ns`: when the one was made that they saw (0: none did).
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise RuntimeError("no C++ compiler (g++ or clang++) was found")
    target = folder / library_name(chosen)
    flags = isa.INSTRUCTION_SETS[chosen].compiler_flags
    began_s = time.monotonic()
    before = _made_at_ns(target) if seen_ns is None else seen_ns
    with drafts.draft_of(target) as work:
        if _made_at_ns(target) != before:  # by another process, while we waited for it
            return target
        draft = work / target.name
        command = [*compiler.split(), *COMPILER_FLAGS, *flags, str(SOURCE), "-o", str(draft)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{compiler}: {error}") from error
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        with draft.open("rb+") as file:
            seal = _seal(file.read())
            file.write(seal)
        draft.replace(target)
    log.info(fields("kernels-built", file=target.name, seconds=round(time.monotonic() - began_s, 1)))
    return target


def _made_at_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def main(argv: list[str]) -> int:
    """Build every instruction set of this machine's kind into a folder, for an image that has no compiler."""
    if len(argv) != 1:
        print("usage: python -m headway_engine.fused.build FOLDER", file=sys.stderr)
        return 2
    for chosen in isa.of_machine(os.uname().machine):
        print(compile_into(Path(argv[0]), chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
