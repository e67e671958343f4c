"""The count of requests that never ran: sizes, ages, and the door."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.backlog import Backlog
from headway_engine.sequence import Sequence
from headway_engine.tenants import Tenant
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
    assert len(backlog._by_arrival) < 100


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
