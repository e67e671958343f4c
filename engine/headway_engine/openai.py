"""OpenAI's bodies understood: what a client asks for, or which field is wrong. Pure: bytes in, a Call out.

Bad input ends here, as an ApiError that names the field; the core sees only what can be run. Knows
nothing of sockets, tokenizers and scheduling.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from headway_engine.answers import Kind, bad_request
from headway_engine.bodies import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SEED_SPACE,
    ChatBody,
    Common,
    CompletionBody,
    Message,
    StreamOptions,
    TokenIds,
)
from headway_engine.sequence import SamplingParams
from headway_engine.structured import response_grammar, structured_grammar
from headway_engine.tools import Tools, understood

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions. Chats run to the context's end when nothing is said."""
MODEL_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters of sampling for which a model may have its own default (generation_config.json)."""


Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A body that was understood. One of `prompts` and `messages` is filled."""

    kind: Kind
    model: str
    sampling: SamplingParams  # max_tokens as asked for (0: not said); no end-of-sequence ids yet
    unsaid: tuple[str, ...] = ()  # of MODEL_DEFAULTED, what the client left open
    grammar_field: str = ""  # what asked for the grammar of `sampling`
    tools: Tools | None = None
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    template_values: dict[str, Any]
    max_tokens_field: str  # what the client called it
    n: int
    stops: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    generates: bool  # False: the prompt is echoed and nothing follows
    priority: int

    @property
    def logprobs(self) -> bool:
        return self.sampling.logprobs >= 0

    @property
    def scores(self) -> bool:
        """The prompt's own log-probabilities are asked for."""
        return self.sampling.prompt_logprobs >= 0


T = TypeVar("T")
_AT = re.compile(r"^(?P<what>.*?) - at `\$(?:\.)?(?P<where>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")


