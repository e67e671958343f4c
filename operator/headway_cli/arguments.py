"""Types of command line options: what a number, a port or a file to write must be.

A wrong value ends the command before it starts, with the usual words and exit status 2.
"""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path


def positive(text: str) -> float:
    """A number above 0, and an end to it: `float` also takes nan and inf."""
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def not_negative(text: str) -> float:
    """A number from 0 on."""
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must not be below 0")
    return value


def count(text: str) -> int:
    """A whole number from 1 on."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def count_to(most: int) -> Callable[[str], int]:
    """A type: a whole number from 1 to `most`."""

    def checked(text: str) -> int:
        value = count(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"{text}: must be at most {most}")
        return value

    return checked


def port(text: str) -> int:
    """A TCP port; 0 takes any that is free."""
    value = _whole(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 to 65535")
    return value


def file_to_write(text: str) -> Path:
    """A file that can be written when the work is done, which is a bad time to find out otherwise."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written")
    return path


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text}: not a number")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: not a whole number") from None
