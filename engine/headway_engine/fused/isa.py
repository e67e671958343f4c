"""Instruction sets that the kernels are built for, and which of them this CPU runs.

A set is a name, the compiler's flags, and the CPU's flags that it needs. The environment can lower what is
used. Knows nothing of compilers and libraries.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headway_engine.model_error import ModelError

ISA_ENV = "HEADWAY_CPU_ISA"
"""The best instruction set that may be used; `torch`: no kernels at all."""

NO_KERNELS = "torch"

_X86 = ("x86_64", "amd64", "i686")
_ARM64 = ("aarch64", "arm64")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
_AVX2_CPU = frozenset({"avx2", "fma", "f16c"})
_AVX512_CPU = _AVX2_CPU | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_VNNI_CPU = _AVX512_CPU | {"avx512_vnni"}
_BF16_CPU = _VNNI_CPU | {"avx512_bf16"}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One way to compile the kernels. `has_bf16`: it has instructions for products of bfloat16;
    `multiplies_bf16`: they are faster than those of float32.

    With AVX-512's vdpbf16ps they were slower on the one CPU where that was measured (Sapphire Rapids). AMD's
    Zen 4 may gain by it: there, ask for bfloat16 by name and compare.
    """

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    machines: tuple[str, ...]  # of uname; empty: any
    has_bf16: bool = False
    multiplies_bf16: bool = False


INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    one.name: one
    for one in (
        InstructionSet(
            "amx",
            (*_BF16, "-mamx-tile", "-mamx-bf16"),
            _BF16_CPU | {"amx_tile", "amx_bf16"},
            _X86,
            has_bf16=True,
            multiplies_bf16=True,
        ),
        InstructionSet("avx512_bf16", _BF16, _BF16_CPU, _X86, has_bf16=True),
        InstructionSet("avx512_vnni", _VNNI, _VNNI_CPU, _X86),
        InstructionSet("avx512", _AVX512, _AVX512_CPU, _X86),
        InstructionSet("avx2", _AVX2, _AVX2_CPU, _X86),
        InstructionSet("neon_dot", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp", "atomics"}), _ARM64),
        InstructionSet("neon", (), frozenset(), _ARM64),  # part of every 64-bit Arm; `baseline` is the same
        InstructionSet("baseline", (), frozenset(), ()),
    )
}
"""Best first."""


def of_machine(machine: str) -> tuple[str, ...]:
    """Names of the sets that kernels are built for on such a machine (uname's word), best first."""
    return tuple(
        one.name for one in INSTRUCTION_SETS.values() if not one.machines or machine.lower() in one.machines
    )


def runnable(machine: str, cpu_flags: frozenset[str]) -> tuple[str, ...]:
    """Those of them that a CPU with these flags runs, best first."""
    return tuple(name for name in of_machine(machine) if INSTRUCTION_SETS[name].cpu_flags <= cpu_flags)


def allowed(names: tuple[str, ...], highest: str) -> tuple[str, ...]:
    """`names` from `highest` on; all if it is empty, none for `torch`. Raises ModelError for other words."""
    if not highest or highest in names:
        return names[names.index(highest) :] if highest else names
    if highest == NO_KERNELS:
        return ()
    why = "this CPU does not run it" if highest in INSTRUCTION_SETS else "there is no such instruction set"
    raise ModelError(f"{ISA_ENV}: {highest!r}: {why}; use one of {', '.join((*names, NO_KERNELS))}")


def available() -> tuple[str, ...]:
    """What this process may use, best first: what the CPU runs, up to HEADWAY_CPU_ISA. Raises ModelError."""
    return allowed(runnable(os.uname().machine, cpu_flags()), os.environ.get(ISA_ENV, ""))


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU's flags as Linux says them; empty where it does not. A flag is there only where the system
    saves its registers, so that it can really be used."""
    try:
        return flags_in(Path("/proc/cpuinfo").read_text())
    except OSError:
        return frozenset()


def flags_in(cpuinfo: str) -> frozenset[str]:
    """The flags of the first CPU; x86 calls them `flags`, Arm `Features`."""
    line = next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())
