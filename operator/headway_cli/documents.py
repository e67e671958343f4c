"""Resource files: YAML in, objects out as the API server would store them, or an error that names the field.

Knows nothing of what is done with them.
"""

from pathlib import Path
from typing import Any

import yaml

from headway_cli.errors import UserError
from headway_operator.resource import API_VERSION, KIND, InvalidSpec
from headway_operator.schema import admit

Manifest = dict[str, Any]

WHERE_FIELDS_ARE = "`kubectl explain infd.spec` lists every field with its unit and range"
QUOTE_OFF = 'Off needs quotes (mode: "Off"): YAML reads the bare word as false'

SIDE_KINDS = frozenset({"Secret", "ConfigMap"})
"""Kinds that may stand beside the resource in a file, because it can refer to them."""


def read_resources(path: Path) -> tuple[Manifest, list[Manifest]]:
    """The one InferenceDeployment of a file, with its defaults, and the Secrets and ConfigMaps beside it.

    Raises UserError for anything else.
    """
    documents = [d for d in _documents(path) if d is not None]
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
            raise UserError(f"{path}, document {number}: not a Kubernetes object (it has no kind)")
    ours = [d for d in documents if d["kind"] == KIND]
    others = [d for d in documents if d["kind"] != KIND]
    if len(ours) != 1:
        found = ", ".join(d["kind"] for d in documents) or "nothing"
        raise UserError(
            f"{path}: needs exactly one {KIND}; found {found}",
            f"A minimal one: apiVersion: {API_VERSION}, kind: {KIND}, metadata.name and spec.model.uri",
        )
    foreign = sorted({d["kind"] for d in others} - SIDE_KINDS)
    if foreign:
        raise UserError(
            f"{path}: {', '.join(foreign)} needs a cluster",
            "On one machine only Secrets and ConfigMaps may stand beside the resource",
        )
    return admitted(ours[0], path), [_in_namespace(d, path) for d in others]


def _documents(path: Path) -> list[Any]:
    try:
        with path.open(encoding="utf-8") as file:
            return list(yaml.safe_load_all(file))
    except FileNotFoundError as e:
        raise UserError(f"{path}: there is no such file", "Examples are in the folder examples/") from e
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from e
    except yaml.YAMLError as e:
        raise UserError(f"{path}: not YAML: {e}") from e


def _in_namespace(document: Manifest, path: Path) -> Manifest:
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise UserError(f"{path}: {document['kind']} without metadata.name")
    return {**document, "metadata": {"namespace": "default", **metadata}}


def admitted(document: Manifest, path: Path) -> Manifest:
    """The object as the API server would store it. Raises UserError that names every wrong field."""
    try:
        stored = admit(document)
    except InvalidSpec as e:
        lines = "\n".join(f"  {problem}" for problem in e.problems)
        bare_off = any(problem.path == "spec.tuning.mode" for problem in e.problems)
        raise UserError(
            f"{path}: the resource is not valid\n{lines}", QUOTE_OFF if bare_off else WHERE_FIELDS_ARE
        ) from e
    return _in_namespace(stored, path)
