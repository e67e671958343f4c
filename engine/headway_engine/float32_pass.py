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

_LARGE = 1 << 20
"""Numbers of a weight that is widened in memory kept for the next: new memory costs four times as much."""


def logits(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [sequences, tokens, vocabulary] of `ids` [sequences, tokens], as float32: those of the module's
    own pass in its own type, with attention as transformers chooses it."""
    with torch.no_grad(), plain_attention(module):
        found: torch.Tensor = module(input_ids=ids, use_cache=False).logits
    return found.float()


def float32_logits(module: Any, ids: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Logits of the tokens `columns`, as if all weights had been float32 from the start."""
    head = module.get_output_embeddings()
    with in_float32(module, columns):
        found = logits(module, ids)
    return found if head is not None and widenable(head) else found[..., columns]


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
    inputs, head, room = module.get_input_embeddings(), module.get_output_embeddings(), _Room(columns.device)
    with ExitStack() as stack:
        for part in module.modules():
            if widenable(part):
                widening = _Widening(
                    room,
                    columns if part is head else None,
                    looks_up=part is inputs and isinstance(part, nn.Embedding),
                )
                stack.callback(part.register_forward_pre_hook(widening.begin).remove)
                stack.callback(part.register_forward_hook(widening.end, always_call=True).remove)
        yield


class _Room:
    """Memory for widened weights. What was taken last is given back first."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, device=device)
        self.used = 0

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in float32, which is good until the memory is given back."""
        end = self.used + tensor.numel()
        if self._memory.numel() < end:
            # Those who have some of the old memory keep it.
            self._memory = torch.empty(end, device=tensor.device)
        taken = self._memory[self.used : end].view(tensor.shape)
        self.used = end
        return taken.copy_(tensor)


class _Widening:
    """Of one module, while it computes."""

    def __init__(self, room: _Room, rows: torch.Tensor | None, looks_up: bool) -> None:
        """`rows` are those of its weights that are needed; those that are looked up, where it `looks_up`."""
        self._room, self._rows, self._looks_up = room, rows, looks_up
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._padding: int | None = None
        self._used_before = 0

    def begin(self, part: nn.Module, inputs: Any) -> Any:
        """See Module.register_forward_pre_hook."""
        rows, given, self._used_before = self._rows, inputs, self._room.used
        if self._looks_up and len(inputs) == 1:
            rows, numbers = torch.unique(inputs[0], return_inverse=True)
            given = (numbers,)
        for tensor in widenable(part):
            self._own.append((tensor, tensor.data))
            data = tensor.data if rows is None or tensor.dim() == 0 else tensor.data[rows]
            # A small one may be a table of which the module returns a part.
            large = isinstance(tensor, nn.Parameter) and data.numel() >= _LARGE
            tensor.data = self._room.widened(data) if large else data.float()
        if isinstance(part, nn.Embedding):
            self._padding, part.padding_idx = part.padding_idx, None  # maybe none of the rows that are left
        return given

    def end(self, part: nn.Module, inputs: Any, out: Any) -> None:
        """See Module.register_forward_hook."""
        while self._own:
            tensor, data = self._own.pop()
            tensor.data = data
        self._room.used = self._used_before
        if isinstance(part, nn.Embedding):
            part.padding_idx = self._padding
