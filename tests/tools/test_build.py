"""The builder of the control plane: what it reuses, what it refuses, when it builds anew."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """tools/kube/build.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("kube_build", ROOT / "tools/kube/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kube_build"] = module
    spec.loader.exec_module(module)
    return module


def program(path: Path, says: str) -> Path:
    """An executable that prints one line."""
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("go1.26.8", True),
        ("go1.27rc1", True),
        ("go2.0", True),
        ("go1.25.9", False),
        ("", False),
        ("devel", False),
    ],
)
def test_only_a_go_that_can_build_the_pins_is_used(build: ModuleType, version: str, good: bool) -> None:
    assert build.new_enough(version) is good


@pytest.mark.parametrize("lane", ["1.37", "1.34"])
def test_a_kubernetes_binary_is_told_the_version_that_its_lane_pins(build: ModuleType, lane: str) -> None:
    server = next(tool for tool in build.tools(lane) if tool.name == "kube-apiserver")
    flags = build.linker_flags(server)
    assert f"-X k8s.io/component-base/version.gitVersion=v{lane}." in flags
    assert f"-X k8s.io/client-go/pkg/version.gitMinor={lane.split('.')[1]}" in flags


def test_another_go_or_another_lane_is_another_binary(build: ModuleType, tmp_path: Path) -> None:
    places = {
        build.place(tool, version, tmp_path)
        for lane in ("1.37", "1.34")
        for tool in build.tools(lane)
        for version in ("go1.26.6", "go1.26.8")
    }
    # etcd and helm are the same in both lanes.
    assert len(places) == 2 * (2 + 2 * 3)


def test_given_binaries_are_used_where_they_fit_the_lane(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    tools = {tool.name: tool for tool in build.tools("1.37")}
    fits = program(tmp_path / "kube-apiserver", "Kubernetes v1.37.0")
    program(tmp_path / "kube-scheduler", "Kubernetes v1.33.1")
    etcd = program(tmp_path / "etcd", "etcd Version: 3.6.0")
    assert build.given(tools["kube-apiserver"], "1.37") == fits
    assert build.given(tools["etcd"], "1.37") == etcd
    assert build.given(tools["kube-scheduler"], "1.37") is None
    assert "Kubernetes v1.33.1, not v1.37" in capsys.readouterr().err
    assert build.given(tools["helm"], "1.37") is None


def test_nothing_is_built_when_only_asked(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    assert build.assets("1.37", may_build=False) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_shows_exactly_the_binaries(build: ModuleType, tmp_path: Path) -> None:
    binary = program(tmp_path / "etcd", "")
    folder = build.link({"etcd": binary}, tmp_path / "assets", "1.37")
    assert os.listdir(folder) == ["etcd"]
    assert (folder / "etcd").resolve() == binary.resolve()
    assert build.link({"etcd": binary}, tmp_path / "assets", "1.37") == folder
