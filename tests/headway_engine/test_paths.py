"""Ways of computing a model, best first: what is left and why, what is told, and who is refused."""

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from headway_engine.lean.runner import LeanRunner
from headway_engine.messages import Fallback
from headway_engine.model import LoadedModel, ModelError
from headway_engine.paths import Path, PathMissing, Serving, first_right
from headway_engine.protocol import Capacity
from headway_engine.runner import TransformersRunner
from headway_engine.start_check import Build
from headway_engine.stepping import StepRunner
from support import faults, runners, tiny_models

CAPACITY = runners.capacity()
MIXED = next(fault for fault in faults.FAULTS if fault.model is faults.mixed_heads)
STALE = next(fault for fault in faults.FAULTS if fault.name == "one stale block")
NAN = next(fault for fault in faults.FAULTS if fault.model is faults.one_nan)


def path(kernels: str, build: Build = TransformersRunner, empties: bool = False) -> Path:
    return Path("lean" if empties else "transformers", kernels, build, empties)


def wrong_as_a_whole(way: Build) -> Build:
    """Right on the small copy, whose blocks are few, and wrong on the model."""

    def build(model: LoadedModel, capacity: Capacity) -> StepRunner:
        return (STALE.in_(way) if capacity == CAPACITY else way)(model, capacity)

    return build


def raising(error: Exception) -> Build:
    def build(*_: Any) -> StepRunner:
        raise error

    return build


def serving(*paths: Path, reload: Callable[[], LoadedModel] | None = None) -> Serving:
    model = tiny_models.fresh("llama")
    return first_right(paths, model, CAPACITY, reload=reload, way_out="do something else")


def test_the_best_way_serves_and_nothing_else_is_tried() -> None:
    found = serving(path("amx"), path("torch", raising(AssertionError("not to be tried"))))
    assert found.path.name == "transformers on amx"
    assert found.fallbacks == ()
    assert found.runner.name == "transformers"


@pytest.mark.parametrize(
    ("build", "reason", "why"),
    [
        (MIXED.in_(TransformersRunner), "wrong logits", "by more than rounding explains"),
        (wrong_as_a_whole(TransformersRunner), "wrong logits", "the whole model in float32"),
        (NAN.in_(TransformersRunner), "logits not finite", "the model's own are"),
        (raising(PathMissing("no C++ compiler was found")), "unavailable", "no C++ compiler was found"),
        (raising(RuntimeError("bad\nkernel")), "failed", "RuntimeError: bad kernel"),
    ],
    ids=["wrong", "wrong as a whole", "not finite", "missing", "raises"],
)
def test_a_way_that_fails_is_left_for_the_next_and_that_is_told(
    build: Build, reason: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In one log line, and to whoever asked."""
    with caplog.at_level(logging.WARNING, logger="headway_engine"):
        found = serving(path("amx", build), path("avx2"))
    assert found.path.name == "transformers on avx2"
    (left,) = found.fallbacks
    assert (left.path, left.reason) == ("transformers on amx", reason)
    assert why in left.why
    (line,) = [line for line in caplog.messages if line.startswith("runner-fallback")]
    assert 'left="transformers on amx"' in line
    assert why in line


def test_what_a_runner_has_emptied_is_loaded_again_and_the_runner_is_gone_by_then() -> None:
    """Two copies of a large model may be more than there is room for."""
    built: list[weakref.ref[StepRunner]] = []
    loads: list[int] = []
    model: Any = tiny_models.fresh("llama")

    def noting(model: LoadedModel, capacity: Capacity) -> StepRunner:
        runner = wrong_as_a_whole(LeanRunner)(model, capacity)
        built.append(weakref.ref(runner))
        return runner

    def reload() -> LoadedModel:
        loads.append(sum(one() is not None for one in built))
        assert not any(p.numel() for p in model.module.parameters()), (
            "whoever holds the model holds no weights"
        )
        return tiny_models.fresh("llama")

    first, second = path("a", noting, empties=True), path("b", noting, empties=True)
    gc.disable()
    try:
        paths = (first, second, path("torch"))
        found = first_right(paths, model, CAPACITY, reload=reload, way_out="")
    finally:
        gc.enable()
    assert found.path.name == "transformers on torch"
    assert [left.reason for left in found.fallbacks] == ["wrong logits"] * 2
    assert loads == [0, 0]
    s = tiny_models.sequence("a", [5, 6, 7], range(4))
    tiny_models.advance(found.runner, (s, 3))
    assert tuple(s.tokens[3:]) == tiny_models.greedy("llama", (5, 6, 7), 1)


def test_a_runner_that_is_wrong_on_the_copy_takes_no_weights() -> None:
    """The model is still whole, and not loaded again."""
    found = serving(path("a", MIXED.in_(LeanRunner), empties=True), path("torch"), reload=None)
    assert found.path.name == "transformers on torch"


def test_without_a_way_to_load_again_an_emptied_model_is_refused() -> None:
    with pytest.raises(ModelError, match="is not computed right by lean on a: the whole model"):
        serving(path("a", wrong_as_a_whole(LeanRunner), empties=True), path("torch"))


def test_a_model_that_nothing_computes_right_is_refused_by_what_was_wrong_with_the_best() -> None:
    """Of those that were there at all; with the way out."""
    with pytest.raises(ModelError) as caught:
        serving(
            path("amx", raising(PathMissing("no compiler"))),
            path("avx2", MIXED.in_(TransformersRunner)),
            path("torch", NAN.in_(TransformersRunner)),
        )
    words = str(caught.value)
    assert words.startswith("model: LlamaForCausalLM, ")
    assert "is not computed right by transformers on avx2 (nor by 2 other ways): 2 layers in float32" in words
    assert words.endswith("; do something else")
    assert len(words) < 400


def test_where_no_way_is_to_be_had_it_is_said() -> None:
    with pytest.raises(ModelError, match="transformers on amx cannot be had here: no compiler; install g"):
        serving(path("amx", raising(PathMissing("no compiler"))))
    with pytest.raises(ModelError, match="there is no way of computing it here; do something else"):
        serving()


@pytest.mark.parametrize("error", [ModelError("attention: no"), MemoryError("full")], ids=repr)
def test_what_no_other_way_would_mend_ends_the_start(error: Exception) -> None:
    """A setting, or a lack of memory."""
    with pytest.raises(type(error), match=str(error)):
        serving(path("amx", raising(error)), path("torch"))


def test_reasons_are_a_few_short_words() -> None:
    """They are labels of a metric: whatever varies is in `why`."""
    found = serving(path("a", raising(RuntimeError("at 0x7f31"))), path("torch"))
    assert found.fallbacks == (Fallback("transformers on a", "failed", "RuntimeError: at 0x7f31"),)
