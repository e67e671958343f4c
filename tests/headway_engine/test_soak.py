"""Random traffic with cancels and limit flips: afterwards nothing is left over and the books balance.

HEADWAY_SOAK_S says for how long (8 seconds if it does not). The toy makes every answer checkable;
`bench/soak.py` does the same with the real model for half an hour.
"""

import json
import os

import pytest

from headway_engine.protocol import Metric, Outcome
from support import fake_engine
from support.engine_server import engine_server
from support.soak import Plan, soak
from support.traffic import TENANTS, Law, alphabet_prompts

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
    assert findings.rests == 2
    # It had everything in it.
    ended = {outcome: findings.samples[f'{Metric.OUTCOME}{{outcome="{outcome}"}}'] for outcome in Outcome}
    assert min(ended[o] for o in (Outcome.FINISHED, Outcome.ABORTED, Outcome.REJECTED)) > 0
    assert min(findings.flips, findings.refused_flips, findings.probes, findings.outcomes["400"]) > 0
    for process, points in findings.resident.items():
        growth, _ = findings.growth(process)
        assert growth < 0.3 * points[-1].bytes, f"the {process} grew by {growth:.0f} bytes"
