"""What the command line tool says and how: a terminal gets colour and live tables, a pipe gets plain lines.

`UserError` is what a user can mend: it is shown without a traceback and ends the program with status 2.
"""

import sys
from typing import TextIO

from rich.console import Console

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Something that the user can mend. `hint` says how, where the message does not."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Failed(Exception):
    """Something went wrong that is not the user's doing; ends the program with status 1."""


def make_console(file: TextIO | None = None) -> Console:
    """A console that neither wraps nor decorates where nobody looks."""
    stream = file or sys.stdout
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, no_color=True, soft_wrap=True, width=160)


def step(console: Console, text: str) -> None:
    """One line about what happens now."""
    console.print(f"[bold cyan]==>[/] {text}" if console.is_terminal else f"==> {text}")
