"""What is no number in the cache: who meets it fails, and nobody else ever reads what it left."""

from typing import Any

import pytest
import torch

from headway_engine.loop import Loop
from headway_engine.messages import Report, StepReport, Submit
from headway_engine.protocol import Limits
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import Finished, FinishReason, TokenOut
from support import runners, tiny_models

CAPACITY = runners.capacity()
LIMITS = Limits(max_batch_tokens=64, max_batch_sequences=8, prefill_chunk_tokens=8, max_queued_requests=16)
SHARED = tuple(range(10, 18))
"""Two blocks that two prompts begin with."""

PROMPTS = {
    "bystander": tuple(range(50, 80)),
    "poisoned": (*SHARED, *range(100, 116)),
    "beside it": (*SHARED, *range(200, 240)),
    "later": (*SHARED, *range(200, 240), 7),
}


class Machine:
    """A real runner and scheduler in a loop."""

    def __init__(self, kind: str) -> None:
        self.runner: Any = runners.fresh(kind, "llama", CAPACITY)
        self.scheduler = Scheduler(CAPACITY, LIMITS)
        self.reports: list[Report] = []
        self.loop = Loop(
            self.scheduler, self.runner.run, self.reports.append, limits=LIMITS, clock=lambda: 0.0
        )

    def submit(self, *names: str) -> None:
        for name in names:
            self.loop.post(Submit(tiny_models.request(name, PROMPTS[name], max_tokens=4)))

    def spoil(self, name: str, index: int, tensors: list[torch.Tensor]) -> None:
        """A block of this request holds what is no number from now on."""
        for tensor in tensors:
            tensor[self.scheduler._roster.sequences[name].block_table[index]] = float("nan")

    def run(self) -> None:
        self.loop.turn()
        while self.scheduler.running or self.scheduler.waiting:
            self.loop.turn()
            self.scheduler.check()

    def ends(self) -> dict[str, FinishReason]:
        return {e.id: e.reason for e in self._events() if isinstance(e, Finished)}

    def output(self, name: str) -> tuple[int, ...]:
        return tuple(e.token for e in self._events() if isinstance(e, TokenOut) and e.id == name)

    def _events(self) -> list[Any]:
        return [e for r in self.reports if isinstance(r, StepReport) for e in r.events]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["padded", "kernel", "fused", "lean", "lean graphs"])
def test_who_shares_a_block_that_went_wrong_is_computed_again(kind: str, late: bool) -> None:
    """A prompt in chunks spoils a block that is found by another before anything is sampled of it.

    The first one fails, and its block will be zeroed. The other had gone on from the block (`late`: in the
    very step that failed, where nothing is sampled of it): it is computed anew, and whoever comes later finds
    nothing of either.
    """
    machine = Machine(kind)
    machine.submit("bystander", "poisoned")
    machine.loop.turn()
    machine.spoil("poisoned", 1, machine.runner._cache.keys)
    if late:
        machine.loop.turn()
    assert machine.ends() == {}, "nothing was sampled yet"
    machine.submit("beside it")
    machine.loop.turn()
    assert machine.scheduler._roster.sequences["beside it"].cached_prompt_tokens == len(SHARED)
    assert machine.ends() == ({"poisoned": FinishReason.ERROR} if late else {})
    machine.run()
    machine.submit("later")
    machine.run()
    assert machine.ends() == {
        "bystander": FinishReason.LENGTH,
        "poisoned": FinishReason.ERROR,
        "beside it": FinishReason.LENGTH,
        "later": FinishReason.LENGTH,
    }
    for name in ("bystander", "beside it", "later"):
        assert machine.output(name) == tiny_models.greedy("llama", PROMPTS[name], 4), name
    for tensor in (*machine.runner._cache.keys, *machine.runner._cache.values):
        assert torch.isfinite(tensor).all()
