"""Pods as processes: what a pod's author may rely on."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from headway_local.images import Image, Images
from headway_local.objects import Manifest, Token
from headway_local.pod import BackOff, PodOptions, PodProcess, mounts_work, rewrite
from headway_local.pod_status import Phase, Running, Waiting
from headway_local.volumes import Mount
from support.eventually import eventually
from support.pods import Objects, python_pod

WAIT_S = 30.0


def options(tmp_path: Path, *, bind_mounts: bool = False, back_off_s: float = 0.05) -> PodOptions:
    return PodOptions(
        images=Images(rules=(Image("python*", ("{python}",)),)),
        claims=tmp_path / "claims",
        back_off=BackOff(first_s=back_off_s, most_s=1.0),
        config_retry_s=0.02,
        bind_mounts=bind_mounts,
    )


class Started:
    """A pod that is stopped when the block ends, with every status it reported."""

    def __init__(self, pod: Manifest, tmp_path: Path, objects: Objects | None = None, **how: object) -> None:
        self.statuses: list[Manifest] = []
        self.process = PodProcess(
            pod,
            pod_ip="127.0.0.1",
            folder=tmp_path / "pod",
            source=objects or Objects(),
            options=options(tmp_path, **how),  # type: ignore[arg-type]
            on_status=self.statuses.append,
        )

    async def __aenter__(self) -> PodProcess:
        self.process.start()
        return self.process

    async def __aexit__(self, *error: object) -> None:
        await self.process.stop(0)


async def said(process: PodProcess, text: str) -> None:
    """Wait until the container has printed something."""
    await eventually(lambda: text in process.log_tail(1000))


async def test_a_job_that_succeeds_ends_in_succeeded_with_its_output_kept(tmp_path: Path) -> None:
    async with Started(python_pod("print('hello')", restartPolicy="Never"), tmp_path) as pod:
        facts = await pod.wait_for(lambda facts: facts.phase.final, WAIT_S)
    assert facts.phase is Phase.SUCCEEDED
    assert pod.log_tail() == "hello"
    state = pod.status["containerStatuses"][0]["state"]["terminated"]
    assert (state["exitCode"], state["reason"]) == (0, "Completed")


async def test_environment_comes_from_values_fields_config_maps_and_secrets(tmp_path: Path) -> None:
    code = "import os; print(*(os.environ[key] for key in ('GREETING', 'NAME', 'KEY', 'COLOUR')))"
    objects = Objects(config_maps={"c": {"colour": "blue"}}, secrets={"s": {"key": "hush"}})
    env = [
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "GREETING", "value": "hi-$(NAME)-$$(NAME)-$(NOBODY)"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
        {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "colour"}}},
    ]
    async with Started(python_pod(code, restartPolicy="Never", env=env), tmp_path, objects) as pod:
        await pod.wait_for(lambda facts: facts.phase.final, WAIT_S)
    assert pod.log_tail() == "hi-p-$(NAME)-$(NOBODY) p hush blue"


async def test_a_missing_secret_keeps_the_pod_waiting_until_it_appears(tmp_path: Path) -> None:
    objects = Objects()
    env = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}}]
    async with Started(python_pod("print('on')", restartPolicy="Never", env=env), tmp_path, objects) as pod:
        facts = await pod.wait_for(
            lambda f: f.state.__class__ is Waiting and "not found" in f.state.message, WAIT_S
        )
        assert facts.state.reason == "CreateContainerConfigError"
        objects.secrets["s"] = {"key": "x"}
        assert (await pod.wait_for(lambda facts: facts.phase.final, WAIT_S)).phase is Phase.SUCCEEDED


VOLUMES = [
    {"name": "conf", "configMap": {"name": "c"}},
    {"name": "scratch", "emptyDir": {}},
    {
        "name": "access",
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token"}},
                {
                    "downwardAPI": {
                        "items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]
                    }
                },
            ]
        },
    },
]
MOUNTS = [
    {"name": "conf", "mountPath": "/etc/hwtest", "readOnly": True},
    {"name": "scratch", "mountPath": "/hwtest-scratch"},
    {"name": "access", "mountPath": "/var/run/secrets/hwtest"},
]


async def test_volumes_are_seen_at_their_mount_paths_and_leave_no_trace_on_the_machine(
    tmp_path: Path,
) -> None:
    if not await mounts_work():
        pytest.skip("this user may not make mount namespaces")
    code = (
        "import pathlib as p; r=lambda f: p.Path(f).read_text();"
        "access = '/var/run/secrets/hwtest/';"
        "print(r('/etc/hwtest/a'), r(access + 'token'), r(access + 'namespace'));"
        "p.Path('/hwtest-scratch/x').write_text('1'); print(p.Path('/etc/passwd').exists());"
        "\ntry: p.Path('/etc/hwtest/b').write_text('')\nexcept OSError as e: print('read-only', e.errno)"
    )
    objects = Objects(config_maps={"c": {"a": "one"}}, token=Token("tok", 9e9))
    pod_spec = python_pod(code, restartPolicy="Never", volumes=VOLUMES, volumeMounts=MOUNTS)
    async with Started(pod_spec, tmp_path, objects, bind_mounts=True) as pod:
        await pod.wait_for(lambda facts: facts.phase.final, WAIT_S)
        assert (pod.folder / "volumes" / "scratch" / "x").read_text() == "1"
    assert pod.log_tail() == "one tok default\nTrue\nread-only 30"
    assert not Path("/etc/hwtest").exists()
    assert not Path("/hwtest-scratch").exists()


@pytest.mark.parametrize("bind_mounts", [False, True])
async def test_a_mount_never_hides_the_interpreter_and_its_packages(
    tmp_path: Path, bind_mounts: bool
) -> None:
    """A work tree below /tmp, and a pod with a volume at /tmp: the program runs, its arguments are moved."""
    if bind_mounts and not await mounts_work():
        pytest.skip("this user may not make mount namespaces")
    above = str(Path(sys.prefix).parent)
    code = "import msgspec, os, sys; print(os.environ['BESIDE']); print(sys.argv[1])"
    spec = python_pod(
        code,
        argument=f"--scratch={above}/x",
        restartPolicy="Never",
        volumes=[{"name": "scratch", "emptyDir": {}}],
        volumeMounts=[{"name": "scratch", "mountPath": above}],
        env=[{"name": "BESIDE", "value": above + "x"}],
    )
    async with Started(spec, tmp_path, Objects(), bind_mounts=bind_mounts) as pod:
        await pod.wait_for(lambda facts: facts.phase.final, WAIT_S)
    assert pod.log_tail() == f"{above}x\n--scratch={pod.folder / 'volumes' / 'scratch' / 'x'}"


async def test_without_mounts_paths_in_arguments_and_environment_lead_to_the_volume(tmp_path: Path) -> None:
    code = "import os, sys; print(open(sys.argv[1].split('=')[1]).read(), open(os.environ['F']).read())"
    objects = Objects(config_maps={"c": {"a": "one"}})
    spec = python_pod(
        code,
        restartPolicy="Never",
        volumes=VOLUMES[:1],
        volumeMounts=MOUNTS[:1],
        env=[{"name": "F", "value": "/etc/hwtest/a"}],
    )
    spec["spec"]["containers"][0]["args"].append("--file=/etc/hwtest/a")
    async with Started(spec, tmp_path, objects) as pod:
        await pod.wait_for(lambda facts: facts.phase.final, WAIT_S)
    assert pod.log_tail() == "one one"


async def test_a_changed_config_map_reaches_the_running_pod_when_volumes_are_refreshed(
    tmp_path: Path,
) -> None:
    objects = Objects(config_maps={"c": {"a": "one"}})
    spec = python_pod("import time; time.sleep(600)", volumes=VOLUMES[:1], volumeMounts=MOUNTS[:1])
    async with Started(spec, tmp_path, objects) as pod:
        await pod.wait_ready(WAIT_S)
        file = pod.folder / "volumes" / "conf" / "a"
        assert file.read_text() == "one"
        objects.config_maps["c"] = {"a": "two", "b": "new"}
        await pod.refresh_volumes()
        assert file.read_text() == "two"
        assert (file.parent / "b").read_text() == "new"


async def test_a_crashing_container_is_restarted_at_once_and_then_backs_off(tmp_path: Path) -> None:
    async with Started(python_pod("raise SystemExit(3)"), tmp_path, back_off_s=600.0) as pod:
        facts = await pod.wait_for(lambda f: isinstance(f.state, Waiting) and f.restarts == 1, WAIT_S)
        assert facts.state == Waiting("CrashLoopBackOff", "back-off 1s restarting failed container=c")
        assert facts.last_end is not None
        assert facts.last_end.exit_code == 3
        assert pod.status["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 3
        assert pod.status["phase"] == "Running"


SERVER = """
import http.server, os, signal, sys, threading
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == '/break': H.broken = True
        self.send_response(500 if H.broken and self.path == '/live' else 200)
        self.end_headers()
    broken = False
