"""Random traffic with cancels and limit flips: afterwards nothing is left over and the books balance.

HEADWAY_SOAK_S says for how long (8 seconds if it does not). The toy makes every answer checkable;
`bench/soak.py` does the same with the real model for half an hour.
"""

import json
import os

import pytest

from headway_engine.protocol import Metric, Outcome
from support import fake_engine
from support.client import judged
from support.engine_server import engine_server
from support.soak import Findings, Plan, Resident, soak
from support.traffic import COMPLETIONS, EMBEDDINGS, TENANTS, Ask, Law, alphabet_prompts

SOAK_S = float(os.environ.get("HEADWAY_SOAK_S", "8"))

LAW = Law(
    prompt=alphabet_prompts,
    most_prompt_tokens=200,
    most_output_tokens=120,
    schemas=False,  # the toy does not obey grammars
    slow_share=0.01,
    stalls=False,  # it takes a minute until a client that never reads is taken to be gone
    patience_s=0.1,
    pause_s=1.0,
)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 240)
async def test_nothing_is_left_over_after_random_traffic(tmp_path):
    """Gauges 0, arrived = finished + aborted + rejected + failed + in flight, memory flat, answers right."""
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"tenants": TENANTS}))
    plan = Plan(
        seconds=SOAK_S,
        law=LAW,
        least_requests=300,
        mean_pause_s=0.02,
        flip_every_s=0.1,
        probe_every_s=0.2,
        rest_every_s=SOAK_S / 2,
        probes=("abc", "stu"),
    )
    arguments = ("--tenants-file", str(tenants))
    env = {"FAKE_STEP_S": "0.002"}
    with engine_server(tmp_path, arguments=arguments, command=fake_engine.COMMAND, env=env) as engine:
        findings = await soak(engine, plan)
        assert engine.terminate() == 0
    assert findings.complaints == []
    assert findings.rests > 0  # two, where the machine keeps up
    # It had everything in it.
    ended = {outcome: findings.samples[f'{Metric.OUTCOME}{{outcome="{outcome}"}}'] for outcome in Outcome}
    assert min(ended[o] for o in (Outcome.FINISHED, Outcome.ABORTED, Outcome.REJECTED)) > 0
    assert min(findings.flips, findings.refused_flips, findings.probes, findings.outcomes["400"]) > 0
    assert findings.vectors > findings.embeddings > 0
    for process, points in findings.resident.items():
        growth, _ = findings.growth(process)
        assert growth < 0.3 * points[-1].bytes, f"the {process} grew by {growth:.0f} bytes"


def resident(bytes_per_sequence, jitter=0):
    """Half an hour of readings, a second apart, ten sequences each, with a warm-up of 100 MiB."""
    warm = 100 << 20
    return [
        Resident(
            float(t), 10 * t, warm + min(t, 300) * 300_000 + 10 * t * bytes_per_sequence + jitter * (t % 2)
        )
        for t in range(1800)
    ]


@pytest.mark.parametrize(("leak", "jitter", "seen"), [(0, 0, 0), (0, 6 << 20, 0), (4096, 6 << 20, 1)])
def test_a_leak_is_told_from_a_warm_up_and_from_jitter(leak, jitter, seen):
    """4 KiB a sequence is more than the bound; a warm-up that ends in the first third is nothing."""
    findings = Findings(resident={"core": resident(leak, jitter)})
    findings.judge_growth()
    assert len(findings.complaints) == seen


CHUNK = b'data: {"choices": [{"index": 0, "text": "%s", "finish_reason": %s}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "right"),
    [
        (CHUNK % (b"bc", b"null") + CHUNK % (b"d", b'"length"') + DONE, True),
        (CHUNK % (b"bc", b"null") + CHUNK % (b"d", b'"length"'), False),
        (CHUNK % (b"bc", b'"length"') + CHUNK % (b"d", b'"length"') + DONE, False),
        (CHUNK % (b"bcd", b"null") + DONE, False),
        (CHUNK % (b"bxd", b'"stop"') + DONE, False),
        (CHUNK % (b"bcd", b'"stop"') + b'data: {"error": {"message": "gone"}}\n\n', False),
        (DONE, False),
        (b"", False),
    ],
    ids=["right", "cut", "goes-on", "no-end", "wrong-text", "error", "no-choice", "nothing"],
)
def test_a_client_of_the_soak_sees_a_wrong_stream(body, right):
    """What the soak asks of an answer, so that its silence means something."""
    ask = Ask(path=COMPLETIONS, body=b'{"max_tokens": 3}', stream=True, expects=("bcd",))
    assert (judged(ask, 200, body).complaint == "") is right


def vectors(*rows, **changes):
    data = [{"index": i, "embedding": row} for i, row in enumerate(rows)]
    return json.dumps({"data": data, "usage": {"prompt_tokens": 9}} | changes).encode()


@pytest.mark.parametrize(
    ("body", "right"),
    [
        (vectors([0.6, 0.8], [1.0, 0.0], [0.6, 0.8]), True),
        (vectors([0.6, 0.8], "AACAPwAAAAA=", [0.6, 0.8]), True),
        (vectors([0.6, 0.8], [1.0, 0.0]), False),
        (vectors([0.6, 0.8], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]), False),
        (vectors([0.6, 0.8], [1.0, 0.0], [0.8, 0.6]), False),
        (vectors([0.6, 0.8], [2.0, 0.0], [0.6, 0.8]), False),
        (vectors([0.6, 0.8], [float("nan"), 0.0], [0.6, 0.8]), False),
        (vectors([0.6, 0.8], [1.0], [0.6, 0.8]), False),
        (vectors([], [], []), False),
        (vectors([0.6, 0.8], [1.0, 0.0], [0.6, 0.8], usage={"prompt_tokens": 2}), False),
        (vectors([0.6, 0.8], [1.0, 0.0], [0.6, 0.8]).replace(b'"index": 1', b'"index": 2'), False),
    ],
    ids=["right", "base64", "few", "many", "twins", "long", "nan", "ragged", "empty", "usage", "order"],
)
def test_a_client_of_the_soak_sees_wrong_vectors(body, right):
    """Three inputs, of which the first and the last are the same."""
    ask = Ask(path=EMBEDDINGS, body=b"{}", sequences=3, twins=(0, 2))
    assert (judged(ask, 200, body).complaint == "") is right


def test_no_server_error_passes_a_client_of_the_soak():
    ask = Ask(path=COMPLETIONS, body=b'{"max_tokens": 3}')
    assert judged(ask, 500, b"{}").complaint
    assert not judged(ask, 429, b"{}").complaint
    bad = Ask(path=COMPLETIONS, body=b"{", bad=True)
    assert judged(bad, 200, b"{}").complaint
    assert not judged(bad, 400, b'{"error": {}}').complaint
