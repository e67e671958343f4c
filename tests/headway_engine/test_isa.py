"""Instruction sets: which of them a CPU runs, and how the environment lowers what is used."""

import itertools

import pytest

from headway_engine.fused import isa

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
ICE_LAKE = AVX512 | {"avx512_vnni"}
ZEN_4 = ICE_LAKE | {"avx512_bf16"}
NEOVERSE_N1 = frozenset({"fp", "asimd", "atomics", "asimdhp", "asimddp"})
SAPPHIRE_RAPIDS = ZEN_4 | {"amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", frozenset(), ("baseline",)),
        ("x86_64", AVX2, ("avx2", "baseline")),
        ("x86_64", AVX2 - {"f16c"}, ("baseline",)),
        ("AMD64", AVX512, ("avx512", "avx2", "baseline")),
        ("x86_64", ICE_LAKE, ("avx512_vnni", "avx512", "avx2", "baseline")),
        ("x86_64", ZEN_4, ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "baseline")),
        ("x86_64", SAPPHIRE_RAPIDS, ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "baseline")),
        ("aarch64", frozenset({"asimd"}), ("neon", "baseline")),
        ("aarch64", NEOVERSE_N1, ("neon_dot", "neon", "baseline")),
        ("arm64", frozenset(), ("neon", "baseline")),
        ("riscv64", frozenset(), ("baseline",)),
    ],
)
def test_a_cpu_runs_what_its_flags_say_best_first(
    machine: str, flags: frozenset[str], expected: tuple[str, ...]
) -> None:
    """A set needs all of its flags: a hypervisor may withhold any."""
    assert isa.runnable(machine, flags) == expected


def test_flags_are_read_as_linux_writes_them_on_x86_and_on_arm() -> None:
    """Arm has one entry a CPU without a name, and calls its flags features."""
    arm = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd atomics asimddp\nCPU part\t: 0xd0c\n"
    assert isa.flags_in(arm * 2) == {"fp", "asimd", "atomics", "asimddp"}
    assert isa.runnable("aarch64", isa.flags_in(arm)) == ("neon_dot", "neon", "baseline")
    assert isa.flags_in("processor\t: 0\nflags\t\t: fpu avx2\nvmx flags\t: vnmi\n") == {"fpu", "avx2"}
    assert isa.flags_in("") == frozenset()


def test_the_environment_names_the_highest_set() -> None:
    """What lies below it stays, for the case that it fails."""
    names = isa.runnable("x86_64", ICE_LAKE)
    assert isa.allowed(names, "") == names
    assert isa.allowed(names, "avx512") == ("avx512", "avx2", "baseline")
    assert isa.allowed(names, "baseline") == ("baseline",)
    assert isa.allowed(names, "torch") == ()


@pytest.mark.parametrize(
    ("word", "why"), [("amx", "this CPU does not run it"), ("sse9", "there is no such instruction set")]
)
def test_a_set_that_is_not_there_is_refused_with_those_that_are(word: str, why: str) -> None:
    """Never something else in its place: whoever forces a path wants to know which one ran."""
    with pytest.raises(
        ValueError, match=f"HEADWAY_CPU_ISA: '{word}': {why}; use one of avx2, baseline, torch"
    ):
        isa.allowed(("avx2", "baseline"), word)


def test_every_set_that_multiplies_bf16_is_better_than_those_that_do_not() -> None:
    """The order is the order in which they are tried."""
    x86 = [isa.INSTRUCTION_SETS[name] for name in isa.of_machine("x86_64")]
    assert [one.multiplies_bf16 for one in x86] == sorted((one.multiplies_bf16 for one in x86), reverse=True)
    for better, worse in itertools.pairwise(x86):
        assert worse.cpu_flags <= better.cpu_flags
