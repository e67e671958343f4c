"""The two sequences of the controller: `apply` makes objects exist, `tune` makes limits follow the SLO.

Level-based: every run reads what is there, works out what should be, and closes the gap; what started the
run does not matter, and a run that was cut off anywhere is completed by the next one. Decisions come from
pure modules; this one only orders them. Knows nothing of kopf, queues or HTTP.
"""

import asyncio
import base64
import dataclasses
import datetime
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway_engine.logs import fields
from headway_engine.protocol import Capacity
from headway_operator import freshness, manifests, status
from headway_operator.cluster import Cluster, ClusterError, Forbidden, Gone, Manifest, Refused
from headway_operator.fleet import Fleet, FleetError, PodRef, Unreachable
from headway_operator.invalid import invalid_status
from headway_operator.known import Basis, Known, has_traffic, plain, wanted_limits
from headway_operator.manifests import Images
from headway_operator.metrics import Observation, Sample, observe
from headway_operator.news import News, changes_of_limits, transitions
from headway_operator.owned import OwnedObjects
from headway_operator.pods import pods_of
from headway_operator.resource import API_VERSION, KIND, InvalidSpec, Resource, parse
from headway_operator.status import Facts, Problem
from headway_operator.tuner.controller import decide
from headway_operator.tuner.memory import from_status

Key = tuple[str, str]

CONTROL_KEY_BYTES = 32
LOOK_AGAIN_S = 300.0
"""When a resource that cannot be served is looked at again without being told."""

logger = logging.getLogger(__name__)


class Clock(Protocol):
    """Time as the controller sees it; tests move it."""

    def wall_s(self) -> float:
        """Seconds since the epoch: what is stored and outlives the process."""

    def monotonic_s(self) -> float:
        """Seconds that never jump: what measures intervals."""


class Reports(Protocol):
    """Who hears of what the controller does (its own metrics)."""

    def read(self, key: Key, uid: str, generation: int) -> None:
        """A read of the resource showed this generation."""

    def scraped(self) -> None:
        """At least one pod answered a scrape."""

    def decided(self, verdict: str) -> None:
        """The tuner decided."""

    def limits_not_taken(self) -> None:
        """A pod refused or missed what it was sent."""

    def status_written(self) -> None:
        """A status was written."""


@dataclass(frozen=True, slots=True)
class Next:
    """When to come back: in `after_s`, or never (the resource is gone) for None."""

    after_s: float | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """One pod after it was asked and, where needed, corrected."""

    sample: Sample | Unreachable
    refusal: str | None = None


