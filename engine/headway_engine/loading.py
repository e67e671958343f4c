"""A model brought into memory for the runner that will serve it.

Weights stay in the blocks of a GGUF file, or are put into blocks of 8 bits, where the kernels compute with
those; a model that no kernel computes right so is loaded once more with plain weights. Knows nothing of
requests.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from headway_engine import model, runner
from headway_engine.config import EngineConfig
from headway_engine.devices import choose_device
from headway_engine.fused import build
from headway_engine.fused.llama import why_not_fused
from headway_engine.gguf_packed import read_index
from headway_engine.logs import fields
from headway_engine.model import LoadedModel, ModelError
from headway_engine.model_source import ModelSource, SourceKind, must_be_unchanged
from headway_engine.packed_weights import put_into_blocks
from headway_engine.paths import NoneRight, Serving
from headway_engine.protocol import Capacity

log = logging.getLogger(__name__)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, what fits beside it, and the runner that computes it."""

    model: LoadedModel
    capacity: Capacity
    serving: Serving


def load(settings: EngineConfig, source: ModelSource, progress: Progress) -> Loaded:
    """Load the weights, measure what fits, and build the runner. Raises ModelError."""
    if not computes_blocks(settings):
        return _loaded(settings, progress, functools.partial(_plain, settings, source, progress))
    in_blocks = functools.partial(_in_blocks, settings, source, progress)
    try:
        found = _loaded(settings, progress, in_blocks)
    except NoneRight as error:
        if not error.in_blocks:
            raise
        log.warning(fields("blocks-unpacked", why=str(error)))
        left, dtype = error.left, error.dtype
    else:
        if source.kind is SourceKind.GGUF:
            must_be_unchanged(source, kept=False)  # its blocks were read until now
        return found
    # Only here, since the error held the model in blocks, and its memory is needed. The same type as before:
    # that of weights in a file says nothing of what is faster here.
    again = replace(settings, dtype=dtype)
    plain = _loaded(again, progress, functools.partial(_plain, again, source, progress))
    return replace(plain, serving=replace(plain.serving, fallbacks=(*left, *plain.serving.fallbacks)))


def computes_blocks(settings: EngineConfig) -> bool:
    """Whether the kernels may serve, which alone compute fast with weights in blocks. Raises ModelError."""
    if settings.runner not in ("auto", "fused") or settings.dtype == "float16":
        return False
    return choose_device(settings.device).type == "cpu" and bool(build.usable())


def _loaded(settings: EngineConfig, progress: Progress, read: Callable[[], LoadedModel]) -> Loaded:
    loaded = read()
    if loaded.tokenizer_dir is None:
        raise ModelError(f"model: {settings.model} has no tokenizer beside its weights")
    progress("measuring capacity")
    capacity = runner.measure_capacity(loaded, settings)
    progress("building the runner")  # the first time, this may compile kernels
    return Loaded(loaded, capacity, runner.best_runner(settings, loaded, capacity, reload=read))


def _plain(settings: EngineConfig, source: ModelSource, progress: Progress) -> LoadedModel:
    return _read(settings, source, progress, quantize=settings.quantization, keep_blocks=False)


def _in_blocks(settings: EngineConfig, source: ModelSource, progress: Progress) -> LoadedModel:
    """With weights in blocks, where that can be; else as `_plain` does."""
    if not settings.quantization:
        return _read(settings, source, progress, quantize="", keep_blocks=True)
    if folder := model.blocks_of(source, progress):
        types = ", ".join(read_index(folder).block_types)
        raise ModelError(
            f"quantization: the weights of {source.uri} are quantized already ({types}), and stay so in "
            "memory; leave --quantization out"
        )
    if source.shape is None:
        loaded = _read(settings, source, progress, quantize="", keep_blocks=False)
        if why_not_fused(loaded) is None:
            progress("packing weights into 8 bits")
            put_into_blocks(loaded.module)
            return loaded
        del loaded  # the memory is needed
    return _plain(settings, source, progress)


def _read(
    settings: EngineConfig, source: ModelSource, progress: Progress, *, quantize: str, keep_blocks: bool
) -> LoadedModel:
    return model.load(
        source,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        progress=progress,
        quantize=quantize,
        keep_blocks=keep_blocks,
    )
