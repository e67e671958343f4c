"""How the command line tool speaks: colour and live tables in a terminal, plain lines in a pipe."""

import sys
from typing import TextIO

from rich.console import Console


def make_console(file: TextIO | None = None) -> Console:
    """A console that neither wraps nor decorates where nobody looks."""
    stream = file or sys.stdout
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, no_color=True, soft_wrap=True, width=160)


def step(console: Console, text: str) -> None:
    """One line about what happens now."""
    console.print(f"[bold cyan]==>[/] {text}" if console.is_terminal else f"==> {text}")
