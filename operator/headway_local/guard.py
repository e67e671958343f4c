"""Kills the process groups of a runner that died without stopping them (kill -9, out of memory).

One small process per runner, started on first use. It reads "+GROUP" and "-GROUP" lines from its standard
input; the end of that input is the runner's death. Standard library only, since it also runs as a script.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


class Guard:
    """The runner's side: `add` a process group when it starts, `remove` it once it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # the Ctrl-C that stops the runner must not stop its guard
                )
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


GUARD = Guard()
"""One per runner process."""


def main() -> None:
    """The guard's side."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