def decode(body: bytes, type: type[T]) -> T:
    """A body as a struct. Raises a 400 that names the field."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        text = str(error)
        at = _AT.match(text)
        what, where = (at["what"], at["where"]) if at else (text, "")
        named = _UNKNOWN.search(what) or _MISSING.search(what)
        if named:
            where = f"{where}.{named['name']}".lstrip(".")
        message = f"{where}: {what}" if where else what
        raise bad_request(message, where.split("[")[0].split(".")[0] or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def parse_completion(body: bytes) -> Call:
    """/v1/completions. Raises ApiError."""
    b = decode(body, CompletionBody)
    if b.suffix:
        raise bad_request("suffix is not supported", "suffix")
    if b.best_of is not None and b.best_of != (b.n or 1):
        raise bad_request("best_of is supported only when it equals n", "best_of")
    if b.max_tokens == 0 and not b.echo:
        raise bad_request(
            "max_tokens: 0 is for echo alone; without it the answer would be empty", "max_tokens"
        )
    prompts = prompts_of(b.prompt, "prompt")
    if len(prompts) * (b.n or 1) > MAX_CHOICES:
        raise bad_request(f"prompts times n must not exceed {MAX_CHOICES}", "n")
    return _call(
        Kind.COMPLETION,
        b,
        max_tokens=COMPLETION_MAX_TOKENS if b.max_tokens is None else b.max_tokens,
        logprobs=-1 if b.logprobs is None else b.logprobs,
        prompts=prompts,
        echo=bool(b.echo),
        generates=b.max_tokens != 0,
    )


def parse_chat(body: bytes) -> Call:
    """/v1/chat/completions. Raises ApiError."""
    b = decode(body, ChatBody)
    if b.functions or b.function_call not in (None, "none", "auto"):
        raise bad_request("functions are not supported; use tools", "functions")
    offered = understood(b.tools or (), b.tool_choice, b.parallel_tool_calls)
    if b.modalities not in (None, ["text"]):
        raise bad_request('modalities: only ["text"] is supported', "modalities")
    if b.top_logprobs and not b.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    return _call(
        Kind.CHAT,
        b,
        max_tokens=b.max_completion_tokens or b.max_tokens or 0,
        logprobs=(b.top_logprobs or 0) if b.logprobs else -1,
        messages=plain_messages(b.messages),
        template_values=_template_values(b.chat_template_kwargs or {}),
        offered=offered,
        max_tokens_field="max_completion_tokens" if b.max_completion_tokens else "max_tokens",
    )


def _call(
    kind: Kind,
    b: Common,
    *,
    max_tokens: int,
    logprobs: int,
    prompts: tuple[Prompt, ...] = (),
    messages: tuple[dict[str, Any], ...] = (),
    template_values: dict[str, Any] | None = None,
    offered: Tools | None = None,
    max_tokens_field: str = "max_tokens",
    echo: bool = False,
    generates: bool = True,
) -> Call:
    if b.stream_options is not None and not b.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    options = b.stream_options or StreamOptions()
    min_tokens = b.min_tokens or 0
    if (max_tokens or not generates) and min_tokens > max_tokens:
        raise bad_request(f"min_tokens ({min_tokens}) is above max_tokens ({max_tokens})", "min_tokens")
    grammar, grammar_field = _grammar(b, offered)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(b.temperature, 1.0),
        top_p=_or(b.top_p, 1.0),
        top_k=max(b.top_k or 0, 0),
        min_p=_or(b.min_p, 0.0),
        presence_penalty=_or(b.presence_penalty, 0.0),
        frequency_penalty=_or(b.frequency_penalty, 0.0),
        repetition_penalty=_or(b.repetition_penalty, 1.0),
        seed=secrets.randbelow(SEED_SPACE) if b.seed is None else b.seed % SEED_SPACE,
        logit_bias=_logit_bias(b.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else -1,
        stop_token_ids=tuple(b.stop_token_ids or ()),
        grammar=grammar,
    )
    return Call(
        kind=kind,
        model=b.model,
        sampling=sampling,
        unsaid=tuple(name for name in MODEL_DEFAULTED if getattr(b, name) is None),
        grammar_field=grammar_field,
        tools=offered,
        prompts=prompts,
        messages=messages,
        template_values=template_values or {},
        max_tokens_field=max_tokens_field,
        n=b.n or 1,
        stops=_stops(b.stop),
        ignore_eos=bool(b.ignore_eos),
        stream=bool(b.stream),
        include_usage=options.include_usage or options.continuous_usage_stats,
        continuous_usage=options.continuous_usage_stats,
        echo=echo,
        generates=generates,
        priority=b.priority or 0,
    )


def _grammar(b: Common, offered: Tools | None) -> tuple[str, str]:
    """What the output must obey, and the field that says so."""
    wanted = {
        "response_format": response_grammar(b.response_format),
        "structured_outputs": structured_grammar(b.structured_outputs),
        "tools": offered.grammar if offered else "",
    }
    named = [name for name, grammar in wanted.items() if grammar]
    if len(named) > 1 or (named and offered and "tools" not in named):
        raise bad_request(
            "response_format, structured_outputs and tools: only one of them at a time is supported; with "
            'tool_choice "none", tools do not count',
            named[0],
        )
    field = named[0] if named else ""
    grammar = wanted.get(field, "")
    if not grammar:
        return "", ""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(b, name):
            raise bad_request(f"{name}: an output under {field} ends where it is complete", name)
    return grammar, field


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop: at most {MAX_STOPS} strings", "stop")
    if any(not s or len(s) > MAX_STOP_CHARS for s in stops):
        raise bad_request(f"stop: strings must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return stops


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias: at most {MAX_LOGIT_BIAS} tokens", "logit_bias")
    pairs = []
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise bad_request(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def prompts_of(prompt: str | list[Any], field: str) -> tuple[Prompt, ...]:
    """The four forms: a text, texts, token ids, lists of token ids. A list may have millions of items, and
    everybody waits while it is looked at, so no loop of ours runs over it."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise bad_request(f"{field}: must not be empty", field)
    if (texts := _as(prompt, list[str])) is not None:
        return tuple(texts)
    if (ids := _as(prompt, TokenIds)) is not None:
        return (tuple(ids),)
    if (lists := _as(prompt, list[TokenIds])) is not None:
        return tuple(tuple(ids) for ids in lists)
    raise bad_request(f"{field}: must be a string, strings, token ids, or lists of token ids", field)


def _as(value: Any, form: type[T]) -> T | None:
    """The value, if it has that form."""
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError:
        return None


def _template_values(values: dict[str, Any]) -> dict[str, Any]:
    """What a client tells the chat template beside the messages, and may not tell it twice."""
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in values:
            raise bad_request(
                f"chat_template_kwargs: {name} is not for the client to set here", "chat_template_kwargs"
            )
    return values


def plain_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Messages as chat templates want them: content is text."""
    return tuple(
        {
            "role": m.role,
            "content": _content(m.content, i) if m.content is not None else None,
            "name": m.name,
            "tool_calls": [_tool_call(call) for call in m.tool_calls] if m.tool_calls else None,
            "tool_call_id": m.tool_call_id,
            "reasoning_content": m.reasoning_content,
        }
        for i, m in enumerate(messages)
    )


def _content(content: str | list[dict[str, Any]], index: int) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise bad_request(f"messages[{index}].content: only parts of type text are supported", "messages")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """An earlier call, its arguments as an object: the API has them as text, chat templates do not. What the
    official client parsed of them is no business of the model's."""
    function = call.get("function")
    if isinstance(function, dict) and "parsed_arguments" in function:
        function = {key: value for key, value in function.items() if key != "parsed_arguments"}
        call = {**call, "function": function}
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}", type=dict)
    except (msgspec.DecodeError, RecursionError):
        return call  # what a model wrote need not be JSON
    return {**call, "function": {**function, "arguments": arguments}}


def seed_of(call: Call, index: int) -> int:
    """The seed of choice `index`. The first has the client's own; siblings have derived ones, or n samples
    would be n times the same."""
    return (call.sampling.seed + index * 0x9E3779B97F4A7C15) % SEED_SPACE
