"""A small copy of a model: a few of its layers, one of each kind, and a few rows of its vocabulary.

What a way of computing a model gets wrong shows in two layers as well as in eighty, and two cost next to
nothing. The copy's parameters share the model's memory until they are widened or emptied, which changes the
copy alone. Knows nothing of what is computed with it.
"""

import copy
import dataclasses
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway_engine.model import LoadedModel
from headway_engine.packed_weights import BlockedEmbedding, BlockedLinear, token_rows

MOST_LAYERS = 4
"""Layers of a copy whose model has layers of many kinds; the others are not looked at."""

_NUMBERS = ("layer_idx", "layer_id", "layer_number")
"""What modules call the number of their layer."""

_BLOCKED = (BlockedEmbedding, BlockedLinear)

_PLAIN = (bool, int, float, str, type(None))

Memo = dict[int, Any]


class CannotCopy(Exception):
    """No small copy can be made of this model; the message says why."""


@dataclass(frozen=True, slots=True)
class SmallCopy:
    """A model of few layers. Its token i is token `ids[i]` of the whole model."""

    model: LoadedModel
    ids: tuple[int, ...]

    def widened(self) -> "SmallCopy":
        """The same in float32; itself, where it is."""
        if self.model.dtype is torch.float32:
            return self
        module = shared(self.model.module, {})
        for part in module.modules():
            for tensor in widenable(part):
                tensor.data = tensor.data.float()
        config = module.config.get_text_config()
        return SmallCopy(
            dataclasses.replace(self.model, module=module, config=config, dtype=torch.float32), self.ids
        )


def small_copy(model: LoadedModel, ids: Seq[int]) -> SmallCopy:
    """The model with one layer of each kind (first and last where all are alike), and of its vocabulary these
    `ids`; all of them where it keeps its embeddings in a form of its own. Raises CannotCopy."""
    module: Any = model.module
    layers = _layers(module, len(model.layer_shapes))
    chosen = chosen_layers([_kind(layer) for layer in layers])
    memo: Memo = {}
    config = copy.deepcopy(module.config, memo)
    text = config.get_text_config()
    _shorten(text, len(layers), chosen)
    vocabulary = _vocabulary(module)
    with torch.no_grad():
        rows = torch.tensor(ids, device=model.device)
        for part in vocabulary:
            for tensor in token_rows(part):
                if id(tensor) not in memo:  # embeddings and head may be one
                    some = tensor[rows]
                    memo[id(tensor)] = _parameter(some) if isinstance(tensor, nn.Parameter) else some
        kept = nn.ModuleList()
        memo[id(layers)] = kept
        for number, index in enumerate(chosen):
            kept.append(shared(layers[index], memo))
            _renumber(kept[-1], number)
        small: Any = shared(module, memo)
    if vocabulary:
        text.vocab_size = len(ids)
        for part in _vocabulary_parts(small):
            _resize(part, len(ids))
    shapes = {number: model.layer_shapes[index] for number, index in enumerate(chosen)}
    return SmallCopy(
        dataclasses.replace(model, module=small, config=text, layer_shapes=shapes),
        tuple(ids) if vocabulary else tuple(range(int(text.vocab_size))),
    )


def chosen_layers(kinds: Seq[Hashable]) -> list[int]:
    """The first of each kind, MOST_LAYERS at most; first and last where all are alike."""
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    if len(first) == 1:
        return sorted({0, len(kinds) - 1})
    return sorted(first.values())[:MOST_LAYERS]


def widenable(module: nn.Module) -> list[torch.Tensor]:
    """Floating-point parameters and buffers of the module itself. None of a module that packs its weights
    and unpacks them while it computes: its scales have the type that they must have."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return [] if any(_is_packed(tensor) for tensor in own) else [t for t in own if t.is_floating_point()]


def _is_packed(tensor: torch.Tensor) -> bool:
    """Codes of some quantization: in tensors of a class of their own, in 8 bits, or in integers that are no
    positions."""
    if hasattr(tensor, "__tensor_flatten__"):
        return True
    if tensor.dtype is torch.bool or tensor.dim() < 2:
        return False
    return tensor.dtype.itemsize == 1 or (not tensor.is_floating_point() and tensor.dtype is not torch.int64)


def _layers(module: nn.Module, count: int) -> nn.ModuleList:
    """The list of the model's layers, each with the number that its attention says."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            numbers = [set(_numbers(layer)) for layer in part]
            if numbers == [{index} for index in range(count)]:
                return part
    raise CannotCopy(f"{type(module).__name__} keeps its {count} layers in no list")


def _numbers(layer: nn.Module) -> Iterator[int]:
    for part in layer.modules():
        yield from (value for name in _NUMBERS if isinstance(value := vars(part).get(name), int))


def _renumber(layer: nn.Module, number: int) -> None:
    for part in layer.modules():
        for name in _NUMBERS:
            if isinstance(vars(part).get(name), int):
                setattr(part, name, number)


def _kind(layer: nn.Module) -> Hashable:
    """What two layers have in common when they compute alike: modules, shapes and settings."""
    return tuple(
        (
            name,
            type(part).__name__,
            tuple((key, tuple(t.shape)) for key, t in part.named_parameters(recurse=False)),
            tuple(
                sorted(
                    (key, repr(value))
                    for key, value in vars(part).items()
                    if isinstance(value, _PLAIN) and key not in _NUMBERS
                )
            ),
        )
        for name, part in layer.named_modules()
    )


def _shorten(config: Any, count: int, chosen: Seq[int]) -> None:
    """A configuration of `count` layers becomes one of the chosen ones."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[index] for index in chosen])
    config.num_hidden_layers = len(chosen)


def _vocabulary(module: Any) -> list[nn.Module]:
    """The modules that have a row for each token, when all of them can be cut."""
    parts = _vocabulary_parts(module)
    sizes = {t.shape[0] for part in parts for t in token_rows(part)}
    known = all(isinstance(part, _BLOCKED) or len(widenable(part)) > 0 for part in parts)
    return parts if known and len(sizes) == 1 else []


def _vocabulary_parts(module: Any) -> list[nn.Module]:
    inputs, head = module.get_input_embeddings(), module.get_output_embeddings()
    size = getattr(inputs, "num_embeddings", None)
    others = [
        part
        for part in module.modules()
        if isinstance(part, nn.Embedding) and part.num_embeddings == size and part is not inputs
    ]
    return [part for part in (inputs, head, *others) if part is not None]


def _resize(part: nn.Module, rows: int) -> None:
    if isinstance(part, nn.Embedding):
        part.num_embeddings = rows
        part.padding_idx = None  # of training, and maybe none of the rows that are left
    elif isinstance(part, BlockedEmbedding):
        part.num_embeddings = rows
    elif isinstance(part, nn.Linear | BlockedLinear):
        part.out_features = rows


def shared(module: nn.Module, memo: Memo) -> Any:
    """A deep copy whose tensors are others in the same memory, but for those that `memo` has already."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            memo.setdefault(id(parameter), _parameter(parameter))
        for buffer in part.buffers(recurse=False):
            memo.setdefault(id(buffer), buffer.detach())
    return copy.deepcopy(module, memo)


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)
