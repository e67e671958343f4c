"""Which limits are wanted before the tuner speaks: a decision, the stored state, or the spec."""

from typing import Any

import msgspec
import pytest

from headway_engine.protocol import Limits
from headway_operator.known import Known, wanted_limits
from headway_operator.resource import Resource
from headway_operator.tuner.controller import Decision, State, Verdict
from headway_operator.tuner.memory import Memory
from support.resources import a_resource

SPEC = {"batching": {"maxBatchTokens": 2048}}


def state(resource: Resource, tokens: int, **base: Any) -> Memory:
    """A tuner that stands at `tokens`, having started from the spec (or from another)."""
    start = resource.batching.limits()
    return Memory(
        base=msgspec.structs.replace(start, **base),
        tuned=msgspec.structs.replace(start, max_batch_tokens=tokens, generation=7),
    )


def tokens(resource: Resource, memory: Memory, decision: Decision | None = None) -> int:
    limits = wanted_limits(resource, Known(uid="u", memory=memory, decision=decision))
    assert limits.generation == 0
    return limits.max_batch_tokens


def test_a_fresh_resource_starts_with_its_spec() -> None:
    """Nothing is stored."""
    assert tokens(a_resource(spec=SPEC), Memory()) == 2048


def test_the_stored_state_is_taken_up_again() -> None:
    """After a restart of the controller."""
    resource = a_resource(spec=SPEC)
    assert tokens(resource, state(resource, 640)) == 640


def test_a_state_of_another_spec_is_not() -> None:
    """The user edited the limits in the meantime."""
    resource = a_resource(spec=SPEC)
    assert tokens(resource, state(resource, 640, max_batch_tokens=4096)) == 2048


@pytest.mark.parametrize("mode", ["Off", "Recommend"])
def test_only_auto_may_set_what_the_tuner_thinks(mode: str) -> None:
    """Off and Recommend run what the spec says."""
    resource = a_resource(spec={**SPEC, "tuning": {"mode": mode}})
    assert tokens(resource, state(resource, 640)) == 2048


def test_without_a_target_there_is_nothing_to_tune_for() -> None:
    """The spec again."""
    resource = a_resource(spec={**SPEC, "slo": None})
    assert tokens(resource, state(resource, 640)) == 2048


def test_a_state_above_the_capacity_is_not_taken_up() -> None:
    """The reservation was lowered; an engine would refuse it."""
    resource = a_resource(spec={"batching": {"maxBatchTokens": 2048, "capacity": {"maxBatchTokens": 4096}}})
    assert tokens(resource, state(resource, 5000)) == 2048


def test_the_last_decision_holds() -> None:
    """Whatever is stored."""
    resource = a_resource(spec=SPEC)
    decision = Decision(
        limits=Limits(max_batch_tokens=999, generation=3),
        verdict=Verdict.HOLD,
        state=State.ACTIVE,
        reason="",
        memory=Memory(),
    )
    assert tokens(resource, state(resource, 640), decision) == 999
