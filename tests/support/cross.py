"""Programs for 64-bit Arm on another machine: compilers that make them, and emulators that run them.

Compilers are Debian's `aarch64-linux-gnu-g++`, which brings OpenMP, and Zig's, which comes from PyPI and
brings none: its programs have one thread and no library (`alone.cpp`). Emulators are qemu-user, and Unicorn
from PyPI, which emulates a CPU without an operating system: it runs programs whose only system calls are
`write` and `exit`.
"""

import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway_engine.fused import build, isa
from headway_engine.model_source import default_cache_dir

SOURCES = Path(__file__).parent / "kernels_alone"
DRIVER = SOURCES / "driver.cpp"
GCC = "aarch64-linux-gnu-g++"
ZIG = "ziglang"
COMPILERS = (GCC, ZIG)
_PLAIN = tuple(flag for flag in build.COMPILER_FLAGS if flag not in ("-O3", "-shared", "-fPIC", "-fopenmp"))
_ZIG_FLAGS = {"-march=armv8.2-a+dotprod": "-mcpu=generic+v8_2a+dotprod"}  # it has its own names of processors
_TIMEOUT_S = 200


def needs(compiler: str) -> None:
    """Skips the test where the compiler is missing."""
    if compiler == ZIG and importlib.util.find_spec(ZIG) is None:
        pytest.skip("no ziglang here (a package of the extra `dev`)")
    if compiler == GCC and shutil.which(GCC) is None:
        pytest.skip(f"no {GCC} here (Debian's package g++-aarch64-linux-gnu)")


def library(compiler: str, chosen: str, folder: Path) -> Path:
    """The kernels' shared library, with the flags that it has on such a machine, less optimised to save time.

    Zig's is linked without the libraries of C++ and OpenMP: their names are left undefined.
    """
    made = folder / f"{chosen}.so"
    flags = (*build.COMPILER_FLAGS, *isa.INSTRUCTION_SETS[chosen].compiler_flags)
    if compiler == GCC:
        _call([GCC, *flags, "-O1", str(build.SOURCE), "-o", str(made)])
        return made
    part = folder / f"{chosen}.o"
    plain = [flag for flag in flags if flag != "-shared"]
    _zig("c++", *plain, "-I", str(SOURCES), "-c", str(build.SOURCE), "-o", str(part))
    _zig("cc", "-shared", "-nostdlib", str(part), "-o", str(made))
    return made


def driver(compiler: str, chosen: str, folder: Path) -> Path:
    """The program that checks the kernels, linked statically; Zig's without a library, and for one thread."""
    made = folder / f"driver-{chosen}"
    flags = ("-O2", *_PLAIN, *isa.INSTRUCTION_SETS[chosen].compiler_flags, "-I", str(build.SOURCE.parent))
    if compiler == GCC:
        _call([GCC, *flags, "-fopenmp", "-static", str(DRIVER), "-o", str(made)])
        return made
    parts = [folder / "driver.o", folder / "alone.o"]
    bare = ("-fno-exceptions", "-fno-sanitize=undefined", "-femulated-tls", "-I", str(SOURCES))
    no_messages = "-D_LIBCPP_VERBOSE_ABORT(...)=__builtin_trap()"  # of the C++ library's checks
    _zig("c++", *flags, *bare, no_messages, "-c", str(DRIVER), "-o", str(parts[0]))
    _zig("c++", "-O2", *bare, "-ffreestanding", "-c", str(SOURCES / "alone.cpp"), "-o", str(parts[1]))
    _zig("cc", "-nostdlib", "-static", *map(str, parts), "-o", str(made))
    return made


def native_driver(chosen: str, folder: Path) -> Path:
    """The same program for this machine. Skips the test where there is no C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler here")
    made = folder / f"driver-{chosen}"
    flags = ("-O2", *_PLAIN, "-fopenmp", *isa.INSTRUCTION_SETS[chosen].compiler_flags)
    _call([*compiler.split(), *flags, "-I", str(build.SOURCE.parent), str(DRIVER), "-o", str(made)])
    return made


def _zig(command: str, *arguments: str) -> None:
    cache = str(default_cache_dir() / "zig")
    places = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    own = [_ZIG_FLAGS.get(flag, flag) for flag in arguments]
    _call([sys.executable, "-m", ZIG, command, "-target", "aarch64-linux-gnu", *own], os.environ | places)


def _call(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and what it wrote."""

    code: int
    text: str


