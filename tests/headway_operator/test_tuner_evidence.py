"""The numbers behind a decision."""

import pytest

from headway_operator.resource import Percentile, Slo, Target
from headway_operator.tuner.evidence import attainment
from support.observations import a_histogram, an_observation

SLO = Slo(ttft=Target(0.5, Percentile.P95), itl=None, e2e=None)


@pytest.mark.parametrize(
    ("latencies_s", "values", "share", "requests"),
    [
        ([0.1] * 3 + [9.0], {"arrivals": 4.0}, 0.75, 4),
        ([9.0], {"arrivals": 0.0}, 0.0, 1),
        ([0.1], {"arrivals": 50.0}, 1.0, 1),
        ([0.1], {"arrivals": 0.0, "rejected": 2.0, "failed": 1.0}, 0.25, 4),
        ([], {"arrivals": 3.0, "rejected": 3.0}, 0.0, 3),
        ([], {"arrivals": 3.0}, None, None),
        ([], {"arrivals": 0.0, "rejected": None, "failed": None}, None, None),
    ],
)
def test_a_share_comes_with_the_number_that_it_is_a_share_of(
    latencies_s: list[float], values: dict[str, float | None], share: float | None, requests: float | None
) -> None:
    """Never "0 % of 0": what is judged in an interval may have arrived before it, and the other way round."""
    seen = an_observation(ttft=a_histogram(latencies_s, 500) if latencies_s else None, **values)
    assert attainment(SLO, seen) == (share, requests)
