"""JSON schemas that are meant to do harm, or that nothing can be made of."""

from typing import Any


def response_format(schema: Any) -> dict[str, Any]:
    """OpenAI's wrapping."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def deep(levels: int) -> dict[str, Any]:
    """Objects in objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


OVERSIZED: dict[str, dict[str, Any]] = {
    "deep nesting": deep(100),
    "deeper than Python's stack": {"enum": [None]} | {"const": "x"} | deep(400),
    "huge enum": {"enum": [f"value {i}" for i in range(100_000)]},
    "a megabyte": {"type": "string", "description": "x" * (1 << 20)},
    "many properties": {"type": "object", "properties": {f"p{i}": {} for i in range(2_000)}},
}
"""Refused by their size, before anything is compiled."""

WRONG: dict[str, dict[str, Any]] = {
    "unknown type": {"type": "strin"},
    "unknown format": {"type": "string", "format": "shoe size"},
    "not enforceable": {"type": "array", "uniqueItems": True},
    "negation": {"not": {"type": "string"}},
    "a reference to the network": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a reference to nothing": {"$ref": "#/$defs/nothing"},
    "contradiction": {"type": "integer", "minimum": 5, "maximum": 1},
    "empty enum": {"enum": []},
    "a regex that is none": {"type": "string", "pattern": "((("},
    "look-ahead": {"type": "string", "pattern": "^(?=a)b$"},
    "a circle of references": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "a reference to itself": {"$ref": "#"},
}
"""Small, and refused when they are compiled."""

COSTLY: dict[str, dict[str, Any]] = {
    "everything with everything": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(4)]}
            for i in range(12)
        ]
    },
    "an object that never ends": {
        "type": "object",
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "very many items": {"type": "array", "items": {"enum": [1]}, "minItems": 1_000_000},
    "brackets in a regex": {"type": "string", "pattern": "(" * 3_000 + "a" + ")" * 3_000},
}
"""Small, and costly to compile or to follow; refused by the limits of either."""

_LINKS = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}

ENDLESS: dict[str, dict[str, Any]] = {
    "a chain that doubles at every link": {
        "$defs": {**_LINKS, "a40": {"type": "string", "pattern": "^a{1,5}$"}},
        "$ref": "#/$defs/a0",
    },
}
"""Small, and compiled for ever; refused by the clock."""

ODD_BUT_FINE: dict[str, dict[str, Any]] = {
    "recursive": {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "n": {"type": "integer"}},
        "additionalProperties": False,
    },
    "repeated repetitions": {"type": "string", "pattern": "^((a{1,1000}b){1,1000}c){1,1000}$"},
    "nested quantifiers": {"type": "string", "pattern": "^(((((a+)+)+)+)+)+$"},
    "exponential for a backtracking matcher": {"type": "string", "pattern": "^(a|aa|aaa)*b$"},
    "exponential as an automaton": {"type": "string", "pattern": "^[ab]*a[ab]{200}$"},
    "doubling references": {
        "$defs": {
            **{
                f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]}
                for i in range(40)
            },
            "a40": {"type": "integer", "maximum": 9, "minimum": 0},
        },
        "$ref": "#/$defs/a0",
    },
    "a very long string": {"type": "string", "minLength": 100_000, "maxLength": 200_000},
}
"""Look like bombs, and can be followed in small steps."""
