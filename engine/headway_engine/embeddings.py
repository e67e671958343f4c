"""OpenAI's embeddings: what a client may ask, in which portions the core is asked, and the answer.

Pure: bytes in, a call out; vectors in, bytes out. Knows nothing of sockets, tokenizers and scheduling.
"""

import base64
import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headway_engine.answers import bad_request
from headway_engine.bodies import Count
from headway_engine.messages import Embeddings
from headway_engine.openai import Prompt, decode, prompts_of
from headway_engine.protocol import Limits
from headway_engine.sequence import Request, RequestId
from headway_engine.tenants import Tenant

MAX_INPUTS = 2048
MAX_CALL_TOKENS = 300_000
"""OpenAI's bounds of one call: inputs, and tokens of all of them together."""

MOST_IN_FLIGHT = 128
"""Inputs of one call that the core holds at a time: enough to fill its steps, and no flood for others."""

FLOAT_BYTES = 4


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """/v1/embeddings. None means the same as absent, as OpenAI has it."""

    input: str | list[Any]
    model: str = ""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    user: str | None = None  # taken and without effect


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsCall:
    """A body that was understood."""

    model: str
    inputs: tuple[Prompt, ...]
    base64: bool
    dimensions: int  # 0: as many as the model has
    priority: int


def parse_embeddings(body: bytes) -> EmbeddingsCall:
    """/v1/embeddings. Raises ApiError."""
    b = decode(body, EmbeddingsBody)
    inputs = prompts_of(b.input, "input")
    if len(inputs) > MAX_INPUTS:
        raise bad_request(f"input: {len(inputs)} inputs; one call takes at most {MAX_INPUTS}", "input")
    for number, one in enumerate(inputs):
        if not one:
            raise bad_request(f"input[{number}]: must not be empty", "input")
    return EmbeddingsCall(
        model=b.model,
        inputs=inputs,
        base64=b.encoding_format == "base64",
        dimensions=b.dimensions or 0,
        priority=b.priority or 0,
    )


def check_dimensions(call: EmbeddingsCall, embeddings: Embeddings) -> None:
    """400 for a size that the model's vectors may not be cut to: most models' mean nothing when cut."""
    wanted, full = call.dimensions, embeddings.dimensions
    if wanted in (0, full, *embeddings.cuts) or (embeddings.any_cut and wanted < full):
        return
    cuts = ", ".join(map(str, embeddings.cuts))
    if embeddings.any_cut:
        allowed = f"from 1 to {full}"
    else:
        allowed = f"{full}" + (f", or one of {cuts}" if cuts else ": it was not trained to be cut")
    raise bad_request(f"dimensions: {wanted}; vectors of this model have {allowed}", "dimensions")


def most_at_once(limits: Limits, tenant: Tenant) -> int:
    """Inputs of one call that go to the core together: as many as an idle engine lets in of this tenant."""
    slots = limits.max_batch_sequences
    most = min(MOST_IN_FLIGHT, limits.max_queued_requests + slots)
    cap = tenant.max_queued_requests
    return min(most, max(slots, cap)) if cap else most  # those that find a slot do not count as queued


def most_tokens_at_once(limits: Limits, tenant: Tenant) -> int:
    """Their tokens. A single input may have more."""
    return min(limits.max_queued_tokens, tenant.max_queued_tokens or limits.max_queued_tokens)


class Feed:
    """Which inputs of a call to hand to the core next.

    As many at a time as an idle engine lets in, so that a call is not refused for its own size. Once one
    input is in, the call is carried through: an input that is refused for the moment is held back until
    another of the call has ended, and fewer are handed over at a time.
    """

    def __init__(self, requests: Sequence[Request], limits: Limits, tenant: Tenant | None = None) -> None:
        self.answered = 0
        self._waiting = deque(requests)
        self._handed: dict[RequestId, Request] = {}
        self._tokens = 0  # of those handed over
        rule = tenant or Tenant()
        self._most = most_at_once(limits, rule)
        self._most_tokens = most_tokens_at_once(limits, rule)
        self._at_once = self._most

    @property
    def done(self) -> bool:
        return not self._waiting and not self._handed

    @property
    def idle(self) -> bool:
        """The core has none of the call's inputs."""
        return not self._handed

    def take(self) -> list[Request]:
        """Requests for the core now."""
        taken: list[Request] = []
        while self._waiting and len(self._handed) < self._at_once:
            size = len(self._waiting[0].prompt)
            if self._handed and self._tokens + size > self._most_tokens:
                break
            request = self._waiting.popleft()
            self._handed[request.id] = request
            self._tokens += size
            taken.append(request)
        return taken

    def end(self, id: RequestId) -> None:
        """An input has its vector."""
        self._return(id)
        self.answered += 1
        self._at_once = min(self._at_once + 1, self._most)

    def hold_back(self, id: RequestId) -> None:
        """An input was refused for the moment."""
        self._waiting.appendleft(self._return(id))
        self._at_once = max(1, len(self._handed))

    def _return(self, id: RequestId) -> Request:
        request = self._handed.pop(id)
        self._tokens -= len(request.prompt)
        return request


def answer(call: EmbeddingsCall, vectors: Sequence[bytes], model: str, prompt_tokens: int) -> bytes:
    """The answer to a call: vectors in the order of its inputs. Takes time in proportion to them."""
    data = [msgspec.Raw(_item(call, index, vector)) for index, vector in enumerate(vectors)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _item(call: EmbeddingsCall, index: int, vector: bytes) -> bytes:
    vector = cut(vector, call.dimensions)
    embedding = base64.b64encode(vector).decode() if call.base64 else array("f", vector).tolist()
    return msgspec.json.encode({"object": "embedding", "index": index, "embedding": embedding})


def cut(vector: bytes, dimensions: int) -> bytes:
    """The first so many dimensions, made one long again; 0: all."""
    if not dimensions or dimensions * FLOAT_BYTES >= len(vector):
        return vector
    kept = array("f", vector[: dimensions * FLOAT_BYTES])
    length = math.sqrt(math.fsum(x * x for x in kept)) or 1.0
    return array("f", (x / length for x in kept)).tobytes()
