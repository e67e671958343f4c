"""Whose turn it is: classes, ageing, counters and their lift, and how far tenants can drift apart."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.fairness import (
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    FairQueue,
)
from headway_engine.sequence import Sequence, Status
from headway_engine.tenants import Fairness, Tenant, TenantPolicy
from support.engine_builders import Drive, a_capacity, a_request, some_limits


def a_member(
    order: int, tenant: str = "", priority: int = 0, arrival_s: float = 0.0, prompt: int = 4
) -> Sequence:
    request = a_request(f"s{order}", prompt, tenant=tenant, priority=priority, arrival_s=arrival_s)
    return Sequence(request, list(request.prompt), order=order)


def a_queue(*members: Sequence, policy: TenantPolicy | None = None) -> FairQueue:
    queue = FairQueue(policy)
    for member in members:
        queue.push(member)
    return queue


def admit_next(queue: FairQueue, now_s: float = 0.0, cost: int = 0) -> str:
    """Take the next, let it run, charge it."""
    sequence = queue.take(now_s)
    assert sequence is not None
    queue.admitted(sequence)
    queue.charge(sequence, cost)
    return sequence.id


def order_of(queue: FairQueue, now_s: float = 0.0, cost: int = 0) -> list[str]:
    return [admit_next(queue, now_s, cost) for _ in range(len(queue))]


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    assert order_of(a_queue(*(a_member(i) for i in range(5))), cost=10) == [f"s{i}" for i in range(5)]


def test_tenants_alternate_when_their_requests_cost_the_same() -> None:
    """Ten of the first were there before the second came; it does not wait for them."""
    queue = a_queue(*(a_member(i, "a") for i in range(4)), *(a_member(i, "b") for i in range(4, 8)))
    assert order_of(queue, cost=10) == ["s0", "s4", "s1", "s5", "s2", "s6", "s3", "s7"]


def test_a_weight_of_three_gives_three_turns_to_one() -> None:
    policy = TenantPolicy(tenants={"a": Tenant(weight=3)})
    queue = a_queue(
        *(a_member(i, "a") for i in range(6)), *(a_member(i, "b") for i in range(6, 12)), policy=policy
    )
    assert sum(id in {"s0", "s1", "s2", "s3", "s4", "s5"} for id in order_of(queue, cost=12)[:8]) == 6


def test_costly_requests_count_more_than_many_small_ones() -> None:
    queue = a_queue(*(a_member(i, "large") for i in range(2)), *(a_member(i, "small") for i in range(2, 12)))
    served = []
    for _ in range(7):
        sequence = queue.take(0.0)
        assert sequence is not None
        queue.admitted(sequence)
        queue.charge(sequence, 50 if sequence.request.tenant == "large" else 10)
        served.append(sequence.request.tenant)
    assert served == ["large", "small", "small", "small", "small", "small", "large"]


def test_first_come_first_served_does_not_look_at_tenants() -> None:
    policy = TenantPolicy(fairness=Fairness.FIRST_COME_FIRST_SERVED, tenants={"b": Tenant(weight=9)})
    queue = a_queue(*(a_member(i, "ab"[i % 3 == 0]) for i in range(7)), policy=policy)
    assert order_of(queue, cost=10) == [f"s{i}" for i in range(7)]


def test_a_tenant_that_was_idle_starts_level_with_those_who_wait() -> None:
    queue = a_queue(*(a_member(i, "busy") for i in range(20)))
    for _ in range(10):
        admit_next(queue, cost=10)
    for i in range(20, 30):
        queue.push(a_member(i, "idle"))
    assert queue.counter(0, "idle") == queue.counter(0, "busy") == 100
    first_ten = order_of(queue, cost=10)[:10]
    assert sum(int(id[1:]) >= 20 for id in first_ten) == 5


def test_a_tenant_that_comes_back_when_nobody_waits_starts_where_the_last_was_chosen() -> None:
    queue = a_queue(a_member(0, "busy"))
    admit_next(queue, cost=100)
    queue.push(a_member(1, "busy"))
    admit_next(queue, cost=0)
    queue.push(a_member(2, "idle"))
    assert queue.counter(0, "idle") == 100


def test_a_tenant_that_had_more_than_its_share_still_owes_it_after_a_pause() -> None:
    queue = a_queue(a_member(0, "greedy"), a_member(1, "other"), a_member(2, "other"), a_member(3, "other"))
    admit_next(queue, cost=100)
    queue.push(a_member(4, "greedy"))
    assert order_of(queue, cost=10) == ["s1", "s2", "s3", "s4"]


def test_a_higher_class_goes_first_whatever_its_counters() -> None:
    queue = a_queue(a_member(0, "a"), a_member(1, "b", priority=1), a_member(2, "b", priority=1))
    assert order_of(queue, cost=1000) == ["s1", "s2", "s0"]


def test_a_tenants_priority_is_added_to_that_of_its_requests() -> None:
    policy = TenantPolicy(tenants={"gold": Tenant(priority=10), "batch": Tenant(priority=-10)})
    queue = a_queue(
        a_member(0, "batch"),
        a_member(1),
        a_member(2, "gold", priority=-5),
        a_member(3, "gold"),
        policy=policy,
    )
    assert order_of(queue) == ["s3", "s2", "s1", "s0"]


def test_a_client_cannot_push_itself_before_a_tenant_of_higher_priority() -> None:
    """With declared tenants, a request's own priority lets others go first, and no more."""
    policy = TenantPolicy(tenants={"gold": Tenant(priority=10), "batch": Tenant(priority=-10)})
    queue = a_queue(
        a_member(0, "batch", priority=1000),
        a_member(1, "nobody", priority=1000),
        a_member(2, "gold"),
        policy=policy,
    )
    assert order_of(queue) == ["s2", "s1", "s0"]


