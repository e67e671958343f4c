"""Ways of computing a model, best first: the first that passes the check at start serves.

One that cannot be had here, fails while it is tried, or gives wrong logits, is left for the next, and that is
told. Knows nothing of what the ways are (`runner`), and nothing of what is right (`start_check`).
"""

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from headway_engine.devices import dtype_name
from headway_engine.logs import fields
from headway_engine.messages import Fallback
from headway_engine.model import LoadedModel
from headway_engine.model_error import ModelError, in_words
from headway_engine.protocol import Capacity
from headway_engine.start_check import Build, StartCheck
from headway_engine.stepping import StepRunner

log = logging.getLogger(__name__)

UNAVAILABLE = "unavailable"
FAILED = "failed"
"""Reasons for leaving a path, beside the faults of the check."""

Reload = Callable[[], LoadedModel]
"""Loads the model once more, for when a runner has emptied the first."""


class NoneRight(ModelError):
    """Nothing computes a model right."""

    def __init__(self, message: str, model: LoadedModel, left: Sequence[Fallback], in_blocks: bool) -> None:
        super().__init__(message)
        self.left = tuple(left)
        self.in_blocks = in_blocks  # its weights were: plain ones may be computed right
        self.dtype = dtype_name(model.dtype)


class PathMissing(Exception):
    """This way of computing cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Path:
    """One way of computing a model. `build` may raise PathMissing."""

    runner: str
    kernels: str  # the instruction set, the attention kernel, or torch
    build: Build
    empties: bool  # it takes the module's weights over

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.runner} on {self.kernels}"


@dataclass(frozen=True, slots=True)
class Serving:
    """The runner that serves, and what was left for it."""

    runner: StepRunner
    path: Path
    fallbacks: tuple[Fallback, ...]


@dataclass(frozen=True, slots=True)
class _Left:
    fallback: Fallback
    emptied: bool = False  # the model is of no use any more


def first_right(
    paths: Iterable[Path],
    model: LoadedModel,
    capacity: Capacity,
    *,
    reload: Reload | None = None,
    way_out: str,
) -> Serving:
    """The first way that gives the model's own logits; each that is left is one log line.

    `way_out` ends the sentence of the NoneRight that is raised for a model that none computes right. Without
    `reload`, what comes after a runner that emptied the module is not tried.
    """
    in_blocks = model.in_blocks
    check = StartCheck(model, capacity)
    left: list[Fallback] = []
    whole: LoadedModel | None = model
    for path in paths:
        if whole is None:
            if reload is None:
                break
            whole = reload()
        outcome = _tried(path, check, whole, capacity)
        if isinstance(outcome, StepRunner):
            return Serving(outcome, path, tuple(left))
        fallback = outcome.fallback
        left.append(fallback)
        log.warning(fields("runner-fallback", left=path.name, reason=fallback.reason, why=fallback.why))
        if outcome.emptied:
            _give_memory_back(whole)
            whole = None
    raise NoneRight(_refusal(model, left, way_out), model, left, in_blocks)


def _tried(path: Path, check: StartCheck, model: LoadedModel, capacity: Capacity) -> StepRunner | _Left:
    emptied = False
    try:
        wrong = check.small(model, path.build, path.name)
        if wrong is None:
            emptied = path.empties
            runner = path.build(model, capacity)
            wrong = check.whole(runner, path.name)
            if wrong is None:
                return runner
    except PathMissing as error:
        return _Left(Fallback(path.name, UNAVAILABLE, in_words(error)))
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise  # another way would not help
    except Exception as error:  # noqa: BLE001 - what a kernel says of a machine that it does not know varies
        return _Left(Fallback(path.name, FAILED, f"{type(error).__name__}: {in_words(error)}"), emptied)
    return _Left(Fallback(path.name, wrong.fault.value, wrong.words), emptied)


def _refusal(model: LoadedModel, left: Sequence[Fallback], way_out: str) -> str:
    """About the best path that was there at all."""
    if not left:
        return f"model: {model.description}: there is no way of computing it here; {way_out}"
    best = next((one for one in left if one.reason != UNAVAILABLE), None)
    if best is None:
        return (
            f"model: {model.description}: {left[0].path} cannot be had here: {left[0].why}; install g++, "
            "or let HEADWAY_KERNELS name a folder of kernels built before, or use --runner transformers"
        )
    more = len(left) - 1
    others = f" (nor by {more} other way{'s' if more > 1 else ''})" if more else ""
    return f"model: {model.description} is not computed right by {best.path}{others}: {best.why}; {way_out}"


def _give_memory_back(model: LoadedModel) -> None:
    """All of a model that is of no use any more, whoever still holds it, and of its runner."""
    for tensor in (*model.module.parameters(), *model.module.buffers()):
        tensor.data = tensor.data.new_empty(0)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
