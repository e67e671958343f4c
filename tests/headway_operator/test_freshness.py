"""Which figures are news: those that moved by more than the number of requests behind them explains."""

from typing import Any

import pytest

from headway_operator.freshness import figures_differ

Json = dict[str, Any]


def a_status(requests: int = 200, attainment: int = 97, ttft_ms: int = 400, **more: Any) -> Json:
    return {
        "slo": {
            "ttft": {"measuredMilliseconds": ttft_ms, "samples": 900, "misses": 9},
            "attainmentPercent": attainment,
            "samples": requests,
        },
        "throughput": {"requestsPerMinute": 6 * requests, "running": 3, "waiting": 0, **more},
        "capacity": {"replicasNeeded": 1, "requestsPerMinute": 2000, "maxBatchTokens": 2048},
    }


def test_the_same_status_differs_in_nothing() -> None:
    assert not figures_differ(a_status(), a_status())
    assert not figures_differ({}, {})


@pytest.mark.parametrize(
    ("old", "new", "news"),
    [
        (a_status(ttft_ms=400), a_status(ttft_ms=430), False),
        (a_status(ttft_ms=400), a_status(ttft_ms=700), True),
        (a_status(200), a_status(215), False),
        (a_status(200), a_status(400), True),
        (a_status(attainment=97), a_status(attainment=95), False),
        (a_status(attainment=97), a_status(attainment=80), True),
        (a_status(1, 100), a_status(1, 0), False),
        (a_status(1, ttft_ms=400), a_status(1, ttft_ms=900), False),
        (a_status(running=1, waiting=0), a_status(running=9, waiting=4), False),
        (a_status(), a_status(outputTokensPerSecond=10), True),
    ],
    ids=[
        "latency wobbles",
        "latency jumps",
        "traffic wobbles",
        "traffic doubles",
        "attainment wobbles",
        "attainment falls",
        "one request misses",
        "one request is slow",
        "others are running just now",
        "a figure is known for the first time",
    ],
)
def test_a_figure_is_news_beyond_chance(old: Json, new: Json, news: bool) -> None:
    assert figures_differ(old, new) is news


def test_every_change_of_what_is_reserved_or_needed_is_news() -> None:
    for name in ("replicasNeeded", "maxBatchTokens"):
        new = a_status()
        new["capacity"] = new["capacity"] | {name: 3}
        assert figures_differ(a_status(), new)


def test_a_verdict_on_a_target_is_news_whatever_the_figures_say() -> None:
    """An e2e target is judged and shown, and no condition tells of it."""
    kept = {"slo": {"e2e": {"verdict": "Met", "measuredMilliseconds": 900}, "samples": 4}}
    missed = {"slo": {"e2e": {"verdict": "Violated", "measuredMilliseconds": 900}, "samples": 4}}
    assert figures_differ(kept, missed)
    assert not figures_differ(kept, kept)