def test_a_preempted_sequence_goes_before_newcomers_of_its_class_and_after_higher_ones() -> None:
    queue = a_queue(*(a_member(i) for i in range(4)))
    for _ in range(2):
        admit_next(queue)
    again = []
    for order in (1, 0):
        sequence = a_member(order)
        sequence.preemptions = 1
        again.append(sequence)
    for sequence in again:
        queue.push_preempted(sequence)
    queue.push(a_member(9, priority=1))
    assert order_of(queue) == ["s9", "s0", "s1", "s2", "s3"]


def test_what_is_put_back_stands_where_it_was() -> None:
    queue = a_queue(
        *(a_member(i, "ab"[i % 2]) for i in range(6)), *(a_member(i, priority=1) for i in range(6, 8))
    )
    taken = [queue.take(0.0) for _ in range(5)]
    queue.put_back([s for s in taken if s is not None])
    assert len(queue) == 8
    assert order_of(queue, cost=10) == ["s6", "s7", "s0", "s1", "s2", "s3", "s4", "s5"]


def test_removal_from_the_middle_leaves_the_order_of_the_others() -> None:
    members = [a_member(i) for i in range(6)]
    queue = a_queue(*members)
    for i in (0, 3, 5):
        queue.remove(members[i])
        queue.leave(members[i])
    assert len(queue) == 3
    assert order_of(queue) == ["s1", "s2", "s4"]


def test_a_low_class_gets_one_admission_in_four_once_it_has_aged() -> None:
    policy = TenantPolicy(ageing_s=10, aged_share=4)
    queue = a_queue(
        *(a_member(i, priority=-5) for i in range(4)),
        *(a_member(i, arrival_s=9.0) for i in range(4, 24)),
        policy=policy,
    )
    early = [admit_next(queue, now_s=9.5) for _ in range(4)]
    assert all(int(id[1:]) >= 4 for id in early)
    late = [int(admit_next(queue, now_s=10.0)[1:]) < 4 for _ in range(12)]
    assert sum(late) == 3
    assert late.index(True) == 0  # overdue: four of the others have gone already


def test_ageing_does_not_disturb_the_order_inside_a_class() -> None:
    """A heavy tenant's requests are old because they are many; that earns nothing against its equals."""
    queue = a_queue(*(a_member(i, "heavy") for i in range(10)), a_member(10, "light", arrival_s=1000.0))
    assert admit_next(queue, now_s=1000.0, cost=10) == "s0"
    assert admit_next(queue, now_s=1000.0) == "s10"


