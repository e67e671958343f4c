"""Typed reading of JSON objects: every wrong member is noted with its path, none is guessed.

Knows nothing of the fields of a resource.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from kubernetes.utils.duration import parse_duration


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a resource; `path` is dotted, from the top: `spec.batching.window`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class InvalidSpec(ValueError):
    """A resource that cannot be served; carries every problem that was found."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def duration_ms(text: str) -> int:
    """Milliseconds of a GEP-2257 duration; ValueError for anything else."""
    return round(parse_duration(text).total_seconds() * 1000)


Choice = TypeVar("Choice", bound=StrEnum)


class Reader:
    """Reads typed members of one JSON object; a wrong one is noted as a problem and read as its default."""

    def __init__(self, body: Mapping[str, Any], problems: list[Problem], path: str = "") -> None:
        self.body = body
        self._problems = problems
        self._path = path

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _note(self, key: str, message: str) -> None:
        self._problems.append(Problem(self._at(key), message))

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.body.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self._note(key, "must be an object")
            return {}
        return value

    def section(self, key: str) -> "Reader":
        return Reader(self.mapping(key), self._problems, self._at(key))

    def sections(self, key: str) -> "list[Reader]":
        """The objects in a list."""
        found = []
        for index, value in enumerate(self.items(key)):
            if isinstance(value, Mapping):
                found.append(Reader(value, self._problems, f"{self._at(key)}[{index}]"))
            else:
                self._note(f"{key}[{index}]", "must be an object")
        return found

    def items(self, key: str) -> tuple[Any, ...]:
        value = self.body.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            self._note(key, "must be a list")
            return ()
        return tuple(value)

    def text(self, key: str, default: str) -> str:
        value = self.body.get(key, default)
        if not isinstance(value, str):
            self._note(key, "must be a string")
            return default
        return value

    def integer(self, key: str, default: int) -> int:
        value = self.body.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self._note(key, "must be a whole number")
            return default
        return value

    def maybe_integer(self, key: str) -> int | None:
        return self.integer(key, 0) if key in self.body else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.body.get(key, default)
        if not isinstance(value, bool):
            self._note(key, "must be true or false")
            return default
        return value

    def choice(self, key: str, default: Choice) -> Choice:
        kind = type(default)
        try:
            return kind(self.text(key, default.value))
        except ValueError:
            self._note(key, f"must be one of {', '.join(member.value for member in kind)}")
            return default

    def duration_ms(self, key: str, default_ms: int) -> int:
        if key not in self.body:
            return default_ms
        try:
            return duration_ms(self.text(key, ""))
        except ValueError:
            self._note(key, "must be a duration such as 20ms, 1s or 1m30s")
            return default_ms
