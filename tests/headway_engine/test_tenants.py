"""Tenants of a real engine: who a key makes them, what their limits refuse, what the metrics say of them."""

import json
import threading
from pathlib import Path

import httpx
import msgspec
import pytest

from headway_engine.protocol import Metric
from headway_engine.tenants import Fairness, Tenant, TenantPolicy
from support import fake_engine
from support.engine_server import Engine, engine_server, wait_until

TENANTS = {
    "fairness": "VirtualTokenCounter",
    "tenants": {"gold": {"weight": 4, "priority": 10}, "batch": {"weight": 1, "max_queued_requests": 2}},
}
KEYS = {"gold": "gold-key\ngold-key-2\n", "batch": "batch-key\n", "guest": "guest-key\n"}


def written(folder: Path, tenants: dict = TENANTS, keys: dict[str, str] = KEYS) -> list[str]:
    """The engine's arguments for these tenants and keys, put into files."""
    (folder / "keys").mkdir()
    for name, text in keys.items():
        (folder / "keys" / name).write_text(text)
    (folder / "tenants.json").write_text(json.dumps(tenants))
    return [f"--tenants-file={folder / 'tenants.json'}", f"--keys-file={folder / 'keys'}"]


def ask(engine: Engine, key: str | None, *, tokens: int = 5) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": "abc", "max_tokens": tokens}
    return httpx.post(engine.url + "/v1/completions", json=body, headers=headers, timeout=60)


def tenant_tokens(engine: Engine) -> dict[tuple[str, str], float]:
    """(tenant, kind) to tokens."""
    found = {}
    for name, value in engine.metrics().items():
        if name.startswith(Metric.TENANT_TOKENS):
            kind, tenant = (part.split("=")[1].strip('"') for part in name.split("{")[1][:-1].split(","))
            found[tenant, kind] = value
    return found


def test_keys_make_tenants_and_their_tokens_are_counted_apart(tmp_path: Path) -> None:
    """Two keys are two tenants; whoever is not declared shares one series; no known key is a 401."""
    with engine_server(tmp_path, arguments=written(tmp_path), command=fake_engine.COMMAND) as engine:
        assert tenant_tokens(engine) == {
            (t, k): 0 for t in ("gold", "batch") for k in ("prompt", "output")
        }, "declared tenants are there before they ask"
        for key in (None, "wrong", "gold-key-3", "gold-key gold-key-2"):
            refused = ask(engine, key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        for key, tokens in (("gold-key", 5), ("gold-key-2", 2), ("batch-key", 3), ("guest-key", 4)):
            assert ask(engine, key, tokens=tokens).status_code == 200
        found = tenant_tokens(engine)
        assert {t: found[t, "output"] for t, _ in found} == {"gold": 7, "batch": 3, "(others)": 4}


def test_a_tenant_over_its_queue_cap_is_refused_with_its_limit_named(tmp_path: Path) -> None:
    """429 for the tenant that has too many waiting, while another is served."""
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"max_batch_sequences": 1}))
    with engine_server(
        tmp_path,
        arguments=[*written(tmp_path), f"--limits-file={limits}"],
        command=fake_engine.COMMAND,
        env={"FAKE_STEP_S": "0.02"},
    ) as engine:
        answers: list[int] = []

        def client(key: str, tokens: int) -> threading.Thread:
            thread = threading.Thread(
                target=lambda: answers.append(ask(engine, key, tokens=tokens).status_code)
            )
            thread.start()
            return thread

        headers = {"authorization": "Bearer batch-key"}
        body = {"prompt": "abc", "max_tokens": 900, "stream": True}  # longer than the test takes
        url = engine.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as running:
            assert running.status_code == 200  # its first token is there
            threads = [client("batch-key", 1) for _ in range(2)]
            wait_until(lambda: engine.metrics()[Metric.WAITING] == 2, "two wait")
            refused = ask(engine, "batch-key")
            assert ask(engine, "gold-key", tokens=1).status_code == 200
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert (
            "requests of tenant 'batch' are waiting and its limit is 2" in refused.json()["error"]["message"]
        )
        for thread in threads:
            thread.join(60)
        assert answers == [200, 200]


def test_a_new_key_in_the_folder_is_known_and_an_old_one_is_not_without_a_restart(tmp_path: Path) -> None:
    with engine_server(tmp_path, arguments=written(tmp_path), command=fake_engine.COMMAND) as engine:
        assert ask(engine, "gold-key").status_code == 200
        (tmp_path / "keys" / "gold").write_text("fresh-key\n")
        wait_until(lambda: ask(engine, "fresh-key").status_code == 200, "the new key lets in")
        assert ask(engine, "gold-key").status_code == 401


@pytest.mark.parametrize("option", ["--tenants-file", "--keys-file"])
def test_a_bad_file_ends_the_engine_with_words(tmp_path: Path, option: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"tenants": {"gold": {"wight": 4}}}')
    with engine_server(
        tmp_path, arguments=[f"{option}={bad}"], command=fake_engine.COMMAND, wait_ready=False
    ) as engine:
        assert engine.process.wait(60) == 1
        assert f"{option} {bad}: " in engine.log()


def test_the_policy_of_a_file_is_that_of_its_words() -> None:
    policy = msgspec.json.decode(json.dumps(TENANTS), type=TenantPolicy)
    assert policy.fairness is Fairness.VIRTUAL_TOKEN_COUNTER
    assert policy.of("gold") == Tenant(weight=4.0, priority=10)
    assert policy.of("nobody") == Tenant()


@pytest.mark.parametrize(
    "tenant",
    [
        {"weight": 0},
        {"weight": -1},
        {"tokens_per_s": -1},
        {"weight": "4"},
        {"share": 1},
        {"max_queued_requests": -1},
        {"max_queued_tokens": -1},
        {"burst_tokens": -1},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(tenant: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps({"tenants": {"a": tenant}}), type=TenantPolicy)
