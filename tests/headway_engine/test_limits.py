"""What becomes of limits: numbered when they change, brought below capacity at start."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.limits import differences, successor
from headway_engine.protocol import Capacity, Limits, check_limits, clamp_limits

counts = st.integers(1, 100_000)


def test_unchanged_limits_keep_their_generation():
    """A controller that repeats itself does not make it look as if something had changed."""
    current = Limits(generation=4)
    assert successor(current, Limits(generation=9)) is current


def test_a_change_takes_the_next_generation_of_whoever_is_ahead():
    """After a restart the engine counts from 0 again; the controller that knows better is believed."""
    current = Limits(generation=4)
    assert successor(current, Limits(generation=0, window_ms=3)) == Limits(generation=5, window_ms=3)
    assert successor(current, Limits(generation=9, window_ms=3)) == Limits(generation=10, window_ms=3)


@settings(deadline=None)
@given(counts, counts, counts, counts, counts)
def test_clamped_limits_are_valid(tokens, sequences, chunk, most_tokens, most_sequences):
    """Whatever a file says and whatever was reserved."""
    capacity = Capacity(
        max_batch_tokens=max(most_tokens, most_sequences),
        max_batch_sequences=most_sequences,
        kv_blocks=1,
        block_tokens=1,
        max_model_tokens=1,
    )
    wanted = Limits(max_batch_tokens=tokens, max_batch_sequences=sequences, prefill_chunk_tokens=chunk)
    check_limits(clamp_limits(wanted, capacity), capacity)


def test_differences_name_what_changed():
    """For the log: one entry for each field."""
    assert differences(Limits(), Limits(window_ms=3, generation=1)) == [
        ("generation", 0, 1),
        ("window_ms", 0, 3),
    ]
