"""Requests that have never run: how many, how large, whose, since when; and whether one more may join them.

Knows nothing of the order in which they run (`fairness`) or of what runs now.
"""

import heapq
from dataclasses import dataclass

from headway_engine.protocol import Limits
from headway_engine.sequence import Request, RequestId, Sequence
from headway_engine.tenants import Fairness, Tenant, TenantPolicy


@dataclass(slots=True)
class _Share:
    """What one tenant has waiting."""

    requests: int = 0
    tokens: int = 0


_NOTHING = _Share()


class _Ages:
    """Sequences, and which of them arrived first."""

    def __init__(self) -> None:
        self._members: dict[RequestId, Sequence] = {}
        self._heap: list[tuple[float, int, Sequence]] = []  # entries of those who left die late

    def __len__(self) -> int:
        return len(self._members)

    def add(self, sequence: Sequence) -> None:
        self._members[sequence.id] = sequence
        heapq.heappush(self._heap, (sequence.request.arrival_s, sequence.order, sequence))
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if self._counts(entry[2])]
            heapq.heapify(self._heap)

    def remove(self, id: RequestId) -> bool:
        return self._members.pop(id, None) is not None

    def oldest(self) -> Sequence | None:
        while self._heap and not self._counts(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _counts(self, sequence: Sequence) -> bool:
        """It is here, and not another one that came under its id later."""
        return self._members.get(sequence.id) is sequence


class Backlog:
    """Counts of waiting requests, in total and by tenant, and their ages."""

    def __init__(self, policy: TenantPolicy | None = None) -> None:
        self._policy = policy or TenantPolicy()
        self.tokens = 0
        self._members = _Ages()
        self._impatient = _Ages()  # those whose queue timeout counts
        self._shares: dict[str, _Share] = {}
        self._calls: dict[str, set[RequestId]] = {}  # who waits of each call that has several sequences

    @property
    def requests(self) -> int:
        return len(self._members)

    def add(self, sequence: Sequence, *, begun: bool = False) -> None:
        """One more waits. `begun`: others of its call run already, so it is not to time out."""
        self._members.add(sequence)
        if not begun:
            self._impatient.add(sequence)
        if call := sequence.request.call:
            self._calls.setdefault(call, set()).add(sequence.id)
        self.tokens += sequence.prompt_len
        share = self._shares.setdefault(sequence.request.tenant, _Share())
        share.requests += 1
        share.tokens += sequence.prompt_len

    def remove(self, sequence: Sequence) -> bool:
        """Forget a request that starts, or ends unserved. False when it was not here."""
        if not self._members.remove(sequence.id):
            return False
        self._impatient.remove(sequence.id)
        if call := sequence.request.call:
            self._calls[call].discard(sequence.id)
            if not self._calls[call]:
                del self._calls[call]
        self.tokens -= sequence.prompt_len
        share = self._shares[sequence.request.tenant]
        share.requests -= 1
        share.tokens -= sequence.prompt_len
        if not share.requests:
            del self._shares[sequence.request.tenant]
        return True

    def oldest(self) -> Sequence | None:
        """The request that arrived first."""
        return self._members.oldest()

    def next_to_expire(self) -> Sequence | None:
        """The request whose queue timeout passes first."""
        return self._impatient.oldest()

    def begin(self, call: str) -> None:
        """A sequence of this call runs: the others do not time out any more, for a refusal would come in the
        middle of an answer, and what was computed of it would be for nothing."""
        for id in self._calls.get(call, ()):
            self._impatient.remove(id)

    def refusal(
        self, request: Request, limits: Limits, tenant: Tenant, prefill_tokens: int, free_slots: int
    ) -> str | None:
        """Why one more request would be too many, in words that name the limit; None when it may join.

        `prefill_tokens` are prompt tokens of running requests that are still to be computed: the newcomer
        waits for them just as for those of the queue. A request counts its own prompt, but with nothing
        queued a single one is never too large. What a free slot takes at the next step does not count as
        queued, so a cap of 0 requests means no queue, and not no service.

        What one tenant has queued must not keep others out, or fairness would only be among those who came
        first: a full queue still lets in a tenant that has less than its share, up to twice the limit in all.
        """
        size = len(request.prompt)
        share = self._shares.get(request.tenant, _NOTHING)
        most = limits.max_queued_requests + max(0, free_slots)
        if self.requests >= most and not self._owed(request, self.requests, share.requests, 1, most):
            return (
                f"{self.requests} requests are waiting and the limit max_queued_requests is "
                f"{limits.max_queued_requests}"
            )
        queued = self.tokens + prefill_tokens
        most = limits.max_queued_tokens
        if queued and queued + size > most and not self._owed(request, queued, share.tokens, size, most):
            return (
                f"{queued} prompt tokens are queued, this request has {size}, and the limit "
                f"max_queued_tokens is {limits.max_queued_tokens}"
            )
        if not share.requests:
            return None
        waits = self.requests >= free_slots
        if waits and tenant.max_queued_requests and share.requests >= tenant.max_queued_requests:
            return (
                f"{share.requests} requests of tenant {request.tenant!r} are waiting and its limit is "
                f"{tenant.max_queued_requests}"
            )
        if tenant.max_queued_tokens and share.tokens + size > tenant.max_queued_tokens:
            return (
                f"{share.tokens} prompt tokens of tenant {request.tenant!r} are queued, this request has "
                f"{size}, and the tenant's limit is {tenant.max_queued_tokens}"
            )
        return None

    def _owed(self, request: Request, queued: int, mine: int, size: int, most: int) -> bool:
        """Whether a newcomer's tenant has less of a full queue than its weight entitles it to. One that has
        nothing waiting may always have one request in it."""
        if self._policy.fairness is not Fairness.VIRTUAL_TOKEN_COUNTER or queued + size > 2 * most:
            return False
        tenants = self._shares.keys() | {request.tenant}
        weights = sum(self._policy.of(tenant).weight for tenant in tenants)
        share = most * self._policy.of(request.tenant).weight / weights
        return len(tenants) > 1 and (not mine or mine + size <= share)
