"""The kernels on 64-bit Arm: compiled on any machine, and run by an emulator beside plain loops."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway_engine.fused import isa, native
from support import cross, kernels

ARM_SETS = tuple(name for name in isa.of_machine("aarch64") if name != "baseline")
"""`baseline` has no flags of its own there: it is `neon` again."""

DRIVEN = ("neon_dot", "neon", "avx2", "baseline")
"""Sets whose products are exact in every element type, as the driver wants them."""

PARTS = {
    *("conversions", "float32", "bfloat16", "half"),
    *("4 bits", "4 bits with offsets", "8 bits", "8 bits with offsets"),
    *("attention, float32", "attention, bfloat16", "sampling"),
}


def check(ended: cross.Ended) -> None:
    """Every part has run, with checks in it, and nothing was wrong."""
    assert ended.code == 0, ended.text
    ran = dict(re.findall(r"^(.+): (\d+) checks$", ended.text, re.MULTILINE))
    assert set(ran) == PARTS
    assert all(int(count) > 100 for count in ran.values()), ended.text
    assert ended.text.endswith("all right: 0\n")


class _Entries:
    """Stands for a library, and notes which entry points are declared."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> SimpleNamespace:
        self.names.add(name)
        return SimpleNamespace()


def entry_points() -> set[str]:
    """What Python calls in a library."""
    entries = _Entries()
    native.declare(entries)  # type: ignore[arg-type]
    return entries.names | {"hw_ready"}


@pytest.mark.parametrize("compiler", cross.COMPILERS)
def test_the_kernels_link_for_arm_and_have_every_entry_point(compiler: str, tmp_path: Path) -> None:
    """With the flags that a build on such a machine uses, so that nothing of x86 is left in its way."""
    cross.needs(compiler)
    machine, names = cross.exported(cross.library(compiler, "neon", tmp_path))
    assert machine == cross.ARM64
    assert entry_points() <= names
    assert {name for name in names if name.startswith("hw_")} == entry_points()


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ARM_SETS)
def test_the_kernels_are_right_on_arm_in_unicorn(chosen: str, tmp_path: Path) -> None:
    """By clang, in one thread; all that it takes comes from PyPI."""
    cross.needs(cross.ZIG)
    check(cross.run_in_unicorn(cross.driver(cross.ZIG, chosen, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ARM_SETS)
def test_the_kernels_are_right_on_arm_in_qemu(chosen: str, tmp_path: Path) -> None:
    """By GCC, with OpenMP and several threads, as on a real machine."""
    cross.needs(cross.GCC)
    check(cross.run_arm64(cross.driver(cross.GCC, chosen, tmp_path)))


@pytest.mark.parametrize("chosen", [name for name in DRIVEN if name in kernels.SETS])
def test_the_same_program_is_right_on_this_machine(chosen: str, tmp_path: Path) -> None:
    """So that what is wrong in an emulator alone is no fault of the program's."""
    if chosen not in kernels.RUNNABLE:
        pytest.skip(f"this CPU has no {chosen}")
    check(cross.run_here(cross.native_driver(chosen, tmp_path)))
