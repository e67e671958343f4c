"""A real Kubernetes control plane in a network namespace: etcd, API server, controllers, scheduler.

`Plane.start` returns when the API server is ready and the default service account exists. Everything is ended
by process id; the data lies in memory where the machine offers that.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.certs import Authority, service_account_keys
from headway_local.guard import GUARD
from headway_local.network import NetworkNamespace

ROOT = Path(__file__).resolve().parents[2]
PLANE_IP = "10.244.0.1"
NODE_IP = "10.244.0.2"
SERVICE_IP = "10.96.0.1"  # of the Service `kubernetes`
SERVICE_RANGE = "10.96.0.0/16"
API_PORT = 6443
RANGES = ((PLANE_IP, 16), (SERVICE_IP, 16))
SERVER = f"https://{PLANE_IP}:{API_PORT}"
READY_TIMEOUT_S = 90.0
FOLDER_PREFIX = "headway-plane-"

AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""


class PlaneError(RuntimeError):
    """The plane cannot be had here, or one of its processes ended."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One request that the API server answered."""

    user: str
    verb: str
    resource: str  # resource or resource/subresource; the path where it is no resource
    namespace: str
    name: str
    code: int
    time_s: float  # epoch, when the request came
    agent: str

    @property
    def writes(self) -> bool:
        return self.verb in ("create", "update", "patch", "delete", "deletecollection")


