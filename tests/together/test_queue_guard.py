"""A queue limit of the resource, seen by a client of the engine that the controller starts."""

from pathlib import Path

import httpx

from headway_operator.manifests import Images, build
from support import fake_engine
from support.engine_server import engine_server
from support.resources import Json, a_resource


def starting_limits(folder: Path, batching: Json) -> Path:
    """The file of limits that a pod of this resource would find."""
    resource = a_resource(spec={"batching": batching})
    objects = build(
        resource, images=Images("headway-engine:1"), control_key="secret", limits=resource.batching.limits()
    )
    (config_map,) = [o for o in objects if o["kind"] == "ConfigMap"]
    path = folder / "limits.json"
    path.write_text(config_map["data"]["limits.json"])
    return path


def test_the_resource_is_the_guard_in_front_of_the_engine(tmp_path: Path) -> None:
    """Row C.6 58: nobody needs a proxy of their own. `queue.maxRequests` in the resource is a 429 of the
    engine, with Retry-After, OpenAI's error body and the limit in its words; what fits is served meanwhile.

    One body brings all requests, so that they are there together however slow the machine is.
    """
    limits = starting_limits(tmp_path, {"maxBatchSequences": 1, "queue": {"maxRequests": 1}})
    with engine_server(tmp_path, arguments=["--limits-file", str(limits)], command=fake_engine.COMMAND) as e:

        def ask(count: int) -> httpx.Response:
            body = {"prompt": ["abc"] * count, "max_tokens": 2}
            return httpx.post(f"{e.url}/v1/completions", json=body, timeout=30)

        refused, served = ask(4), ask(1)
        metrics = e.metrics()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert "(1 requests)" in error["message"]
    assert served.json()["choices"][0]["text"] == "de"
    assert metrics['headway_requests_total{outcome="rejected"}'] == 4
