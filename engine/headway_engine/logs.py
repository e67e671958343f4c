"""How a process writes its log: a line per change, an event name and what belongs to it, as text or JSON.

Knows nothing of what is logged. Every logger of a process writes through one handler, to standard error; the
controller uses it too. Needs the standard library only.
"""

import json
import logging
import math
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType

FORMAT_ENV = "HEADWAY_LOG_FORMAT"
CHATTY = ("uvicorn", "uvicorn.error", "httpx", "httpx2", "asyncio", "urllib3")
"""Loggers of libraries that tell of every request."""
FOR_DEVELOPERS = "torch.utils._pytree"
"""Tells the authors of other libraries, at each start, what will change in torch."""

_STANDARD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))
_NOT_SHOWN = frozenset(("color_message", "settings", "k8s_skip"))
"""What uvicorn and kopf tell their own formatters."""
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F)} | {ord("\n"): "\\n"}


context: ContextVar[Mapping[str, object]] = ContextVar("log_context", default=MappingProxyType({}))
"""What the lines of one request have in common."""


class LogFormat(StrEnum):
    """For people, or for collectors."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Change:
    """A value that moved."""

    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.old}->{self.new}"


@dataclass(frozen=True, slots=True)
class Line:
    """An event and its values, as a logger's message: made into text only where it is written."""

    event: str
    values: Mapping[str, object]

    def __str__(self) -> str:
        return " ".join([self.event, *_pairs(self.values)])


def fields(event: str, **values: object) -> Line:
    """One log line: an event name that never changes, and what varies as values. None is left out."""
    return Line(event, {key: value for key, value in values.items() if value is not None})


def configure(level: str, format: LogFormat = LogFormat.TEXT) -> None:
    """Send every logger of the process through one handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format is LogFormat.JSON else LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.getLogger(FOR_DEVELOPERS).setLevel(logging.ERROR)
    logging.captureWarnings(True)


def adopt(*names: str) -> None:
    """Have libraries that brought handlers of their own write through ours. For when they are loaded."""
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


class LineFormatter(logging.Formatter):
    """`2026-01-02T03:04:05.678Z info headway.core ready device=cpu`; one line, whatever the message holds."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname.lower()} {record.name} {record.getMessage()}"
        line = " ".join([line, *_pairs(_added(record))])
        if record.exc_info:
            line += " trace=" + quoted(self.formatException(record.exc_info))
        return line.translate(_CONTROL)


class JsonFormatter(logging.Formatter):
    """The same as an object: time, level, logger, message, and each value under its own name."""

    def format(self, record: logging.LogRecord) -> str:
        known = record.msg if isinstance(record.msg, Line) else None
        body: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": known.event if known else record.getMessage(),
        }
        if record.exc_info:
            body["trace"] = self.formatException(record.exc_info)
        for key, value in {**(known.values if known else {}), **_added(record)}.items():
            body[f"{key}_" if key in body else key] = _plain(value)
        return json.dumps(body)


def quoted(text: str) -> str:
    """Text as it stands when it is one plain word, otherwise in double quotes."""
    plain = text and not any(c.isspace() or c in '"=\\' for c in text)
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _pairs(values: Mapping[str, object]) -> list[str]:
    return [f"{key}={quoted(str(value))}" for key, value in values.items()]


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return at.replace("+00:00", "Z")


def _added(record: logging.LogRecord) -> dict[str, object]:
    """What stands beside the message: the logger's `extra`, and what the request's lines have in common."""
    extra = {k: v for k, v in vars(record).items() if k not in _STANDARD and k not in _NOT_SHOWN}
    return {**context.get(), **extra}


def _plain(value: object) -> object:
    """The value as JSON knows it; what JSON does not know, as text."""
    match value:
        case Change(old=old, new=new):
            return {"old": _plain(old), "new": _plain(new)}
        case float():
            return value if math.isfinite(value) else str(value)
        case None | bool() | int() | str():
            return value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    return str(value)
