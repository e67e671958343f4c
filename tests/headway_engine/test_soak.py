"""Random traffic with cancels and limit flips: afterwards nothing is left over and the books balance.

HEADWAY_SOAK_S says for how long (8 seconds if it does not): half an hour of it is part of a release.
"""

import asyncio
import itertools
import json
import os
import random
import time
from pathlib import Path

import httpx
import pytest

from support import fake_engine
from support.engine_server import engine_server, wait_until

SOAK_S = float(os.environ.get("HEADWAY_SOAK_S", "8"))
CLIENTS = 24
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def client(http, chance, until_s, seen):
    """Ask again and again; hang up in a fifth of the cases; check what comes otherwise."""
    while time.monotonic() < until_s:
        start = chance.choice(ALPHABET[:20])
        body = {
            "prompt": "x " * chance.randrange(100) + start,
            "max_tokens": chance.randrange(1, 120),
            "stream": chance.random() < 0.5,
            "n": chance.choice([1, 1, 1, 2, 4]),
        }
        leaves = chance.random() < 0.2
        try:
            patience_s = chance.random() * 0.2 if leaves else 60
            answer = await asyncio.wait_for(http.post("/v1/completions", json=body), patience_s)
        except TimeoutError:
            assert leaves, "an answer took a minute"
            seen.append("left")
            continue
        seen.append(answer.status_code)
        if answer.status_code == 200 and not body["stream"]:
            expected = (ALPHABET * 6)[ALPHABET.index(start) + 1 :][: body["max_tokens"]]
            assert {c["text"] for c in answer.json()["choices"]} == {expected}


async def flip(engine, until_s):
    """New limits every 100 ms, down to one sequence and back."""
    headers = {"authorization": f"Bearer {engine.key}"}
    async with httpx.AsyncClient(base_url=engine.management_url, headers=headers, timeout=60) as http:
        limits = (await http.get("/control/limits")).json()
        for tokens, sequences in itertools.cycle([(2048, 64), (16, 1), (100, 30)]):
            if time.monotonic() > until_s:
                return
            changes = {
                "max_batch_tokens": tokens,
                "max_batch_sequences": sequences,
                "max_queued_requests": 40,
            }
            answer = await http.put("/control/limits", content=json.dumps({**limits, **changes}))
            assert answer.status_code == 200
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 240)
async def test_nothing_is_left_over_after_random_traffic(tmp_path):
    """Gauges 0, arrived = finished + aborted + rejected + failed, memory flat, every answer right."""
    seen: list[object] = []
    with engine_server(tmp_path, command=fake_engine.COMMAND, env={"FAKE_STEP_S": "0.002"}) as engine:
        processes = (engine.process.pid, engine.core_pid)
        async with httpx.AsyncClient(base_url=engine.url, timeout=120) as http:

            async def run(seconds):
                until_s = time.monotonic() + seconds
                clients = (client(http, random.Random(i), until_s, seen) for i in range(CLIENTS))
                await asyncio.gather(flip(engine, until_s), *clients)

            await run(SOAK_S / 2)
            half_way = sum(map(resident_bytes, processes))
            await run(SOAK_S / 2)
            at_the_end = sum(map(resident_bytes, processes))

        def quiet():
            m = engine.metrics()
            gauges = ("requests_running", "requests_waiting", "queued_tokens", "kv_used_blocks")
            return all(m[f"headway_{gauge}"] == 0 for gauge in gauges)

        wait_until(quiet, "all gauges are 0")
        m = engine.metrics()
    outcomes = {k.split('"')[1]: v for k, v in m.items() if k.startswith("headway_requests_total")}
    assert m["headway_requests_arrived_total"] == sum(outcomes.values())
    assert outcomes["failed"] == 0
    assert outcomes["aborted"] > 0
    assert outcomes["finished"] > 0
    assert set(seen) <= {200, 429, "left"}
    assert at_the_end < 1.3 * half_way
