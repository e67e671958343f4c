"""The access log: one line for each request on the public port, when it is over. Off unless asked for.

Counters answer most questions at no cost; this is for those about one request. Knows nothing of how
requests are served.
"""

import logging

from headway_engine.exchange import Exchange
from headway_engine.logs import fields

log = logging.getLogger("headway.access")


class AccessLog:
    """A watcher that writes lines. Who asked stands in the line as in all lines of a request."""

    def over(self, exchange: Exchange) -> None:
        asked, usage = exchange.asked, exchange.usage
        log.info(
            fields(
                "request",
                method=exchange.method,
                route=exchange.route or None,
                status=exchange.status or None,
                outcome=exchange.outcome,
                error=exchange.error or None,
                model=asked.model if asked else None,
                stream=asked.stream if asked else None,
                prompt_tokens=usage.prompt_tokens if usage else None,
                cached_tokens=usage.cached_tokens if usage else None,
                output_tokens=usage.completion_tokens if usage else None,
                finish_reason=",".join(exchange.finish_reasons) or None,
                preemptions=exchange.preemptions or None,
                queue_ms=milliseconds(exchange.queue_s),
                ttft_ms=milliseconds(exchange.ttft_s),
                total_ms=milliseconds(exchange.ended_s - exchange.arrival_s),
                trace_id=exchange.trace_id or None,
            )
        )


def milliseconds(seconds: float | None) -> float | None:
    """To a tenth."""
    return None if seconds is None else round(seconds * 1000, 1)
