"""Whose request goes next: priority classes, and virtual token counters of tenants inside a class.

Order, first to last:

1. Higher priority class first. To keep a lower class from starving, a request that has waited `ageing_s`
   behind a higher class is *aged*, and one admission in `aged_share` goes to the class of the oldest aged
   request. The share keeps a long backlog of a low class, all of it aged, from crowding out the high one.
2. In a class, preempted sequences first, in the order of their first admission.
3. Then the tenant with the smallest counter; a tenant's own requests in order of arrival.

A tenant's counter in a class grows by PROMPT_WEIGHT for each prompt token when the request first runs
(prefix-cache hits and recomputation are free), and by OUTPUT_WEIGHT for each output token when the step
that yields it is planned, divided by the tenant's weight. A tenant whose queue was empty is lifted to the
smallest counter of those who wait, so being idle earns no credit. (Virtual token counters: Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024.)

**Bound.** Let two tenants both have waiting requests of one class, the highest that waits, all the time
between t1 and t2, and let no request be larger than the room left for it. Then what was computed for them
in that time, in weighted tokens over weight, differs by at most 2 * U, where

    U = (max_batch_sequences + 1) * (PROMPT_WEIGHT * largest prompt + OUTPUT_WEIGHT * largest output)
        / smallest weight

Why: when a tenant is chosen its counter is the smallest. Until it is chosen again it is charged the prompt
of the chosen request and the outputs of its sequences that run or were preempted, at most
max_batch_sequences of them, so two counters are never further apart than that. What is computed lags
behind the counters by the prompts under way, which belong to the same sequences. Both together are below U,
at t1 as at t2. A request that is passed over for lack of room adds the cost of those that overtook it,
whose number the scheduler bounds.

Knows nothing of blocks, steps or torch; costs and the clock are arguments.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from headway_engine.sequence import RequestId, Sequence
from headway_engine.tenants import Fairness, TenantPolicy

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2


@dataclass(slots=True, eq=False)
class _Lane:
    """One tenant in one class."""

    number: int
    weight: float
    counter: float = 0.0
    waiting: int = 0  # sequences in `queue` that `take` could return
    members: int = 0  # sequences that wait or run
    queue: deque[tuple[int, Sequence]] = field(default_factory=deque)
    heap_key: float | None = None  # counter of its entry in the class's heap


@dataclass(slots=True, eq=False)
class _Class:
    """One priority class. `floor` is the largest counter at which a lane was ever chosen."""

    priority: int
    floor: float = 0.0
    members: int = 0  # sequences that wait or run
    waiting: int = 0  # sequences that `take` could return
    lanes: dict[str, _Lane] = field(default_factory=dict)
    heap: list[tuple[float, int, _Lane]] = field(default_factory=list)
    resumed: list[tuple[int, int, Sequence]] = field(default_factory=list)  # (order, place, sequence)
    arrivals: deque[tuple[int, Sequence]] = field(default_factory=deque)  # newcomers only, oldest first


class FairQueue:
    """The waiting sequences, in fair order, and the counters that make it.

    A planning round takes sequences one by one; each is then either `admitted` or, at the end of the round,
    `put_back`. While it runs a sequence is charged; when it ends it leaves. Entries of sequences that are
    gone stay in the deques until they come to the front: an entry counts only while `_place` has its
    number.
    """

    def __init__(self, policy: TenantPolicy | None = None) -> None:
        self.policy = policy or TenantPolicy()
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []  # of _classes, ascending
        self._home: dict[RequestId, tuple[_Class, _Lane]] = {}  # of everyone who waits or runs
        self._place: dict[RequestId, int] = {}  # of those who wait
        self._places = 0
        self._lane_numbers = 0
        self._since_aged = 0  # admissions in order since the last aged one

    def __len__(self) -> int:
        return len(self._place)

    @property
    def highest_class(self) -> int | None:
        """The highest class in which someone waits."""
        for priority in reversed(self._priorities):
            if self._classes[priority].waiting:
                return priority
        return None

    @property
    def several_classes(self) -> bool:
        """Whether sequences of more than one class wait or run."""
        return len(self._priorities) > 1

    def push(self, sequence: Sequence) -> None:
        """A new arrival joins the end of its tenant's queue."""
        klass = self._class(self.policy.class_of(sequence))
        lane = self._lane(klass, sequence)
        if not lane.waiting:
            lane.counter = max(lane.counter, self._floor(klass))
        klass.members += 1
        lane.members += 1
        self._home[sequence.id] = klass, lane
        place = self._next_place(sequence)
        klass.arrivals.append((place, sequence))
        lane.queue.append((place, sequence))
        self._count_in(klass, lane)
        self._trim(klass)

    def push_preempted(self, sequence: Sequence) -> None:
        """A sequence that was running waits again, ahead of the newcomers of its class."""
        klass, _ = self._home[sequence.id]
        insort(klass.resumed, (sequence.order, self._next_place(sequence), sequence))
        klass.waiting += 1

    def take(self, now_s: float) -> Sequence | None:
        """The next in order, or None when nobody else waits."""
        top = self.highest_class
        if top is None:
            return None
        aged = self._aged(top, now_s)
        return self._take_from(aged or self._classes[top])

    def take_preempted(self) -> Sequence | None:
        """The first preempted sequence of the highest class that has one."""
        for priority in reversed(self._priorities):
            klass = self._classes[priority]
            if self._first_resumed(klass):
                return self._take_from(klass)
        return None

    def put_back(self, taken: Iterable[Sequence]) -> None:
        """Undo `take` for these, given in the order in which they were taken."""
        for sequence in reversed(list(taken)):
            klass, lane = self._home[sequence.id]
            place = self._place[sequence.id]
            if sequence.preemptions:
                insort(klass.resumed, (sequence.order, place, sequence))
                klass.waiting += 1
            else:
                lane.queue.appendleft((place, sequence))
                self._count_in(klass, lane)

    def admitted(self, sequence: Sequence) -> None:
        """A taken sequence runs now."""
        del self._place[sequence.id]
        top = self.highest_class
        out_of_order = top is not None and top > self._home[sequence.id][0].priority
        self._since_aged = 0 if out_of_order else self._since_aged + 1

    def remove(self, sequence: Sequence) -> None:
        """A waiting sequence goes away (abort, timeout); `leave` comes after."""
        del self._place[sequence.id]
        klass, lane = self._home[sequence.id]
        klass.waiting -= 1
        if not sequence.preemptions:
            lane.waiting -= 1
            while lane.queue and not self._counts(lane.queue[0]):
                lane.queue.popleft()
        self._trim(klass)

    def charge(self, sequence: Sequence, cost: int) -> None:
        """Tokens of a sequence were scheduled."""
        lane = self._home[sequence.id][1]
        lane.counter += cost / lane.weight

    def leave(self, sequence: Sequence) -> None:
        """A sequence ended. A class that nobody stands in is forgotten, and its counters with it."""
        klass, lane = self._home.pop(sequence.id)
        lane.members -= 1
        klass.members -= 1
        if not klass.members:
            del self._classes[klass.priority]
            self._priorities.remove(klass.priority)
        elif len(klass.lanes) > 2 * klass.members + 64:
            # Coming back they would be lifted to the floor, so there is nothing to remember of these.
            for name in [n for n, x in klass.lanes.items() if not x.members and x.counter <= klass.floor]:
                del klass.lanes[name]

    def counter(self, priority: int, tenant: str) -> float:
        """A tenant's counter in a class; 0 where it has none."""
        klass = self._classes.get(priority)
        lane = klass.lanes.get(tenant) if klass else None
        return lane.counter if lane else 0.0

    def _class(self, priority: int) -> _Class:
        klass = self._classes.get(priority)
        if klass is None:
            klass = self._classes[priority] = _Class(priority)
            insort(self._priorities, priority)
        return klass

    def _lane(self, klass: _Class, sequence: Sequence) -> _Lane:
        shared = self.policy.fairness is Fairness.FIRST_COME_FIRST_SERVED
        tenant = "" if shared else sequence.request.tenant
        lane = klass.lanes.get(tenant)
        if lane is None:
            self._lane_numbers += 1
            weight = 1.0 if shared else self.policy.of(tenant).weight
            lane = klass.lanes[tenant] = _Lane(self._lane_numbers, weight)
        return lane

    def _next_place(self, sequence: Sequence) -> int:
        self._places += 1
        self._place[sequence.id] = self._places
        return self._places

    def _count_in(self, klass: _Class, lane: _Lane) -> None:
        klass.waiting += 1
        lane.waiting += 1
        if lane.heap_key is None:
            lane.heap_key = lane.counter
            heappush(klass.heap, (lane.counter, lane.number, lane))

    def _smallest(self, klass: _Class) -> _Lane | None:
        """The waiting lane with the smallest counter.

        A lane has at most one entry in the heap, with a counter that may be out of date but never too
        large, because counters only grow; so it is enough to put right what comes to the top.
        """
        heap = klass.heap
        while heap:
            key, number, lane = heap[0]
            if not lane.waiting:
                heappop(heap)
                lane.heap_key = None
            elif key < lane.counter:
                lane.heap_key = lane.counter
                heapreplace(heap, (lane.counter, number, lane))
            else:
                return lane
        return None

    def _floor(self, klass: _Class) -> float:
        """Where the counter of a tenant that comes back begins."""
        lane = self._smallest(klass)
        return lane.counter if lane else klass.floor

    def _counts(self, entry: tuple[int, Sequence]) -> bool:
        return self._place.get(entry[1].id) == entry[0]

    def _trim(self, klass: _Class) -> None:
        """Drop the entries of those who are gone, when they are most of what is kept."""
        if len(klass.arrivals) <= 2 * klass.waiting + 64:
            return
        klass.arrivals = deque(filter(self._counts, klass.arrivals))
        for lane in klass.lanes.values():
            lane.queue = deque(filter(self._counts, lane.queue))

    def _first_resumed(self, klass: _Class) -> Sequence | None:
        while klass.resumed:
            _, place, sequence = klass.resumed[0]
            if self._place.get(sequence.id) == place:
                return sequence
            klass.resumed.pop(0)
        return None

    def _oldest(self, klass: _Class) -> Sequence | None:
        """The sequence of a class that has waited longest, whether taken in this round or not."""
        resumed = self._first_resumed(klass)
        if resumed:
            return resumed
        while klass.arrivals:
            if self._counts(klass.arrivals[0]):
                return klass.arrivals[0][1]
            klass.arrivals.popleft()
        return None

    def _take_from(self, klass: _Class) -> Sequence:
        """The next in order inside a class that has one."""
        if self._first_resumed(klass):
            klass.waiting -= 1
            return klass.resumed.pop(0)[2]
        lane = self._smallest(klass)
        assert lane is not None, "a class that counts waiting sequences has none"
        klass.floor = max(klass.floor, lane.counter)
        klass.waiting -= 1
        lane.waiting -= 1
        while True:
            entry = lane.queue.popleft()
            if self._counts(entry):
                return entry[1]

    def _aged(self, top: int, now_s: float) -> _Class | None:
        """The class below `top` whose oldest sequence has aged, when it is the turn of the aged."""
        if self._since_aged < self.policy.aged_share - 1:
            return None
        best: tuple[int, _Class] | None = None
        for priority in self._priorities:
            klass = self._classes[priority]
            if priority >= top:
                break
            oldest = self._oldest(klass) if klass.waiting else None
            if oldest is None or now_s - oldest.request.arrival_s < self.policy.ageing_s:
                continue
            if best is None or oldest.order < best[0]:
                best = (oldest.order, klass)
        return best[1] if best else None
