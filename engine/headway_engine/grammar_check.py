"""Grammars checked in a process of its own, which ends itself when one takes too long.

Nearly all that compiling may cost is limited by counts (`grammar.LIMITS`), but not all of it: a chain of
`allOf` that doubles at every link is not, and a thread that compiles one cannot be stopped. A process can,
and the kernel does it by processor time, so a busy machine refuses nothing that an idle one takes. What
has passed here is safe for the core. Knows nothing of requests.
"""

import contextlib
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import IO

from headway_engine.grammar import GrammarError, check

CPU_S = 0.5
"""Processor time for one grammar; usual ones take milliseconds, 400 properties with patterns 60 of them."""

KEPT_ANSWERS = 64

COMMAND = (sys.executable, "-m", "headway_engine.grammar_check")


class Checker:
    """Asks the process, and starts it when there is none. For one thread; `check` blocks."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._fine: OrderedDict[str, None] = OrderedDict()

    def check(self, grammar: str) -> None:
        """Raise GrammarError for a grammar that is wrong, fulfilled by nothing, or too costly."""
        if grammar in self._fine:
            self._fine.move_to_end(grammar)
            return
        answer = self._ask(grammar)
        if answer is None:
            raise GrammarError("it takes too long to compile")
        if answer:
            raise GrammarError(answer)
        self._fine[grammar] = None
        if len(self._fine) > KEPT_ANSWERS:
            self._fine.popitem(last=False)

    def close(self) -> None:
        """End the process. It also ends by itself when this one does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, grammar: str) -> str | None:
        """What is wrong with it, in words; empty for nothing, None when the process did not survive it."""
        for _ in range(2):
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _write(process.stdin, grammar)
                answer = _read(process.stdout)
            except OSError:
                answer = None
            if answer is not None:
                return answer
            self._process = None
            # Its input stays open until it has ended, so this is its own end and not one for want of input.
            ended_by = process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                process.stdin.close()
            if ended_by == -signal.SIGPROF:
                return None
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process


def _write(stream: IO[bytes], text: str) -> None:
    body = text.encode()
    stream.write(len(body).to_bytes(4, "big") + body)
    stream.flush()


def _read(stream: IO[bytes]) -> str | None:
    """The next text; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    body = stream.read(size)
    return body.decode() if len(body) == size else None


def main() -> None:
    """The process: grammars in, words out, until nobody asks any more."""
    for ignored in (signal.SIGTERM, signal.SIGINT):  # may be sent to the whole process group
        signal.signal(ignored, signal.SIG_IGN)
    while (grammar := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # nobody handles SIGPROF, so it ends the process
        try:
            check(grammar)
            words = ""
        except GrammarError as error:
            words = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, words)


if __name__ == "__main__":
    main()
