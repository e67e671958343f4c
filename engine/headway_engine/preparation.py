"""Work ahead of a request's first step, in a thread of its own, so that nobody else waits for it.

One thread, first come, first served: requests with the same grammar compile it once, and the steps keep the
other cores. Knows nothing of what is prepared, of admission or of reports.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from headway_engine.logs import fields
from headway_engine.sequence import Request, RequestId

log = logging.getLogger("headway.core")

Prepare = Callable[[Request], None]
"""What can be done for a request ahead of its first step, in any thread."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The work for this request is done, or has failed with these words."""

    id: RequestId
    failure: str = ""


class Preparer:
    """Requests under preparation. All but its thread's work is for the one thread that owns it."""

    def __init__(self, prepare: Prepare, done: Callable[[Prepared], None]) -> None:
        """`done` is called from the preparing thread, once for each request."""
        self._prepare = prepare
        self._done = done
        self._pending: dict[RequestId, Request] = {}
        self._line: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._started = False

    def start(self, request: Request) -> None:
        """Queue a request for preparation."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="preparation", daemon=True).start()
        self._pending[request.id] = request
        self._line.put(request)

    def take(self, request_id: RequestId) -> Request | None:
        """The request, which from now on is no longer here; None for one that is not."""
        return self._pending.pop(request_id, None)

    def take_all(self) -> list[Request]:
        """Every request that is here, in order; none is afterwards."""
        requests = list(self._pending.values())
        self._pending.clear()
        return requests

    def _run(self) -> None:
        while True:
            request = self._line.get()
            if request.id in self._pending:  # nothing is compiled for those who have left
                self._done(Prepared(request.id, self._failure(request)))

    def _failure(self, request: Request) -> str:
        try:
            self._prepare(request)
        except BaseException as error:
            log.exception(fields("preparation-failed", id=request.id))
            return f"{type(error).__name__}: {error}"[:500]
        return ""
