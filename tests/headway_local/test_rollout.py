"""A rollout reaches its end, and never has fewer ready pods or more pods than its strategy allows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_local import rollout
from headway_local.rollout import PodView, Strategy


def old(name: str, ready: bool = True) -> PodView:
    return PodView(name, current=False, ready=ready)


def new(name: str, ready: bool = True) -> PodView:
    return PodView(name, current=True, ready=ready)


def test_one_pod_is_replaced_only_after_its_successor_is_ready() -> None:
    """The default for one replica: surge of one, none unavailable."""
    how = Strategy(max_surge=1, max_unavailable=0)
    assert rollout.step([old("a")], 1, how) == rollout.Step(start=1)
    assert rollout.step([old("a"), new("b", ready=False)], 1, how) == rollout.Step()
    assert rollout.step([old("a"), new("b")], 1, how) == rollout.Step(stop=("a",))
    assert rollout.step([new("b")], 1, how) == rollout.Step()


def test_recreate_starts_nothing_before_the_old_has_gone() -> None:
    """An accelerator that one pod holds cannot be had by another."""
    how = Strategy(recreate=True)
    assert rollout.step([old("a")], 1, how) == rollout.Step(stop=("a",))
    assert rollout.step([replace(old("a"), stopping=True)], 1, how) == rollout.Step()
    assert rollout.step([], 1, how) == rollout.Step(start=1)


def test_an_old_pod_that_is_not_ready_goes_at_once() -> None:
    """It serves nobody, so nothing is lost."""
    assert rollout.step([old("a", ready=False)], 1, Strategy(max_surge=0, max_unavailable=1)).stop == ("a",)


def test_scaling_down_stops_pods_that_are_not_ready_first() -> None:
    """The ready ones carry the traffic."""
    pods = [new("a"), new("b", ready=False), new("c")]
    assert rollout.step(pods, 2, Strategy()).stop == ("b",)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"replicas": 1}, Strategy(max_surge=1, max_unavailable=0)),
        ({"replicas": 8}, Strategy(max_surge=2, max_unavailable=2)),
        ({"strategy": {"type": "Recreate"}}, Strategy(recreate=True)),
        (
            {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}},
            Strategy(max_surge=0, max_unavailable=1),
        ),
        (
            {"replicas": 3, "strategy": {"rollingUpdate": {"maxSurge": "50%", "maxUnavailable": "50%"}}},
            Strategy(max_surge=2, max_unavailable=1),
        ),
    ],
)
def test_strategies_resolve_as_in_kubernetes(spec: dict[str, object], expected: Strategy) -> None:
    """Percentages of surge round up and those of unavailability down; both 0 would never move."""
    assert rollout.strategy(spec) == expected


@given(
    replicas=st.integers(0, 6),
    olds=st.lists(st.booleans(), max_size=6),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 3),
    recreate=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_every_rollout_ends_with_the_wanted_pods_and_keeps_its_promises(
    replicas: int, olds: list[bool], surge: int, unavailable: int, recreate: bool, order: object
) -> None:
    """From any start, when pods get ready and go in any order."""
    how = Strategy(recreate, surge, unavailable if surge + unavailable else 1)
    pods = {f"old{i}": old(f"old{i}", ready) for i, ready in enumerate(olds)}
    ready_before = sum(p.ready for p in pods.values())
    made = 0
    for _ in range(200):
        step = rollout.step(list(pods.values()), replicas, how)
        assert step.start == 0 or not (recreate and any(not p.current for p in pods.values()))
        for name in step.stop:
            assert not pods[name].stopping
            pods[name] = replace(pods[name], stopping=True, ready=False)
        for _ in range(step.start):
            pods[f"new{made}"] = new(f"new{made}", ready=False)
            made += 1
        alive = [p for p in pods.values() if not p.stopping]
        if step.start:
            assert len(alive) <= replicas + how.max_surge
        if not recreate:
            floor = min(ready_before, replicas - how.max_unavailable)
            assert sum(p.ready for p in alive) >= floor
        waiting = [p for p in pods.values() if p.stopping or not p.ready]
        if not waiting and step == rollout.Step():
            break
        if waiting:
            chosen = order.choice(waiting)  # type: ignore[attr-defined]
            if chosen.stopping:
                del pods[chosen.name]
            elif chosen.current:
                pods[chosen.name] = replace(chosen, ready=True)
    assert len(pods) == replicas
    assert all(p.current and p.ready for p in pods.values())


def test_the_status_tells_progress_and_keeps_the_time_of_the_last_turn() -> None:
    """Available turns with readiness; its time changes with its value only."""
    deployment = {"metadata": {"generation": 3}, "spec": {"replicas": 2}}
    first = rollout.status(deployment, [new("a", ready=False), new("b")], "t1")
    assert (first["replicas"], first["readyReplicas"], first["observedGeneration"]) == (2, 1, 3)
    assert [c["status"] for c in first["conditions"]] == ["False", "True"]
    assert first["conditions"][1]["reason"] == "ReplicaSetUpdated"
    second = rollout.status({**deployment, "status": first}, [new("a"), new("b")], "t2")
    assert [(c["status"], c["lastTransitionTime"]) for c in second["conditions"]] == [
        ("True", "t2"),
        ("True", "t1"),
    ]
    assert second["conditions"][1]["reason"] == "NewReplicaSetAvailable"
