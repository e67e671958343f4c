"""Minutes of random traffic on a virtual clock, at a real engine's size: nothing is lost, nothing is kept."""

import random
from collections import Counter

from headway_engine.protocol import BatchingMode, Capacity, Limits
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import Event, Finished, FinishReason, Rejected, SampledToken
from headway_engine.tenants import Tenant, TenantPolicy
from support.engine_builders import a_capacity, a_prompt, a_request, some_limits

STEP_S = 0.05
STEPS = 3000


def any_limits(chance: random.Random, capacity: Capacity) -> Limits:
    sequences = chance.choice([4, 16, 64])
    return some_limits(
        capacity,
        mode=chance.choice([BatchingMode.CONTINUOUS] * 3 + [BatchingMode.DYNAMIC, BatchingMode.STATIC]),
        window_ms=chance.choice([0, 0, 20, 200]),
        max_batch_sequences=sequences,
        max_batch_tokens=chance.choice([sequences, 256, 1024]),
        prefill_chunk_tokens=chance.choice([16, 128, 1024]),
        max_queued_requests=chance.choice([10, 200]),
        max_queued_tokens=chance.choice([2000, 50_000]),
        queue_timeout_ms=5000,
    )


def test_every_request_of_a_long_random_day_is_accounted_for_all_the_time() -> None:
    """Overload, a fifth cancelled, limits flipped every second, three tenants, a cache that is too small.

    At every step: arrived = finished + aborted + rejected + failed + timed out + in flight. At the end
    every gauge is 0.
    """
    chance = random.Random(20)
    capacity = a_capacity(
        max_batch_tokens=1024, max_batch_sequences=64, kv_blocks=300, block_tokens=16, max_model_tokens=1024
    )
    policy = TenantPolicy(tenants={"gold": Tenant(weight=4, priority=10), "batch": Tenant(priority=-10)})
    scheduler = Scheduler(capacity, any_limits(chance, capacity), tenants=policy)
    system_prompts = [a_prompt(200, seed=s) for s in range(4)]
    ended: Counter[FinishReason] = Counter()
    arrived = rejected = 0
    present: list[str] = []
    now_s = 0.0

    def note(events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Finished):
                ended[event.reason] += 1

    for turn in range(STEPS + 100_000):
        if turn < STEPS:
            for _ in range(chance.choice([0, 0, 0, 1, 1, 4])):
                arrived += 1
                prompt = (
                    *chance.choice(system_prompts)[: chance.choice([0, 64, 200])],
                    *a_prompt(30, arrived % 50),
                )
                answer = scheduler.admit(
                    a_request(
                        f"r{arrived}",
                        prompt,
                        max_tokens=chance.randint(1, 120),
                        arrival_s=now_s,
                        tenant=chance.choice(["gold", "", "batch"]),
                    ),
                    now_s,
                )
                if isinstance(answer, Rejected):
                    rejected += 1
                elif chance.random() < 0.2:
                    present.append(answer.id)
            if present and chance.random() < 0.2:
                note(scheduler.abort(present.pop(chance.randrange(len(present))), now_s))
            if turn % 20 == 0:
                scheduler.set_limits(any_limits(chance, capacity))
        elif not scheduler.running and not scheduler.waiting:
            break
        note(scheduler.expire(now_s))
        step = scheduler.next_step(now_s)
        now_s += STEP_S
        if step is not None:
            sampled = {
                c.sequence.id: SampledToken(len(c.sequence.tokens) % 97) for c in step.chunks if c.samples
            }
            if turn % 500 == 499:
                for c in step.chunks:
                    note(scheduler.give_up(c.sequence.id, "bad luck"))
            note(scheduler.commit(step, sampled, now_s))
        assert arrived == ended.total() + rejected + scheduler.running + scheduler.waiting
        if turn % 20 == 0:
            scheduler.check()
    scheduler.check()
    assert (scheduler.running, scheduler.waiting, scheduler.queued_tokens) == (0, 0, 0)
    assert (scheduler.pool.used_blocks, scheduler.pool.free_blocks) == (0, 300)
    # The day had everything in it.
    assert all(ended[reason] > 20 for reason in FinishReason if reason is not FinishReason.STOP), ended
    assert min(rejected, scheduler.preemptions_total, scheduler.prefix_hit_tokens_total) > 50
