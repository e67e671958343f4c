"""The built helm, for tests that render the chart; nothing it does here needs a cluster."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "headway"

Json = dict[str, Any]


@cache
def binary() -> Path:
    """helm of the test tools; skips where they are not built, except in CI."""
    candidates = [Path(folder) / "helm" for folder in [os.environ.get("KUBEBUILDER_ASSETS")] if folder]
    command = [sys.executable, str(ROOT / "tools/kube/build.py"), "--check", "--print-dir"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode == 0:
        candidates.append(Path(built.stdout.strip()) / "helm")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    text = "helm is not built: run tools/kube/build.py"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(text)
    pytest.skip(text)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """helm with these arguments; the caller looks at the exit status."""
    return subprocess.run(
        [str(binary()), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def render(*arguments: str, release: str = "headway", namespace: str = "headway-system") -> list[Json]:
    """The chart's objects for these settings."""
    done = run("template", release, str(CHART), "--namespace", namespace, *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, Loader=_Loader) if document]


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
