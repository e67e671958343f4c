"""A log line is one line, whatever is logged; as text or as JSON it says the same."""

import json
import logging
import math
import re
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_engine import logs
from headway_engine.logs import Change, JsonFormatter, LineFormatter, LogFormat, fields


def record(message="hello", *args, level=logging.INFO, exc_info=None, **extra):
    made = logging.getLogger("headway.test").makeRecord(
        "headway.test", level, "f", 1, message, args, exc_info, extra=extra
    )
    made.created = 1767323045.678
    return made


def as_json(made):
    line = JsonFormatter().format(made)
    assert "\n" not in line
    return json.loads(line)


def test_values_are_quoted_when_they_must_be():
    """So that key=value can be read back."""
    line = fields("limits", tokens="1->2", why='he said "no"', empty="", path="a=b")
    assert str(line) == 'limits tokens=1->2 why="he said \\"no\\"" empty="" path="a=b"'


def test_what_is_none_is_left_out():
    """There is nothing to say of it."""
    assert str(fields("request", tenant=None, tokens=0)) == "request tokens=0"


def test_a_trace_stays_on_its_line():
    """Log collectors cut at line ends."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failed = record("failed", level=logging.ERROR, exc_info=sys.exc_info())
    line = LineFormatter().format(failed)
    assert "\n" not in line
    assert " error headway.test failed trace=" in line
    assert "ValueError: two" in line
    assert "ValueError: two\nlines" in as_json(failed)["trace"]


def test_a_line_as_text():
    """Time in UTC, level, logger, message, and what was given as extra."""
    line = LineFormatter().format(record("ready in %d s", 3, device="cpu", why="two words"))
    assert line == '2026-01-02T03:04:05.678Z info headway.test ready in 3 s device=cpu why="two words"'


def test_the_same_line_as_json():
    """Numbers stay numbers."""
    assert as_json(record("ready in %d s", 3, device="cpu", cores=2)) == {
        "time": "2026-01-02T03:04:05.678Z",
        "level": "info",
        "logger": "headway.test",
        "message": "ready in 3 s",
        "device": "cpu",
        "cores": 2,
    }


def test_an_event_has_each_value_under_its_own_name():
    """The message is the event's name, which never changes: something to count and to filter by."""
    said = as_json(
        record(fields("limits", max_batch_tokens=Change(1, 2), why="asked for", ratio=0.5, on=True))
    )
    assert said["message"] == "limits"
    assert said["max_batch_tokens"] == {"old": 1, "new": 2}
    assert (said["why"], said["ratio"], said["on"]) == ("asked for", 0.5, True)
    assert " limits max_batch_tokens=1->2 " in LineFormatter().format(
        record(fields("limits", max_batch_tokens=Change(1, 2), why="x"))
    )


def test_a_value_that_is_named_like_a_part_of_the_line_does_not_hide_it():
    """It gets a name beside it."""
    said = as_json(record(fields("x", level="high", time=5)))
    assert (said["level"], said["level_"]) == ("info", "high")
    assert said["time_"] == 5


def test_the_lines_of_one_request_say_whose_they_are():
    """Set once, for the task that serves it; others' lines have nothing of it."""
    token = logs.context.set({"request_id": "r1", "tenant": "gold"})
    try:
        said = as_json(record(fields("request-failed", id="a")))
        assert (said["request_id"], said["tenant"], said["id"]) == ("r1", "gold", "a")
        assert LineFormatter().format(record("x")).endswith(" x request_id=r1 tenant=gold")
    finally:
        logs.context.reset(token)
    assert "request_id" not in as_json(record("x"))


@given(st.text(), st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.floats() | st.none()))
def test_whatever_is_logged_is_one_line_and_valid_json(text, values):
    """Control characters, quotes, half characters, infinities."""
    line = logs.Line("event", {"text": text, **{f"k{key}": value for key, value in values.items()}})
    written = LineFormatter().format(record(line))
    assert not re.search(r"[\x00-\x1f\x7f]", written)
    said = json.loads(JsonFormatter().format(record(line)), parse_constant=pytest.fail)
    assert said["text"] == text
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            assert said[f"k{key}"] == str(value)


def test_what_json_does_not_know_is_told_as_text():
    """A log line never fails."""
    said = as_json(record("x", where={"path": [1, (2, object)]}, error=ValueError("no"), kind=LogFormat.JSON))
    assert said["where"] == {"path": [1, [2, "<class 'object'>"]]}
    assert (said["error"], said["kind"]) == ("no", "json")


@pytest.fixture
def as_before():
    """The root logger and the libraries' ones are as they were when the test is over."""
    kept = logging.getLogger().handlers[:]
    levels = {name: logging.getLogger(name).level for name in ("", *logs.CHATTY)}
    yield
    logging.captureWarnings(False)
    logging.getLogger().handlers[:] = kept
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("format", list(LogFormat))
def test_every_logger_writes_through_the_one_handler(as_before, capsys, format):
    """uvicorn's too; what it says of each request is left out."""
    logs.configure("info", format)
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.", extra={"color_message": "x"})
    logging.getLogger("uvicorn.error").info("too much")
    logging.getLogger("elsewhere").info("hello")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    if format is LogFormat.JSON:
        said = [json.loads(line) for line in lines]
        assert said[0].keys() == {"time", "level", "logger", "message"}
        assert [s["logger"] for s in said] == ["uvicorn.error", "elsewhere"]
    else:
        assert lines[0].endswith("Z warning uvicorn.error Invalid HTTP request received.")


def test_libraries_with_handlers_of_their_own_write_through_ours(as_before, capsys):
    """torch and transformers bring theirs; and Python's warnings are lines too."""
    own = logging.getLogger("headway.test.library")
    own.addHandler(logging.StreamHandler())
    own.propagate = False
    logs.configure("info", LogFormat.JSON)
    logs.adopt("headway.test.library")
    own.warning("one\nline")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # inside pytest's own catching of warnings
        warnings.warn("old ways", stacklevel=1)
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["logger"], first["message"]) == ("headway.test.library", "one\nline")
    assert second["logger"] == "py.warnings"
    assert "old ways" in second["message"]
