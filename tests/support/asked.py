"""Ask an API all that its OpenAPI document allows, and much that it does not: schemathesis, unmodified.

Every answer must have a status, a content type, headers and a body that the document tells of; what it
forbids must be refused; nothing may be a 500. The same cases are made in every run.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

LEFT_OUT = ("positive_data_acceptance",)
"""A document cannot say all that is wrong: a prompt may be longer than the context of this model."""


def ask_everything(
    url: str,
    folder: Path,
    *,
    headers: Mapping[str, str] | None = None,
    phases: Sequence[str] = ("examples", "coverage", "fuzzing"),
    examples: int = 5,
    left_out: Sequence[str] = LEFT_OUT,
    timeout_s: float = 240.0,
) -> str:
    """What schemathesis printed. AssertionError with it when an answer breaks the document's word."""
    line = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json"),
        *("--phases", ",".join(phases), "--max-examples", str(examples), "--generation-deterministic"),
        *("--continue-on-failure", "--no-color", "--exclude-checks", ",".join(left_out)),
        *(word for name, value in (headers or {}).items() for word in ("-H", f"{name}: {value}")),
    ]
    # In a folder of its own: it looks for a configuration where it starts, and may leave reports there.
    done = subprocess.run(
        line,
        cwd=folder,
        env={**os.environ, "COLUMNS": "110"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-4_000:]
    return done.stdout