def binaries(lane: str = "1.37") -> Path:
    """Folder of the built control plane; PlaneError with the command that builds it."""
    command = [sys.executable, str(ROOT / "tools/kube/build.py"), "--lane", lane, "--check", "--print-dir"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise PlaneError(done.stderr.strip())
    return Path(done.stdout.strip())


def _sweep(base: Path) -> None:
    """Remove what test runs that were killed have left in memory."""
    for folder in base.glob(f"{FOLDER_PREFIX}*-*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


class Plane:
    """A running control plane. `kubectl` and `helm` run inside its network."""

    def __init__(self, assets: Path, namespace: NetworkNamespace, folder: Path) -> None:
        self.assets = assets
        self.network = namespace
        self.folder = folder
        self.audit_path = folder / "audit.jsonl"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}
        self.authority = Authority(folder, SERVER)
        self.admin = self.authority.client("admin", "admin", "system:masters")

    @classmethod
    def start(cls, lane: str = "1.37") -> "Plane":
        """Start everything and wait until pods may be created. PlaneError where that cannot be."""
        assets = binaries(lane)
        try:
            namespace = NetworkNamespace(RANGES)
        except OSError as error:
            how = "run as root, or under `unshare --map-root-user --net`"
            raise PlaneError(f"this user may not make a network namespace ({error}): {how}") from error
        memory = Path("/dev/shm")
        base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        _sweep(base)
        folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=base))
        plane = cls(assets, namespace, folder)
        try:
            plane._start()
        except BaseException:
            plane.stop()
            raise
        return plane

    def _start(self) -> None:
        folder, etcd = self.folder, "http://127.0.0.1:2379"
        self.authority.server(
            "apiserver",
            ["127.0.0.1", PLANE_IP, SERVICE_IP],
            ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"],
        )
        controllers = self.authority.client("controllers", "system:kube-controller-manager")
        scheduler = self.authority.client("scheduler", "system:kube-scheduler")
        service_account_keys(folder)
        (folder / "audit.yaml").write_text(AUDIT_POLICY)
        self.run(
            "etcd",
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync=true",
        )
        self.run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=0.0.0.0",
            f"--secure-port={API_PORT}",
            f"--advertise-address={PLANE_IP}",
            f"--tls-cert-file={folder}/apiserver.crt",
            f"--tls-private-key-file={folder}/apiserver.key",
            f"--client-ca-file={folder}/ca.crt",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder}/sa.pub",
            f"--service-account-signing-key-file={folder}/sa.key",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--enable-aggregator-routing=true",
            f"--audit-policy-file={folder}/audit.yaml",
            f"--audit-log-path={self.audit_path}",
        )
        self.wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok", "/readyz")
        self.run(
            "kube-controller-manager",
            f"--kubeconfig={controllers}",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={folder}/sa.key",
            f"--root-ca-file={folder}/ca.crt",
            "--bind-address=127.0.0.1",
            "--authentication-skip-lookup=true",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=20s",
        )
        self.run(
            "kube-scheduler",
            f"--kubeconfig={scheduler}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--authentication-skip-lookup=true",
        )
        self.wait_for(
            lambda: self.kubectl("-n", "default", "get", "sa", "default", check=False).returncode == 0,
            "the default service account",
        )

    # Processes.

    def run(self, name: str, *arguments: str) -> None:
        """Start one of the plane's programs; its output goes to NAME.log in the folder."""
        self._commands[name] = list(arguments)
        with self.network.entered(), (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(self.assets / name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            GUARD.add(self.processes[name].pid)

    def kill(self, name: str) -> None:
        """kill -9, and wait for the end."""
        self.processes[name].kill()
        self.processes[name].wait()

    def restart(self, name: str) -> None:
        """Start a program that was killed, with the arguments it had."""
        self.run(name, *self._commands[name])

    def stop(self) -> None:
        """End every process and remove the folder."""
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            process = self.processes.get(name)
            if process is None or process.poll() is not None:
                continue
            # The API server would wait a minute for its watchers.
            process.send_signal(signal.SIGKILL if name == "kube-apiserver" else signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.network.close()
        if os.environ.get("HEADWAY_KEEP_PLANE"):
            sys.stderr.write(f"kept: {self.folder}\n")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Poll until true; PlaneError with log tails when a process of the plane ends or time runs out."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self.log_tail(name)}" for name in dead or self.processes)
                reason = f"{', '.join(dead)} ended" if dead else f"no {what} within {timeout_s:g} s"
                raise PlaneError(f"{reason}\n{logs}")
            time.sleep(0.1)

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The end of a program's log."""
        text = (self.folder / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    # What tests ask of it.

    def command(
        self, *argv: str, stdin: str | None = None, check: bool = True, timeout_s: float = 290.0, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program in the plane's network with the admin's kubeconfig; AssertionError where it fails."""
        environment = {**os.environ, "KUBECONFIG": str(self.admin), **env}
        for name in ("HOME", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"):
            environment[name] = str(self.folder / "home")
        with self.network.entered():
            done = subprocess.run(
                argv,
                input=stdin,
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                timeout=timeout_s,
            )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
        return done

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, kubeconfig: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """kubectl of the virtual environment."""
        program = Path(sys.executable).with_name("kubectl")
        return self.command(
            str(program), "--kubeconfig", str(kubeconfig or self.admin), *arguments, stdin=stdin, check=check
        )

    def helm(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """The built helm."""
        return self.command(str(self.assets / "helm"), *arguments, check=check)

    def objects(self, *arguments: str) -> Any:
        """`kubectl get -o json`, parsed: the object, or the items of a list."""
        answer = json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)
        return answer["items"] if answer["kind"] == "List" else answer

    def apply(self, *manifests: dict[str, Any]) -> None:
        """`kubectl apply` of manifests."""
        bundle = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(bundle))

    def audit(self, *, user: str | None = None, since_s: float = 0.0) -> list[AuditEntry]:
        """Requests that the API server has logged, of one user (a prefix fits) and from a moment on."""
        entries = []
        for line in self.audit_path.read_text().splitlines():
            try:
                raw = json.loads(line)
            except ValueError:
                continue  # the last line may be half written
            entry = _entry(raw)
            if (user is None or entry.user.startswith(user)) and entry.time_s >= since_s:
                entries.append(entry)
        return entries

    def writes(self, user: str, since_s: float) -> list[AuditEntry]:
        """What a user wrote from a moment on."""
        return [entry for entry in self.audit(user=user, since_s=since_s) if entry.writes]

    def forbidden(self, user: str | None = None, since_s: float = 0.0) -> list[AuditEntry]:
        """Requests answered with 403."""
        return [entry for entry in self.audit(user=user, since_s=since_s) if entry.code == 403]


def _entry(raw: dict[str, Any]) -> AuditEntry:
    ref = raw.get("objectRef") or {}
    resource = ref.get("resource") or raw.get("requestURI", "")
    if ref.get("subresource"):
        resource += f"/{ref['subresource']}"
    received = datetime.fromisoformat(raw["requestReceivedTimestamp"].replace("Z", "+00:00"))
    return AuditEntry(
        user=raw["user"]["username"],
        verb=raw["verb"],
        resource=resource,
        namespace=ref.get("namespace", ""),
        name=ref.get("name", ""),
        code=(raw.get("responseStatus") or {}).get("code", 0),
        time_s=received.timestamp(),
        agent=raw.get("userAgent", ""),
    )
