"""A pod's volumes as folders: ConfigMap, Secret, emptyDir, projected, downward API, hostPath and claims.

Content that can change is swapped whole behind one symbolic link, as the kubelet does it, so that a reader
never sees half of an update. Knows nothing of processes; how a folder appears at its mount path is the
business of `launch`.
"""

import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from headway_local.environment import config_map_data, field_value, secret_data
from headway_local.objects import Manifest, ObjectSource, PodConfigError, Token

FileTree = dict[str, tuple[bytes, int]]
"""Relative path to content and file mode."""

_TOKEN_REFRESH_SHARE = 0.8  # of its lifetime, as the kubelet does


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a folder (or file) should be seen."""

    path: str
    source: Path
    read_only: bool


class Volumes:
    """The volumes of one pod below `folder`; persistent claims live below `claims`."""

    def __init__(
        self, pod: Manifest, folder: Path, source: ObjectSource, *, claims: Path, pod_ip: str, host_ip: str
    ) -> None:
        self._pod = pod
        self._folder = folder
        self._source = source
        self._claims = claims
        self._pod_ip = pod_ip
        self._host_ip = host_ip
        self._tokens: dict[tuple[str, str], tuple[Token, float]] = {}
        self._places: dict[str, Path] = {}

    async def project(self) -> None:
        """Make every volume, or bring its content up to date. Raises PodConfigError for missing objects."""
        for volume in self._pod["spec"].get("volumes") or ():
            self._places[volume["name"]] = await self._place(volume)

    def mounts(self, container: Manifest) -> list[Mount]:
        """The container's mounts, parents before children."""
        found = []
        for mount in container.get("volumeMounts") or ():
            place = self._places.get(mount["name"])
            if place is None:
                raise PodConfigError(f"volume {mount['name']} is not declared")
            if mount.get("subPath"):
                place = place / mount["subPath"]
                if not place.exists():
                    place.mkdir(parents=True)
            found.append(Mount(os.path.normpath(mount["mountPath"]), place, bool(mount.get("readOnly"))))
        return sorted(found, key=lambda mount: mount.path)

    def remove(self) -> None:
        """Delete everything but persistent claims and host paths."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _place(self, volume: Manifest) -> Path:
        target: Path = self._folder / "volumes" / volume["name"]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            namespace = self._pod["metadata"].get("namespace", "default")
            target = self._claims / namespace / volume["persistentVolumeClaim"]["claimName"]
            target.mkdir(parents=True, exist_ok=True)
            return target
        target.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            return target
        swap(target, await self._tree(volume, owner=volume["name"]))
        return target

    async def _tree(self, volume: Manifest, *, owner: str, mode: int = 0o644) -> FileTree:
        namespace = self._pod["metadata"].get("namespace", "default")
        for kind, read, fetch in self._kinds():
            if kind not in volume:
                continue
            ref = volume[kind]
            name = ref.get("name") or ref.get("secretName")
            found = await fetch(namespace, name)
            if found is None:
                if ref.get("optional"):
                    return {}
                raise PodConfigError(f'{kind.lower()} "{name}" not found')
            return _select(read(found), ref, mode=ref.get("defaultMode", mode))
        if "downwardAPI" in volume:
            tree: FileTree = {}
            for item in volume["downwardAPI"].get("items") or ():
                path = item["fieldRef"]["fieldPath"]
                text = field_value(path, self._pod, pod_ip=self._pod_ip, host_ip=self._host_ip)
                tree[item["path"]] = (text.encode(), item.get("mode", mode))
            return tree
        if "serviceAccountToken" in volume:
            ref = volume["serviceAccountToken"]
            token = await self._token(owner, ref.get("audience", ""), ref.get("expirationSeconds", 3600))
            return {ref["path"]: (token.value.encode(), mode)} if token else {}
        if "projected" in volume:
            merged: FileTree = {}
            inner = volume["projected"].get("defaultMode", mode)
            for source in volume["projected"].get("sources") or ():
                merged |= await self._tree(source, owner=owner, mode=inner)
            return merged
        raise PodConfigError(f"volume {owner}: unsupported kind {sorted(set(volume) - {'name'})}")

    def _kinds(
        self,
    ) -> tuple[
        tuple[str, Callable[[Manifest], dict[str, bytes]], Callable[[str, str], Awaitable[Manifest | None]]],
        ...,
    ]:
        return (
            ("configMap", config_map_data, self._source.config_map),
            ("secret", secret_data, self._source.secret),
        )

    async def _token(self, owner: str, audience: str, lifetime_s: int) -> Token | None:
        known = self._tokens.get((owner, audience))
        if known is not None and time.time() < known[1]:
            return known[0]
        token = await self._source.token(self._pod, audience, lifetime_s)
        if token is not None:
            now = time.time()
            self._tokens[owner, audience] = (token, now + _TOKEN_REFRESH_SHARE * (token.expires_at_s - now))
        return token


def _select(content: dict[str, bytes], ref: Manifest, *, mode: int) -> FileTree:
    items = ref.get("items")
    if not items:
        return {key: (value, mode) for key, value in content.items()}
    tree: FileTree = {}
    for item in items:
        if item["key"] in content:
            tree[item["path"]] = (content[item["key"]], item.get("mode", mode))
        elif not ref.get("optional"):
            raise PodConfigError(f"references non-existent key: {item['key']}")
    return tree


def swap(target: Path, tree: FileTree) -> bool:
    """Make `target` show exactly these files, all at once; False where nothing differed.

    Layout of the kubelet: files in a folder of their own, `..data` points to it, names point through it.
    """
    data = target / "..data"
    if data.exists() and _read(data) == {path: value for path, (value, _) in tree.items()}:
        return False
    fresh = target / f"..{time.time_ns()}"
    fresh.mkdir()
    for path, (value, mode) in tree.items():
        file = fresh / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)
        file.chmod(mode)
    old = data.resolve() if data.exists() else None
    pending = target / "..data_tmp"
    pending.symlink_to(fresh.name)
    pending.replace(data)
    tops = {path.split("/")[0] for path in tree}
    for top in tops:
        link = target / top
        if not link.is_symlink():
            link.symlink_to(f"..data/{top}")
    for entry in target.iterdir():
        if entry.is_symlink() and not entry.name.startswith("..") and entry.name not in tops:
            entry.unlink()
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return True


def _read(folder: Path) -> dict[str, bytes]:
    real = folder.resolve()
    return {str(file.relative_to(real)): file.read_bytes() for file in real.rglob("*") if file.is_file()}
