"""How the engine writes its log: one line per change, `key=value` pairs after a fixed event name.

Knows nothing of what is logged. Both processes write to standard error.
"""

import logging
import sys
from datetime import UTC, datetime


class LineFormatter(logging.Formatter):
    """`2026-01-02T03:04:05.678Z info headway.core ready device=cpu`; one line, whatever the message holds."""

    def format(self, record: logging.LogRecord) -> str:
        at = (
            datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        line = f"{at} {record.levelname.lower()} {record.name} {record.getMessage()}"
        if record.exc_info:
            line += " trace=" + quoted(self.formatException(record.exc_info))
        return line.replace("\n", "\\n")


def configure(level: str) -> None:
    """Send every logger of the process through one handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("uvicorn", "uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def fields(event: str, **values: object) -> str:
    """The text of one log line."""
    return " ".join([event, *(f"{key}={quoted(str(value))}" for key, value in values.items())])


def quoted(text: str) -> str:
    """Text as it stands when it is one plain word, otherwise in double quotes."""
    plain = text and not any(c.isspace() or c in '"=\\' for c in text)
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