s = http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H)
print('serving', flush=True); s.serve_forever()
"""


def probe(path: str, port: int, **more: object) -> Manifest:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": 0.05, **more}


async def test_a_failing_liveness_probe_restarts_the_container_after_its_threshold(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    port = unused_tcp_port
    spec = python_pod(SERVER, argument=str(port), terminationGracePeriodSeconds=1)
    spec["spec"]["containers"][0] |= {
        "startupProbe": probe("/", port, failureThreshold=600),
        "readinessProbe": probe("/", port),
        "livenessProbe": probe("/live", port, failureThreshold=3),
    }
    async with Started(spec, tmp_path) as pod:
        await pod.wait_ready(WAIT_S)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /break HTTP/1.0\r\n\r\n")
        await writer.drain()
        await pod.wait_for(lambda facts: facts.restarts == 1 and facts.ready, WAIT_S)
        writer.close()
        assert "liveness probe failed: HTTP probe failed with statuscode: 500" in pod.log_tail()


async def test_a_pod_is_not_ready_before_its_readiness_probe_passes(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    spec = python_pod("import time; print('up', flush=True); time.sleep(600)")
    spec["spec"]["containers"][0]["readinessProbe"] = probe("/", unused_tcp_port)
    async with Started(spec, tmp_path) as pod:
        await said(pod, "up")
        assert isinstance(pod.facts.state, Running)
        assert not pod.facts.ready
        ready = next(c for c in pod.status["conditions"] if c["type"] == "Ready")
        assert (ready["status"], ready["reason"]) == ("False", "ContainersNotReady")


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *a: print('term', flush=True))
print('up', flush=True)
while True: time.sleep(1)
"""


