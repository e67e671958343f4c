"""Tenants on a real control plane: keys from a Secret, followed live; an edit of tenants rolls the pods."""

import json

import httpx
import pytest

from cluster.controller import Controller
from cluster.node import Node
from cluster.plane import Plane
from cluster.served import Json, Served, small
from support.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def secret(namespace: str, **keys: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "chat-keys", "namespace": namespace},
        "stringData": keys,
    }


async def status(chat: Served, key: str) -> int:
    """HTTP status of one small completion with a key."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer = await client.post(
            f"{chat.url()}/completions",
            json={"prompt": "once", "max_tokens": 2, "ignore_eos": True},
            headers={"authorization": f"Bearer {key}"},
        )
    return answer.status_code


async def output_tokens(chat: Served) -> dict[str, float]:
    """Tenant to generated tokens, as the one pod counts them."""
    [pod] = chat.pods()
    return {
        dict(labels)["tenant"]: value
        for (name, labels), value in (await chat.metrics(pod)).items()
        if name == "headway_tenant_tokens_total" and dict(labels)["kind"] == "output"
    }


async def test_keys_come_from_a_secret_and_tenants_from_the_resource(
    plane: Plane, node: Node, controller: Controller, namespace: str
) -> None:
    """No Secret, no pod, and the status says so; then keys, counters, a new key with the old pod, an edit."""
    tenancy = {"tenants": [{"name": "gold", "weight": 4}], "keysSecretRef": {"name": "chat-keys"}}
    chat = Served(plane, node, namespace, small(tenancy=tenancy))
    await eventually(
        lambda: chat.condition("Ready").get("reason") == "KeysSecretMissing", what="the reason", every_s=0.5
    )

    plane.apply(secret(namespace, gold="g-key", guest="guest-key"))
    chat.wait_ready()
    assert [await status(chat, key) for key in ("g-key", "guest-key", "other")] == [200, 200, 401]
    assert await output_tokens(chat) == {"gold": 2, "(others)": 2}

    [pod] = chat.pods()
    plane.apply(secret(namespace, gold="new-key", guest="guest-key"))

    async def known() -> bool:
        return await status(chat, "new-key") == 200

    await eventually(known, timeout_s=150, every_s=1.0, what="the new key in the running engine")
    assert await status(chat, "g-key") == 401
    [same] = chat.pods()
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]

    chat.patch({"tenancy": {"tenants": [{"name": "gold", "weight": 2}, {"name": "guest"}]}})

    def replaced() -> bool:
        uids = [pod["metadata"]["uid"] for pod in chat.pods()]
        return len(uids) == 1 and same["metadata"]["uid"] not in uids

    await eventually(replaced, timeout_s=120, every_s=0.5, what="a pod that knows the new tenants")
    chat.wait_ready()
    assert (await output_tokens(chat)).keys() >= {"gold", "guest"}
    text = json.dumps(plane.objects("-n", namespace, "deployments,configmaps,pods"))
    assert "new-key" not in text, "keys stand in the Secret only"
