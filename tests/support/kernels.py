"""The C++ kernels for tests: the instruction sets of this kind of machine, and the library of each."""

import ctypes
import os

import pytest

from headway_engine.fused import build, isa

SETS = isa.of_machine(os.uname().machine)
"""Every set that kernels are built for here; a test that is given one skips it where the CPU lacks it."""

RUNNABLE = isa.runnable(os.uname().machine, isa.cpu_flags())
"""Those that this CPU runs."""

needs_compiler = pytest.mark.skipif(build.kernels() is None, reason="no C++ compiler here")


def loaded(chosen: str) -> ctypes.CDLL:
    """Built into the cache when it is not there. Skips the test where that cannot be, or cannot run."""
    if chosen not in RUNNABLE:
        pytest.skip(f"this CPU has no {chosen}")
    try:
        return build.load(chosen)
    except build.KernelsMissing as error:
        pytest.skip(f"no kernels for {chosen} here: {error}")
