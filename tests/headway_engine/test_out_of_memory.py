"""Steps that run out of memory, from the runner through loop and scheduler to what is shown of limits."""

from typing import Any

import pytest
import torch

from headway_engine.loop import Loop
from headway_engine.messages import Died, LimitsApplied, Report, SetLimits, StepReport, Submit
from headway_engine.protocol import Capacity, Limits
from headway_engine.runner import build_runner
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import Event, Finished, FinishReason
from support import tiny_models
from support.core_line import Bench as FrontBench

CAPACITY = Capacity(
    max_batch_tokens=64, max_batch_sequences=4, kv_blocks=96, block_tokens=4, max_model_tokens=97
)
LIMITS = Limits(max_batch_tokens=64, max_batch_sequences=4, prefill_chunk_tokens=64, max_queued_requests=16)


class Machine:
    """A real model and scheduler in a loop, on a device in which `room` tokens of a step fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, error: Exception) -> None:
        self.room = room
        self.steps: list[int] = []
        self.reports: list[Report] = []
        runner: Any = build_runner(tiny_models.engine_config(), tiny_models.fresh("llama"), CAPACITY)
        forward = runner._forward

        def tight(chunks: Any, *rest: Any) -> Any:
            tokens = sum(chunk.length for chunk in chunks)
            self.steps.append(tokens)
            if tokens > self.room:
                raise error
            return forward(chunks, *rest)

        monkeypatch.setattr(runner, "_forward", tight)
        self.loop = Loop(
            Scheduler(CAPACITY, LIMITS), runner.run, self.reports.append, limits=LIMITS, clock=lambda: 0.0
        )

    def submit(self, name: str, prompt: tuple[int, ...], tokens: int = 3) -> None:
        self.loop.post(Submit(tiny_models.request(name, prompt, max_tokens=tokens)))

    def turn(self, times: int) -> bool:
        return all(self.loop.turn() for _ in range(times))

    def ends(self) -> dict[str, Finished]:
        events: list[Event] = [e for r in self.reports if isinstance(r, StepReport) for e in r.events]
        return {e.id: e for e in events if isinstance(e, Finished)}

    def changes(self) -> list[LimitsApplied]:
        return [r for r in self.reports if isinstance(r, LimitsApplied)]


ERRORS = [
    MemoryError("no memory for the step"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", ERRORS, ids=["python", "device", "cpu-allocator"])
def test_a_step_too_large_is_done_in_parts_and_the_limit_halves(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error is called: both requests fit alone and get their own answer, none is failed."""
    machine = Machine(monkeypatch, room=30, error=error)
    prompts = {name: tuple(range(first, first + 25)) for name, first in (("a", 10), ("b", 40))}
    for name, prompt in prompts.items():
        machine.submit(name, prompt)
    assert machine.turn(4)
    assert {end.reason for end in machine.ends().values()} == {FinishReason.LENGTH}
    assert len(machine.ends()) == 2
    (change,) = machine.changes()
    assert (change.ticket, change.limits.max_batch_tokens, change.limits.generation) == (0, 25, 1)
    assert machine.steps[:3] == [50, 25, 25]


def test_a_request_that_never_fits_fails_with_words_and_the_others_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One chunk of 40 tokens where 30 fit; afterwards the lower limit cuts it, and it is answered."""
    machine = Machine(monkeypatch, room=30, error=ERRORS[1])
    machine.submit("long", tuple(range(10, 50)))
    machine.turn(1)
    failed = machine.ends()["long"]
    assert failed.reason is FinishReason.ERROR
    assert "out of memory in a step of 40 tokens" in failed.message
    assert "Traceback" not in failed.message
    machine.submit("again", tuple(range(10, 50)))
    machine.submit("short", (5, 6, 7))
    assert machine.turn(8)
    assert machine.ends()["again"].reason is FinishReason.LENGTH
    assert machine.ends()["short"].reason is FinishReason.LENGTH
    assert len(machine.changes()) == 1


def test_a_limit_that_was_raised_again_is_lowered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuner that does not know why the limit fell must not be able to switch the guard off."""
    machine = Machine(monkeypatch, room=30, error=ERRORS[0])
    for first in (10, 110):  # other prompts each time: what is in the prefix cache makes no large step
        machine.loop.post(SetLimits(ticket=1, limits=LIMITS))
        machine.submit(f"a{first}", tuple(range(first, first + 25)))
        machine.submit(f"b{first}", tuple(range(first + 30, first + 55)))
        assert machine.turn(4)
    assert {end.reason for end in machine.ends().values()} == {FinishReason.LENGTH}
    own = [change for change in machine.changes() if change.ticket == 0]
    assert [change.limits.max_batch_tokens for change in own] == [25, 25]


def test_memory_that_is_gone_for_good_ends_in_words_and_not_in_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step fails: the limit is lowered once and stays above its floor, each request gets an answer,
    and the core gives up after a probe, to be started anew."""
    machine = Machine(monkeypatch, room=0, error=ERRORS[0])
    going_on = True
    for number in range(8):
        if going_on:
            machine.submit(f"r{number}", tuple(range(10, 30)))
            going_on = machine.turn(1)
    assert not going_on
    assert len(machine.steps) < 20
    (change,) = machine.changes()
    assert change.limits.max_batch_tokens >= LIMITS.max_batch_sequences
    (died,) = (r for r in machine.reports if isinstance(r, Died))
    assert "out of memory" in died.message
    answered = [name for name in machine.ends() if name.startswith("r")]
    assert {machine.ends()[name].reason for name in answered} == {FinishReason.ERROR}
    assert len(answered) >= 3


async def test_a_limit_that_the_core_lowered_is_seen_where_limits_are_read() -> None:
    """GET /control/limits answers with what the client of the core holds; /metrics from telemetry."""
    front = FrontBench()
    lowered = Limits(max_batch_tokens=25, generation=1)
    await front.core._take(LimitsApplied(0, lowered))
    assert front.core.limits == lowered
    lines = front.telemetry.exposition().decode().splitlines()
    assert 'headway_limit{parameter="max_batch_tokens"} 25.0' in lines
    assert "headway_limits_generation 1.0" in lines