async def test_stop_runs_pre_stop_then_term_and_kills_what_stays(tmp_path: Path) -> None:
    spec = python_pod(STUBBORN, terminationGracePeriodSeconds=1)
    hook = {"exec": {"command": ["python", "-c", "print(1); open('stopped','w')"]}}
    spec["spec"]["containers"][0] |= {"lifecycle": {"preStop": hook}, "workingDir": str(tmp_path)}
    async with Started(spec, tmp_path) as pod:
        await said(pod, "up")
        await pod.stop()
        assert (tmp_path / "stopped").exists()
        assert "term" in pod.log_tail()
        assert pod.status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
        assert pod.facts.phase is Phase.FAILED
        assert pod.pid is None


async def test_children_of_the_container_end_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys;"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(c.pid, flush=True)"
    )
    async with Started(python_pod(code, restartPolicy="Never"), tmp_path) as pod:
        await pod.wait_for(lambda facts: facts.phase.final, WAIT_S)
    await gone(int(pod.log_tail()))


async def gone(pid: int) -> None:
    """Wait until a process is no more (or a zombie that waits for its reaper)."""

    def ended() -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state == "Z"

    await eventually(ended)


RUNNER = """
import asyncio, sys
from pathlib import Path
from headway_local.images import Image, Images
from headway_local.pod import PodOptions, PodProcess
from support.eventually import eventually
from support.pods import Objects, python_pod
async def main():
    code = "import os, subprocess, sys;"
    code += "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    code += "print(os.getpid(), c.pid, flush=True); c.wait()"
    pod = PodProcess(python_pod(code), pod_ip="127.0.0.1", folder=Path(sys.argv[1]), source=Objects(),
                     options=PodOptions(images=Images(rules=(Image("python*", ("{python}",)),))))
    pod.start()
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_nothing_survives_a_runner_that_is_killed(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUNNER, str(tmp_path), env={**os.environ, "PYTHONPATH": tests}
    )
    log = tmp_path / "log.txt"
    await eventually(lambda: log.exists() and len(log.read_text().split()) == 2)
    pids = [int(word) for word in log.read_text().split()]
    runner.send_signal(signal.SIGKILL)
    await runner.wait()
    for pid in pids:
        await gone(pid)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/etc/x/f", "/v/conf/f"),
        ("/etc/x", "/v/conf"),
        ("--file=/etc/x/f", "--file=/v/conf/f"),
        ("/etc/xy", "/etc/xy"),
        ("a=b", "a=b"),
        ("/etc/x/deep/f", "/v/deep/f"),
    ],
)
def test_rewriting_touches_only_paths_below_a_mount(word: str, expected: str) -> None:
    mounts = [Mount("/etc/x", Path("/v/conf"), True), Mount("/etc/x/deep", Path("/v/deep"), True)]
    assert rewrite(word, mounts) == expected
