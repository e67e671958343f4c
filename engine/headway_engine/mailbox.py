"""News of one call's requests, on their way from the channel's reader to the task that answers the call.

Knows nothing of who computes them, and nothing of how they are answered.
"""

import asyncio
from dataclasses import dataclass

from headway_engine.sequence import Event, Rejected, RequestId
from headway_engine.telemetry import Journey


@dataclass(frozen=True, slots=True)
class CutOff:
    """The request ends unanswered because the engine ends: it would do well to be sent again."""

    id: RequestId
    message: str
    code: str
    retry_after_s: float


News = Event | Rejected | CutOff


class Mailbox:
    """News of one HTTP request, put by the channel's reader and taken by the request's task. It holds no
    more than the request's own tokens: a slow client gets what piled up in one piece."""

    def __init__(self) -> None:
        self.journeys: list[Journey] = []
        """What became of each sequence; kept up to date, for whoever wants to know in the end."""
        self._news: list[News] = []
        self._wake = asyncio.Event()

    def put(self, news: News) -> None:
        self._news.append(news)
        self._wake.set()

    async def filled(self) -> None:
        """Wait until there are news, and leave them."""
        await self._wake.wait()

    async def take(self) -> list[News]:
        """All news since the last time; waits for the first."""
        await self._wake.wait()
        self._wake.clear()
        news, self._news = self._news, []
        return news