def run_here(program: Path) -> Ended:
    """Run a program of this machine."""
    return _run([str(program)])


def run_arm64(program: Path) -> Ended:
    """Run a static program for Arm: by this CPU if it is one, else by qemu-user, or skip the test."""
    if os.uname().machine in isa.INSTRUCTION_SETS["neon"].machines:
        return run_here(program)
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not emulator:
        pytest.skip("no qemu-aarch64 here (Debian's package qemu-user-static)")
    return _run([emulator, "-cpu", "max", str(program)])


def _run(command: list[str]) -> Ended:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    return Ended(done.returncode, done.stdout + done.stderr)


_LOADED = 1  # a program header's type: bytes that a process has in memory
_SYSTEM_CALL = 2  # Unicorn's number of that exception
_WRITE, _EXIT = 64, 93
_STACK, _STACK_BYTES = 0x7F000000, 8 << 20
_PAGE = 4096
_NO_TRAP = 3 << 20  # CPACR_EL1: no trap on floating point


def run_in_unicorn(program: Path) -> Ended:
    """Run a program without a library by Unicorn. Skips the test where that is missing."""
    unicorn: Any = pytest.importorskip("unicorn", reason="no unicorn here (a package of the extra `dev`)")
    arm: Any = pytest.importorskip("unicorn.arm64_const")
    image = program.read_bytes()
    machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    machine.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
    parts = _loaded(image)
    first = min(at for _, at, _, _ in parts) // _PAGE * _PAGE
    end = -(-max(at + room for _, at, _, room in parts) // _PAGE) * _PAGE
    machine.mem_map(first, end - first)
    for offset, at, size, _ in parts:
        machine.mem_write(at, image[offset : offset + size])
    machine.mem_map(_STACK, _STACK_BYTES)
    machine.reg_write(arm.UC_ARM64_REG_SP, _STACK + _STACK_BYTES)
    machine.reg_write(arm.UC_ARM64_REG_CPACR_EL1, _NO_TRAP)
    written: list[str] = []
    codes: list[int] = []

    def on_exception(_: Any, kind: int, __: Any) -> None:
        number, x0 = machine.reg_read(arm.UC_ARM64_REG_X8), machine.reg_read(arm.UC_ARM64_REG_X0)
        if (kind, number) == (_SYSTEM_CALL, _WRITE):
            size = machine.reg_read(arm.UC_ARM64_REG_X2)
            written.append(machine.mem_read(machine.reg_read(arm.UC_ARM64_REG_X1), size).decode())
            machine.reg_write(arm.UC_ARM64_REG_X0, size)
            return
        if (kind, number) != (_SYSTEM_CALL, _EXIT):
            written.append(f"exception {kind}, system call {number}")
        codes.append(x0 if (kind, number) == (_SYSTEM_CALL, _EXIT) else -1)
        machine.emu_stop()

    machine.hook_add(unicorn.UC_HOOK_INTR, on_exception)
    machine.emu_start(struct.unpack_from("<Q", image, 24)[0], 0)
    return Ended(codes[0], "".join(written))


def _loaded(image: bytes) -> list[tuple[int, int, int, int]]:
    """Of each loaded part of an ELF program: offset in the file, address, bytes there, bytes in memory."""
    (table,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", image, table + i * size) for i in range(count)]
    return [(h[2], h[3], h[5], h[6]) for h in headers if h[0] == _LOADED]


ARM64 = 183  # ELF's number of the machine
_DYNAMIC_SYMBOLS = 11  # a section's type


def exported(path: Path) -> tuple[int, set[str]]:
    """Of an ELF shared library: the machine's number, and the names of what it defines for others."""
    image = path.read_bytes()
    (machine,) = struct.unpack_from("<H", image, 18)
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    names = set()
    for _, kind, _, _, offset, length, link, _, _, each in sections:
        if kind != _DYNAMIC_SYMBOLS:
            continue
        for at in range(offset, offset + length, each):
            name, _, _, section, _, _ = struct.unpack_from("<IBBHQQ", image, at)
            begin = sections[link][4] + name
            if section:  # 0: to be found elsewhere
                names.add(image[begin : image.index(b"\0", begin)].decode())
    return machine, names
