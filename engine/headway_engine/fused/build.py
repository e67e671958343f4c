"""Build the kernels for this CPU and load them: once per machine, into the cache, or not at all.

One shared library per instruction set, compiled from one file and its headers. A library that a container
image brings along (built by `python -m headway_engine.fused.build FOLDER`, named by HEADWAY_KERNELS) is used
before anything is compiled. Knows nothing of models.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

from headway_engine.logs import fields
from headway_engine.model_source import default_cache_dir

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
KERNELS_ENV = "HEADWAY_KERNELS"
"""A folder of libraries built beforehand; `off` turns the kernels off."""

_BASE = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "baseline": (),
}
_BUILD_TIMEOUT_S = 300


@cache
def kernels() -> ctypes.CDLL | None:
    """The library for this CPU, built if need be; None (with one log line) where that cannot be."""
    place = os.environ.get(KERNELS_ENV, "")
    if place == "off":
        log.info(fields("kernels", why=f"turned off by {KERNELS_ENV}"))
        return None
    name = library_name(instruction_set())
    try:
        for folder in (Path(place) if place else None, default_cache_dir() / "kernels"):
            if folder is not None and (folder / name).is_file():
                return ctypes.CDLL(str(folder / name))  # OSError where OpenMP's runtime is missing, say
        return ctypes.CDLL(str(compile_into(default_cache_dir() / "kernels", instruction_set())))
    except (OSError, RuntimeError) as error:
        why = "torch's own attention is used instead, which is slower"
        log.warning(fields("kernels-missing", why=why, error=error))
        return None


def instruction_set() -> str:
    """The best of INSTRUCTION_SETS that this CPU runs, as torch sees it."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return "avx512"
    return "avx2" if capability == "AVX2" else "baseline"


def library_name(chosen: str) -> str:
    """Named by what is in it: sources, flags, machine."""
    digest = hashlib.sha256()
    for source in (SOURCE, *HEADERS):
        digest.update(f"{source.name} {source.stat().st_size} ".encode() + source.read_bytes())
    digest.update(" ".join((*_BASE, *INSTRUCTION_SETS[chosen])).encode())
    return f"headway-kernels-{os.uname().machine}-{chosen}-{digest.hexdigest()[:16]}.so"


def compile_into(folder: Path, chosen: str) -> Path:
    """Compile for one instruction set; the file appears by one rename. RuntimeError says what is missing."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise RuntimeError("no C++ compiler (g++ or clang++) was found")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(chosen)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as work:
        draft = Path(work) / target.name
        command = [*compiler.split(), *_BASE, *INSTRUCTION_SETS[chosen], str(SOURCE), "-o", str(draft)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{compiler}: {error}") from error
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        draft.replace(target)
    log.info(fields("kernels-built", file=target.name, seconds=round(time.monotonic() - began_s, 1)))
    return target


def main(argv: list[str]) -> int:
    """Build every instruction set of this machine's kind into a folder, for an image that has no compiler."""
    if len(argv) != 1:
        print("usage: python -m headway_engine.fused.build FOLDER", file=sys.stderr)
        return 2
    sets = INSTRUCTION_SETS if os.uname().machine in ("x86_64", "AMD64") else {"baseline": ()}
    for chosen in sets:
        print(compile_into(Path(argv[0]), chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
