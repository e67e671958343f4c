"""Random histories of the scheduler: whatever happens, blocks add up, all end, and outputs are right."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway_engine.protocol import BatchingMode, Capacity, Limits
from headway_engine.sequence import Pooling, Request
from headway_engine.tenants import Fairness, Tenant, TenantPolicy
from support.engine_builders import Drive, a_capacity, a_prompt, a_request, some_limits

SHARED = a_prompt(40, seed=3)
"""Prompts begin with parts of this, so that the prefix cache is hit."""


@st.composite
def capacities(draw: st.DrawFn) -> Capacity:
    """From caches in which two requests are too many to roomy ones."""
    sequences = draw(st.integers(2, 6))
    return a_capacity(
        max_batch_sequences=sequences,
        max_batch_tokens=draw(st.integers(sequences, 24)),
        kv_blocks=draw(st.integers(6, 16)),
        block_tokens=draw(st.sampled_from([2, 3, 4])),
        max_model_tokens=draw(st.sampled_from([32, 64])),
    )


@st.composite
def limits_below(draw: st.DrawFn, capacity: Capacity) -> Limits:
    """Any limits that the control API would accept for a capacity."""
    sequences = draw(st.integers(1, capacity.max_batch_sequences))
    return some_limits(
        capacity,
        mode=draw(st.sampled_from(BatchingMode)),
        window_ms=draw(st.sampled_from([0, 0, 15, 200])),
        max_batch_sequences=sequences,
        max_batch_tokens=draw(st.integers(sequences, capacity.max_batch_tokens)),
        prefill_chunk_tokens=draw(st.integers(1, capacity.max_batch_tokens)),
        max_queued_requests=draw(st.sampled_from([100, 100, 100, 3, 0])),
        max_queued_tokens=draw(st.sampled_from([10_000, 10_000, 10_000, 30, 0])),
        queue_timeout_ms=draw(st.sampled_from([0, 0, 30_000, 60])),
    )


@st.composite
def requests(draw: st.DrawFn, number: int) -> Request:
    """A request that may share its beginning with others; some end by a stop token, some want a vector."""
    prompt = SHARED[: draw(st.sampled_from([0, 4, 9, 12]))] + a_prompt(
        draw(st.integers(1, 8)), seed=number % 5
    )
    return a_request(
        f"r{number}",
        prompt,
        max_tokens=draw(st.integers(1, 30)),
        min_tokens=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.sampled_from([(), (), (3, 50), tuple(range(20))])),
        tenant=draw(st.sampled_from(["", "a", "b"])),
        priority=draw(st.sampled_from([0, 0, 0, 5, -5])),
        call=draw(st.sampled_from(["", "", "x", "y"])),
        cache_salt=draw(st.sampled_from(["", "", "other"])),
        pooling=draw(st.sampled_from([None, None, None, Pooling.LAST, Pooling.MEAN])),
    )


def play(draw: st.DrawFn, drive: Drive) -> None:
    """Let some turns go by in which anything may happen."""
    number = 0
    for _ in range(draw(st.integers(5, 40))):
        match draw(
            st.sampled_from(
                ["submit", "submit", "step", "step", "step", "abort", "limits", "time", "fail", "lose"]
            )
        ):
            case "submit":
                for _ in range(draw(st.integers(1, 6))):
                    drive.submit(draw(requests(number)))
                    number += 1
            case "step":
                drive.step()
            case "abort" if drive.requests:
                # In the middle of a step, when there is one.
                step = drive.plan()
                drive.abort(draw(st.sampled_from(sorted(drive.requests))))
                if step is not None:
                    drive.commit(step)
            case "limits":
                drive.scheduler.set_limits(draw(limits_below(drive.capacity)))
            case "time":
                drive.now_s += draw(st.sampled_from([0.01, 0.1, 20.0]))
            case "fail":
                step = drive.plan()
                if step is not None:
                    drive.fail(step, "out of luck")
            case "lose":
                step = drive.plan()
                if step is not None:
                    held = sorted({block for c in step.chunks for block in c.sequence.block_table})
                    drive.lose(draw(st.lists(st.sampled_from(held), max_size=3)))
                    drive.commit(step)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_history_ends_with_every_request_answered_and_every_block_free(data: st.DataObject) -> None:
    """Arrivals, aborts inside a step, failed steps, blocks that go wrong, limit and mode changes, priorities,
    tenants, tiny caches.

    The drive checks after every call that blocks add up, and before every step that each sequence's table
    names the blocks in which its tokens really were computed.
    """
    capacity = data.draw(capacities())
    drive = Drive(
        capacity,
        data.draw(limits_below(capacity)),
        tenants=TenantPolicy(
            fairness=data.draw(st.sampled_from(Fairness)),
            tenants={"a": Tenant(weight=4, priority=data.draw(st.sampled_from([0, 3])))},
            ageing_s=0.1,
        ),
        prefix_caching=data.draw(st.booleans()),
    )
    play(data.draw, drive)
    drive.run(most_steps=3000)
    drive.assert_all_ended_right()
