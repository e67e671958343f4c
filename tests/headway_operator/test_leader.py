"""Leader election on a virtual clock: takeover, release, loss, and clocks that disagree."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from headway_operator.leader import (
    Leader,
    LeadershipLost,
    Lease,
    LeaseUnavailable,
    Sight,
    look,
    may_take,
)
from support.virtual_loop import run_virtually


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Store:
    """A lease record with optimistic locking, like the API server's."""

    lease: Lease | None = None
    writes: list[Lease] = field(default_factory=list)
    down: bool = False
    hangs: bool = False

    async def read(self) -> Lease | None:
        await self._trouble()
        return self.lease

    async def create(self, lease: Lease) -> Lease:
        await self._trouble()
        if self.lease is not None:
            raise LeaseUnavailable("it exists")
        return self._write(lease, 1)

    async def replace(self, lease: Lease) -> Lease:
        await self._trouble()
        if self.lease is None or self.lease.version != lease.version:
            raise LeaseUnavailable("someone was faster")
        return self._write(lease, int(self.lease.version) + 1)

    def _write(self, lease: Lease, version: int) -> Lease:
        self.lease = replace(lease, version=str(version))
        self.writes.append(self.lease)
        return self.lease

    async def _trouble(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.down:
            raise LeaseUnavailable("the API server is away")


@dataclass
class Candidate:
    """A controller that notes when it leads. `skew_s`: how wrong its wall clock is."""

    store: Store
    name: str
    skew_s: float = 0.0
    led: list[tuple[float, float]] = field(default_factory=list)
    error: BaseException | None = None

    async def run(self) -> None:
        leader = Leader(self.store, self.name, wall_s=lambda: 1e9 + now() + self.skew_s, chance=lambda: 0.5)

        async def lead() -> None:
            start_s = now()
            try:
                await asyncio.Event().wait()
            finally:
                self.led.append((start_s, now()))

        try:
            await leader.run(lead)
        except LeadershipLost as error:
            self.error = error
            assert not leader.leading


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def scenario(test: Callable[[Store], object]) -> None:
    run_virtually(test(Store()))  # type: ignore[arg-type]


def test_the_first_candidate_leads_at_once_and_renews() -> None:
    """An absent lease is created; it is renewed every 2 s."""

    async def test(store: Store) -> None:
        one = Candidate(store, "one")
        task = asyncio.create_task(one.run())
        await asyncio.sleep(20.5)
        assert store.lease is not None
        assert store.lease.holder == "one"
        assert len(store.writes) == 11
        await stop(task)
        assert one.led == [(0.0, 20.5)]

    scenario(test)


def test_a_planned_stop_hands_over_within_one_retry() -> None:
    """The stopped leader empties the holder, so nobody waits for the lease to run out."""

    async def test(store: Store) -> None:
        one, two = Candidate(store, "one"), Candidate(store, "two")
        first = asyncio.create_task(one.run())
        await asyncio.sleep(1)
        second = asyncio.create_task(two.run())
        await asyncio.sleep(30)
        await stop(first)
        await asyncio.sleep(3)
        await stop(second)
        assert one.led == [(0.0, 31.0)]
        assert 31.0 < two.led[0][0] < 33.5
        assert store.lease is not None
        assert store.lease.transitions == 1
        assert store.lease.holder == ""

    scenario(test)


def test_a_killed_leader_is_replaced_after_the_lease() -> None:
    """Nobody renews: the other takes over after 15 s of seeing it unchanged, and not before."""

    async def test(store: Store) -> None:
        store.lease = Lease("dead", 15, 0.0, 0.0, 3, "7")
        two = Candidate(store, "two")
        task = asyncio.create_task(two.run())
        await asyncio.sleep(40)
        await stop(task)
        assert 15.0 <= two.led[0][0] < 18.0
        assert store.writes[0].transitions == 4

    scenario(test)


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_wrong_clock_neither_steals_nor_starves(skew_s: float) -> None:
    """An hour of skew in either direction changes nothing while the leader renews."""

    async def test(store: Store) -> None:
        one, two = Candidate(store, "one"), Candidate(store, "two", skew_s=skew_s)
        first = asyncio.create_task(one.run())
        await asyncio.sleep(1)
        second = asyncio.create_task(two.run())
        await asyncio.sleep(600)
        assert two.led == []
        await stop(first)
        await asyncio.sleep(5)
        await stop(second)
        assert len(two.led) == 1

    scenario(test)


@pytest.mark.parametrize("trouble", ["down", "hangs"])
def test_a_leader_cut_off_stops_before_another_can_start(trouble: str) -> None:
    """It cannot renew for 10 s: its work ends, and only after that does the other's begin."""

    async def test(store: Store) -> None:
        cut_off = Store()
        one, two = Candidate(cut_off, "one"), Candidate(store, "two")
        first = asyncio.create_task(one.run())
        await asyncio.sleep(7)
        store.lease = cut_off.lease  # both saw the same record until the network split
        second = asyncio.create_task(two.run())
        setattr(cut_off, trouble, True)
        await asyncio.sleep(60)
        await stop(second)
        await asyncio.wait_for(first, 1)
        assert isinstance(one.error, LeadershipLost)
        assert one.led[0][1] <= 7 + 10.0
        assert two.led[0][0] >= one.led[0][1]

    scenario(test)


def test_a_short_outage_costs_nothing() -> None:
    """Under 10 s without the API server the leader goes on."""

    async def test(store: Store) -> None:
        one = Candidate(store, "one")
        task = asyncio.create_task(one.run())
        await asyncio.sleep(5)
        store.down = True
        await asyncio.sleep(7)
        store.down = False
        await asyncio.sleep(60)
        await stop(task)
        assert one.led == [(0.0, 72.0)]

    scenario(test)


def test_a_renewal_whose_answer_was_lost_is_read_back() -> None:
    """The record still names us though our version is stale: go on."""

    async def test(store: Store) -> None:
        one = Candidate(store, "one")
        task = asyncio.create_task(one.run())
        await asyncio.sleep(5)
        assert store.lease is not None
        store.lease = replace(store.lease, version="100")
        await asyncio.sleep(20)
        await stop(task)
        assert one.led == [(0.0, 25.0)]
        assert one.error is None

    scenario(test)


def test_a_stop_in_the_middle_of_a_renewal_still_gives_the_lease_back() -> None:
    """The renewal reached the store, its answer did not reach us: our version is stale."""

    async def test(store: Store) -> None:
        one = Candidate(store, "one")
        task = asyncio.create_task(one.run())
        await asyncio.sleep(5)
        assert store.lease is not None
        store.lease = replace(store.lease, version="100")
        await stop(task)
        assert store.lease.holder == ""

    scenario(test)


@pytest.mark.parametrize("holder", ["thief", ""])
def test_a_lease_taken_away_ends_the_work(holder: str) -> None:
    """Someone edited the record: whoever it names, it is not us."""

    async def test(store: Store) -> None:
        one = Candidate(store, "one")
        task = asyncio.create_task(one.run())
        await asyncio.sleep(5)
        assert store.lease is not None
        store.lease = replace(store.lease, holder=holder, version="100")
        await asyncio.wait_for(task, 5)
        assert isinstance(one.error, LeadershipLost)
        assert store.lease.holder == holder

    scenario(test)


def test_only_one_of_many_candidates_leads_at_any_time() -> None:
    """Five candidates, each stopped after a while: their reigns follow one another."""

    async def test(store: Store) -> None:
        candidates = [Candidate(store, f"c{n}") for n in range(5)]
        tasks = {c.name: asyncio.create_task(c.run()) for c in candidates}
        for _ in range(5):
            await asyncio.sleep(20)
            assert store.lease is not None
            await stop(tasks.pop(store.lease.holder))
        reigns = sorted(reign for c in candidates for reign in c.led)
        assert len(reigns) == 5
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(reigns))

    scenario(test)


def test_work_that_fails_ends_the_leadership_with_its_error() -> None:
    """The process must not sit on the lease while its work is dead."""

    async def test(store: Store) -> None:
        async def lead() -> None:
            await asyncio.sleep(3)
            raise ValueError("bug")

        leader = Leader(store, "one", wall_s=lambda: 0.0, chance=lambda: 0.5)
        with pytest.raises(ValueError, match="bug"):
            await leader.run(lead)
        assert store.lease is not None
        assert store.lease.holder == ""

    scenario(test)


def test_the_clock_starts_anew_with_every_change_of_the_record() -> None:
    """Pure part: what was seen, and when it may be taken."""
    lease = Lease("other", 15, 0.0, 0.0, 0, "1")
    sight = look(None, lease, 100.0)
    assert look(sight, lease, 110.0) == sight
    assert not may_take(sight, "me", 114.9)
    assert may_take(sight, "me", 115.0)
    renewed = look(sight, replace(lease, version="2"), 114.0)
    assert renewed == Sight(replace(lease, version="2"), 114.0)
    assert may_take(sight, "other", 100.0)
    assert may_take(look(None, replace(lease, holder=""), 100.0), "me", 100.0)
