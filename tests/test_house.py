"""Rules of the house that no linter knows."""

import ast
import importlib
import operator
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
_KEPT_BY_TOOLS = frozenset(
    (".git", ".venv", ".headway", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__")
) | {".import_linter_cache"}


def tracked_files() -> list[Path]:
    """Files under version control; where there is no git (an unpacked archive), every file below the root."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    # Git also refuses a checkout that belongs to somebody else; what it and the tools keep there is not ours.
    return [p for p in ROOT.rglob("*") if p.is_file() and not _KEPT_BY_TOOLS & {*p.relative_to(ROOT).parts}]


def test_the_operator_folder_never_shadows_the_standard_library() -> None:
    """An __init__.py there would replace `operator` for everything started at the root."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not (ROOT / "tests" / "operator").exists()
    assert operator.itemgetter(1)("ab") == "b"


def test_every_module_says_what_it_does() -> None:
    """A module opens with a docstring."""
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.suffix == ".py"
        and path.is_relative_to(ROOT)
        and path.parts[len(ROOT.parts)] in {"operator", "engine", "tests", "tools", "bench"}
        and not re.match(r'(#![^\n]*\n)?\s*(r?"""|from __future__)', path.read_text())
    ]
    assert silent == []


def test_no_unfinished_marks_are_committed() -> None:
    """Work to be done is written in the tracker, not in the code."""
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    marked = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked_files()
        if path.suffix in {".py", ".yaml", ".md", ".sh", ".cpp", ".h", ".toml"}
        for line in path.read_text(errors="replace").splitlines()
        if mark.search(line)
    ]
    assert marked == []


def test_no_path_of_one_machine_is_committed() -> None:
    """What runs here must run anywhere: no home folders, no work folders of one machine."""
    local = re.compile(r"/(wo" + r"rk|ro" + r"ot|ho" + r"me/[a-z])/")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:100]}"
        for path in tracked_files()
        if path.suffix not in {".sum", ".csv", ".jsonl"}
        for line in path.read_text(errors="replace").splitlines()
        if local.search(line)
    ]
    assert found == []


def test_links_between_pages_lead_somewhere() -> None:
    """A page that is named is there."""
    link = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in tracked_files()
        if page.suffix == ".md"
        for target in link.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []


def test_the_four_packages_import_without_torch_where_they_must() -> None:
    """The controller image carries no torch, so nothing it imports may need it."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import headway_operator.__main__, headway_cli.__main__, headway_local, headway_engine.protocol\n"
    )
    done = subprocess.run(
        [importlib.import_module("sys").executable, "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_map_shows_every_module() -> None:
    """docs/architecture.md lists every module; `python tools/file_tree.py` brings it up to date."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = [f"{ROOT}/operator/headway_{n}" for n in ("operator", "local", "cli")] + [
        f"{ROOT}/engine/headway_engine"
    ]
    missing = [
        str(path.relative_to(ROOT))
        for package in packages
        for path in Path(package).rglob("*.py")
        if path.name != "__init__.py" and f"`{path.relative_to(package)}`" not in page
    ]
    assert missing == []


def logged_events() -> set[str]:
    """Names of events in the sources: what stands first in each call of `fields`."""
    return {
        call.args[0].value
        for path in tracked_files()
        if path.suffix == ".py" and path.parts[len(ROOT.parts)] in {"operator", "engine"}
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call)
        and (getattr(call.func, "id", "") == "fields" or getattr(call.func, "attr", "") == "fields")
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }


def test_the_page_of_logs_names_every_event_and_no_other() -> None:
    """Whoever filters by an event finds what it means, and none that no longer comes."""
    page = (ROOT / "docs" / "how-to" / "read-logs.md").read_text("utf-8")
    rows = page.partition("| event |")[2].partition("\n\n")[0]
    told = {name for row in rows.splitlines()[2:] for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    assert told == logged_events()


def test_decisions_have_numbers_of_their_own() -> None:
    """A page opens with its number, and no two have the same."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers)
    assert [
        page.name for page in pages if not page.read_text("utf-8").startswith(f"# {page.name[:4]}: ")
    ] == []
