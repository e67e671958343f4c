"""The leader's record as a Lease object, over a real socket."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from headway_operator.cluster_kube import KubeCluster
from headway_operator.leader import Lease, LeaseUnavailable
from headway_operator.lease_kube import KubeLeaseStore
from support.fake_api import Answer, Asked, FakeApi

PATH = "/apis/coordination.k8s.io/v1/namespaces/system/leases"
LEASE = Lease("one", 15, acquired_s=1_800_000_000.25, renewed_s=1_800_000_004.5, transitions=3)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi().serving() as api:
        yield api


@pytest.fixture
async def store(api: FakeApi) -> AsyncIterator[KubeLeaseStore]:
    cluster = KubeCluster(Configuration(host=api.url))
    yield KubeLeaseStore(cluster, "system", "headway")
    await cluster.close()


def stored(asked: Asked) -> Answer:
    """The API server gives back what it was sent, with a version."""
    body: dict[str, Any] = asked.body
    return Answer({**body, "metadata": {**body["metadata"], "resourceVersion": "8"}})


async def test_a_record_survives_the_way_there_and_back(api: FakeApi, store: KubeLeaseStore) -> None:
    """Created under its name, replaced under its version, nothing lost."""
    api.answers = stored
    made = await store.create(LEASE)
    assert made == replace(LEASE, version="8")
    assert await store.replace(made) == made
    create, update = api.requests
    assert (create.method, create.path) == ("POST", PATH)
    assert "resourceVersion" not in create.body["metadata"]
    assert (update.method, update.path) == ("PUT", f"{PATH}/headway")
    assert update.body["metadata"]["resourceVersion"] == "8"
    assert update.body["spec"]["renewTime"].endswith("04.500000Z")


async def test_an_absent_lease_is_none(api: FakeApi, store: KubeLeaseStore) -> None:
    """The first candidate makes it."""
    api.answers = lambda asked: Answer({"message": "not found"}, 404)
    assert await store.read() is None


@pytest.mark.parametrize(
    "spec", [None, {}, {"holderIdentity": None, "renewTime": "yesterday", "leaseDurationSeconds": None}]
)
async def test_a_lease_that_someone_emptied_is_free(
    api: FakeApi, store: KubeLeaseStore, spec: dict[str, Any] | None
) -> None:
    """Whatever is missing or unreadable in it."""
    api.answers = lambda asked: Answer({"metadata": {"resourceVersion": "9"}, "spec": spec})
    lease = await store.read()
    assert lease is not None
    assert (lease.holder, lease.version, lease.renewed_s) == ("", "9", 0.0)


@pytest.mark.parametrize("status", [403, 409, 429, 500])
async def test_every_failure_is_one_to_the_election(api: FakeApi, store: KubeLeaseStore, status: int) -> None:
    """It tries again until its time is up."""
    api.answers = lambda asked: Answer({"message": "no"}, status)
    for attempt in (store.read(), store.create(LEASE), store.replace(replace(LEASE, version="1"))):
        with pytest.raises(LeaseUnavailable):
            await attempt
