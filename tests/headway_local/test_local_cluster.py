"""The door without Kubernetes: objects in memory, Deployments as real processes."""

import asyncio
import inspect
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headway_local.images import Image, Images
from headway_local.local_cluster import LocalCluster
from headway_local.pod import BackOff, PodOptions
from headway_operator.cluster import Gone

SERVER = """
import argparse, http.server, os, signal, sys
p = argparse.ArgumentParser()
p.add_argument("--port", type=int)
p.add_argument("--word", default="")
a = p.parse_args()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = open(os.environ["FILE"]).read() if self.path == "/file" else a.word
        self.send_response(200); self.end_headers(); self.wfile.write(text.encode())
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", a.port), Handler).serve_forever()
"""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    """A cluster whose image "web" is a small HTTP server."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    options = PodOptions(
        images=Images(rules=(Image("web", ("{python}", "-I", str(script))),)),
        claims=tmp_path / "claims",
        back_off=BackOff(first_s=0.05),
    )
    made = LocalCluster(tmp_path / "pods", options=options)
    yield made
    await made.close(grace_s=2)


def deployment(*, replicas: int = 1, word: str = "one", **spec: Any) -> dict[str, Any]:
    """A Deployment of the small server; other words make other pods."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": "default", "labels": {"app": "web"}},
        "spec": {
            "replicas": replicas,
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {
                    "terminationGracePeriodSeconds": 5,
                    "containers": [
                        {
                            "name": "web",
                            "image": "web",
                            "args": ["--word", word],
                            "env": [{"name": "FILE", "value": "/etc/web/text"}],
                            "ports": [{"name": "http", "containerPort": 8000}],
                            "volumeMounts": [{"name": "config", "mountPath": "/etc/web"}],
                            "readinessProbe": {
                                "httpGet": {"port": "http", "path": "/"},
                                "periodSeconds": 0.05,
                            },
                        }
                    ],
                    "volumes": [{"name": "config", "configMap": {"name": "web", "optional": True}}],
                },
            },
            **spec,
        },
    }


def config_map(text: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "web", "namespace": "default"},
        "data": {"text": text},
    }


