"""Volumes as folders, swapped whole."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_local.objects import PodConfigError, Token
from headway_local.volumes import Volumes, swap
from support.pods import Objects, python_pod

TREES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d/e", "d/f"]),
    st.tuples(st.binary(max_size=8), st.just(0o644)),
    max_size=5,
)


def shown(folder: Path) -> dict[str, bytes]:
    """What a reader finds, through the links."""
    found = {}
    for top in folder.iterdir():
        if not top.name.startswith(".."):
            files = [top] if top.is_file() else [f for f in top.rglob("*") if f.is_file()]
            found |= {str(file.relative_to(folder)): file.read_bytes() for file in files}
    return found


@given(st.lists(TREES, min_size=1, max_size=4))
def test_a_reader_sees_exactly_the_last_tree(
    tmp_path_factory: pytest.TempPathFactory, trees: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("volume")
    for tree in trees:
        swap(folder, tree)
        assert shown(folder) == {path: content for path, (content, _) in tree.items()}
    assert len([entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]) == 1


def test_nothing_is_touched_when_nothing_changed(tmp_path: Path) -> None:
    assert swap(tmp_path, {"a": (b"1", 0o600)})
    before = (tmp_path / "..data").readlink()
    assert not swap(tmp_path, {"a": (b"1", 0o600)})
    assert (tmp_path / "..data").readlink() == before
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def volumes(tmp_path: Path, declared: list[dict[str, Any]], objects: Objects) -> Volumes:
    return Volumes(
        python_pod("", volumes=declared),
        tmp_path / "pod",
        objects,
        claims=tmp_path / "claims",
        pod_ip="10.0.0.1",
        host_ip="10.0.0.2",
    )


async def test_items_choose_keys_and_paths(tmp_path: Path) -> None:
    declared = [{"name": "v", "secret": {"secretName": "s", "items": [{"key": "k", "path": "deep/file"}]}}]
    found = volumes(tmp_path, declared, Objects(secrets={"s": {"k": "1", "other": "2"}}))
    await found.project()
    [mount] = found.mounts({"volumeMounts": [{"name": "v", "mountPath": "/s/", "readOnly": True}]})
    assert (mount.path, mount.read_only) == ("/s", True)
    assert shown(mount.source) == {"deep/file": b"1"}


async def test_a_claim_outlives_the_pod_and_scratch_space_does_not(tmp_path: Path) -> None:
    declared = [
        {"name": "keep", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    found = volumes(tmp_path, declared, Objects())
    await found.project()
    places = {m.path: m.source for m in found.mounts(
        {"volumeMounts": [{"name": "keep", "mountPath": "/k"}, {"name": "scratch", "mountPath": "/s"}]}
    )}  # fmt: skip
    for place in places.values():
        (place / "file").write_text("x")
    found.remove()
    assert (places["/k"] / "file").exists()
    assert not places["/s"].exists()


async def test_a_token_is_asked_for_again_only_when_most_of_its_life_is_over(tmp_path: Path) -> None:
    class Counting(Objects):
        asked = 0

        async def token(self, pod: Any, audience: str, lifetime_s: int) -> Token:
            self.asked += 1
            return Token(f"token-{self.asked}", expires_at_s=self.expires_at_s)

        expires_at_s = 9e9

    objects = Counting()
    declared = [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]
    found = volumes(tmp_path, declared, objects)
    await found.project()
    await found.project()
    assert objects.asked == 1
    objects.expires_at_s = 0.0
    late = volumes(tmp_path, declared, objects)
    await late.project()
    await late.project()
    assert objects.asked == 3


async def test_a_missing_config_map_and_an_undeclared_volume_are_named(tmp_path: Path) -> None:
    with pytest.raises(PodConfigError, match='configmap "c" not found'):
        await volumes(tmp_path, [{"name": "v", "configMap": {"name": "c"}}], Objects()).project()
    optional = volumes(tmp_path, [{"name": "v", "configMap": {"name": "c", "optional": True}}], Objects())
    await optional.project()
    with pytest.raises(PodConfigError, match="other"):
        optional.mounts({"volumeMounts": [{"name": "other", "mountPath": "/x"}]})
