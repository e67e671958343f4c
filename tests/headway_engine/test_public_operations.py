"""The public port keeps the word of its OpenAPI document."""

import json
import re

import pytest

from headway_engine.core_client import CoreClient
from headway_engine.protocol import Objectives
from headway_engine.public_operations import OPERATIONS, public_document
from headway_engine.server import Front, public_app
from headway_engine.telemetry import Telemetry
from support import fake_engine
from support.asked import ask_everything
from support.engine_server import engine_server
from support.routes import routes_of


def test_every_route_is_described():
    """And no other."""
    telemetry = Telemetry(Objectives(), start_time_s=0.0)
    app = public_app(Front(CoreClient(telemetry), telemetry, "tiny", created=0))
    assert routes_of(app) - {("get", "/openapi.json")} == set(OPERATIONS)


@pytest.mark.parametrize("keyed", [False, True])
def test_the_document_is_whole(keyed):
    """No dangling reference; operations have names of their own; keys are asked for where there are some."""
    whole = public_document(keyed=keyed)
    text = json.dumps(whole)
    wanted = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert wanted <= set(whole["components"]["schemas"])
    operations = [o for path in whole["paths"].values() for o in path.values()]
    assert len({o["operationId"] for o in operations}) == len(operations)
    assert {o["tags"][0] for o in operations} == {tag["name"] for tag in whole["tags"]}
    closed = [o for o in operations if o["operationId"] != "health"]
    assert all(o["security"] == ([{"key": []}] if keyed else []) for o in closed)
    assert ("X-Headway-Tenant" in text) is not keyed


@pytest.mark.slow
def test_every_answer_is_as_the_document_says(tmp_path):
    """Whatever is asked, within the document and outside it: no 500, nothing undocumented."""
    with engine_server(tmp_path, command=fake_engine.COMMAND, env={"FAKE_CONTEXT": "128"}) as e:
        told = ask_everything(e.url, tmp_path)
        assert f"Tested: {len(OPERATIONS)}" in told
        assert e.get("/healthz")[0] == 200


def test_a_keyed_engine_asks_for_a_key_everywhere(tmp_path):
    """With no key or another one, every operation is a 401; the document and /health are open."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"secret": "gold"}))
    arguments = ["--keys-file", str(keys)]
    with engine_server(tmp_path, arguments=arguments, command=fake_engine.COMMAND) as e:
        for method, path in (key for key, operation in OPERATIONS.items() if not operation.open):
            body = {} if method == "post" else None
            for headers in ({}, {"authorization": "Bearer other"}):
                status, _ = e.request(method.upper(), path, body, management=False, headers=headers)
                assert status == 401, path
        assert e.get("/health", management=False)[0] == 200
        assert json.loads(e.get("/openapi.json", management=False)[1]) == public_document(keyed=True)