def thing() -> dict[str, Any]:
    """An object that the cluster knows nothing about."""
    return {
        "apiVersion": "x/v1",
        "kind": "Thing",
        "metadata": {"name": "t", "namespace": "default"},
        "spec": {"a": 1},
    }


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """Wait for a condition, which may be a coroutine function; its value."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = condition()
            if inspect.isawaitable(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.02)


async def pods(cluster: LocalCluster) -> list[dict[str, Any]]:
    return await cluster.list("v1", "Pod", "default", {"app": "web"})


def status(cluster: LocalCluster) -> dict[str, Any]:
    return (cluster.peek("Deployment", "default", "web") or {}).get("status") or {}


async def get(pod: dict[str, Any], path: str = "/") -> str:
    port = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
    url = f"http://{pod['status']['podIP']}:{port}{path}"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    return await asyncio.to_thread(read)


async def test_two_replicas_run_side_by_side_on_ports_of_their_own(cluster: LocalCluster) -> None:
    """Both answer, both are ready, the Deployment says so."""
    await cluster.apply(deployment(replicas=2))
    await until(lambda: status(cluster).get("readyReplicas") == 2)
    found = await pods(cluster)
    assert [await get(pod) for pod in found] == ["one", "one"]
    assert {pod["status"]["phase"] for pod in found} == {"Running"}
    assert {c["type"]: c["status"] for c in status(cluster)["conditions"]}["Available"] == "True"


async def test_a_new_template_replaces_pods_one_by_one_without_a_gap(cluster: LocalCluster) -> None:
    """At any moment one pod is ready, and the old one goes only after the new one came."""
    await cluster.apply(deployment(word="one"))
    await until(lambda: status(cluster).get("readyReplicas") == 1)
    fewest = [9]
    cluster.on_change = lambda changed: fewest.append(
        sum(p.facts.ready for p in cluster.processes()) if changed["kind"] == "Pod" else 9
    )
    await cluster.apply(deployment(word="two"))
    await until(lambda: status(cluster).get("observedGeneration") == 2)
    await until(lambda: len(cluster.processes()) == 1 and cluster.processes()[0].facts.ready)
    assert min(fewest) >= 1
    assert [await get(pod) for pod in await pods(cluster)] == ["two"]


async def test_a_killed_pod_runs_again(cluster: LocalCluster) -> None:
    """kill -9 of the process: restarted in place, counted, ready again."""
    await cluster.apply(deployment())
    await until(lambda: status(cluster).get("readyReplicas") == 1)
    (process,) = cluster.processes()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await process.wait_for(lambda facts: facts.restarts == 1 and facts.ready, timeout_s=20)
    assert process.pid != pid


async def test_scaling_to_nothing_and_deleting_stop_the_processes(cluster: LocalCluster) -> None:
    """No process is left, with SIGTERM and not with a kill."""
    await cluster.apply(deployment(replicas=2))
    await until(lambda: status(cluster).get("readyReplicas") == 2)
    await cluster.apply(deployment(replicas=1))
    await until(lambda: len(cluster.processes()) == 1)
    (last,) = cluster.processes()
    await cluster.delete("apps/v1", "Deployment", "default", "web")
    await until(lambda: not cluster.processes())
    assert last.pid is None
    assert last.facts.phase == "Succeeded"


async def test_what_an_owner_owned_goes_with_it(cluster: LocalCluster) -> None:
    """Garbage collection by owner reference, down to the processes."""
    owner = cluster.put(
        {"apiVersion": "x/v1", "kind": "Thing", "metadata": {"name": "t", "namespace": "default"}}
    )
    child = deployment()
    child["metadata"]["ownerReferences"] = [{"kind": "Thing", "name": "t", "uid": owner["metadata"]["uid"]}]
    await cluster.apply(child)
    await until(cluster.processes)
    await cluster.delete("x/v1", "Thing", "default", "t")
    assert await cluster.get("apps/v1", "Deployment", "default", "web") is None
    await until(lambda: not cluster.processes())


async def test_a_changed_config_map_reaches_the_running_pod(cluster: LocalCluster) -> None:
    """The volume is brought up to date, the process stays."""
    await cluster.apply(config_map("first"))
    await cluster.apply(deployment())
    await until(lambda: status(cluster).get("readyReplicas") == 1)
    (pod,) = await pods(cluster)
    (process,) = cluster.processes()
    pid = process.pid
    assert await get(pod, "/file") == "first"
    await cluster.apply(config_map("second"))

    async def is_second() -> bool:
        return await get(pod, "/file") == "second"

    await until(is_second)
    assert process.pid == pid


async def test_a_config_map_that_goes_away_stops_nothing(cluster: LocalCluster) -> None:
    """The running pod keeps the old content, and Deployments are still followed."""
    await cluster.apply(config_map("first"))
    wanted = deployment()
    wanted["spec"]["template"]["spec"]["volumes"][0]["configMap"]["optional"] = False
    await cluster.apply(wanted)
    await until(lambda: status(cluster).get("readyReplicas") == 1)
    (pod,) = await pods(cluster)
    await cluster.delete("v1", "ConfigMap", "default", "web")
    wanted["spec"]["replicas"] = 0
    await cluster.apply(config_map("unrelated") | {"metadata": {"name": "other", "namespace": "default"}})
    assert await get(pod, "/file") == "first"
    await cluster.apply(wanted)
    await until(lambda: not cluster.processes())


async def test_apply_keeps_what_others_set_and_drops_what_it_no_longer_says(cluster: LocalCluster) -> None:
    """Server-side apply, for the one manager that the controller is."""
    await cluster.apply({**config_map("x"), "data": {"a": "1", "b": "2"}})
    cluster.edit("ConfigMap", "default", "web", lambda o: o["data"].update(theirs="3"))
    after = await cluster.apply({**config_map("x"), "data": {"a": "9"}})
    assert after["data"] == {"a": "9", "theirs": "3"}


async def test_an_apply_without_a_difference_writes_nothing(cluster: LocalCluster) -> None:
    """The version stays, nobody is woken."""
    first = await cluster.apply(config_map("x"))
    heard: list[Any] = []
    cluster.on_change = heard.append
    assert await cluster.apply(config_map("x")) == first
    assert heard == []


async def test_the_generation_counts_changes_of_the_spec_only(cluster: LocalCluster) -> None:
    """Labels and status leave it alone; the uid never changes."""
    first = cluster.put(thing())
    await cluster.apply_status({**thing(), "status": {"ok": True}})
    labelled = cluster.edit("Thing", "default", "t", lambda o: o["metadata"].update(labels={"x": "y"}))
    assert labelled["metadata"]["generation"] == 1
    edited = cluster.edit("Thing", "default", "t", lambda o: o["spec"].update(a=2))
    assert edited["metadata"]["generation"] == 2
    assert edited["metadata"]["uid"] == first["metadata"]["uid"]
    assert edited["status"] == {"ok": True}


async def test_a_status_for_nothing_is_gone(cluster: LocalCluster) -> None:
    """The resource was deleted in the meantime."""
    with pytest.raises(Gone):
        await cluster.apply_status({**thing(), "status": {}})


async def test_what_is_returned_is_a_copy(cluster: LocalCluster) -> None:
    """A caller that changes what it got changes nothing in the cluster."""
    await cluster.apply(config_map("x"))
    found = await cluster.get("v1", "ConfigMap", "default", "web")
    assert found is not None
    found["data"]["text"] = "spoilt"
    again = await cluster.get("v1", "ConfigMap", "default", "web")
    assert json.dumps(again).count("spoilt") == 0


async def test_events_are_kept_and_heard(cluster: LocalCluster) -> None:
    """They are what the table shows as reasons."""
    heard: list[Any] = []
    cluster.on_event = heard.append
    await cluster.post_event({}, type_="Normal", reason="ParametersChanged", note="why", action="Tune")
    assert [e.note for e in cluster.events] == ["why"] == [e.note for e in heard]
