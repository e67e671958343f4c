"""The count of requests that never ran: sizes, ages, and the door."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.backlog import Backlog
from headway_engine.sequence import Sequence
from headway_engine.tenants import Fairness, Tenant, TenantPolicy
from support.engine_builders import a_request, some_limits


def a_sequence(number: int, arrival_s: float = 0.0, prompt: int = 5, tenant: str = "") -> Sequence:
    request = a_request(f"r{number}", prompt, arrival_s=arrival_s, tenant=tenant)
    return Sequence(request, list(request.prompt), order=number)


def test_an_empty_backlog_has_no_oldest() -> None:
    backlog = Backlog()
    assert (backlog.requests, backlog.tokens, backlog.oldest()) == (0, 0, None)


def test_the_oldest_is_by_arrival_and_not_by_admission() -> None:
    """Long prompts take longer to tokenise and are admitted after shorter ones that came later."""
    backlog = Backlog()
    late, early = a_sequence(1, arrival_s=5.0), a_sequence(2, arrival_s=3.0)
    backlog.add(late)
    backlog.add(early)
    assert backlog.oldest() is early
    assert backlog.remove(early)
    assert backlog.oldest() is late


def test_a_request_that_comes_again_is_as_old_as_it_is_then() -> None:
    """Under the same id, as an input of a call that timed out does."""
    backlog = Backlog()
    first, other, again = a_sequence(1, arrival_s=1.0), a_sequence(2, arrival_s=2.0), a_sequence(1, 3.0)
    backlog.add(first)
    backlog.remove(first)
    backlog.add(other)
    backlog.add(again)
    assert (backlog.oldest(), backlog.next_to_expire()) == (other, other)


def test_removing_twice_counts_once() -> None:
    backlog = Backlog()
    sequence = a_sequence(1)
    backlog.add(sequence)
    assert backlog.remove(sequence)
    assert not backlog.remove(sequence)
    assert (backlog.requests, backlog.tokens) == (0, 0)


def test_what_left_is_not_kept_behind_one_that_stays() -> None:
    backlog = Backlog()
    backlog.add(a_sequence(0))
    for number in range(1, 2000):
        sequence = a_sequence(number, arrival_s=number)
        backlog.add(sequence)
        backlog.remove(sequence)
    assert max(len(ages._heap) for ages in (backlog._members, backlog._impatient)) < 100


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_counts_and_ages_are_those_of_a_plain_list(data: st.DataObject) -> None:
    backlog, plain = Backlog(), list[Sequence]()
    for number in range(data.draw(st.integers(1, 60))):
        if plain and data.draw(st.booleans()):
            sequence = plain.pop(data.draw(st.integers(0, len(plain) - 1)))
            assert backlog.remove(sequence)
        else:
            sequence = a_sequence(
                number,
                data.draw(st.floats(0, 9)),
                data.draw(st.integers(1, 9)),
                data.draw(st.sampled_from("ab")),
            )
            backlog.add(sequence)
            plain.append(sequence)
        assert backlog.requests == len(plain)
        assert backlog.tokens == sum(s.prompt_len for s in plain)
        oldest = min(plain, key=lambda s: (s.request.arrival_s, s.order), default=None)
        assert backlog.oldest() is oldest
        of_a = [s for s in plain if s.request.tenant == "a"]
        refused = backlog.refusal(
            a_request("new", 1, tenant="a"), some_limits(), Tenant(max_queued_requests=3), 0, 1
        )
        assert bool(refused) is (len(of_a) >= 3)


def test_a_full_queue_lets_in_a_tenant_that_has_less_than_its_share_of_it() -> None:
    """Weights 3 and 1 beside a queue of 8: gold may have 6 and batch 2 in it, whoever came first."""
    policy = TenantPolicy(tenants={"gold": Tenant(weight=3)})
    backlog, limits = Backlog(policy), some_limits(max_queued_requests=8)

    def joins(tenant: str) -> bool:
        number = backlog.requests
        request = a_request(f"new{number}", 5, tenant=tenant)
        if backlog.refusal(request, limits, policy.of(tenant), 0, 0) is not None:
            return False
        backlog.add(a_sequence(number, tenant=tenant))
        return True

    assert [joins("batch") for _ in range(9)] == [True] * 8 + [False]
    assert [joins("gold") for _ in range(7)] == [True] * 6 + [False]
    assert not joins("batch")


def test_a_full_queue_grows_to_twice_its_limits_and_no_further() -> None:
    """Names of tenants may come from clients: inventing them must not open the queue."""
    backlog, limits = Backlog(), some_limits(max_queued_requests=4, max_queued_tokens=25)
    joined = 0
    for number in range(50):
        request = a_request(f"r{number}", 5, tenant=f"t{number}")
        if backlog.refusal(request, limits, Tenant(), 0, 0) is None:
            backlog.add(a_sequence(number, tenant=f"t{number}"))
            joined += 1
    assert joined == 8
    assert backlog.tokens <= 50


def test_in_order_of_arrival_a_full_queue_is_full_for_everyone() -> None:
    backlog = Backlog(TenantPolicy(fairness=Fairness.FIRST_COME_FIRST_SERVED))
    backlog.add(a_sequence(0, tenant="a"))
    request = a_request("new", 5, tenant="b")
    assert backlog.refusal(request, some_limits(max_queued_requests=1), Tenant(), 0, 0) is not None
