"""What tenants may have: weights, priorities, caps and rates, as the operator's resource states them.

Values only; who goes next is `fairness`, who is refused `backlog` and `rates`.
"""

from enum import StrEnum

import msgspec

from headway_engine.sequence import Sequence


class Fairness(StrEnum):
    """How tenants of one class share."""

    VIRTUAL_TOKEN_COUNTER = "VirtualTokenCounter"
    FIRST_COME_FIRST_SERVED = "FirstComeFirstServed"


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant may have. A cap of 0 means none beyond the engine's own."""

    weight: float = 1.0
    priority: int = 0  # added to each request's own, which is at most 0 where tenants are declared
    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    tokens_per_s: float = 0.0  # prompt and output together; 0: no limit of its own
    burst_tokens: int = 0  # what may be spent at once after a pause; 0: ten seconds' worth


class TenantPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of sharing. Tenants that are not named get `default`."""

    fairness: Fairness = Fairness.VIRTUAL_TOKEN_COUNTER
    tenants: dict[str, Tenant] = {}
    default: Tenant = Tenant()
    ageing_s: float = 10.0
    aged_share: int = 4

    def __post_init__(self) -> None:
        for name, tenant in [("default", self.default), *self.tenants.items()]:
            if not 0 < tenant.weight < float("inf"):
                raise ValueError(f"tenant {name!r}: weight {tenant.weight} is not a positive number")
            if not 0 <= tenant.tokens_per_s < float("inf"):
                raise ValueError(f"tenant {name!r}: tokens_per_s is {tenant.tokens_per_s}")
            for cap in ("max_queued_requests", "max_queued_tokens", "burst_tokens"):
                if getattr(tenant, cap) < 0:
                    raise ValueError(f"tenant {name!r}: {cap} is {getattr(tenant, cap)}")
        if not self.ageing_s >= 0 or self.aged_share < 2:
            raise ValueError("ageing_s must not be negative and aged_share must be at least 2")

    def of(self, tenant: str) -> Tenant:
        return self.tenants.get(tenant, self.default)

    def class_of(self, sequence: Sequence) -> int:
        """The priority class a sequence stands in; higher goes first.

        Where tenants are declared, a client may let others go first but not push itself forward: its tenant's
        priority is the most it has, or one tenant could take what another was promised.
        """
        own = sequence.request.priority
        if self.tenants:
            own = min(0, own)
        return own + self.of(sequence.request.tenant).priority