def test_nothing_is_kept_of_tenants_and_classes_that_are_gone() -> None:
    """A million tenants and priorities may pass through; the memory is that of those present."""
    queue = FairQueue()
    stays = a_member(0, "stays")
    queue.push(stays)
    admit_next(queue)
    for i in range(1, 3000):
        member = a_member(i, f"tenant{i}", priority=i % 7)
        queue.push(member)
        if i % 3 == 0:
            queue.remove(member)
        else:
            assert admit_next(queue, cost=3) == member.id
        queue.leave(member)
    kept = sum(len(k.lanes) + len(k.heap) + len(k.arrivals) for k in queue._classes.values())
    assert len(queue._classes) == 1
    assert kept < 400
    queue.leave(stays)
    assert queue._classes == {}


def test_aborts_behind_one_that_waits_for_ever_leave_nothing_behind() -> None:
    queue = a_queue(a_member(0, "first"))
    for i in range(1, 3000):
        member = a_member(i, "first")
        queue.push(member)
        queue.remove(member)
        queue.leave(member)
    (klass,) = queue._classes.values()
    assert len(klass.arrivals) + len(klass.lanes["first"].queue) < 200


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_not_a_positive_number_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        TenantPolicy(tenants={"a": Tenant(weight=weight)})


@dataclass
class ObviousQueue:
    """The same order, found by looking at everything."""

    waiting: list[Sequence] = field(default_factory=list)
    counters: dict[tuple[int, str], float] = field(default_factory=dict)
    floors: dict[int, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    births: list[tuple[int, str]] = field(default_factory=list)

    def push(self, s: Sequence) -> None:
        key = (s.request.priority, s.request.tenant)
        if key not in self.births:
            self.births.append(key)
        in_class = [w for w in self.waiting if w.request.priority == key[0]]
        if not any(w.request.tenant == key[1] for w in in_class):
            levels = [self.counters[key[0], w.request.tenant] for w in in_class]
            floor = min(levels) if levels else self.floors.get(key[0], 0.0)
            self.counters[key] = max(self.counters.get(key, 0.0), floor)
        self.waiting.append(s)

    def pop(self) -> Sequence:
        top = max(s.request.priority for s in self.waiting)
        first = min(
            (s for s in self.waiting if s.request.priority == top),
            key=lambda s: (
                self.counters[top, s.request.tenant],
                self.births.index((top, s.request.tenant)),
                s.order,
            ),
        )
        self.floors[top] = max(self.floors.get(top, 0.0), self.counters[top, first.request.tenant])
        self.waiting.remove(first)
        return first

    def charge(self, s: Sequence, cost: int) -> None:
        self.counters[s.request.priority, s.request.tenant] += cost / self.weights.get(s.request.tenant, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_order_is_that_of_the_slow_obvious_queue(data: st.DataObject) -> None:
    """Pushes, admissions, charges, removals and put-backs in any order (nobody leaves, nobody ages)."""
    queue = FairQueue(TenantPolicy(tenants={"a": Tenant(weight=3)}, ageing_s=1e9))
    obvious = ObviousQueue(weights={"a": 3.0})
    running: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(["push", "push", "admit", "charge", "remove", "look"]))
        if what == "push":
            tenant, priority = data.draw(st.sampled_from("abc")), data.draw(st.integers(-1, 0))
            member = a_member(number, tenant, priority)
            queue.push(member)
            obvious.push(member)
        elif what == "admit" and obvious.waiting:
            expected = obvious.pop()
            assert queue.take(0.0) is expected
            queue.admitted(expected)
            running.append(expected)
        elif what == "charge" and running:
            sequence, cost = data.draw(st.sampled_from(running)), data.draw(st.integers(1, 40))
            queue.charge(sequence, cost)
            obvious.charge(sequence, cost)
        elif what == "remove" and obvious.waiting:
            sequence = data.draw(st.sampled_from(obvious.waiting))
            queue.remove(sequence)
            obvious.waiting.remove(sequence)
        elif what == "look":
            # Taking and putting back raises the floor, as a passed-over request should.
            looked = []
            for _ in range(min(len(obvious.waiting), data.draw(st.integers(0, 4)))):
                expected = obvious.pop()
                assert queue.take(0.0) is expected
                looked.append(expected)
            obvious.waiting = sorted([*obvious.waiting, *looked], key=lambda s: s.order)
            queue.put_back(looked)
    assert [s.id for s in iter(lambda: queue.take(0.0), None)] == [
        obvious.pop().id for _ in range(len(obvious.waiting))
    ]


def served_cost(drive: Drive, tenant: str) -> int:
    """Weighted tokens that were computed for a tenant: prompts as far as they are, and outputs."""
    running = drive.scheduler._roster.running
    prompts = outputs = 0
    for id, request in drive.requests.items():
        if request.tenant == tenant:
            outputs += len(drive.output[id])
            if drive.output[id]:
                prompts += len(request.prompt)
            elif id in running:
                prompts += running[id].computed
    return PROMPT_WEIGHT * prompts + OUTPUT_WEIGHT * outputs


def waits(drive: Drive, tenant: str) -> bool:
    present = drive.scheduler._roster.sequences.values()
    return any(s.status is Status.WAITING and s.request.tenant == tenant for s in present)


@settings(max_examples=30, deadline=None)
@given(
    sizes_a=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=5, max_size=40),
    sizes_b=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=5, max_size=40),
    weight=st.sampled_from([1.0, 2.0, 4.0]),
    slots=st.integers(1, 5),
    chunk=st.integers(2, 20),
)
def test_two_backlogged_tenants_never_drift_further_apart_than_the_stated_bound(
    sizes_a: list[tuple[int, int]], sizes_b: list[tuple[int, int]], weight: float, slots: int, chunk: int
) -> None:
    """The module's bound, on what was really computed, over every interval in which both wait."""
    capacity = a_capacity(max_batch_sequences=slots, max_batch_tokens=24, kv_blocks=200)
    drive = Drive(
        capacity,
        some_limits(capacity, prefill_chunk_tokens=chunk),
        tenants=TenantPolicy(tenants={"a": Tenant(weight=weight)}),
        prefix_caching=False,
    )
    for tenant, sizes in (("a", sizes_a), ("b", sizes_b)):
        drive.submit(
            *(
                a_request(f"{tenant}{i}", p, max_tokens=o, tenant=tenant, stop_token_ids=())
                for i, (p, o) in enumerate(sizes)
            )
        )
    prompt = max(p for p, _ in (*sizes_a, *sizes_b))
    output = max(o for _, o in (*sizes_a, *sizes_b))
    bound = (slots + 1) * (PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output) / 1.0
    apart = [0.0]
    while waits(drive, "a") and waits(drive, "b"):
        drive.step()
        if waits(drive, "a") and waits(drive, "b"):
            apart.append(served_cost(drive, "a") / weight - served_cost(drive, "b"))
    assert max(apart) - min(apart) <= 2 * bound


