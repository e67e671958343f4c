"""Rates: how fast a tenant may spend tokens, and how fast the engine computes prompts.

Both serve the front door: the first refuses, the second says when coming back is worth it. Knows nothing of
queues.
"""

from headway_engine.tenants import Tenant, TenantPolicy

MOST_IDLE_BUCKETS = 1000
"""Beyond so many, buckets that are full again are forgotten: a new one would be full as well."""


class TokenRates:
    """A bucket of tokens for each tenant that has a rate.

    A request is let in while the bucket is not empty, whatever its size, and may leave it in debt: its
    prompt is taken at admission and its output as it comes, since nobody knows beforehand how long it will
    be. The debt is paid by waiting, so over time a tenant spends its rate and never more than one burst and
    what was under way above it.
    """

    def __init__(self, policy: TenantPolicy) -> None:
        self._policy = policy
        self._buckets: dict[str, tuple[float, float]] = {}  # tenant: (level, at_s)
        self.active = any(t.tokens_per_s for t in (policy.default, *policy.tenants.values()))

    def wait_s(self, tenant: str, now_s: float) -> float:
        """Seconds until a tenant may send its next request; 0: now."""
        rule = self._policy.of(tenant)
        if not rule.tokens_per_s:
            return 0.0
        return max(0.0, (1.0 - self._level(tenant, rule, now_s)) / rule.tokens_per_s)

    def spend(self, tenant: str, tokens: int, now_s: float) -> None:
        """Tokens were admitted for a tenant, or came out for it."""
        rule = self._policy.of(tenant)
        if not rule.tokens_per_s:
            return
        self._buckets[tenant] = (self._level(tenant, rule, now_s) - tokens, now_s)
        if len(self._buckets) > MOST_IDLE_BUCKETS:
            full = [
                name
                for name in self._buckets
                if (r := self._policy.of(name)) and self._level(name, r, now_s) >= self._burst(r)
            ]
            for name in full:
                del self._buckets[name]

    def _level(self, tenant: str, rule: Tenant, now_s: float) -> float:
        burst = self._burst(rule)
        level, at_s = self._buckets.get(tenant, (burst, now_s))
        return min(burst, level + (now_s - at_s) * rule.tokens_per_s)

    @staticmethod
    def _burst(rule: Tenant) -> float:
        return max(1.0, float(rule.burst_tokens or 10 * rule.tokens_per_s))


class PrefillPace:
    """Prompt tokens a second over the last hundred or so steps, to guess when a queue will be shorter."""

    _KEEP = 0.99  # weight of the past at each step

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, prefill_tokens: int, seconds: float) -> None:
        self._tokens = self._tokens * self._KEEP + prefill_tokens
        self._seconds = self._seconds * self._KEEP + max(0.0, seconds)

    def retry_after_s(self, queued_tokens: int) -> float:
        """Time in which half of the queue will be computed, from 1 s to 1 min; 1 s while nothing is known."""
        if self._tokens < 1 or self._seconds <= 0:
            return 1.0
        return min(60.0, max(1.0, queued_tokens / 2 * self._seconds / self._tokens))
