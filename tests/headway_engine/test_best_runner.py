"""Which ways of computing are tried on which machine, in which order, and what the command line limits."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway_engine import model as model_module
from headway_engine import runner as runner_module
from headway_engine.core_process import load_model
from headway_engine.fused import build, isa
from headway_engine.fused.llama import FusedRunner
from headway_engine.lean import choice
from headway_engine.lean.installed import FlashAttention2
from headway_engine.lean.kernels import GatherKernel
from headway_engine.listening import LayerShape
from headway_engine.model import LoadedModel, ModelError
from headway_engine.paths import Path
from headway_engine.runner import best_runner
from headway_engine.sequence import Chunk, Step
from headway_engine.stepping import StepRunner
from support import faults, kernels, paged_functions, runners, tiny_models

CAPACITY = runners.capacity()
MIXED = next(fault for fault in faults.FAULTS if fault.model is faults.mixed_heads)
STALE = next(fault for fault in faults.FAULTS if fault.name == "one stale block")
SETS = ("amx", "avx2", "baseline")
FUSED = [f"fused on {name}" for name in SETS]
KERNELS = [f"transformers on {name}" for name in SETS]

needs_compiler = kernels.needs_compiler


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A CPU of three instruction sets, whichever this one has. `wrong` fused ones mix heads up, `missing`
    ones cannot be built."""
    library = build.kernels()
    assert library is not None

    def of(wrong: tuple[str, ...] = (), missing: tuple[str, ...] = ()) -> None:
        names: dict[int, str] = {}

        def load(name: str) -> Any:
            if name in missing:
                raise build.KernelsMissing(f"the compiler knows no {name}")
            own = ctypes.CDLL(library._name)  # told apart by its object
            names[id(own)] = name
            loaded.append(own)
            return own

        loaded: list[ctypes.CDLL] = []

        def fused(model: Any, capacity: Any, of: Any, threads: int) -> StepRunner:
            def right(m: LoadedModel, c: Any) -> StepRunner:
                return FusedRunner(m, c, of, threads)

            return (MIXED.in_(right) if names[id(of)] in wrong else right)(model, capacity)

        monkeypatch.setattr(build, "usable", lambda: SETS)
        monkeypatch.setattr(build, "load", load)
        monkeypatch.setattr(runner_module, "FusedRunner", fused)

    return of


def served(architecture: str = "llama", dtype: str = "float32", **config: Any) -> tuple[str, list[str]]:
    """What serves, and what was left for it."""
    config = {"runner": "auto"} | config
    found = best_runner(
        tiny_models.engine_config(**config), tiny_models.fresh(architecture, dtype=dtype), CAPACITY
    )
    return found.path.name, [left.path for left in found.fallbacks]


@needs_compiler
def test_a_cpu_takes_the_best_instruction_set_that_is_right(machine: Callable[..., None]) -> None:
    """Then the next; and through transformers the best one again, whose attention may be right."""
    machine()
    assert served() == ("fused on amx", [])
    machine(wrong=("amx",))
    assert served() == ("fused on avx2", FUSED[:1])
    machine(wrong=SETS)
    assert served() == ("transformers on amx", FUSED)


@needs_compiler
def test_a_set_that_cannot_be_built_is_left_once(machine: Callable[..., None]) -> None:
    """And not tried again for transformers."""
    machine(missing=("amx",))
    assert served() == ("fused on avx2", ["fused on amx"])
    machine(missing=SETS)
    assert served() == ("transformers on torch", FUSED)
    machine(missing=("amx",), wrong=("avx2", "baseline"))
    assert served() == ("transformers on avx2", FUSED)


@needs_compiler
def test_other_architectures_go_through_transformers_in_the_same_order(machine: Callable[..., None]) -> None:
    machine(missing=("amx", "avx2"))
    assert served("gpt2") == ("transformers on baseline", KERNELS[:2])


@needs_compiler
def test_what_has_no_kernel_runs_on_torch_and_nothing_was_left(machine: Callable[..., None]) -> None:
    """float16 on a CPU."""
    machine()
    assert served(dtype="float16") == ("transformers on torch", [])


@needs_compiler
def test_a_runner_that_is_asked_for_by_name_limits_the_ways(machine: Callable[..., None]) -> None:
    """What is left then is a refusal with both ways out."""
    machine(wrong=("amx",))
    assert served(runner="fused") == ("fused on avx2", FUSED[:1])
    assert served(runner="transformers") == ("transformers on amx", [])
    assert served(runner="lean") == ("lean on torch", [])
    machine(wrong=SETS)
    with pytest.raises(
        ModelError, match=r"by fused on amx \(nor by 2 other ways\): .*; use --runner auto, or serve"
    ):
        served(runner="fused")


