"""Attainment counts what was offered; percentiles stand beside it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from headway_cli import report
from headway_cli.client import Answer, Ending
from headway_cli.report import Record
from headway_operator.resource import Percentile, Slo, Target

SLO = Slo(ttft=Target(0.5), itl=Target(0.05), e2e=Target(10.0))


def answer(
    *,
    ttft_s: float | None = 0.1,
    gaps_s: tuple[float, ...] = (0.01,) * 20,
    e2e_s: float = 1.0,
    ending: Ending = Ending.FINISHED,
    http_status: int = 200,
    error: str = "",
) -> Answer:
    """An answer that meets SLO, unless told otherwise."""
    return Answer(ending, http_status, ttft_s, gaps_s, e2e_s, 10, len(gaps_s) + 1, error=error)


def record(a: Answer, lag_s: float = 0.0) -> Record:
    return Record(due_s=0.0, send_lag_s=lag_s, answer=a)


def test_rejected_and_failed_requests_are_misses() -> None:
    """One good answer of four offered requests is 25 %, although all that finished were good."""
    refused = answer(ending=Ending.REJECTED, http_status=429, ttft_s=None, gaps_s=(), error="full")
    broken = answer(ending=Ending.FAILED, http_status=0, ttft_s=None, gaps_s=(), error="reset")
    result = report.summarise([record(a) for a in (answer(), refused, refused, broken)], SLO, 10.0)
    assert result.attainment == 0.25
    assert (result.offered, result.finished, result.rejected, result.failed) == (4, 1, 2, 1)
    assert result.goodput_rps == 0.1
    assert result.errors == (("429: full", 2), ("no answer: reset", 1))
    assert result.ttft is not None
    assert result.ttft.count == 1


def test_each_target_alone_makes_a_miss() -> None:
    """And the report says which."""
    late, slow, long = answer(ttft_s=0.6), answer(gaps_s=(0.1,) * 20), answer(e2e_s=11.0)
    result = report.summarise([record(a) for a in (late, slow, long, answer())], SLO, 1.0)
    assert (result.missed_ttft, result.missed_itl, result.missed_e2e) == (1, 1, 1)
    assert result.met_slo == 1


def test_a_percentile_target_allows_its_share_of_slow_gaps() -> None:
    """One slow gap in twenty is what p95 means; two in forty are, and two in thirty are not."""
    assert report.meets(answer(gaps_s=(0.01,) * 38 + (1.0,) * 2), SLO)
    assert not report.meets(answer(gaps_s=(0.01,) * 28 + (1.0,) * 2), SLO)
    assert not report.meets(answer(gaps_s=(0.01,) * 38 + (1.0,) * 2), Slo(itl=Target(0.05, Percentile.P99)))


def test_one_slow_gap_fails_no_request() -> None:
    """Five gaps have no 95th percentile to speak of."""
    assert report.meets(answer(gaps_s=(0.01,) * 4 + (1.0,)), SLO)


def test_the_share_of_slow_gaps_is_over_all_requests() -> None:
    """That is what the promise of the deployment is about; without a target there is none."""
    answers = [answer(gaps_s=(0.01,) * 9 + (1.0,)), answer(gaps_s=(0.01,) * 10)]
    records = [record(a) for a in answers]
    assert report.summarise(records, SLO, 1.0).gaps_over == 0.05
    assert report.summarise(records, Slo(), 1.0).gaps_over is None


def test_an_answer_without_a_first_token_misses_a_ttft_target_only() -> None:
    """An empty answer is no good answer where a first token was promised."""
    empty = answer(ttft_s=None, gaps_s=())
    assert not report.meets(empty, SLO)
    assert report.meets(empty, Slo(itl=Target(0.05)))


def test_a_client_that_sends_late_is_found_out() -> None:
    """More than 5 % of the TTFT target at p99."""
    assert report.summarise([record(answer(), lag_s=0.026)], SLO, 1.0).client_too_slow
    assert not report.summarise([record(answer(), lag_s=0.024)], SLO, 1.0).client_too_slow


def test_nothing_offered_is_an_empty_report() -> None:
    """No division by zero, no invented figures."""
    result = report.summarise([], SLO, 0.0)
    assert (result.attainment, result.ttft, result.goodput_rps) == (0.0, None, 0.0)


def test_the_report_is_plain_json() -> None:
    """With every request, if asked for."""
    records = [record(answer())]
    text = json.dumps(report.as_json(report.summarise(records, SLO, 1.0), records))
    assert json.loads(text)["summary"]["attainment"] == 1.0
    assert len(json.loads(text)["requests"]) == 1


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], share: float) -> None:
    """Checked against the definition."""
    ordered = sorted(values)
    found = report.percentile(ordered, share)
    assert sum(v <= found for v in ordered) >= share * len(ordered) - 1e-9
    assert sum(v < found for v in ordered) < share * len(ordered) + 1e-9
