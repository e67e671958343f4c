"""The forms of the public port's answers, errors and events of streams included.

They are for its OpenAPI document only; `answers` writes bodies as dicts, and a test holds them to these.
Knows nothing of which operation answers with which.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Count = Annotated[int, Meta(ge=0)]
Finish = Literal["stop", "length", "tool_calls"]


class Form(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Nothing is in an answer that is not here."""


class Error(Form):
    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
    param: Annotated[str | None, Meta(description="the field of the body that is wrong")]
    code: Annotated[str | None, Meta(description="the reason, for programs")]


class ErrorBody(Form):
    """Every answer other than 200, as OpenAI has it."""

    error: Error


class PromptDetails(Form):
    cached_tokens: Annotated[int, Meta(ge=0, description="found in the prefix cache, not computed")]


class Usage(Form):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(Form):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(Form):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(Form):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Form):
    """An event of a stream. The last one of a stream that was asked for usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Embedding(Form):
    object: Literal["embedding"]
    index: Count
    embedding: Annotated[
        list[float] | str,
        Meta(description="of length 1; with `base64`, float32 values in little-endian order"),
    ]


class EmbeddingsUsage(Form):
    prompt_tokens: Count
    total_tokens: Count


class EmbeddingsList(Form):
    """The answer of /v1/embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class CalledFunction(Form):
    name: str
    arguments: Annotated[str, Meta(description="JSON as text")]


class ToolCall(Form):
    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionDelta(Form):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Form):
    index: Count
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class TopLogprob(Form):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class TokenLogprob(Form):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Form):
    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(Form):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Form):
    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class Chat(Form):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    choices: list[ChatChoice]
    usage: Usage


class MessageDelta(Form):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Form):
    index: Count
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(Form):
    """An event of a stream. The last one of a stream that was asked for usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Form):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Annotated[int, Meta(ge=1, description="tokens of prompt and output together")]


class Health(Form):
    status: Literal["ok"]


class Models(Form):
    object: Literal["list"]
    data: list[Model]


class Tokens(Form):
    count: Count
    max_model_len: Annotated[int, Meta(ge=1)]
    tokens: list[Count]


class Text(Form):
    prompt: str
