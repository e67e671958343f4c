"""OpenAI's answers: whole ones, chunks of a stream, errors. Pure: values in, bytes out.

Knows nothing of sockets, and nothing of what was asked beyond its kind.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from headway_engine.generation import Delta, TokenInfo, Usage
from headway_engine.tool_calls import CallPart, joined

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""


class ApiError(Exception):
    """An answer other than 200. `param` names the offending field of the body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """OpenAI's error object."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _error_type(self.status),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, where coming back helps."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, round(self.retry_after_s)))}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """What can never work."""
    return ApiError(400, message, param=param, code=code)


def _error_type(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 404:
            return "not_found_error"
        case 429:
            return "rate_limit_error"
        case _ if status >= 500:
            return "server_error"
    return "invalid_request_error"


class Kind(Enum):
    """Which of the two generating routes; the value is the prefix of response ids."""

    CHAT = "chatcmpl"
    COMPLETION = "cmpl"


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer repeats."""

    kind: Kind
    id: str
    created: int  # Unix time
    model: str


def new_id(kind: Kind) -> str:
    """An id for an answer; never made from anything of the client's."""
    return f"{kind.value}-{secrets.token_hex(16)}"


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def chunk(head: Head, delta: Delta, *, usage: Usage | None, usage_field: bool) -> bytes:
    """One event of a stream. `usage_field`: usage was asked for, so the field is there, if only as null."""
    if head.kind is Kind.CHAT:
        said: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if delta.text or delta.first:
            said["content"] = delta.text or (None if delta.calls else "")
        if delta.calls:
            said["tool_calls"] = [_call_delta(part) for part in joined(delta.calls)]
        choice: dict[str, Any] = {"index": delta.index, "delta": said}
        choice["logprobs"] = _chat_logprobs(delta.logprobs) if delta.logprobs else None
        kind = "chat.completion.chunk"
    else:
        choice = {"index": delta.index, "text": delta.text}
        choice["logprobs"] = _completion_logprobs(delta.logprobs) if delta.logprobs else None
        kind = "text_completion"
    choice["finish_reason"] = delta.finish_reason
    body = _object(head, kind, [choice])
    if usage_field:
        body["usage"] = usage_object(usage) if usage else None
    return event(body)


def usage_chunk(head: Head, usage: Usage) -> bytes:
    """The last event before [DONE] when usage was asked for: no choices."""
    kind = "chat.completion.chunk" if head.kind is Kind.CHAT else "text_completion"
    return event({**_object(head, kind, []), "usage": usage_object(usage)})


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error inside a stream; the stream ends after it, without [DONE]."""
    return b"data: " + error.body() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def answer(head: Head, choices: Sequence[Delta], usage: Usage, *, logprobs: bool) -> bytes:
    """The whole answer of a request that is not streamed; each choice is one delta with everything in it."""
    out: list[dict[str, Any]] = []
    for c in choices:
        choice: dict[str, Any] = {"index": c.index}
        if head.kind is Kind.CHAT:
            calls = [_call(part) for part in joined(c.calls)]
            content = None if calls and not c.text else c.text
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                choice["message"]["tool_calls"] = calls
            choice["logprobs"] = _chat_logprobs(c.logprobs) if logprobs else None
        else:
            choice["text"] = c.text
            choice["logprobs"] = _completion_logprobs(c.logprobs) if logprobs else None
        choice["finish_reason"] = c.finish_reason
        out.append(choice)
    kind = "chat.completion" if head.kind is Kind.CHAT else "text_completion"
    return msgspec.json.encode({**_object(head, kind, out), "usage": usage_object(usage)})


def _call(part: CallPart) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.id, "type": "function", "function": function}


def _call_delta(part: CallPart) -> dict[str, Any]:
    """Id and name once, arguments as they come: clients add strings up, and stumble over nulls."""
    if part.id:
        return {"index": part.index, **_call(part)}
    return {"index": part.index, "function": {"arguments": part.arguments}}


def _object(head: Head, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def _chat_logprobs(tokens: Sequence[TokenInfo]) -> dict[str, Any]:
    def entry(text: str, raw: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**entry(t.text, t.raw, t.logprob), "top_logprobs": [entry(*top) for top in t.top]} for t in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[TokenInfo]) -> dict[str, Any]:
    return {
        "tokens": [_label(t.text, t.raw) for t in tokens],
        "token_logprobs": [_finite(t.logprob) for t in tokens],
        "top_logprobs": [_alternatives(t) for t in tokens],
        "text_offset": [t.offset for t in tokens],
    }


def _alternatives(token: TokenInfo) -> dict[str, float | None] | None:
    """The likeliest tokens, and where those are asked for the chosen one too. None for the first token of a
    prompt, which has no alternatives."""
    if token.logprob is None:
        return None
    own = [(token.text, token.raw, token.logprob)] if token.top else []
    return {_label(text, raw): _finite(logprob) for text, raw, logprob in (*token.top, *own)}


def _label(text: str, raw: bytes) -> str:
    """A token's name. Parts of characters are named by their bytes, or all would have the same name."""
    return text if text.encode() == raw else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def model(name: str, created: int, max_model_tokens: int) -> dict[str, Any]:
    """The one model that is served, as /v1/models shows it."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headway",
        "max_model_len": max_model_tokens,
    }