def test_the_environment_can_lower_the_sets_and_its_mistakes_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the variable's name, before any weight is packed."""
    monkeypatch.setattr(isa, "cpu_flags", lambda: isa.INSTRUCTION_SETS["avx2"].cpu_flags)
    monkeypatch.setattr("os.uname", lambda: type("uname", (), {"machine": "x86_64"}))
    monkeypatch.setenv(isa.ISA_ENV, "amx")
    with pytest.raises(
        ModelError, match="HEADWAY_CPU_ISA: 'amx': this CPU does not run it; use one of avx2, "
    ):
        served()
    monkeypatch.setenv(isa.ISA_ENV, "torch")
    assert served() == ("transformers on torch", [])
    with pytest.raises(ModelError, match="there is no way of computing it here; use --runner auto"):
        served(runner="fused")


@needs_compiler
def test_the_core_loads_the_model_again_and_reports_what_was_left(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the whole model shows that a runner is wrong: it has taken the weights by then."""
    machine()
    right, loads = runner_module.FusedRunner, []

    def wrong_as_a_whole(model: LoadedModel, capacity: Any, *rest: Any) -> StepRunner:
        def way(m: LoadedModel, c: Any) -> StepRunner:
            return right(m, c, *rest)

        return (STALE.in_(way) if capacity.kv_blocks == 64 else way)(model, capacity)

    def load(*arguments: Any, **named: Any) -> LoadedModel:
        loads.append(named["dtype"])
        return once(*arguments, **named)

    once = model_module.load
    monkeypatch.setattr(runner_module, "FusedRunner", wrong_as_a_whole)
    monkeypatch.setattr(model_module, "load", load)
    settings = tiny_models.engine_config(model=tiny_models.uri("llama"), runner="auto", device="cpu")
    core = load_model(settings, lambda _: None)
    assert (core.ready.runner, core.ready.kernels) == ("transformers", "amx")
    assert [left.path for left in core.ready.fallbacks] == FUSED
    assert all("the whole model" in left.why for left in core.ready.fallbacks)
    assert loads == ["auto"] * 4
    s = tiny_models.sequence("a", [5, 6, 7], range(4))
    out = core.run(Step((Chunk(s, 0, 3, samples=True),)))
    assert (out["a"].token,) == tiny_models.greedy("llama", (5, 6, 7), 1)


# Accelerators: their order is shown on a CPU, with kernels of Python.


def on_accelerator(
    monkeypatch: pytest.MonkeyPatch, found: list[Any], architecture: str = "llama", **config: Any
) -> list[Path]:
    monkeypatch.setattr(choice, "kernels", lambda *_, **__: iter(found))
    needs = choice.Needs(torch.bfloat16, frozenset({LayerShape(2, 8, 8)}), 256, (9, 0))
    monkeypatch.setattr(choice, "needs_of", lambda *_: needs)
    config = {"decode_graphs": False} | config
    wanted = ("lean", "transformers") if architecture == "llama" else ("transformers",)
    model = tiny_models.fresh(architecture)
    return list(runner_module._accelerator_paths(tiny_models.engine_config(**config), model, wanted))


def test_an_accelerator_takes_lean_with_each_kernel_and_transformers_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kernel is looked for once, and torch's own attention ends both rows."""
    flash = FlashAttention2(paged_functions.flash2_with_kvcache, paged_functions.flash2_varlen)
    paths = on_accelerator(monkeypatch, [flash, GatherKernel(), None])
    assert [(path.runner, path.kernels, path.empties) for path in paths] == [
        ("lean", "flash-attn 2", True),
        ("lean", "torch", True),
        ("lean", "torch", True),
        ("transformers", "flash-attn 2", False),
        ("transformers", "torch", False),
        ("transformers", "torch", False),
    ]
    others = on_accelerator(monkeypatch, [flash, None], "gpt2")
    assert [path.name for path in others] == ["transformers on flash-attn 2", "transformers on torch"]


def test_a_kernel_of_half_precision_leaves_the_copy_in_float32_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is around it shows there; the kernel itself in the types that it takes."""
    flash = FlashAttention2(paged_functions.flash2_with_kvcache, paged_functions.flash2_varlen)
    for path in on_accelerator(monkeypatch, [flash]):
        half: Any = path.build(tiny_models.fresh("llama", dtype="bfloat16"), CAPACITY)
        assert half._kernel is flash
        wide: Any = path.build(tiny_models.fresh("llama"), CAPACITY)
        assert wide._kernel is None


def test_a_kernel_that_was_asked_for_and_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise ValueError("triton: not installed")
        yield

    with pytest.raises(ModelError, match="attention: triton: not installed"):
        on_accelerator(monkeypatch, none())  # type: ignore[arg-type]
