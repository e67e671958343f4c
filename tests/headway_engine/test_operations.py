"""Tables of operations as OpenAPI documents: small ones, by hand."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway_engine.operations import Answer, Operation, Port, document, precisely


class Body(msgspec.Struct):
    """Words."""

    count: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    words: Annotated[str | list[Any], precisely({"enum": ["a", ["b"]]})] = "a"


class Event(msgspec.Struct):
    text: str


def port(**fields):
    return Port(
        **{
            "title": "t",
            "version": "1",
            "description": "d",
            "tags": {"a": "all"},
            "security": [{"key": []}],
            "security_schemes": {"key": {"type": "http", "scheme": "bearer"}},
            **fields,
        }
    )


def operation(**fields):
    answers = {200: Answer(description="yes", type=Event)}
    return Operation(**{"id": "ask", "tag": "a", "summary": "Ask", "answers": answers, **fields})


def described(operation, port_=None):
    whole = document(port_ or port(), {("post", "/ask"): operation})
    return whole, whole["paths"]["/ask"]["post"]


def test_bounds_are_exact_and_fields_can_say_more_than_their_types():
    """A float's 2**63 would allow one more than the engine does."""
    whole, asked = described(operation(body=Body, examples={"one": {"count": 1}}))
    content = asked["requestBody"]["content"]["application/json"]
    assert content["schema"] == {"$ref": "#/components/schemas/Body"}
    assert content["examples"] == {"one": {"value": {"count": 1}}}
    properties = whole["components"]["schemas"]["Body"]["properties"]
    assert properties["count"] == {"type": "integer", "minimum": 1, "maximum": (1 << 63) - 1}
    assert properties["words"] == {"enum": ["a", ["b"]], "default": "a"}


def test_a_stream_is_told_by_its_events():
    """Each of them, and the mark at the end."""
    answers = {200: Answer(description="yes", type=Body, events=(Event,))}
    _, asked = described(operation(answers=answers))
    content = asked["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    done, told = content["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"]
    assert done == {"const": "[DONE]"}
    assert told["contentSchema"] == {"$ref": "#/components/schemas/Event"}


def test_keys_headers_and_texts():
    """What a port's operations have in common, and what one of them does not."""
    headers = {"X-Who": {"description": "who", "schema": {"type": "string"}}}
    common = port(request_headers=headers, answer_headers={"X-Id": "an id"})
    _, asked = described(operation(path_parameters={"name": "which"}), common)
    assert asked["security"] == [{"key": []}]
    assert [(p["name"], p["in"], p["required"]) for p in asked["parameters"]] == [
        ("name", "path", True),
        ("X-Who", "header", False),
    ]
    assert set(asked["responses"]["200"]["headers"]) == {"X-Id"}
    text = {200: Answer(description="yes", media_type="text/plain")}
    _, open_ = described(operation(open=True, answers=text), common)
    assert open_["security"] == []
    assert "parameters" not in open_
    assert open_["responses"]["200"]["content"] == {"text/plain": {"schema": {"type": "string"}}}
