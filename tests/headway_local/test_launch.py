"""What the launcher does to the machine's folders on the way to a container's own view of them."""

from pathlib import Path

from headway_local.launch import _empty_folder


def test_stand_ins_are_staged_where_they_hide_nothing(tmp_path: Path) -> None:
    """A work tree may lie in /mnt: only an empty folder is covered, and a new one where there is none."""
    full, empty, absent = tmp_path / "full", tmp_path / "empty", tmp_path / "absent"
    (full / "work").mkdir(parents=True)
    empty.mkdir()
    assert _empty_folder((str(absent), str(full), str(empty))) == str(empty)
    made = Path(_empty_folder((str(absent), str(full))))
    assert made not in (full, absent)
    assert list(made.iterdir()) == []
    made.rmdir()
