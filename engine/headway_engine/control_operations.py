"""What the management port says of itself: its operations, and the form of their answers.

Knows nothing of how requests are handled.
"""

from importlib.metadata import version
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway_engine import protocol
from headway_engine.operations import Answer, Operation, Operations, Port, document
from headway_engine.protocol import MAX_GENERATION, BatchingMode, Capacity, Limits, Objectives

TEXT = "text/plain"

Tokens = Annotated[int, Meta(ge=1, description="at most that of the capacity")]
Milliseconds = Annotated[int, Meta(ge=0, le=86_400_000, description="0: no target")]


class WholeLimits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`Limits` as a body, with the bounds of `check_limits` that hold for every engine."""

    generation: Annotated[int, Meta(ge=0, le=MAX_GENERATION, description="of no effect here")] = 0
    mode: BatchingMode
    window_ms: Annotated[int, Meta(ge=0, le=1000)]
    max_batch_tokens: Tokens
    max_batch_sequences: Annotated[
        int, Meta(ge=1, description="at most that of the capacity, and at most max_batch_tokens")
    ]
    prefill_chunk_tokens: Tokens
    max_queued_requests: Annotated[int, Meta(ge=0, le=1_000_000)]
    max_queued_tokens: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    queue_timeout_ms: Annotated[int, Meta(ge=0, le=3_600_000, description="0: none")]


class Targets(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`Objectives` as a body, with their bounds."""

    ttft_ms: Milliseconds = 0
    itl_ms: Milliseconds = 0
    e2e_ms: Milliseconds = 0


class Complaint(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Every answer of /control other than 200."""

    field: str | None
    message: str


KEY = {
    401: Answer(
        description="no valid key", type=Complaint, headers={"WWW-Authenticate": "the scheme: Bearer"}
    ),
    403: Answer(description=f"closed: {protocol.CONTROL_KEY_ENV} is not set", type=Complaint),
}
NOT_READY = {503: Answer(description="not ready, or the core does not answer", type=Complaint)}
BODY = {
    400: Answer(description="not JSON", type=Complaint),
    408: Answer(description="the body did not come in time", type=Complaint),
    413: Answer(description="the body is too large", type=Complaint),
    422: Answer(
        description="not a valid set; `field` names what is wrong, and nothing has changed",
        type=Complaint,
        example={"field": "max_batch_tokens", "message": "9000 is outside 1..8192"},
    ),
}


def _probe(id: str, summary: str, no: str) -> Operation:
    return Operation(
        id=id,
        tag="probes",
        summary=summary,
        open=True,
        answers={
            200: Answer(description="yes", media_type=TEXT),
            503: Answer(description=no, media_type=TEXT),
        },
    )


OPERATIONS: Operations = {
    ("get", protocol.METRICS_PATH): Operation(
        id="metrics",
        tag="probes",
        summary="Metrics for Prometheus",
        open=True,
        answers={200: Answer(description="the exposition", media_type=TEXT)},
    ),
    ("get", protocol.HEALTH_PATH): _probe("health", "Whether no restart would help", "it would, and why"),
    ("get", protocol.READY_PATH): _probe("ready", "Whether requests are served now", "they are not, and why"),
    ("get", protocol.LIMITS_PATH): Operation(
        id="limits",
        tag="control",
        summary="Read the limits in force",
        answers={200: Answer(description="in force", type=Limits), **KEY, **NOT_READY},
    ),
    ("put", protocol.LIMITS_PATH): Operation(
        id="setLimits",
        tag="control",
        summary="Change the limits, as a whole and between two steps",
        description="Every field but `generation` must be there: nothing is changed by leaving it out.",
        body=WholeLimits,
        examples={"whole": msgspec.to_builtins(Limits(max_batch_tokens=256, max_batch_sequences=16))},
        answers={200: Answer(description="in force now", type=Limits), **KEY, **BODY, **NOT_READY},
    ),
    ("get", protocol.OBJECTIVES_PATH): Operation(
        id="objectives",
        tag="control",
        summary="Read the targets",
        answers={200: Answer(description="the targets", type=Objectives), **KEY},
    ),
    ("put", protocol.OBJECTIVES_PATH): Operation(
        id="setObjectives",
        tag="control",
        summary="Change the targets",
        description="They place histogram boundaries; a change restarts the latency histograms.",
        body=Targets,
        examples={"two": {"ttft_ms": 500, "itl_ms": 50}},
        answers={200: Answer(description="the targets now", type=Objectives), **KEY, **BODY},
    ),
    ("get", protocol.CAPACITY_PATH): Operation(
        id="capacity",
        tag="control",
        summary="Read what was reserved at start",
        answers={200: Answer(description="the capacity", type=Capacity), **KEY, **NOT_READY},
    ),
}


def control_document() -> dict[str, Any]:
    """The OpenAPI document of the management port."""
    port = Port(
        title="Headway engine control",
        version=version("headway"),
        description="Metrics, probes, and the limits and targets of the engine's scheduler.",
        tags={"probes": "For kubelets and Prometheus", "control": "For the controller, with its key"},
        security=[{"key": []}],
        security_schemes={"key": {"type": "http", "scheme": "bearer"}},
    )
    return document(port, OPERATIONS)
