"""A call of several sequences, from its body to its answer: it is refused whole or served whole."""

import json

import httpx

from support import fake_engine
from support.engine_server import engine_server


def test_a_stream_that_has_begun_is_not_cut_by_the_queue_timeout(tmp_path):
    """Three samples and room for one: the timeout comes into force while the first is being sent."""
    body = {"prompt": "abc", "max_tokens": 40, "n": 3, "stream": True}
    env = {"FAKE_STEP_S": "0.01"}
    with engine_server(tmp_path, command=fake_engine.COMMAND, env=env) as engine:
        engine.put_limits(max_batch_sequences=1, queue_timeout_ms=0)
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            events = [next(lines)]
            status, _ = engine.put_limits(queue_timeout_ms=1)
            assert status == 200
            events += lines
    assert [line for line in events if line][-1] == "data: [DONE]"
    choices = [c for line in events if "choices" in line for c in json.loads(line[6:])["choices"]]
    assert {c["index"] for c in choices if c["finish_reason"] == "length"} == {0, 1, 2}
