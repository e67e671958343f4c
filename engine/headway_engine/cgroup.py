"""What the control groups of this process leave it: memory in bytes, and processor cores.

Reads versions 1 and 2, the process's own group and those above it, and takes the tightest. Knows nothing of
what the memory or the cores are for. On a system without control groups there is no limit.
"""

import os
from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number near 2^63."""


def free_memory_bytes(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> int | None:
    """The smallest limit minus use over this process's group and those above it; None without any limit.

    `memory.high` counts as a limit: above it the kernel does not kill, but slows every allocation down
    until the engine stands still. Page cache counts as free: the kernel gives it back.
    """
    free = [
        found
        for version, group in _groups(membership, mount, "memory")
        if (found := _group_free_bytes(version, group)) is not None
    ]
    return min(free, default=None)


def quota_cores(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> float | None:
    """The smallest CPU quota over this process's group and those above it, in cores; None without any."""
    quotas = [
        found
        for version, group in _groups(membership, mount, "cpu")
        if (found := _group_cores(version, group)) is not None
    ]
    return min(quotas, default=None)


def usable_cores() -> int:
    """Cores this process may run on, by affinity and by the CPU quota, at least one. A quota is rounded
    down: more threads than it allows only throttle each other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _groups(membership: Path, mount: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of each group that may limit this process, from its own one up.

    In a container the folder that `membership` names is often not there, because only the container's own
    part of the tree is mounted; then the group at the mount is the container's.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            version, roots = 2, [mount]
        elif controller in controllers.split(","):
            # Controllers that are mounted together have one folder, often with a link for each of them.
            version, roots = 1, [mount / controller, mount / controllers]
        else:
            continue
        root = next((root for root in roots if root.is_dir()), roots[0])
        folder = root / place.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                yield version, group
            if group == root:
                break


def _group_free_bytes(version: int, group: Path) -> int | None:
    if version == 2:
        limits = [_number(group / "memory.max"), _number(group / "memory.high")]
        use, cache_key = _number(group / "memory.current"), "inactive_file"
    else:
        limits = [_number(group / "memory.limit_in_bytes")]
        use, cache_key = _number(group / "memory.usage_in_bytes"), "total_inactive_file"
    limit = min((each for each in limits if each is not None and each < _NO_LIMIT_BYTES), default=None)
    if limit is None or use is None:
        return None
    try:
        statistics = (group / "memory.stat").read_text().splitlines()
    except OSError:
        statistics = []
    cache = next((int(line.split()[1]) for line in statistics if line.split()[0] == cache_key), 0)
    return max(0, limit - use + cache)


def _group_cores(version: int, group: Path) -> float | None:
    if version == 2:
        try:
            quota_text, period_text = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            return None
        return None if quota_text == "max" else int(quota_text) / int(period_text)
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    if quota is None or not period or quota < 0:  # -1: no limit
        return None
    return quota / period


def _number(file: Path) -> int | None:
    """The number in a file; None for "max", and where there is no such file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
