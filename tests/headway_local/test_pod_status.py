"""The status that the Kubernetes API shows of a pod."""

from datetime import UTC, datetime, timedelta
from typing import Any

from headway_local.pod_status import Phase, PodFacts, Running, Terminated, Waiting, build
from support.pods import python_pod

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def status(facts: PodFacts, previous: dict[str, Any] | None = None, now: datetime = NOON) -> dict[str, Any]:
    pod = python_pod("")
    pod["metadata"]["generation"] = 3
    return build(pod, facts, previous, pod_ip="10.0.0.1", host_ip="10.0.0.2", now=now)


def conditions(found: dict[str, Any]) -> dict[str, str]:
    return {c["type"]: c["status"] for c in found["conditions"]}


def test_a_pod_that_waits_has_no_address_and_is_not_ready() -> None:
    found = status(PodFacts())
    assert found["phase"] == "Pending"
    assert "podIP" not in found
    assert found["containerStatuses"][0]["state"] == {"waiting": {"reason": "ContainerCreating"}}
    assert conditions(found) == {
        "PodReadyToStartContainers": "False",
        "Initialized": "True",
        "Ready": "False",
        "ContainersReady": "False",
        "PodScheduled": "True",
    }


def test_times_move_only_with_the_condition_that_turned() -> None:
    running = PodFacts(phase=Phase.RUNNING, state=Running(NOON), sandbox=True, started=True)
    first = status(running)
    later = status(running.change(ready=True), first, NOON + timedelta(minutes=1))
    times = {c["type"]: c["lastTransitionTime"][11:16] for c in later["conditions"]}
    assert times == {
        "PodReadyToStartContainers": "12:00",
        "Initialized": "12:00",
        "Ready": "12:01",
        "ContainersReady": "12:01",
        "PodScheduled": "12:00",
    }
    assert later["podIP"] == "10.0.0.1"
    assert later["observedGeneration"] == 3


def test_a_crash_shows_what_ended_and_that_it_waits() -> None:
    end = Terminated(137, 9, NOON, NOON + timedelta(seconds=5), "Error")
    facts = PodFacts(
        phase=Phase.RUNNING,
        state=Waiting("CrashLoopBackOff", "back-off 10s"),
        last_end=end,
        restarts=2,
        container_id="process://x",
    )
    [container] = status(facts)["containerStatuses"]
    assert container["restartCount"] == 2
    assert container["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert container["lastState"]["terminated"] == {
        "exitCode": 137,
        "signal": 9,
        "reason": "Error",
        "startedAt": "2030-01-01T12:00:00Z",
        "finishedAt": "2030-01-01T12:00:05Z",
        "containerID": "process://x",
    }


def test_a_completed_pod_says_so_in_every_condition_that_turned() -> None:
    end = Terminated(0, 0, NOON, NOON, "Completed")
    found = status(PodFacts(phase=Phase.SUCCEEDED, state=end, sandbox=True))
    reasons = {c["type"]: c.get("reason") for c in found["conditions"]}
    assert reasons["Ready"] == reasons["ContainersReady"] == reasons["Initialized"] == "PodCompleted"
