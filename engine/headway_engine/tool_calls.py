"""Text to tool calls, while it grows: what a stream has told, put together, is what a whole answer tells.

Reads two notations: the forced one, which is JSON alone (see `tools`), and text with calls between
`<tool_call>` and `</tool_call>`, as the chat templates of Qwen, Hermes and SmolLM ask for it. Arguments are
handed on as they come. Knows nothing of tokens and of answers' bodies.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headway_engine.detokenise import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"

HEAD_CHARS = 1024
"""A call whose name and beginning of arguments are not found so early is read when all of it is there."""

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class CallPart:
    """What is new of call number `index`. The first part of a call has its id and its name."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class _Json:
    """Follows JSON text, character by character, to the end of the object it began with."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int | None:
        """The place behind the object's end; None when it is not reached."""
        for at, c in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._in_string = False
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self.depth += 1
            elif c in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return at + 1
        return None


class ToolCallReader:
    """The calls of one answer. `tagged`: calls stand between tags in text; otherwise all is calls."""

    def __init__(
        self, *, tagged: bool, most: int | None = None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        """Calls after the first `most` are left out."""
        self._tagged = tagged
        self._most = most
        self._new_id = new_id
        self._text: list[str] = []
        self._parts: list[CallPart] = []
        self._rest = ""  # not understood yet
        self._spaces = ""  # before what may be a call: told only when text follows
        self._inside = not tagged
        self._raw = ""  # since the opening tag, in case it is no call
        self._object = _Json()  # the call under way, as far as `_seen`
        self._seen = 0
        self._json: _Json | None = None  # of the arguments under way
        self._closing = False  # behind the arguments: up to the end of the call's own object
        self.started = 0
        self.complete = 0

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """Text that belongs to no call, and what is new of calls."""
        self._rest += text
        while self._step():
            pass
        return self._taken()

    def flush(self) -> tuple[str, tuple[CallPart, ...]]:
        """At the end: a call that had not got as far as its arguments is text after all, if it was free to
        be text."""
        if self._tagged and self._json is None and not self._closing:
            self._text.append(self._spaces if not self.started or self._raw or self._rest else "")
            self._text.append(self._raw + self._rest)
        self._rest = self._raw = self._spaces = ""
        return self._taken()

    @property
    def whole(self) -> bool:
        """There are calls, and none is cut off."""
        return self.started > 0 and self.started == self.complete

    def _taken(self) -> tuple[str, tuple[CallPart, ...]]:
        text = "".join(self._text)
        parts = tuple(p for p in self._parts if self._most is None or p.index < self._most)
        self._text.clear()
        self._parts.clear()
        return text, parts

    def _step(self) -> bool:
        """Understand one more piece; False when more text is needed for that."""
        if not self._rest:
            return False
        if self._json is not None:
            return self._arguments(self._json)
        if self._closing:
            return self._to_the_objects_end()
        return self._head() if self._inside else self._free_text()

    def _free_text(self) -> bool:
        at = self._rest.find(OPEN)
        end = at if at >= 0 else len(self._rest) - overlap(self._rest, OPEN)
        said = self._spaces + self._rest[:end]
        kept = said.rstrip()
        self._spaces = said[len(kept) :]
        self._text.append(kept)
        self._rest = self._rest[end:]
        if at < 0:
            return False
        self._rest = self._rest[len(OPEN) :]
        self._raw = OPEN
        self._inside = True
        return True

    def _head(self) -> bool:
        """Between calls, or in the beginning of one."""
        skipped = len(self._rest) - len(self._rest.lstrip(" \t\r\n,[]"))
        if skipped:
            self._skip(skipped)
            return True
        if self._tagged and self._rest.startswith(CLOSE):
            self._rest = self._rest[len(CLOSE) :]
            self._inside, self._raw, self._spaces = False, "", ""
            return True
        if self._rest[0] != "{":
            return self._no_call()
        found = _HEAD.match(self._rest[:HEAD_CHARS]) if self._seen < HEAD_CHARS else None
        if found and (name := _string(found[1])) is not None:
            self._start(name)
            self._rest = self._rest[found.end() :]
            self._json = _Json()
            return True
        seen, self._seen = self._seen, len(self._rest)
        end = self._object.push(self._rest[seen:])
        return end is not None and self._whole_object(seen + end)

    def _whole_object(self, end: int) -> bool:
        """A call whose parts are not where they usually are, read when all of it is there."""
        name, arguments = _call(self._rest[:end])
        self._object, self._seen = _Json(), 0
        if name is None:
            return self._no_call()
        self._start(name)
        self._add(arguments)
        self.complete += 1
        self._rest = self._rest[end:]
        return True

    def _arguments(self, json: _Json) -> bool:
        end = json.push(self._rest)
        self._add(self._rest if end is None else self._rest[:end])
        self._rest = "" if end is None else self._rest[end:]
        if end is not None:
            self._json, self._closing = None, True
        return True

    def _to_the_objects_end(self) -> bool:
        at = self._rest.find("}")
        self._rest = "" if at < 0 else self._rest[at + 1 :]
        if at >= 0:
            self._closing = False
            self.complete += 1
        return True

    def _no_call(self) -> bool:
        """What stands behind the tag is no call: it is text, tag and all. In the forced notation this
        cannot be."""
        if self._tagged and CLOSE.startswith(self._rest):
            return False  # may become the closing tag
        if not self._tagged:
            self._rest = self._rest[1:]
            return True
        self._text.append(self._spaces + self._raw)
        self._spaces, self._raw, self._inside = "", "", False
        return True

    def _skip(self, count: int) -> None:
        if self._raw:
            self._raw += self._rest[:count]
        self._rest = self._rest[count:]

    def _start(self, name: str) -> None:
        self._parts.append(CallPart(self.started, "", self._new_id(), name))
        self.started += 1
        self._raw = self._spaces = ""
        self._object, self._seen = _Json(), 0

    def _add(self, arguments: str) -> None:
        if arguments:
            self._parts.append(CallPart(self.started - 1, arguments))


def _string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        return None


def _call(text: str) -> tuple[str | None, str]:
    """Name and arguments of a call written as JSON; no name when it is none."""
    try:
        call: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None, ""
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return None, ""
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return name, arguments
    return name, msgspec.json.encode(arguments).decode()


def joined(parts: tuple[CallPart, ...]) -> list[CallPart]:
    """One part for each call, with everything that is known of it."""
    calls: dict[int, CallPart] = {}
    for part in parts:
        before = calls.get(part.index)
        if before is None:
            calls[part.index] = part
        else:
            calls[part.index] = CallPart(
                part.index, before.arguments + part.arguments, before.id, before.name
            )
    return list(calls.values())
