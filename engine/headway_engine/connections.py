"""Connections that nobody uses, and requests that never come to their end.

A client that opens a connection and says nothing, or sends its headers a byte at a time, holds memory and a
file of ours. Bodies have a deadline of their own where they are read. Knows nothing of routes.
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

KEEP_ALIVE_S = 75
"""Between two requests: longer than the 60 s after which most proxies let a connection go themselves."""
HEADERS_S = 60.0
"""From the first moment, or the first byte after an answer, to the end of the headers."""
MAX_FILES = 65_536


class Connection(H11Protocol):
    """uvicorn's connection, with a deadline for headers and for what a refused request still sends."""

    headers_s = HEADERS_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._unwatch()
        super().on_response_complete()  # from here the time between requests counts

    def _watch(self) -> None:
        """Let the time run unless a request is being answered. More data does not stop it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.headers_s, self.transport.close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection(headers_s: float) -> type[Connection]:
    """A connection with another deadline."""
    fields: dict[str, Any] = {"headers_s": headers_s}
    return type("Connection", (Connection,), fields)


def allow_many_files() -> int:
    """Raise this process's limit of open files as far as it may go, and return it: each client holds one, and
    the usual 1024 are fewer than the streams of a busy engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
