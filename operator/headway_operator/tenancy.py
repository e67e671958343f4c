"""Who shares an engine, and how: `spec.tenancy` as frozen values, and the file that the engine reads it from.

Knows nothing of pods, nor of what is in the Secret with the keys.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from headway_operator.reader import Reader


class Fairness(StrEnum):
    """How tenants of one priority share."""

    VIRTUAL_TOKEN_COUNTER = "VirtualTokenCounter"
    FIRST_COME_FIRST_SERVED = "FirstComeFirstServed"


@dataclass(frozen=True, slots=True)
class Tenant:
    """What one tenant may have; a cap or a rate of 0 means none of its own."""

    name: str
    weight: int = 1
    priority: int = 0
    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    tokens_per_second: int = 0
    burst_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The tenants, and the Secret with their API keys: a key of it is a tenant, its value the API keys."""

    fairness: Fairness = Fairness.VIRTUAL_TOKEN_COUNTER
    tenants: tuple[Tenant, ...] = ()
    keys_secret: str | None = None

    def policy(self) -> str | None:
        """What the engine reads, JSON; None where it would say what the engine does anyway."""
        if self.fairness is Fairness.VIRTUAL_TOKEN_COUNTER and not self.tenants:
            return None
        tenants = {
            tenant.name: {
                "weight": tenant.weight,
                "priority": tenant.priority,
                "max_queued_requests": tenant.max_queued_requests,
                "max_queued_tokens": tenant.max_queued_tokens,
                "tokens_per_s": tenant.tokens_per_second,
                "burst_tokens": tenant.burst_tokens,
            }
            # By name, so that an edit that only reorders them is none.
            for tenant in sorted(self.tenants, key=lambda tenant: tenant.name)
        }
        return json.dumps({"fairness": self.fairness.value, "tenants": tenants}, separators=(",", ":"))

    def digest(self) -> str | None:
        """Differs where `policy` does. The engine reads its file at start only, so pods carry this."""
        policy = self.policy()
        return None if policy is None else hashlib.sha256(policy.encode()).hexdigest()[:16]


def read_tenancy(read: Reader) -> Tenancy:
    """The section `spec.tenancy`."""
    d = Tenancy()
    secret = read.section("keysSecretRef")
    return Tenancy(
        fairness=read.choice("fairness", d.fairness),
        tenants=tuple(_tenants(read)),
        keys_secret=secret.text("name", "") if secret.body else None,
    )


def _tenants(read: Reader) -> Iterator[Tenant]:
    for part in read.sections("tenants"):
        d = Tenant(name="")
        yield Tenant(
            name=part.text("name", d.name),
            weight=part.integer("weight", d.weight),
            priority=part.integer("priority", d.priority),
            max_queued_requests=part.integer("maxQueuedRequests", d.max_queued_requests),
            max_queued_tokens=part.integer("maxQueuedTokens", d.max_queued_tokens),
            tokens_per_second=part.integer("tokensPerSecond", d.tokens_per_second),
            burst_tokens=part.integer("burstTokens", d.burst_tokens),
        )
