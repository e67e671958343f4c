"""What becomes an event, and how many of them."""

from typing import Any

from headway_operator.news import BURST, News, Quota, changes_of_limits, transitions
from headway_operator.resource import TuningMode
from headway_operator.tuner.controller import Change


def status(**conditions: str) -> dict[str, Any]:
    return {
        "conditions": [
            {"type": type_, "status": value, "reason": f"R{value}", "message": f"m {value}"}
            for type_, value in conditions.items()
        ]
    }


def told(before: dict[str, Any] | None, after: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(news.type, news.reason, news.note) for news in transitions(before, after)]


def test_a_new_resource_is_no_news() -> None:
    """It is not ready yet, and nothing is known of its targets."""
    assert told(None, status(Ready="False", SLOMet="Unknown", Reconciling="True")) == []
    assert told(status(Ready="False"), status(Ready="True")) == [("Normal", "RTrue", "Ready: m True")]


def test_bad_turns_are_warnings_and_the_way_back_is_normal() -> None:
    """Each is told once, with the condition's own words."""
    good = status(Ready="True", MetricsAvailable="True", SLOMet="True", SLOFeasible="True")
    bad = status(Ready="False", MetricsAvailable="False", SLOMet="False", SLOFeasible="False", Stalled="True")
    assert [type_ for type_, _, _ in told(good, bad)] == ["Warning"] * 5
    assert [type_ for type_, _, _ in told(bad, good)] == ["Normal"] * 5
    assert told(good, good) == told(bad, bad) == []


def on_fallback(ready: bool = True) -> dict[str, Any]:
    reason = "ReadyOnFallback" if ready else "NoReplicaReady"
    return {"conditions": [{"type": "Ready", "status": str(ready), "reason": reason, "message": "m"}]}


def test_serving_on_a_fallback_is_a_warning_once() -> None:
    """Whatever was before: though the resource is ready, somebody should look."""
    warning = [("Warning", "ReadyOnFallback", "Ready: m")]
    assert told(None, on_fallback()) == warning
    assert told(on_fallback(ready=False), on_fallback()) == warning
    assert told(status(Ready="True"), on_fallback()) == warning
    assert told(on_fallback(), on_fallback()) == []
    assert told(on_fallback(), status(Ready="True")) == []
    assert told(on_fallback(), status(Ready="False")) == [("Warning", "RFalse", "Ready: m False")]


def test_a_fallback_is_told_right_after_the_resource_became_ready() -> None:
    """The quota of the condition itself is not its own."""
    quota = Quota()
    (news,) = transitions(None, on_fallback())
    assert quota.allows("Ready", 0.0)
    assert quota.allows(news.topic, 1.0)
    assert not quota.allows(news.topic, 2.0)


def test_not_knowing_is_no_news() -> None:
    """Unknown is neither bad nor good."""
    assert told(status(SLOMet="True"), status(SLOMet="Unknown")) == []
    assert told(status(SLOMet="Unknown"), status(SLOMet="True")) == []
    assert told(status(SLOMet="Unknown"), status(SLOMet="False")) == [
        ("Warning", "RFalse", "SLOMet: m False")
    ]


def test_a_stalled_resource_that_moves_again_says_what_it_was() -> None:
    """The condition is gone then, and so are its words."""
    assert told(status(Stalled="True"), status()) == [("Normal", "Resumed", "Stalled: was: m True")]


def test_a_change_of_limits_says_old_new_and_why() -> None:
    """In one note, whatever the number of parameters."""
    changes = (Change("maxBatchTokens", 8192, 512, "ITL binds"), Change("window", 0, 5, "idle"))
    assert changes_of_limits(changes, TuningMode.AUTO) == [
        News(
            "limits",
            "Normal",
            "LimitsChanged",
            "maxBatchTokens 8192 → 512: ITL binds; window 0 → 5: idle",
            "Tune",
        )
    ]
    assert [n.reason for n in changes_of_limits(changes, TuningMode.RECOMMEND)] == ["LimitsRecommended"]


def test_an_edit_is_applied_and_never_called_advice() -> None:
    """Recommend mode: what the user edited is in force, what the tuner found is not."""
    changes = (
        Change("maxBatchTokens", 512, 1024, "spec.batching was edited", edited=True),
        Change("maxQueuedTokens", 900, 400, "TTFT binds"),
    )
    told = changes_of_limits(changes, TuningMode.RECOMMEND)
    assert [(n.reason, n.note.split()[0]) for n in told] == [
        ("LimitsChanged", "maxBatchTokens"),
        ("LimitsRecommended", "maxQueuedTokens"),
    ]


def test_a_condition_that_flaps_for_ten_minutes_makes_few_events() -> None:
    """Once in two minutes at most, each condition for itself."""
    quota = Quota()
    sent = [t for t in range(0, 600, 10) if quota.allows("SLOMet", float(t))]
    assert sent == [0, 120, 240, 360, 480]
    assert quota.allows("Ready", 1.0)


def test_limits_may_move_often_for_a_while_and_seldom_for_ever() -> None:
    """A burst, then one a minute."""
    quota = Quota()
    sent = [t for t in range(0, 3600, 10) if quota.allows("limits", float(t))]
    assert len([t for t in sent if t < 250]) == BURST
    assert len(sent) == BURST + 59
