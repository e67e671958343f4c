"""A log line is one line, whatever is logged."""

import logging
import sys

from headway_engine.logs import LineFormatter, fields


def test_values_are_quoted_when_they_must_be():
    """So that key=value can be read back."""
    line = fields("limits", tokens="1->2", why='he said "no"', empty="", path="a=b")
    assert str(line) == 'limits tokens=1->2 why="he said \\"no\\"" empty="" path="a=b"'


def test_a_trace_stays_on_its_line():
    """Log collectors cut at line ends."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", None, sys.exc_info())
    line = LineFormatter().format(record)
    assert "\n" not in line
    assert " error x failed trace=" in line
    assert "ValueError: two" in line
