"""Tools of a chat: what the client offers, and how the model is told and held to it. Pure.

A call that must come (`required`, or a function by name) is forced by a grammar, in a notation of our own,
whatever the model was trained on: `{"name": "f", "arguments": {...}}`, or a list of such. A call that may
come (`auto`) is left to the model and its chat template. Knows nothing of how calls are read (`tool_calls`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headway_engine.answers import bad_request
from headway_engine.structured import Name, checked_schema, lark_grammar, spaced

MAX_TOOLS = 128
MAX_FORCED_CALLS = 16
"""In one answer, where calls are forced: a model that never closes the list would go on for ever."""


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class ChosenTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a call. `grammar` is empty where the model may choose (`auto`)."""

    functions: tuple[dict[str, Any], ...]  # as chat templates take them
    grammar: str = ""
    one_call: bool = False

    @property
    def forced(self) -> bool:
        return bool(self.grammar)


def understood(tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None) -> Tools | None:
    """What is offered and wanted; None for nothing. Raises a 400."""
    names = [tool.function.name for tool in tools]
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: at most {MAX_TOOLS}", "tools")
    if len(set(names)) != len(names):
        raise bad_request("tools: two functions have the same name", "tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        return None
    functions = tuple(_plain(tool) for tool in tools)
    if choice is None or choice == "auto":
        return Tools(functions=functions, one_call=parallel is False)
    if isinstance(choice, ChosenTool):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
        if not wanted:
            raise bad_request(f"tool_choice: no tool is named {choice.function.name!r}", "tool_choice")
        return Tools(functions=functions, grammar=_grammar(wanted, 1), one_call=True)
    most = 1 if parallel is False else MAX_FORCED_CALLS
    return Tools(functions=functions, grammar=_grammar(tools, most), one_call=most == 1)


def _plain(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    function["parameters"] = parameters(tool)
    return {"type": "function", "function": function}


def parameters(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments. Without one, a function takes none."""
    schema = tool.function.parameters
    return schema or {"type": "object", "properties": {}, "additionalProperties": False}


def _grammar(tools: Sequence[Tool], most: int) -> str:
    """Calls of these functions: one as an object, several as a list."""
    schemas = [{"type": "object", **parameters(tool)} for tool in tools]
    checked_schema({"tools": schemas}, "tools")
    start = "call" if most == 1 else f'"[" call (", " call){{0,{most - 1}}} "]"'
    lines = [f"start: {start}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        head = f'{{"name": "{tool.function.name}", "arguments": '
        lines.append(f'call_{i}: {msgspec.json.encode(head).decode()} arguments_{i} "}}"')
        lines.append(f"arguments_{i}: %json {msgspec.json.encode(spaced(schema)).decode()}")
    return lark_grammar("\n".join(lines) + "\n")


def told(
    messages: Sequence[dict[str, Any]], functions: Sequence[dict[str, Any]] = ()
) -> tuple[dict[str, Any], ...]:
    """The messages with the tools told in words, for models whose chat template knows nothing of tools.

    Earlier calls and their results become text too: such templates have no other place for them.
    """
    texts = tuple(_as_text(m) for m in messages)
    if not functions:
        return texts
    listed = "\n".join(msgspec.json.encode(f["function"]).decode() for f in functions)
    system = (
        "You can call these functions:\n"
        f"{listed}\n"
        'Call one by answering with JSON: {"name": "FUNCTION", "arguments": {...}}'
    )
    if texts and texts[0]["role"] == "system" and texts[0].get("content"):
        system = f"{texts[0]['content']}\n\n{system}"
        texts = texts[1:]
    return ({"role": "system", "content": system}, *texts)


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"The function returned: {content}"}
    if not message.get("tool_calls"):
        return message
    calls = [msgspec.json.encode(call.get("function")).decode() for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join([content, *calls] if content else calls)}
