"""What the public port says of itself: its operations, with their bodies, answers and examples.

Knows nothing of how requests are handled, or of what stands in an answer (`answer_forms`).
"""

from importlib.metadata import version
from typing import Any

from headway_engine import answer_forms as forms
from headway_engine import bodies
from headway_engine.embeddings import EmbeddingsBody
from headway_engine.operations import Answer, Operation, Operations, Port, document
from headway_engine.protocol import TENANT_HEADER


def _error(description: str, *, retry: bool = False, example: dict[str, Any] | None = None) -> Answer:
    headers = {"Retry-After": "seconds after which coming back helps"} if retry else {}
    return Answer(
        description=description,
        type=forms.ErrorBody,
        headers=headers,
        example={"error": example} if example else None,
    )


def _example(message: str, type: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"message": message, "type": type, "param": param, "code": code}


INVALID = {
    400: _error(
        "can never work; `param` names the field",
        example=_example(
            "temperature: Expected `float` >= 0.0", "invalid_request_error", "temperature", None
        ),
    )
}
KEYS = {
    401: _error(
        "no valid key; where the engine was started with keys",
        example=_example("this API needs a valid key", "authentication_error", None, "invalid_api_key"),
    )
}
MODEL = {404: _error("no such model")}
STARTING = {503: _error("starting, draining, or the core is gone", retry=True)}
BODY = {
    408: _error("the body did not come in time"),
    413: _error("the body is too large"),
    415: _error("the body is no JSON by its Content-Type, or it is compressed"),
}
COMPUTED = {
    429: _error(
        "a limit of the engine or of the tenant is reached",
        retry=True,
        example=_example("the queue is full (1024 requests)", "rate_limit_error", None, "queue_full"),
    ),
    500: _error("this request failed, and the engine lives; the log says why, under the request's id"),
}
READ = {**INVALID, **KEYS, **MODEL, **BODY, **STARTING}
"""What else an operation with a body may answer."""

GENERATED = {**INVALID, **KEYS, **MODEL, **BODY, **COMPUTED, **STARTING}
"""What else one that the model computes may answer."""

_ASKED = {"max_tokens": 16, "temperature": 0}

OPERATIONS: Operations = {
    ("post", "/v1/chat/completions"): Operation(
        id="chat",
        tag="generate",
        summary="Answer a conversation",
        description=(
            "With `stream`, the answer is `text/event-stream`: events `data: {...}` as in `itemSchema`, "
            "then `data: [DONE]`. What fails after the first token is an event with an error, and no [DONE]."
        ),
        body=bodies.ChatBody,
        examples={
            "whole": {**_ASKED, "messages": [{"role": "user", "content": "What is the capital of France?"}]},
            "stream": {
                **_ASKED,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        },
        answers={
            200: Answer(description="the answer", type=forms.Chat, events=(forms.ChatChunk, forms.ErrorBody)),
            **GENERATED,
        },
    ),
    ("post", "/v1/completions"): Operation(
        id="complete",
        tag="generate",
        summary="Continue prompts",
        description="Streams as chats do.",
        body=bodies.CompletionBody,
        examples={
            "whole": {**_ASKED, "prompt": "The capital of France is"},
            "stream": {**_ASKED, "prompt": "The capital of France is", "stream": True},
        },
        answers={
            200: Answer(
                description="the answer",
                type=forms.Completion,
                events=(forms.CompletionChunk, forms.ErrorBody),
            ),
            **GENERATED,
        },
    ),
    ("get", "/health"): Operation(
        id="health",
        tag="models",
        summary="Whether requests are served now",
        description="For clients and load balancers; the probes of a kubelet are at the management port.",
        open=True,
        answers={200: Answer(description="they are", type=forms.Health), **STARTING},
    ),
    ("post", "/v1/embeddings"): Operation(
        id="embed",
        tag="generate",
        summary="Make vectors of inputs",
        body=EmbeddingsBody,
        examples={
            "one": {"input": "The capital of France"},
            "several": {"input": ["Paris", "Rome"], "encoding_format": "base64"},
        },
        answers={
            200: Answer(description="the vectors", type=forms.EmbeddingsList),
            **GENERATED,
        },
    ),
    ("get", "/v1/models"): Operation(
        id="models",
        tag="models",
        summary="List the models: the one that is served",
        answers={200: Answer(description="the list", type=forms.Models), **INVALID, **KEYS, **STARTING},
    ),
    ("get", "/v1/models/{name}"): Operation(
        id="model",
        tag="models",
        summary="Describe a model",
        path_parameters={"name": "the served name; it may contain slashes"},
        answers={
            200: Answer(description="the model", type=forms.Model),
            **INVALID,
            **KEYS,
            **MODEL,
            **STARTING,
        },
    ),
    ("post", "/tokenize"): Operation(
        id="tokenize",
        tag="tokens",
        summary="Turn a prompt, or messages, into token ids",
        body=bodies.TokenizeBody,
        examples={"prompt": {"prompt": "The capital of France is"}},
        answers={
            200: Answer(description="the tokens", type=forms.Tokens),
            **READ,
        },
    ),
    ("post", "/detokenize"): Operation(
        id="detokenize",
        tag="tokens",
        summary="Turn token ids into text",
        body=bodies.DetokenizeBody,
        examples={"ids": {"tokens": [1, 2, 3]}},
        answers={
            200: Answer(description="the text", type=forms.Text),
            **READ,
        },
    ),
}

_TENANT = {
    "description": "who asks, where there are no keys that say it; empty is the tenant without a name",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:@-]{0,64}$"},
}


def public_document(*, keyed: bool) -> dict[str, Any]:
    """The OpenAPI document of the public port. `keyed`: requests need a key, which also says who asks."""
    port = Port(
        title="Headway engine",
        version=version("headway"),
        description="OpenAI's API for one model. Every answer other than 200 has a body as in `ErrorBody`.",
        tags={
            "generate": "Answers of the model, whole or as streams",
            "models": "What is served",
            "tokens": "The tokenizer of the model",
        },
        security=[{"key": []}] if keyed else [],
        security_schemes={"key": {"type": "http", "scheme": "bearer"}} if keyed else {},
        request_headers={} if keyed else {TENANT_HEADER: _TENANT},
        answer_headers={"X-Request-Id": "the client's own if it sent one, else a new one"},
    )
    return document(port, OPERATIONS)
