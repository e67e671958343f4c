"""The demo, whole, on the real model; and its parts that need none."""

import re
from typing import Any

import pytest

from headway_cli import demo
from headway_cli.__main__ import main
from headway_cli.documents import read_resources
from headway_cli.pairs import Pair
from headway_cli.probe import Speed, suit


def test_the_demo_serves_the_quickstart() -> None:
    """The file is there, valid, and names the model that needs no hub."""
    resource, others = read_resources(demo.quickstart())
    assert resource["spec"]["model"]["uri"].startswith("package://")
    assert others == []


class Told:
    """The little of a session that the list of decisions looks at."""

    def __init__(self, history: list[dict[str, Any]], prefill_ns: int = 0) -> None:
        self.machine = self
        self.status = {"tuning": {"history": history, "stepCost": {"perPrefillTokenNanoseconds": prefill_ns}}}
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


@pytest.mark.parametrize(("prefill_ns", "times"), [(0, ""), (1_200_000, ""), (3_000_000, "3.0 times")])
def test_a_machine_that_got_slower_is_told(prefill_ns: int, times: str) -> None:
    """Targets that were chosen for a faster one would otherwise look like the tuner's failure."""
    suited = suit(Speed(1000, 0.05), context=2048, mean_prompt_share=0.3, max_sequences=16)
    said = demo.slowdown(Told([], prefill_ns), suited)  # type: ignore[arg-type]
    assert bool(said) == bool(times)
    assert times in said


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([Pair(0.4, 0.1)] * 5, "shorter in 5 of them): 4.0 times shorter"),
        ([Pair(0.1, 0.4)] * 5, "the tuned limits are the worse ones here"),
        ([Pair(0.4, 0.1)] * 3 + [Pair(0.1, 0.4)] * 2, "shorter in 3 of them). That may be chance"),
    ],
    ids=["better", "worse", "no difference"],
)
def test_pairs_are_told_as_they_are(pairs: list[Pair], said: str) -> None:
    """Also where they show nothing, or the wrong thing."""
    assert said in demo.paired_words(pairs)


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
    # Where something moved both limits are compared, and what came of it is said.
    assert ("Comparing both limits" in said) == ("Side by side a long prompt stopped a running" in said)
