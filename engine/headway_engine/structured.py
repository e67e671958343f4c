"""Structured output: what a body asks of the form of an answer becomes a grammar. Pure.

Refuses schemas that are too large to be followed at once, before any work is spent on them; what they mean
is judged where grammars are compiled (`grammar.check`). Knows nothing of tokens.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from llguidance import LLMatcher
from msgspec import Meta

from headway_engine.answers import bad_request

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64
"""Containers inside containers of the schema itself; an object inside an object takes two."""
MAX_PROPERTIES = 500
"""Of one object: what compiling costs grows with their square."""

SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. Where any space may stand, small models write spaces to the end."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's wrapping of a schema. Every schema is enforced, so `strict` changes nothing."""

    name: Name
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field: one of these."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None


def structured_grammar(wanted: StructuredOutputs | None) -> str:
    """The grammar of vLLM's field; empty when it is not there. Raises a 400."""
    field = "structured_outputs"
    if wanted is None:
        return ""
    given = [value for value in (wanted.json, wanted.regex, wanted.choice) if value is not None]
    if len(given) != 1:
        raise bad_request(f"{field}: give one of json, regex and choice", field)
    checked_schema({"wanted": given}, field)
    if wanted.json is not None:
        return json_grammar(wanted.json)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if not wanted.choice or not all(wanted.choice):
        raise bad_request(f"{field}.choice: at least one, and none of them empty", field)
    return LLMatcher.grammar_from_regex("|".join(re.escape(text) for text in wanted.choice))


def response_grammar(form: ResponseFormat | None) -> str:
    """The grammar of an answer in this form; empty when anything goes. Raises a 400."""
    if form is None or form.type == "text":
        return ""
    if form.type == "json_object":
        return json_grammar({"type": "object"})
    if form.json_schema is None:
        raise bad_request("response_format: json_schema is missing", "response_format")
    schema = form.json_schema.schema
    if schema is None:
        raise bad_request("response_format.json_schema: schema is missing", "response_format")
    return json_grammar(checked_schema(schema, "response_format"))


def json_grammar(schema: dict[str, Any]) -> str:
    """A grammar of JSON texts that are valid under the schema."""
    return _encoded({"grammars": [{"json_schema": spaced(schema)}]})


def lark_grammar(source: str) -> str:
    """A grammar in Lark's notation, which may contain `%json` schemas."""
    return _encoded({"grammars": [{"lark_grammar": source}]})


def spaced(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with our rules for spaces, whatever it says of its own."""
    return {**schema, "x-guidance": SPACES}


def checked_schema(schema: dict[str, Any], field: str) -> dict[str, Any]:
    """The schema, when its size is bearable. Raises a 400 that names the field."""
    size = len(_encoded(schema))
    if size > MAX_SCHEMA_BYTES:
        raise bad_request(
            f"{field}: the schema has {size} bytes; at most {MAX_SCHEMA_BYTES} are taken", field
        )
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        if not level:
            return schema
        level = [inner for outer in level for inner in _inner(outer, field)]
    raise bad_request(f"{field}: the schema is nested more than {MAX_SCHEMA_DEPTH} deep", field)


def _inner(value: Any, field: str) -> list[Any]:
    """The containers inside a container."""
    if isinstance(value, dict) and len(value) > MAX_PROPERTIES:
        raise bad_request(
            f"{field}: an object with {len(value)} keys; at most {MAX_PROPERTIES} are taken", field
        )
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, dict | list)]


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()
