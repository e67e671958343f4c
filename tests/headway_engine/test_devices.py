"""Which device and type a word on the command line stands for, on machines of every kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway_engine import capacity
from headway_engine.devices import choose_device, choose_dtype, slow_here
from headway_engine.fused import isa
from headway_engine.model import ModelError

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets what torch sees: devices by their compute capability, and whether it was built for them."""

    def of(*capabilities: tuple[int, int], built: bool = True) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.2" if built else None)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: built and bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index or 0]
        )

    return of


def test_auto_takes_what_is_there(machine: Machine) -> None:
    """A CUDA device if there is one, else the CPU; `cpu` is always to be had."""
    machine()
    assert choose_device("auto") == torch.device("cpu")
    machine((9, 0))
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")


def test_one_of_several_devices_is_named_by_its_number(machine: Machine) -> None:
    """Counted from 0, as everywhere."""
    machine((9, 0), (9, 0))
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ModelError, match="device: 'cuda:2' is not there: there are 2 CUDA devices"):
        choose_device("cuda:2")


def test_a_device_that_is_not_there_is_an_error_with_the_reason(machine: Machine) -> None:
    """Never the CPU in its place: that would be a hundred times slower and look like a healthy pod."""
    machine(built=False)
    with pytest.raises(ModelError, match=r"'cuda' is not there: torch .* is built without CUDA"):
        choose_device("cuda")
    machine()
    with pytest.raises(ModelError, match="'cuda:0' is not there: no CUDA device and driver are seen"):
        choose_device("cuda:0")


@pytest.mark.parametrize("name", ["tpu", "mps", "gpu 1", "cuda:x"])
def test_words_that_name_no_device_are_refused(name: str, machine: Machine) -> None:
    """With the words that do."""
    machine((9, 0))
    with pytest.raises(ModelError, match=r"^device: .*use auto, cpu, cuda or cuda:N"):
        choose_device(name)


def test_auto_dtype_on_cuda_is_what_the_hardware_multiplies(machine: Machine) -> None:
    """float16 on devices that only imitate bfloat16, whatever the weights are in; the second device is asked
    about itself."""
    machine((9, 0), (7, 5))
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("auto", torch.device("cuda:1"), torch.bfloat16) is torch.float16
    assert choose_dtype("float32", torch.device("cuda:1")) is torch.float32
    with pytest.raises(ModelError, match=r"^dtype: "):
        choose_dtype("int3", torch.device("cuda"))


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.device]:
    """Sets which CPU this is, by the best instruction set that it runs, and what the environment allows."""

    def of(best: str, allowed: str = "") -> torch.device:
        machine = "aarch64" if best == "neon" else "x86_64"
        monkeypatch.setattr("os.uname", lambda: type("uname", (), {"machine": machine}))
        monkeypatch.setattr(isa, "cpu_flags", lambda: isa.INSTRUCTION_SETS[best].cpu_flags)
        monkeypatch.setenv(isa.ISA_ENV, allowed)
        return torch.device("cpu")

    return of


@pytest.mark.parametrize(
    ("best", "allowed", "fast"),
    [
        ("amx", "", True),
        ("avx512_bf16", "", False),
        ("avx512_vnni", "", False),
        ("avx512", "", False),
        ("avx2", "", False),
        ("baseline", "", False),
        ("neon", "", False),
        ("amx", "avx512_bf16", False),
        ("amx", "avx512", False),
        ("amx", "torch", False),
    ],
)
def test_auto_dtype_on_a_cpu_is_bfloat16_where_that_is_faster_and_loses_nothing(
    best: str, allowed: str, fast: bool, cpu: Callable[..., torch.device]
) -> None:
    """Weights of float16 and float32 lose bits in bfloat16, and random ones have nothing to gain."""
    device = cpu(best, allowed)
    assert choose_dtype("auto", device, torch.bfloat16) is (torch.bfloat16 if fast else torch.float32)
    for stored in (torch.float16, torch.float32, None):
        assert choose_dtype("auto", device, stored) is torch.float32
    assert choose_dtype("bfloat16", device) is torch.bfloat16, "what is asked for by name is had"
    used = best if allowed in ("", "torch") else allowed
    assert slow_here(torch.bfloat16, device) is (used not in ("amx", "avx512_bf16") or allowed == "torch")
    assert slow_here(torch.float16, device)
    assert not slow_here(torch.float32, device)


def test_nothing_that_an_accelerator_is_given_is_slow(machine: Machine) -> None:
    machine((9, 0))
    assert not slow_here(torch.float16, torch.device("cuda"))


def test_an_instruction_set_that_this_cpu_lacks_is_an_error_with_the_variables_name(
    cpu: Callable[..., torch.device],
) -> None:
    """Not a traceback, and not another set in its place."""
    with pytest.raises(
        ModelError, match=r"^HEADWAY_CPU_ISA: 'amx': this CPU does not run it; use one of avx2, "
    ):
        choose_dtype("auto", cpu("avx2", "amx"), torch.bfloat16)


def test_free_memory_of_a_device_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the device that is meant, after what torch keeps for later was given back."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: calls.append(device) or (7 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    found = capacity.free_memory(torch.device("cuda:1"))
    assert found.free_bytes == 7 << 30
    assert found.source == "a device"
    assert calls == ["empty", torch.device("cuda:1")]
