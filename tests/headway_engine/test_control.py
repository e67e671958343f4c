"""The management port: the control API's table of answers, over real HTTP with a toy model."""

import json

import httpx
import pytest

from headway_engine.control import control_app
from headway_engine.core_client import Phase
from headway_engine.mailbox import Mailbox
from headway_engine.protocol import Limits
from headway_engine.sequence import Started
from support import fake_engine
from support.core_line import Bench, request
from support.engine_server import engine_server

WHOLE = {name: getattr(Limits(max_batch_sequences=64), name) for name in Limits.__struct_fields__}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with engine_server(tmp_path_factory.mktemp("engine"), command=fake_engine.COMMAND) as e:
        yield e


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"max_batch_tokens": 4096}, "max_batch_tokens"),
        ({"max_batch_tokens": 32}, "max_batch_tokens"),
        ({"max_batch_tokens": "many"}, "max_batch_tokens"),
        ({"max_batch_tokens": None}, "max_batch_tokens"),
        ({"max_batch_tokens": 1.5}, "max_batch_tokens"),
        ({"max_batch_sequences": 65}, "max_batch_sequences"),
        ({"max_batch_sequences": 0}, "max_batch_sequences"),
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens"),
        ({"window_ms": -1}, "window_ms"),
        ({"window_ms": 5000}, "window_ms"),
        ({"max_queued_requests": -1}, "max_queued_requests"),
        ({"max_queued_tokens": -1}, "max_queued_tokens"),
        ({"queue_timeout_ms": -1}, "queue_timeout_ms"),
        ({"mode": "Sometimes"}, "mode"),
        ({"generation": "x"}, "generation"),
        ({"generation": -1}, "generation"),
        ({"generation": 2**64 - 1}, "generation"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bad_limits_are_a_422_that_names_the_field_and_change_nothing(engine, changes, field):
    """Judged as a whole: nothing is applied when one field is wrong."""
    before = engine.limits()
    status, body = engine.request("PUT", "/control/limits", {**WHOLE, "window_ms": 7, **changes})
    assert (status, json.loads(body)["field"]) == (422, field)
    assert json.loads(body)["message"]
    assert engine.limits() == before


@pytest.mark.parametrize("missing", [name for name in WHOLE if name != "generation"])
def test_limits_are_sent_whole(engine, missing):
    """A field that is left out is an error, and not a default."""
    body = {name: value for name, value in WHOLE.items() if name != missing}
    status, answer = engine.request("PUT", "/control/limits", body)
    assert (status, json.loads(answer)["field"]) == (422, missing)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"NaN", b"\xff"])
def test_bodies_that_are_no_limits(engine, body):
    """Never a 500."""
    assert engine.request("PUT", "/control/limits", body)[0] in (400, 422)


def test_a_change_is_answered_with_what_is_in_force(engine):
    """The generation is the engine's own; the same values again keep it; metrics agree."""
    before = engine.limits()["generation"]
    status, first = engine.put_limits(max_batch_tokens=256)
    assert (status, first["max_batch_tokens"], first["generation"]) == (200, 256, before + 1)
    assert engine.put_limits(max_batch_tokens=256)[1] == first
    assert engine.limits() == first
    assert engine.put_limits(max_batch_tokens=300, generation=40)[1]["generation"] == 41
    assert engine.put_limits(max_batch_tokens=310, generation=2)[1]["generation"] == 42
    metrics = engine.metrics()
    assert metrics['headway_limit{parameter="max_batch_tokens"}'] == 310
    assert metrics["headway_limits_generation"] == 42


@pytest.mark.parametrize("path", ["/control/limits", "/control/objectives", "/control/capacity"])
@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "Basic test-control-key", "Bearer"])
def test_control_needs_its_key(engine, path, authorization):
    """401, whatever is wrong with it."""
    status, body = engine.get(path, headers={"authorization": authorization})
    assert (status, "key" in json.loads(body)["message"]) == (401, True)


def test_control_is_closed_without_a_key_in_the_environment(tmp_path):
    """403 with words, also for those who guess an empty key."""
    with engine_server(tmp_path, command=fake_engine.COMMAND, env={"HEADWAY_CONTROL_KEY": ""}) as e:
        for authorization in ("", "Bearer ", "Bearer x"):
            status, body = e.get("/control/limits", headers={"authorization": authorization})
            assert (status, "HEADWAY_CONTROL_KEY" in body) == (403, True)
        assert e.get("/metrics")[0] == 200


def test_objectives_are_read_back_and_place_boundaries(engine):
    """A boundary exactly on the objective; another field is refused by name."""
    status, body = engine.request("PUT", "/control/objectives", {"ttft_ms": 410, "itl_ms": 33})
    assert (status, json.loads(body)) == (200, {"ttft_ms": 410, "itl_ms": 33, "e2e_ms": 0})
    assert json.loads(engine.get("/control/objectives")[1])["ttft_ms"] == 410
    metrics = engine.metrics()
    assert 'headway_time_to_first_token_seconds_bucket{le="0.41"}' in metrics
    assert metrics['headway_objective_seconds{objective="itl"}'] == 0.033
    for bad in ({"ttft": 1}, {"ttft_ms": -1}, {"ttft_ms": "x"}):
        status, body = engine.request("PUT", "/control/objectives", bad)
        assert (status, json.loads(body)["field"]) == (422, next(iter(bad)))


def test_capacity_is_what_was_reserved(engine):
    """Read by the controller to bound what it asks for."""
    capacity = json.loads(engine.get("/control/capacity")[1])
    assert capacity["kv_blocks"] == fake_engine.CAPACITY.kv_blocks
    assert engine.metrics()['headway_capacity{parameter="kv_blocks"}'] == fake_engine.CAPACITY.kv_blocks


def test_the_two_ports_are_two_applications(engine):
    """Nothing of control at the public port, nothing of the API at the other."""
    for path in ("/metrics", "/control/limits", "/healthz"):
        assert engine.get(path, management=False)[0] == 404
    assert engine.get("/v1/models")[0] == 404


async def test_health_is_logged_when_it_changes_and_not_at_each_probe(caplog):
    """With why; the probes go on every few seconds."""
    b = Bench()
    b.core.phase = Phase.READY
    app = control_app(b.core, b.telemetry, key="", stall_limit_s=60.0)
    caplog.set_level("INFO", "headway.control")
    b.core.submit([request()], Mailbox())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        for now_s, status in ((101.0, 200), (300.0, 503), (301.0, 503), (302.0, 503)):
            b.now_s = now_s
            assert (await client.get("/healthz")).status_code == status
        await b.report(Started("a", 0))
        assert (await client.get("/healthz")).status_code == 200
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("ERROR", 'health fit=True->False why="1 requests are pending and no step has ended for 200 s"'),
        ("INFO", "health fit=False->True why=ok"),
    ]
