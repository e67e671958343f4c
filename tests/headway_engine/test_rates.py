"""What a tenant may spend, and when a refused client should come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.rates import MOST_IDLE_BUCKETS, PrefillPace, TokenRates
from headway_engine.sequence import RejectReason
from headway_engine.tenants import Tenant, TenantPolicy
from support.engine_builders import Drive, a_capacity, a_request, some_limits

TEN_A_SECOND = TenantPolicy(tenants={"slow": Tenant(tokens_per_s=10, burst_tokens=20)})


def test_a_tenant_without_a_rate_never_waits() -> None:
    rates = TokenRates(TEN_A_SECOND)
    rates.spend("other", 10**9, 0.0)
    assert rates.wait_s("other", 0.0) == 0.0


def test_without_any_rate_there_is_nothing_to_keep() -> None:
    assert not TokenRates(TenantPolicy()).active


def test_a_full_bucket_admits_a_request_of_any_size_and_the_debt_is_waited_for() -> None:
    rates = TokenRates(TEN_A_SECOND)
    assert rates.wait_s("slow", 0.0) == 0.0
    rates.spend("slow", 50, 0.0)
    assert rates.wait_s("slow", 0.0) == pytest.approx(3.1)
    assert rates.wait_s("slow", 3.0) == pytest.approx(0.1)
    assert rates.wait_s("slow", 3.2) == 0.0


def test_a_pause_saves_up_one_burst_and_no_more() -> None:
    rates = TokenRates(TEN_A_SECOND)
    rates.spend("slow", 1, 0.0)
    rates.spend("slow", 20, 1e6)
    assert rates.wait_s("slow", 1e6) == pytest.approx(0.1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 60)), min_size=1, max_size=40))
def test_over_time_a_tenant_spends_its_rate_one_burst_and_one_request(
    attempts: list[tuple[float, int]],
) -> None:
    rates, now_s, spent = TokenRates(TEN_A_SECOND), 0.0, 0
    for pause_s, tokens in attempts:
        now_s += pause_s
        if not rates.wait_s("slow", now_s):
            rates.spend("slow", tokens, now_s)
            spent += tokens
    assert spent <= 20 + 10 * now_s + 60 + 1e-6


def test_full_buckets_of_passing_tenants_are_forgotten() -> None:
    rates = TokenRates(TenantPolicy(default=Tenant(tokens_per_s=10)))
    for i in range(5 * MOST_IDLE_BUCKETS):
        rates.spend(f"t{i}", 1, float(i))
    assert len(rates._buckets) <= MOST_IDLE_BUCKETS + 1


def test_a_tenant_over_its_rate_is_refused_with_the_time_to_come_back() -> None:
    """Prompts and outputs both count; the neighbour is not touched."""
    drive = Drive(tenants=TEN_A_SECOND)
    drive.submit(a_request("a", 30, max_tokens=10, tenant="slow"))
    drive.run()
    drive.submit(a_request("b", 1, tenant="slow"), a_request("c", 1, tenant="other"))
    refused = drive.rejected["b"]
    assert refused.reason is RejectReason.QUEUE_FULL
    assert "tenant 'slow' has spent its tokens_per_s" in refused.message
    assert refused.retry_after_s == pytest.approx((1 + 40 - 20) / 10, abs=0.2)
    assert "c" in drive.requests
    drive.now_s += refused.retry_after_s
    drive.submit(a_request("d", 1, tenant="slow"))
    assert "d" in drive.requests


def test_a_refused_request_costs_its_tenant_nothing() -> None:
    limits = some_limits(max_queued_requests=0, max_batch_sequences=1)
    drive = Drive(limits=limits, tenants=TEN_A_SECOND)
    drive.submit(a_request("a", 5, tenant="slow"), a_request("b", 15, tenant="slow"))
    assert drive.rejected.keys() == {"b"}
    drive.run()
    drive.submit(a_request("c", 5, tenant="slow"))
    assert drive.rejected.keys() == {"b"}


@pytest.mark.parametrize(
    ("steps", "queued", "expected_s"),
    [
        ([], 5000, 1.0),  # nothing known
        ([(0, 1.0)] * 50, 5000, 1.0),  # only decodes so far
        ([(100, 0.1)] * 50, 5000, 2.5),  # 1000 tokens/s, half of 5000
        ([(100, 0.1)] * 50, 10, 1.0),
        ([(100, 0.1)] * 50, 10**9, 60.0),
        ([(100, 0.1), (0, 0.1)] * 500, 5000, 5.0),  # half the time goes to decodes
    ],
)
def test_when_to_come_back(steps: list[tuple[int, float]], queued: int, expected_s: float) -> None:
    pace = PrefillPace()
    for tokens, seconds in steps:
        pace.note(tokens, seconds)
    assert pace.retry_after_s(queued) == pytest.approx(expected_s, rel=0.05)


def test_a_full_queue_says_when_to_come_back() -> None:
    """500 of 1000 queued tokens at 64 tokens a step of 0.1 s."""
    capacity = a_capacity(kv_blocks=2000)
    drive = Drive(
        capacity,
        some_limits(capacity, max_batch_tokens=64, max_queued_tokens=1000),
        cost=lambda step: 0.1,
        prefix_caching=False,
    )
    drive.submit(*(a_request(f"r{i}", 100, max_tokens=1) for i in range(10)))
    for i in range(6):
        drive.step()
        drive.submit(a_request(f"more{i}", 64, max_tokens=1))
    drive.submit(a_request("late", 100))
    assert drive.rejected["late"].retry_after_s == pytest.approx(500 / 64 * 0.1, rel=0.4)
