"""Whether requests are traced, as the standard OTEL_* variables say, and how the last spans leave.

OpenTelemetry is an optional extra: only `spans` knows it, and is imported where traces are wanted. Whatever
is wrong with it, the engine serves.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Protocol

from headway_engine.exchange import Watcher
from headway_engine.logs import fields

log = logging.getLogger("headway.tracing")

FLUSH_S = 3.0
"""How long spans may take to leave when the engine ends: a dead collector does not hold up the exit."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
INSTALL = "pip install 'headway[otel]'"


class Tracer(Watcher, Protocol):
    """Makes spans of exchanges, and sends them in the background."""

    def close(self) -> None:
        """Send what is left; may block for long."""


class TracingOff(Exception):
    """Why there are no traces although the environment asks for them."""


def tracer(environment: Mapping[str, str]) -> Tracer | None:
    """A tracer where the environment asks for one; None, with one line in the log, where that cannot be."""
    try:
        if not wanted(environment):
            return None
        from headway_engine.spans import open_tracer

        named = first_set(environment, "OTEL_SERVICE_NAME") or "service.name=" in first_set(
            environment, "OTEL_RESOURCE_ATTRIBUTES"
        )
        return open_tracer(first_set(environment, *ENDPOINTS), named=bool(named))
    except TracingOff as error:
        log.warning(fields("tracing-off", reason=error))
    except ImportError as error:
        log.warning(fields("tracing-off", reason=f"OpenTelemetry is not installed ({error.name}): {INSTALL}"))
    except Exception as error:  # noqa: BLE001 - whatever a library makes of a variable, the engine serves
        log.warning(fields("tracing-off", reason=f"{type(error).__name__}: {error}"))
    return None


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the variables ask for traces. Raises TracingOff when they ask for what is not here."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    endpoint = first_set(environment, *ENDPOINTS)
    exporter = first_set(environment, "OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none")
    if exporter == "none":
        return False
    if exporter != "otlp":
        raise TracingOff(f"OTEL_TRACES_EXPORTER={exporter}: only otlp and none are known here")
    protocol = first_set(environment, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        raise TracingOff(f"the OTLP protocol {protocol} is not known here, only http/protobuf (port 4318)")
    return True


def first_set(environment: Mapping[str, str], *names: str) -> str:
    """The value of the first variable that is set, or nothing."""
    return next((value for name in names if (value := environment.get(name, "").strip())), "")


def close(tracer: Tracer, timeout_s: float = FLUSH_S) -> None:
    """Let the last spans leave, for so long and no longer."""
    # A daemon: what it waits for must not keep the process alive.
    closing = threading.Thread(target=tracer.close, name="tracing", daemon=True)
    closing.start()
    closing.join(timeout_s)
    if closing.is_alive():
        log.warning(fields("traces-cut-short", after_s=timeout_s))
