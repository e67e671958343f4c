"""Everything there is to check on an accelerator, in one go of a few minutes: tests, then throughput.

    python tests/gpu/check.py FOLDER [--quick]

writes FOLDER/gpu-tests.txt and FOLDER/gpu-throughput.md. Needs torch with CUDA, transformers, pytest, and the
engine's small packages (msgspec, llguidance); the project itself need not be installed. `--quick` leaves the
comparison with transformers out. The exit status is that of the tests, or of the throughput script.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS_LIMIT_S = 240
THROUGHPUT_LIMIT_S = 300


def run(command: list[str], limit_s: float, log: Path | None) -> int:
    """The exit status of a command whose output is shown, and kept in `log`; 124 when it took too long."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "engine"), str(ROOT / "tests")))}
    began_s = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        kept = log.open("w") if log else None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                if kept:
                    kept.write(line)
                    kept.flush()
                if time.monotonic() - began_s > limit_s:
                    process.kill()
                    return 124
        finally:
            if kept:
                kept.close()
    return process.returncode


def main() -> int:
    """Tests first: numbers of a wrong answer are worth nothing, but are taken all the same."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path)
    p.add_argument("--quick", action="store_true")
    a = p.parse_args()
    folder = a.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tests = [sys.executable, "-u", "-m", "pytest", "-c", "tests/gpu/device.ini", "tests/gpu", "-v"]
    tested = run([*tests, "--maxfail=5", "--durations=10"], TESTS_LIMIT_S, folder / "gpu-tests.txt")
    measure = [sys.executable, "-u", "tests/gpu/throughput.py", "--out", str(folder / "gpu-throughput.md")]
    measured = run([*measure, *(["--no-peer"] if a.quick else [])], THROUGHPUT_LIMIT_S, None)
    return tested or measured


if __name__ == "__main__":
    sys.exit(main())