class Reconciler:
    """Makes one resource so. One call at a time per resource; different resources may run together."""

    def __init__(
        self,
        cluster: Cluster,
        fleet: Fleet,
        *,
        images: Images,
        clock: Clock,
        randomness: Callable[[int], bytes],
        reports: Reports,
    ) -> None:
        self._cluster = cluster
        self._fleet = fleet
        self._images = images
        self._clock = clock
        self._randomness = randomness
        self._reports = reports
        self._owned = OwnedObjects(cluster)
        self._known: dict[Key, Known] = {}

    def forget(self, key: Key) -> None:
        """Drop what is remembered; the next run reads it again."""
        if self._known.pop(key, None) is not None:
            self._owned.forget(key)

    async def reconcile(self, namespace: str, name: str, *, tick_only: bool = False) -> Next:
        """Make it so. `tick_only` skips the look at owned objects while the spec is the one last applied.

        Raises ClusterError; the same call may then be made again, at any time.
        """
        key = (namespace, name)
        body = await self._cluster.get(API_VERSION, KIND, namespace, name)
        if body is None or "deletionTimestamp" in body["metadata"]:
            # Owned objects carry an owner reference: removing them is the garbage collector's work.
            self.forget(key)
            return Next(None)
        known = self._recall(key, body)
        try:
            resource = parse(body)
        except InvalidSpec as error:
            await self._report_invalid(body, known, error)
            return Next(LOOK_AGAIN_S)

        edited = known.basis != Basis.of(resource)
        if edited:
            known.decision = None  # it was about another spec
        known.limits, known.basis = wanted_limits(resource, known), Basis.of(resource)
        if edited or not tick_only or known.applied_generation != resource.generation:
            await self.apply(resource, known)
        pods = await pods_of(resource, self._cluster)
        if edited or self._due_in_s(known) > 0:
            await self._converge(resource, known, pods)
        else:
            await self.tune(resource, known, pods)
        await self._report(resource, known, pods, body)
        return Next(self._due_in_s(known))

    def _recall(self, key: Key, body: Manifest) -> Known:
        """What is known of this very resource; after a restart, what its status says."""
        uid = body["metadata"]["uid"]
        self._reports.read(key, uid, body["metadata"].get("generation", 0))
        known = self._known.get(key)
        if known is None or known.uid != uid:
            state = ((body.get("status") or {}).get("tuning") or {}).get("state")
            known = self._known[key] = Known(uid=uid, memory=from_status(state))
        return known

    def _due_in_s(self, known: Known) -> float:
        """Seconds until the next tick; the first is due at once."""
        if known.ticked_s is None or known.basis is None:
            return 0.0
        return max(0.0, known.ticked_s + known.basis.tuning.interval_s - self._clock.monotonic_s())

    # Sequence one: objects.

    async def apply(self, resource: Resource, known: Known) -> None:
        """What the spec asks for exists, and nothing that it no longer asks for."""
        known.control_key = await self._control_key(resource)
        try:
            made = await self._owned.make_so(resource, self._manifests(resource, known))
        except (Refused, Forbidden) as error:
            # A pod overlay that the schema let through, a quota, a right that is missing: for people to see.
            known.problems = (Problem(type(error).__name__, str(error)),)
            return
        missing = await self._missing_keys(resource)
        known.problems = (
            *(
                Problem("NameTaken", f"{label} exists and does not belong to this resource")
                for label in made.foreign
            ),
            *missing,
        )
        known.deployment = made.live.get(("apps/v1", "Deployment", resource.namespace, resource.name))
        if not made.foreign:
            known.configured = known.limits
            # A Secret that is made later sends us no event, so the next tick looks again.
            known.applied_generation = 0 if missing else resource.generation

    async def _missing_keys(self, resource: Resource) -> tuple[Problem, ...]:
        """Said where the Secret with the API keys is not there: pods wait for it, and only events say so."""
        name = resource.tenancy.keys_secret
        if name is None or await self._cluster.get("v1", "Secret", resource.namespace, name) is not None:
            return ()
        words = f"spec.tenancy.keysSecretRef: the Secret {name} does not exist, and no pod starts without it"
        return (Problem("KeysSecretMissing", words, fatal=False),)

    def _manifests(self, resource: Resource, known: Known) -> list[Manifest]:
        return manifests.build(
            resource, images=self._images, control_key=known.control_key, limits=known.limits
        )

    async def _control_key(self, resource: Resource) -> str:
        """The key that this resource's engines trust: the stored one, or a new one where there is none."""
        secret = await self._cluster.get(
            "v1", "Secret", resource.namespace, manifests.control_key_name(resource.name)
        )
        stored = ((secret or {}).get("data") or {}).get(manifests.CONTROL_KEY)
        if stored:
            return base64.b64decode(stored).decode(errors="replace")
        return self._randomness(CONTROL_KEY_BYTES).hex()

    # Sequence two: limits.

    async def tune(self, resource: Resource, known: Known, pods: Sequence[PodRef]) -> None:
        """One tick: look, decide, act."""
        now_s = self._clock.monotonic_s()
        ready = [pod for pod in pods if pod.ready]
        samples = await self._scrape(ready)
        # One reading shows nothing: a restarted controller stays with what the last one said.
        goes_on = known.ticked_s is None and known.memory.tuned is not None
        known.observation = self._observe(known, samples, now_s)
        known.ticked_s = now_s
        if ready and not goes_on:
            self._decide(resource, known, samples)
        await self._settle(resource, known, ready, samples)

    def _observe(
        self, known: Known, samples: Mapping[str, Sample | Unreachable], now_s: float
    ) -> Observation | None:
        """What happened since the last tick; None where no pod answered."""
        after = {name: sample for name, sample in samples.items() if isinstance(sample, Sample)}
        if not after:
            return None
        assert known.basis is not None
        elapsed_s = known.basis.tuning.interval_s if known.ticked_s is None else now_s - known.ticked_s
        observation = observe(known.before, after, max(elapsed_s, 1e-3))
        known.before = after
        known.busy = known.busy or has_traffic(observation)
        return observation

    def _decide(self, resource: Resource, known: Known, samples: Mapping[str, Sample | Unreachable]) -> None:
        reported = [s for _, s in sorted(samples.items()) if isinstance(s, Sample)]
        decision = decide(
            resource.slo,
            resource.tuning,
            resource.batching,
            _capacity(resource, reported),
            next((s.limits for s in reported if s.limits is not None), known.limits),
            known.memory,
            known.observation,
            self._clock.wall_s(),
        )
        self._reports.decided(decision.verdict.value)
        known.decision, known.memory = decision, decision.memory
        known.limits = plain(decision.limits)
        # A recommendation stands for many ticks; it is news once.
        if decision.changes and (decision.recommended is None or decision.recommended != known.recommended):
            known.untold = (*known.untold, decision.changes)
        known.recommended = decision.recommended

    async def _converge(self, resource: Resource, known: Known, pods: Sequence[PodRef]) -> None:
        """Between ticks: every ready pod gets what it should have, each at its own pace."""
        await self._settle(resource, known, [pod for pod in pods if pod.ready], {})

    async def _settle(
        self,
        resource: Resource,
        known: Known,
        ready: Sequence[PodRef],
        samples: Mapping[str, Sample | Unreachable],
    ) -> None:
        """Pods have the wanted limits and objectives, and a pod that starts later will find them."""

        async def one(pod: PodRef) -> _Asked:
            # Scraped one by one here, so that a pod that hangs does not hold up an edit for the others.
            sample = samples.get(pod.name) or (await self._scrape([pod]))[pod.name]
            return await self._correct(known, pod, sample)

        asked = await asyncio.gather(*(one(pod) for pod in ready))
        known.samples = {pod.name: one.sample for pod, one in zip(ready, asked, strict=True)}
        known.refused = {
            pod.name: one.refusal for pod, one in zip(ready, asked, strict=True) if one.refusal is not None
        }
        await self._configure(resource, known)

    async def _configure(self, resource: Resource, known: Known) -> None:
        """The ConfigMap that new pods start with follows the wanted limits."""
        if known.configured == known.limits or any(problem.fatal for problem in known.problems):
            return
        config = [m for m in self._manifests(resource, known) if m["kind"] == "ConfigMap"]
        await self._owned.make_some_so(config)
        known.configured = known.limits

    async def _correct(self, known: Known, pod: PodRef, sample: Sample | Unreachable) -> _Asked:
        """Put what differs; the answer of the pod replaces what it reported."""
        if isinstance(sample, Unreachable):
            return _Asked(sample)
        assert known.basis is not None
        objectives = known.basis.objectives
        try:
            if sample.limits is None or not sample.limits.same_values(known.limits):
                taken = await self._fleet.set_limits(pod, known.control_key, known.limits)
                sample = dataclasses.replace(sample, limits=taken)
            if sample.objectives != objectives:
                put = await self._fleet.set_objectives(pod, known.control_key, objectives)
                sample = dataclasses.replace(sample, objectives=put)
        except FleetError as error:
            self._reports.limits_not_taken()
            return _Asked(sample, str(error))
        return _Asked(sample)

    async def _scrape(self, pods: Sequence[PodRef]) -> dict[str, Sample | Unreachable]:
        samples = await self._fleet.scrape(pods)
        if any(isinstance(sample, Sample) for sample in samples.values()):
            self._reports.scraped()
        return samples

    # What became of it.

    async def _report(
        self, resource: Resource, known: Known, pods: tuple[PodRef, ...], body: Manifest
    ) -> None:
        """Write the status where it says something new, then tell of transitions."""
        before = body.get("status") or None
        after = status.build(
            Facts(
                resource=resource,
                deployment=known.deployment,
                pods=pods,
                samples=known.samples,
                observation=known.observation,
                decision=known.decision,
                memory=known.memory,
                refused=known.refused,
                problems=known.problems,
                endpoint=manifests.endpoint(resource),
            ),
            before,
            self._now(),
        )
        if freshness.differs(before, after) or self._figures_due(known, before, after):
            await self._write_status(body, after)
            # What was told of traffic is news once more when it has ended.
            known.busy, known.written_s = has_traffic(known.observation), self._clock.monotonic_s()
        news = transitions(before, after)
        for changes in known.untold:
            news += changes_of_limits(changes, resource.tuning.mode)
        known.untold = ()
        await self._tell(body, known, news)

    def _figures_due(self, known: Known, before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> bool:
        """Figures are written while there is traffic to tell of: once a minute at most, where they moved by
        more than chance or have stood long enough.
        """
        if known.written_s is None:
            known.written_s = self._clock.monotonic_s()
        waited_s = self._clock.monotonic_s() - known.written_s
        if not known.busy or before is None or before == after or waited_s < freshness.FIGURES_EVERY_S:
            return False
        return waited_s >= freshness.REFRESH_S or freshness.figures_differ(before, after)

    async def _write_status(self, body: Manifest, after: Mapping[str, Any]) -> None:
        metadata = body["metadata"]
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"namespace": metadata["namespace"], "name": metadata["name"]},
            "status": dict(after),
        }
        try:
            await self._cluster.apply_status(manifest)
        except Gone:
            return  # deleted while we looked: the next run sees it
        self._reports.status_written()

    async def _tell(self, body: Manifest, known: Known, news: Iterable[News]) -> None:
        """Events, within reason: a flapping condition is told of now and then."""
        now_s = self._clock.monotonic_s()
        for item in news:
            name = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
            logger.info(fields(item.reason, resource=name, note=item.note))
            if not known.quota.allows(item.topic, now_s):
                continue
            try:
                await self._cluster.post_event(
                    body, type_=item.type, reason=item.reason, action=item.action, note=item.note
                )
            except Gone:
                return  # nobody is left to tell
            except ClusterError as error:
                # An event is news, not state: it is not worth doing the whole run again.
                logger.warning(fields("event-not-posted", resource=name, error=error))

    async def _report_invalid(self, body: Manifest, known: Known, error: InvalidSpec) -> None:
        before = body.get("status") or None
        after = invalid_status(body, error, self._now())
        if freshness.differs(before, after):
            await self._write_status(body, after)
            await self._tell(body, known, transitions(before, after))

    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._clock.wall_s(), datetime.UTC)


def _capacity(resource: Resource, reported: Sequence[Sample]) -> Capacity:
    """What one pod reserved: the smallest where they differ, the spec's envelope where none says."""
    known = [sample.capacity for sample in reported if sample.capacity is not None]
    return min(known, key=lambda c: (c.max_batch_tokens, c.kv_tokens), default=resource.batching.envelope())
