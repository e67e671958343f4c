"""The management port keeps the word of its OpenAPI document."""

import msgspec
import pytest

from headway_engine.control import control_app
from headway_engine.control_operations import OPERATIONS, Targets, WholeLimits
from headway_engine.core_client import CoreClient
from headway_engine.protocol import Limits, Objectives
from headway_engine.telemetry import Telemetry
from support import fake_engine
from support.asked import ask_everything
from support.engine_server import engine_server
from support.routes import routes_of


def test_every_route_is_described():
    """And no other."""
    telemetry = Telemetry(Objectives(), start_time_s=0.0)
    app = control_app(CoreClient(telemetry), telemetry, key="k", stall_limit_s=1.0)
    assert routes_of(app) - {("get", "/openapi.json")} == set(OPERATIONS)


@pytest.mark.parametrize(("told", "meant"), [(WholeLimits, Limits), (Targets, Objectives)])
def test_bodies_have_the_fields_of_the_protocol(told, meant):
    """They are written twice, once with bounds."""
    assert told.__struct_fields__ == meant.__struct_fields__
    optional = {f.name for f in msgspec.structs.fields(told) if f.default is not msgspec.NODEFAULT}
    assert optional == ({"generation"} if told is WholeLimits else set(told.__struct_fields__))


@pytest.mark.slow
def test_every_answer_is_as_the_document_says(tmp_path):
    """Whatever is asked, with the key and without: no 500, nothing undocumented."""
    with engine_server(tmp_path, command=fake_engine.COMMAND) as e:
        told = ask_everything(e.management_url, tmp_path, headers={"Authorization": f"Bearer {e.key}"})
        assert f"Tested: {len(OPERATIONS)}" in told
        assert e.get("/healthz")[0] == 200
