"""Text and token ids: encode prompts, render chat templates, decode.

Reads a tokenizer folder with the `tokenizers` library alone: importing transformers would bring torch
into the front end, half a gigabyte and seconds of start-up for a template and a vocabulary. Knows nothing of
requests and scheduling.
"""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from headway_engine.tool_calls import OPEN

Messages = Sequence[dict[str, Any]]


_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
"""Private-use characters around special tokens that a client wrote."""


class TextError(ValueError):
    """A prompt that cannot be turned into tokens, with a hint for the client."""


class Tokeniser:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises TextError when the folder has no tokenizer.json."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TextError(f"{folder} has no tokenizer.json; save the tokenizer in its fast form")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        self._special = {
            name: _token_text(settings[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if settings.get(name) is not None
        }
        self._template_source = _template_source(folder, settings) or ""
        source = self._template_source
        self._template = _environment().from_string(source) if source else None

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a rendered chat. What `render_chat` marked becomes plain text: a client that writes an
        end-of-turn mark into a message writes its characters, and does not end the turn."""
        if _OPEN not in text:
            return self.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for number, piece in enumerate(self._marked.split(text)):
            if piece:
                ids += self._encode_part(piece, plain=number % 2 == 1, first=not ids)
        return ids

    def _encode_part(self, piece: str, *, plain: bool, first: bool) -> list[int]:
        """A piece of a longer text. Some tokenizers put a space before whatever they are given, so a piece
        from the middle is encoded after a newline, which is then taken away again."""
        tokenizer = self._plain if plain else self._tokenizer
        if not first:
            newline = list(tokenizer.encode("\n", add_special_tokens=False).ids)
            ids = list(tokenizer.encode("\n" + piece, add_special_tokens=False).ids)
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
        return list(tokenizer.encode(piece, add_special_tokens=False).ids)

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer, blind to special tokens."""
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Any special token as text, the longest first."""
        tokens = [t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special]
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")

    @cached_property
    def _marked(self) -> re.Pattern[str]:
        return re.compile(f"{_OPEN}({self._controls.pattern}){_CLOSE}|[{_OPEN}{_CLOSE}]")

    def _mark(self, value: Any) -> Any:
        """Special tokens in what the client wrote, between marks of our own."""
        if isinstance(value, str):
            value = value.replace(_OPEN, "").replace(_CLOSE, "")
            return self._controls.sub(f"{_OPEN}\\g<0>{_CLOSE}", value)
        if isinstance(value, dict):
            return {self._mark(key): self._mark(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._mark(inner) for inner in value]
        return value

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest_token_chars(self) -> int:
        """No token stands for more characters; so a text has at least its length over this many tokens."""
        return max((len(token) for token in self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Takes time in proportion to it: keep long ones off the event loop."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    @cached_property
    def knows_tools(self) -> bool:
        """The chat template tells the model of tools."""
        question = [{"role": "user", "content": "?"}]
        function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
        try:
            told = self.render_chat(question, tools=[{"type": "function", "function": function}])
            return told != self.render_chat(question)
        except TextError:
            return False

    @cached_property
    def tags_tool_calls(self) -> bool:
        """The chat template has the model write its calls between `<tool_call>` and `</tool_call>`."""
        return self.knows_tools and OPEN in self._template_source

    def render_chat(
        self,
        messages: Messages,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Messages | None = None,
        **values: Any,
    ) -> str:
        """The prompt text of a conversation, for `encode_chat`. Raises TextError when the model's template
        refuses it."""
        if self._template is None:
            raise TextError("this model has no chat template; use /v1/completions")
        plain = [{key: self._mark(value) for key, value in m.items() if value is not None} for m in messages]
        if tools:
            values = {**values, "tools": self._mark(list(tools))}
        try:
            return self._template.render(
                {**self._special, **values}, messages=plain, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise TextError(f"the model's chat template refused the messages: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def piece(self, id: int) -> tuple[str, bytes]:
        """One token as text and as bytes. Half a character is a replacement sign in the text only."""
        text = str(self._tokenizer.decode([id], skip_special_tokens=False))
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return "", b""
        if self._byte_level and all(c in _BYTE_OF for c in token):
            return text, bytes(_BYTE_OF[c] for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return text, bytes([int(token[3:5], 16)])
        return text, text.encode()

    @cached_property
    def _byte_level(self) -> bool:
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        return "ByteLevel" in json.dumps(decoder)


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}


def _token_text(token: Any) -> str:
    """Tokenizer settings write a token as text or as an object with the text inside."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    return template if template is None else str(template)


def _environment() -> jinja2.Environment:
    """The dialect that chat templates are written in. Sandboxed: a template is code from a stranger."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 for itself, the others from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
