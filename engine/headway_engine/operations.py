"""What a port says of itself: operations with their bodies and answers become an OpenAPI document. Pure.

A table of operations stands beside the routes and not in them, so that it can be read in one go; a test
compares the two. Knows nothing of what the operations do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Meta

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
_LARGEST_INT = (1 << 63) - 1
_INSTEAD = "x-instead"


def precisely(schema: dict[str, Any]) -> Meta:
    """For a field whose type says less than the code that reads it: its schema in the document."""
    return Meta(extra_json_schema={_INSTEAD: schema})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer with one status. `type` is the struct of its body in JSON; without one, it is text."""

    description: str
    type: Any = None
    media_type: str = JSON
    events: tuple[Any, ...] = ()  # structs that events hold, where the answer can also be a stream
    headers: Mapping[str, str] = field(default_factory=dict)  # name → what it says
    example: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a method of a path does."""

    id: str
    tag: str
    summary: str
    description: str = ""
    body: Any = None  # a struct
    examples: Mapping[str, Any] = field(default_factory=dict)  # name → a body
    path_parameters: Mapping[str, str] = field(default_factory=dict)  # name → what it says
    answers: Mapping[int, Answer]
    open: bool = False  # needs no key, and does not look who asks


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """What all operations of a port have in common."""

    title: str
    version: str
    description: str
    tags: Mapping[str, str]  # name → what it says
    security: Sequence[Mapping[str, Sequence[str]]]
    security_schemes: Mapping[str, Any]
    request_headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name → parameter
    answer_headers: Mapping[str, str] = field(default_factory=dict)  # of every answer


Operations = Mapping[tuple[str, str], Operation]
"""(method in small letters, path) → operation."""


def document(port: Port, operations: Operations) -> dict[str, Any]:
    """The OpenAPI document."""
    schemas = _Schemas(operations)
    paths: dict[str, Any] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method] = _operation(port, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": port.title, "version": port.version, "description": port.description},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in port.tags.items()],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": dict(port.security_schemes),
        },
    }


class _Schemas:
    """The schemas of all bodies, each once, and references to them."""

    def __init__(self, operations: Operations) -> None:
        types: list[Any] = []
        for operation in operations.values():
            answers = operation.answers.values()
            for type in (operation.body, *(a.type for a in answers), *(e for a in answers for e in a.events)):
                if type is not None and type not in types:
                    types.append(type)
        refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
        self._of = list(zip(types, refs, strict=True))
        self.components = {name: _exact(schema) for name, schema in components.items()}

    def of(self, type: Any) -> dict[str, Any]:
        return next(schema for known, schema in self._of if known is type)


def _operation(port: Port, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    out: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {
            str(status): _answer(answer, port.answer_headers, schemas)
            for status, answer in operation.answers.items()
        },
        "security": [] if operation.open else list(port.security),
    }
    if operation.description:
        out["description"] = operation.description
    parameters = [
        {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}
        for name, text in operation.path_parameters.items()
    ]
    parameters += [
        {"name": name, "in": "header", "required": False, **parameter}
        for name, parameter in port.request_headers.items()
        if not operation.open
    ]
    if parameters:
        out["parameters"] = parameters
    if operation.body is not None:
        content: dict[str, Any] = {"schema": schemas.of(operation.body)}
        if operation.examples:
            content["examples"] = {name: {"value": value} for name, value in operation.examples.items()}
        out["requestBody"] = {"required": True, "content": {JSON: content}}
    return out


def _answer(answer: Answer, headers: Mapping[str, str], schemas: _Schemas) -> dict[str, Any]:
    schema = {"type": "string"} if answer.type is None else schemas.of(answer.type)
    content: dict[str, Any] = {answer.media_type: {"schema": schema}}
    if answer.example is not None:
        content[answer.media_type]["example"] = answer.example
    if answer.events:
        content[EVENT_STREAM] = {"itemSchema": _event([schemas.of(type) for type in answer.events])}
    return {
        "description": answer.description,
        "headers": {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in {**headers, **answer.headers}.items()
        },
        "content": content,
    }


def _event(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """A server-sent event. `itemSchema` is OpenAPI 3.2's; FastAPI writes it into 3.1 too, which has none."""
    told = [{"type": "string", "contentMediaType": JSON, "contentSchema": body} for body in bodies]
    data = {"anyOf": [{"const": "[DONE]"}, *told]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _exact(schema: Any) -> Any:
    """Bounds of integers as integers (msgspec writes floats, which round the largest ones up), and what
    `precisely` says in place of what the types say."""
    if isinstance(schema, list):
        return [_exact(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if _INSTEAD in schema:
        kept = {key: schema[key] for key in ("description", "default") if key in schema}
        schema = {**schema[_INSTEAD], **kept}
    out = {key: _exact(value) for key, value in schema.items()}
    if out.get("type") == "integer":
        for bound in ("minimum", "maximum"):
            if bound in out:
                out[bound] = max(-_LARGEST_INT - 1, min(int(out[bound]), _LARGEST_INT))
    return out
