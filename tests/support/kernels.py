"""The C++ kernels for tests: which instruction sets run here, and the library of each."""

import ctypes
from functools import cache

import pytest

from headway_engine.fused import build


def runs_here(chosen: str) -> bool:
    order = ["baseline", "avx2", "avx512"]
    return order.index(chosen) <= order.index(build.instruction_set())


@cache
def loaded(chosen: str) -> ctypes.CDLL:
    """Built into the cache when it is not there. Skips the test where that cannot be, or cannot run."""
    if not runs_here(chosen):
        pytest.skip(f"this CPU has no {chosen}")
    folder = build.default_cache_dir() / "kernels"
    path = folder / build.library_name(chosen)
    try:
        return ctypes.CDLL(str(path if path.is_file() else build.compile_into(folder, chosen)))
    except RuntimeError as error:
        pytest.skip(f"no kernels here: {error}")
