"""Limits of control groups, read from trees of files as the kernel shows them, in both versions."""

import os
from pathlib import Path

import pytest

from headway_engine import cgroup

STAT = "anon 5\ninactive_file 100\ntotal_inactive_file 300\n"


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def member_of(tmp_path: Path, *lines: str) -> Path:
    member = tmp_path / "member"
    member.write_text("".join(f"{line}\n" for line in lines))
    return member


def test_the_tightest_group_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    """Version 2: the parent's limit is tighter; no limit anywhere is None."""
    mount, member = tmp_path / "fs", member_of(tmp_path, "0::/pod/container")
    used = {"memory.current": "900", "memory.stat": STAT}
    group(mount / "pod" / "container", {"memory.max": "max", **used})
    assert cgroup.free_memory_bytes(member, mount) is None
    group(mount / "pod", {"memory.max": "2000", **used})
    assert cgroup.free_memory_bytes(member, mount) == 1200
    group(mount / "pod" / "container", {"memory.max": "1500"})
    assert cgroup.free_memory_bytes(member, mount) == 700
    group(mount / "pod" / "container", {"memory.max": "800"})
    assert cgroup.free_memory_bytes(member, mount) == 0, "a full group has nothing free"
    assert cgroup.free_memory_bytes(tmp_path / "absent", mount) is None


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({"memory.max": "2000", "memory.high": "1500"}, 700),
        ({"memory.max": "1500", "memory.high": "2000"}, 700),
        ({"memory.max": "max", "memory.high": "1500"}, 700),
        ({"memory.max": "1500", "memory.high": "max"}, 700),
        ({"memory.max": "max", "memory.high": "max"}, None),
    ],
)
def test_what_the_kernel_slows_down_at_is_a_limit_too(
    limits: dict[str, str], free: int | None, tmp_path: Path
) -> None:
    """memory.high, which Kubernetes sets with memory QoS, and systemd as MemoryHigh."""
    mount, member = tmp_path / "fs", member_of(tmp_path, "0::/pod")
    group(mount / "pod", {**limits, "memory.current": "900", "memory.stat": STAT})
    assert cgroup.free_memory_bytes(member, mount) == free


def test_memory_of_version_1(tmp_path: Path) -> None:
    """Without a limit it says a number near 2^63."""
    mount = tmp_path / "fs"
    member = member_of(tmp_path, "7:cpu,cpuacct:/pod", "4:memory:/pod/container", "0::/")
    used = {"memory.usage_in_bytes": "900", "memory.stat": STAT}
    group(mount / "memory" / "pod" / "container", {"memory.limit_in_bytes": "9223372036854771712", **used})
    assert cgroup.free_memory_bytes(member, mount) is None
    group(mount / "memory" / "pod", {"memory.limit_in_bytes": "1000", **used})
    assert cgroup.free_memory_bytes(member, mount) == 400


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path) -> None:
    """Version 1 without a namespace: the membership names the host's folder, which is not there."""
    mount = tmp_path / "fs"
    member = member_of(tmp_path, "4:memory:/kubepods/pod1/c", "3:cpu,cpuacct:/kubepods/pod1/c")
    group(
        mount / "memory",
        {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900", "memory.stat": STAT},
    )
    group(mount / "cpu,cpuacct", {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"})
    assert cgroup.free_memory_bytes(member, mount) == 400
    assert cgroup.quota_cores(member, mount) == 2.5


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_the_cpu_quota_of_version_1(folder: str, tmp_path: Path) -> None:
    """Mounted under one name or both; -1 is no limit; the tightest of the groups counts."""
    mount, member = tmp_path / "fs", member_of(tmp_path, "3:cpu,cpuacct:/pod/container")
    own, pod = mount / folder / "pod" / "container", mount / folder / "pod"
    group(own, {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"})
    assert cgroup.quota_cores(member, mount) is None
    group(pod, {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"})
    assert cgroup.quota_cores(member, mount) == 4
    group(own, {"cpu.cfs_quota_us": "75000", "cpu.cfs_period_us": "50000"})
    assert cgroup.quota_cores(member, mount) == 1.5


def test_the_cpu_quota_of_version_2(tmp_path: Path) -> None:
    mount, member = tmp_path / "fs", member_of(tmp_path, "0::/pod/container")
    group(mount / "pod" / "container", {"cpu.max": "max 100000"})
    assert cgroup.quota_cores(member, mount) is None
    group(mount / "pod", {"cpu.max": "300000 100000"})
    assert cgroup.quota_cores(member, mount) == 3
    assert cgroup.quota_cores(tmp_path / "absent", mount) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (100.0, 8), (2.9, 2), (0.3, 1)])
def test_cores_are_those_of_the_affinity_within_the_quota(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole cores, rounded down, and never none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cgroup, "quota_cores", lambda: quota)
    assert cgroup.usable_cores() == cores
