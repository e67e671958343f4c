"""OpenAI's bodies as types: which fields there are, what each may be, and what the API's schema says of it.

Knows nothing of what fields mean together: that is `openai`'s.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway_engine.operations import precisely
from headway_engine.structured import ResponseFormat, StructuredOutputs
from headway_engine.tools import Tool, ToolChoice

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 1 << 14
MAX_DETOKENIZE = 1 << 18
MAX_SCORES = 1 << 19
"""Bounds of what one request may cost everybody else, in the front end or in a step."""
SEED_SPACE = 1 << 63

Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
PositiveProbability = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
CountOrZero = Annotated[int, Meta(ge=0, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, le=1 << 31)]
TokenIds = list[TokenId]

# What the types of these fields leave to `openai`, for the API's schema.
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 1 << 31}}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
PromptField = Annotated[
    str | list[Any],
    precisely({"anyOf": [_TEXT, {**_MANY, "items": _TEXT}, _IDS, {**_MANY, "items": _IDS}]}),
]
StopField = Annotated[
    str | list[str] | None,
    precisely({"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}, {"type": "null"}]}),
]
LogitBias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None,
    precisely(
        {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "maxProperties": MAX_LOGIT_BIAS,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "description": "token id to bias",
        }
    ),
]
Content = Annotated[
    str | list[dict[str, Any]] | None,
    precisely({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}),
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; we send none


class Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both routes. None means the same as absent, as OpenAI has it."""

    model: str = ""
    max_tokens: Count | None = None
    min_tokens: CountOrZero | None = None
    temperature: Temperature | None = None
    top_p: PositiveProbability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-SEED_SPACE, le=SEED_SPACE - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopField = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    # Taken and without effect, because they ask for nothing that an engine does.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionBody(Common, kw_only=True, forbid_unknown_fields=True):
    """/v1/completions."""

    prompt: PromptField
    max_tokens: CountOrZero | None = None  # 0, with echo: only score the prompt
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[str | None, precisely({"enum": ["", None]})] = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a chat. Content in parts must be text."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Content = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    # What the official client's message objects carry along when they are sent back, without effect.
    parsed: Any = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ChatBody(Common, kw_only=True, forbid_unknown_fields=True):
    """/v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any] | None, precisely({"enum": [[], None]})] = None
    function_call: Annotated[Any, precisely({"enum": ["none", "auto", None]})] = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Annotated[list[str] | None, precisely({"enum": [["text"], None]})] = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """/tokenize: a prompt, or messages."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """/detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZE)]
    model: str = ""
