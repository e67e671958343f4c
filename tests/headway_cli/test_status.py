"""`headway status`: words for what the status says."""

from typing import Any

import pytest

from headway_cli.status import words

BODY: dict[str, Any] = {
    "metadata": {"name": "chat", "namespace": "team"},
    "spec": {
        "model": {"uri": "hf://org/model"},
        "slo": {"itl": {"p95": "50ms"}},
        "tuning": {"mode": "Auto", "bounds": {"maxBatchTokens": {"max": 640}}},
    },
    "status": {
        "endpoint": "http://chat.team.svc/v1",
        "model": "chat",
        "conditions": [
            {"type": "Ready", "status": "True", "message": "1 of 1 replicas serve"},
            {"type": "MetricsAvailable", "status": "True", "message": "all answer"},
            {"type": "ParametersDrifted", "status": "True", "message": "chat-1 refused"},
        ],
        "slo": {
            "itl": {
                "targetMilliseconds": 50,
                "measuredMilliseconds": 41,
                "percentile": "p95",
                "verdict": "Met",
                "samples": 900,
                "misses": 12,
            },
            "attainmentPercent": 97,
            "samples": 120,
            "windowSeconds": 300,
        },
        "feasibility": {"verdict": "Feasible", "message": "a setting that meets the targets exists"},
        "parameters": [
            {
                "name": "maxBatchTokens",
                "applied": 640,
                "desired": 640,
                "capacity": 8192,
                "reason": "ITL binds",
            },
            {"name": "maxBatchSequences", "desired": 32, "capacity": 32, "reason": "as spec.batching says"},
        ],
        "tuning": {
            "message": "ITL binds",
            "stepCost": {
                "baseMicroseconds": 7100,
                "perPrefillTokenNanoseconds": 33_000,
                "perDecodeNanoseconds": 50_000,
            },
            "history": [
                {
                    "time": "2026-01-01T00:00:00Z",
                    "message": "ITL binds",
                    "changes": [{"name": "maxBatchTokens", "from": 2048, "to": 640}],
                }
            ],
        },
    },
}


def with_status(**changes: Any) -> dict[str, Any]:
    return {**BODY, "status": {**BODY["status"], **changes}}


def test_what_is_set_and_why_is_told() -> None:
    """Targets with counts, every limit with its reason, changes with their times."""
    text = "\n".join(words(BODY))
    for part in (
        "chat in team: hf://org/model",
        "ready: 1 of 1 replicas serve",
        "limits differ: chat-1 refused",
        "ITL p95 41 ms, target 50 ms: met (12 of 900 over it)",
        "97 % of 120 offered requests",
        "maxBatchTokens 640 of at most 8192: ITL",
        "maxBatchSequences differs between pods (wanted 32)",
        "a step costs 7.1 ms, 33 us a prompt token",
        "maxBatchTokens 2048 -> 640: ITL binds",
    ):
        assert part in text
    assert "not measured" not in text


@pytest.mark.parametrize("status", ["False", "Unknown"])
def test_limits_that_nobody_could_be_asked_for_are_not_said_to_differ(status: str) -> None:
    """No pod is ready, or one does not answer: what is in force is unknown, which is no disagreement."""
    conditions = [{"type": "MetricsAvailable", "status": status, "message": "there is no ready pod"}]
    text = "\n".join(words(with_status(conditions=conditions)))
    assert "maxBatchSequences not read from every pod (wanted 32)" in text
    assert "differs" not in text


def test_what_would_change_it_names_the_bound_and_the_reserve_that_bind() -> None:
    """And nothing that does not."""
    text = "\n".join(words(BODY))
    assert "spec.tuning.bounds.maxBatchTokens.max: the limit stands at it" in text
    assert "spec.batching.capacity.maxBatchSequences" in text
    assert "spec.batching.capacity.maxBatchTokens" not in text
    assert "spec.replicas" not in text


def test_a_floor_and_a_lack_of_capacity_have_different_ways_out() -> None:
    """Replicas help against the one only."""
    floor = with_status(feasibility={"verdict": "BelowEngineFloor", "bestItlMilliseconds": 90})
    assert any("90 ms is the best" in line for line in words(floor))
    assert any("replicas would not help" in line for line in words(floor))
    full = with_status(feasibility={"verdict": "CapacityLimited"}, capacity={"replicasNeeded": 3})
    assert any("spec.replicas: 3 would serve" in line for line in words(full))


def test_modes_that_do_not_act_say_how_to_let_them() -> None:
    """Off, Recommend, and no target at all."""
    off = {**BODY, "spec": {**BODY["spec"], "tuning": {"mode": "Off"}}}
    assert any("Auto lets it" in line for line in words(off))
    advice = with_status(recommendation={"message": "maxBatchTokens 2048 -> 640"})
    advice["spec"] = {**BODY["spec"], "tuning": {"mode": "Recommend"}}
    assert any("Auto would apply" in line for line in words(advice))
    aimless = {**BODY, "spec": {"model": BODY["spec"]["model"]}}
    assert any("nothing to tune for" in line for line in words(aimless))


def test_a_resource_that_nobody_has_looked_at_is_told_as_such() -> None:
    """The controller may be down."""
    fresh = {key: value for key, value in BODY.items() if key != "status"}
    assert "has not looked at it yet" in words(fresh)[-1]