def test_weights_of_four_to_one_serve_tokens_four_to_one_while_both_are_backlogged() -> None:
    drive = Drive(
        a_capacity(kv_blocks=400),
        some_limits(max_batch_sequences=8),
        tenants=TenantPolicy(tenants={"gold": Tenant(weight=4)}),
        prefix_caching=False,
    )
    for i in range(150):
        drive.submit(a_request(f"gold{i}", 10, max_tokens=8, tenant="gold"))
        drive.submit(a_request(f"batch{i}", 10, max_tokens=8, tenant="batch"))
    while waits(drive, "gold") and waits(drive, "batch"):
        drive.step()
    ratio = served_cost(drive, "gold") / served_cost(drive, "batch")
    assert 3.6 <= ratio <= 4.4


def test_a_tenant_of_ten_times_the_load_leaves_the_other_its_latency() -> None:
    """What the light tenant sees beside the heavy one is close to what it sees beside its equal."""

    def light_p95_ttft_s(heavy_per_turn: int) -> float:
        drive = Drive(
            a_capacity(kv_blocks=400),
            some_limits(max_batch_sequences=8, max_queued_requests=100_000, max_queued_tokens=10_000_000),
        )
        for turn in range(160):
            for k in range(heavy_per_turn if turn % 2 == 0 else 0):
                drive.submit(a_request(f"h{turn}.{k}", 10, max_tokens=8, tenant="heavy"))
            if turn % 4 == 0:
                drive.submit(a_request(f"l{turn}", 10, max_tokens=8, tenant="light"))
            drive.step()
        times = sorted(drive.ttft_s(id) for id in drive.requests if id[0] == "l" and drive.token_s[id])
        assert len(times) >= 38
        return times[int(len(times) * 0.95)]

    assert light_p95_ttft_s(10) <= light_p95_ttft_s(1) + 0.100
