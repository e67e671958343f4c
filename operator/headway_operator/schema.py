"""What the API server does to a resource before anyone sees it, for where there is no API server.

Applies the CRD's defaults and checks its schema; `rules` checks what the CRD writes in CEL. Knows no
field by name.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from headway_operator import rules
from headway_operator.reader import InvalidSpec, Problem

Json = dict[str, Any]

CRD_FILE = "inferencedeployments.yaml"


@cache
def _crd() -> Json:
    beside, checkout = Path(__file__).parent / "crds", Path(__file__).parents[2] / "crds"
    folder = beside if beside.is_dir() else checkout
    crd: Json = yaml.safe_load((folder / CRD_FILE).read_text(encoding="utf-8"))
    return crd


def load_crd() -> Json:
    """The CustomResourceDefinition that this package was made with."""
    return deepcopy(_crd())


def openapi_schema(crd: Mapping[str, Any]) -> Json:
    """The structural schema of the stored version."""
    (version,) = [version for version in crd["spec"]["versions"] if version["storage"]]
    schema: Json = version["schema"]["openAPIV3Schema"]
    return schema


def admit(body: Mapping[str, Any]) -> Json:
    """The body as the API server would store it; InvalidSpec with every reason why it would not."""
    stored = apply_defaults(_crd(), body)
    problems = list(_schema_problems(_crd(), stored)) or list(rules.problems(stored["spec"]))
    if problems:
        raise InvalidSpec(tuple(problems))
    return stored


def apply_defaults(crd: Mapping[str, Any], body: Mapping[str, Any]) -> Json:
    """A copy of the body with the schema's defaults filled in."""
    filled: Json = deepcopy(dict(body))
    _fill(openapi_schema(crd), filled)
    return filled


def _fill(schema: Mapping[str, Any], value: Any) -> None:
    if isinstance(value, dict):
        for key, part in schema.get("properties", {}).items():
            if key not in value and "default" in part:
                value[key] = deepcopy(part["default"])
            if key in value:
                _fill(part, value[key])
    elif isinstance(value, list):
        for item in value:
            _fill(schema.get("items", {}), item)


def _closed(schema: Any, top: bool = False) -> Any:
    """The schema as the API server means it with strict fields: what is not named is not allowed."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if "properties" in closed:
        closed["properties"] = {key: _closed(part) for key, part in closed["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed["additionalProperties"] = False
    elif isinstance(closed.get("additionalProperties"), dict):
        closed["additionalProperties"] = _closed(closed["additionalProperties"])
    if "items" in closed:
        closed["items"] = _closed(closed["items"])
    if top:
        closed["properties"]["metadata"].pop("additionalProperties", None)
        closed["required"] = ["apiVersion", "kind", "metadata", *closed.get("required", [])]
    return closed


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(_closed(openapi_schema(_crd()), top=True))


def _schema_problems(crd: Mapping[str, Any], body: Json) -> Iterator[Problem]:
    names, group = crd["spec"]["names"], crd["spec"]["group"]
    version = f"{group}/{crd['spec']['versions'][0]['name']}"
    for key, expected in (("apiVersion", version), ("kind", names["kind"])):
        if body.get(key) != expected:
            yield Problem(key, f"must be {expected}")
    if "metadata" in body and "name" not in (body["metadata"] or {}):
        yield Problem("metadata.name", "is required")
    for error in _validator().iter_errors(body):
        yield from _translate(error)


def _translate(error: ValidationError) -> Iterator[Problem]:
    path = _dotted(error.absolute_path)
    prefix = f"{path}." if path else ""
    if error.validator == "required":
        missing = [key for key in error.validator_value if key not in error.instance]
        yield from (Problem(f"{prefix}{key}", "is required") for key in missing)
    elif error.validator == "additionalProperties":
        unknown = [key for key in error.instance if key not in error.schema.get("properties", {})]
        yield from (Problem(f"{prefix}{key}", "is not a field of this kind") for key in unknown)
    else:
        yield Problem(path, _say(error))


def _say(error: ValidationError) -> str:
    value = error.validator_value
    match error.validator:
        case "enum":
            return f"must be one of {', '.join(map(str, value))}"
        case "type":
            return f"must be of type {value}"
        case "pattern":
            return f"{error.instance!r} does not have the form {value}"
        case "minimum":
            return f"must be at least {value}"
        case "maximum":
            return f"must be at most {value}"
        case "minProperties":
            return f"must have at least {value} of its fields"
        case "maxProperties":
            return f"must have at most {value} of its fields"
        case _:
            return str(error.message)


def _dotted(path: Any) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
