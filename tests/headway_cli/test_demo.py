"""The demo, whole, on the real model; and its parts that need none."""

import re
from typing import Any

import pytest

from headway_cli import demo
from headway_cli.__main__ import main
from headway_cli.documents import read_resources


def test_the_demo_serves_the_quickstart() -> None:
    """The file is there, valid, and names the model that needs no hub."""
    resource, others = read_resources(demo.quickstart())
    assert resource["spec"]["model"]["uri"].startswith("package://")
    assert others == []


class Told:
    """The little of a session that the list of decisions looks at."""

    def __init__(self, history: list[dict[str, Any]]) -> None:
        self.machine = self
        self.status = {"tuning": {"history": history}}
        self.events: list[Any] = []


def test_the_way_of_a_limit_is_told_oldest_first() -> None:
    """History is kept newest first."""
    history = [
        {"changes": [{"name": "maxBatchTokens", "from": 400, "to": 160}]},
        {"changes": [{"name": "maxBatchTokens", "from": 1024, "to": 400}]},
    ]
    lines = demo.decisions(Told(history))  # type: ignore[arg-type]
    assert "  maxBatchTokens 1024 → 400 → 160" in lines


def test_no_move_is_said_as_such() -> None:
    """Rather than an empty list."""
    assert "No limit was moved" in demo.decisions(Told([]))[1]  # type: ignore[arg-type]


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_answers_measures_plays_and_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A short one. What the figures are depends on the machine; that they are there does not."""
    assert main(["demo", "--minutes", "0.4"]) == 0
    said = capsys.readouterr().out
    assert "Paris" in said
    assert re.search(r"prefill \d+ tokens/s, decode \d+ tokens/s", said)
    assert re.search(r"Targets that suit it: TTFT p95 \d+ ms, ITL p95 \d+ ms", said)
    assert "time is not stretched" in said
    assert re.search(r"maxBatchTokens=1024 chunk=1024", said)
    assert "tuning.mode Recommend -> Auto" in said
    assert re.search(r"attainment +(\d+%|-)", said)
    requests = re.search(r"requests +(\d+) +(\d+) +(\d+)", said)
    assert requests is not None
    assert int(requests[3]) > 0
