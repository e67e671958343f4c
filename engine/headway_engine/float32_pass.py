"""A model's own forward pass in float32, whatever type its weights have.

Each module's weights are widened while it computes, and its own are put back: the model is never in memory
twice. Of the vocabulary only the rows that are needed are widened. Knows nothing of what is compared with it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from headway_engine.small_copy import widenable


def logits(module: Any, ids: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [sequences, tokens, columns] of `ids` [sequences, tokens], in float32 if the module is, with
    attention as transformers chooses it; `columns`: these tokens' logits, else all."""
    with torch.no_grad(), plain_attention(module):
        found: torch.Tensor = module(input_ids=ids, use_cache=False).logits
    return (found if columns is None else found[..., columns]).float()


def float32_logits(module: Any, ids: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The same as if all weights had been float32 from the start."""
    head = module.get_output_embeddings()
    with in_float32(module, columns):
        cut = head is not None and bool(widenable(head))
        return logits(module, ids, None if cut else columns)


@contextmanager
def plain_attention(module: Any) -> Iterator[None]:
    """Meanwhile the module attends as transformers chooses it, without pages."""
    before = module.config._attn_implementation
    try:
        module.set_attn_implementation("sdpa" if type(module)._supports_sdpa else "eager")
        yield
    finally:
        module.set_attn_implementation(before)


@contextmanager
def in_float32(module: Any, columns: torch.Tensor) -> Iterator[None]:
    """Meanwhile the module computes in float32, and its head makes the logits of `columns` only."""
    with ExitStack() as stack:
        for part in module.modules():
            if widenable(part):
                rows = columns if part is module.get_output_embeddings() else None
                hooks = _Widening(part, rows, looks_up=part is module.get_input_embeddings())
                stack.callback(part.register_forward_pre_hook(hooks.widen).remove)
                stack.callback(part.register_forward_hook(hooks.restore, always_call=True).remove)
        yield


class _Widening:
    """Of one module, while it computes."""

    def __init__(self, part: nn.Module, rows: torch.Tensor | None, looks_up: bool) -> None:
        self._part, self._rows, self._looks_up = part, rows, looks_up
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._padding: Any = None

    def widen(self, part: nn.Module, inputs: Any) -> Any:
        rows, given = self._rows, inputs
        if self._looks_up and len(inputs) == 1:
            rows, numbers = torch.unique(inputs[0], return_inverse=True)
            given = (numbers,)
        for tensor in widenable(part):
            self._before.append((tensor, tensor.data))
            taken = tensor.data if rows is None or tensor.dim() == 0 else tensor.data[rows]
            tensor.data = taken.float()
        if isinstance(part, nn.Embedding):
            self._padding, part.padding_idx = part.padding_idx, None
        return given

    def restore(self, part: nn.Module, inputs: Any, out: Any) -> None:
        while self._before:
            tensor, data = self._before.pop()
            tensor.data = data
        if isinstance(part, nn.Embedding):
            part.padding_idx = self._padding
