"""Rewrites the file tree of docs/architecture.md: a line per module, the first sentence of its docstring.

    python tools/file_tree.py

The tree stands between two marker comments; the prose around it is left alone.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- file tree: begin -->", "<!-- file tree: end -->"
FOLDERS = (
    "engine/headway_engine",
    "operator/headway_operator",
    "operator/headway_local",
    "operator/headway_cli",
    "tools",
    "bench",
    "tests/support",
    "tests/cluster",
)


def modules(folder: str) -> list[Path]:
    """Python files below a folder, without package markers that only carry a docstring."""
    found = sorted((ROOT / folder).rglob("*.py"))
    return [p for p in found if p.name != "__init__.py" or len(ast.parse(p.read_text()).body) > 1]


def sentence(path: Path) -> str:
    """The first sentence of the module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = re.sub(r"\s+", " ", docstring.split("\n\n")[0])
    match = re.match(r"(.*?[a-z`)/0-9])\.(\s|$)", first)
    return (match.group(1) if match else first).rstrip(".")


def tree() -> str:
    """The whole tree as Markdown tables."""
    parts = []
    for folder in FOLDERS:
        rows = [f"| `{p.relative_to(ROOT / folder)}` | {sentence(p)} |" for p in modules(folder)]
        parts.append("\n".join([f"**`{folder}/`**", "", "| module | what it does |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def main() -> None:
    """Write the page if it differs."""
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    renewed = f"{text[:begin]}\n\n{tree()}\n\n{text[end:]}"
    if renewed != text:
        PAGE.write_text(renewed)
        print(f"{PAGE.relative_to(ROOT)} rewritten", file=sys.stderr)


if __name__ == "__main__":
    main()
