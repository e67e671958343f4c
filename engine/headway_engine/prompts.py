"""A call becomes requests: prompts as token ids, one Request and one Choice for each sample.

Refuses what the model cannot do, and long prompts before any work is spent on them. Knows nothing of
sockets and of the core.
"""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from headway_engine import openai
from headway_engine.answers import ApiError, bad_request
from headway_engine.bodies import MAX_SCORES
from headway_engine.embeddings import MAX_CALL_TOKENS, EmbeddingsCall, check_dimensions
from headway_engine.generation import Choice
from headway_engine.grammar import GrammarError
from headway_engine.grammar_check import Checker
from headway_engine.messages import Embeddings, Ready
from headway_engine.openai import Call, Prompt
from headway_engine.protocol import Limits
from headway_engine.sequence import Request, SamplingParams
from headway_engine.text import TextError, Tokeniser
from headway_engine.tool_calls import ToolCallReader
from headway_engine.tools import told

INLINE_PROMPT_CHARS = 2_000
"""Longer prompts are tokenised in a thread: other requests' tokens go out meanwhile."""

GRAMMAR_CHECK_S = 10.0
"""How long a grammar may wait to be checked, and take."""

_checker = Checker()
_checking = ThreadPoolExecutor(1, thread_name_prefix="grammar")
"""Apart from the threads that tokenise: costly grammars hold up nothing but each other."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What is there once the core is ready."""

    ready: Ready
    tokeniser: Tokeniser
    limits: Limits

    @property
    def vocab_size(self) -> int:
        """Ids below this one have a meaning and weights. A tokenizer may know more than the model."""
        return min(self.tokeniser.vocab_size, self.ready.vocab_size or self.tokeniser.vocab_size)


async def encode_prompts(call: Call, serving: Serving) -> list[list[int]]:
    """Token ids of each prompt; 400 for one that is empty, over-long or not of this model, and for a grammar
    that cannot be followed."""
    tokeniser = serving.tokeniser
    limit = serving.ready.capacity.max_model_tokens - call.generates  # room for one token of output
    await check_grammar(call, serving)
    if call.messages:
        text = render_call(call, tokeniser)
        ids = await encode_text(tokeniser, tokeniser.encode_chat, text, limit, "messages")
        return [checked(ids, limit, serving.vocab_size, "messages")]
    prompts = []
    for prompt in call.prompts:
        if isinstance(prompt, str):
            ids = await encode_text(tokeniser, tokeniser.encode, prompt, limit, "prompt")
        else:
            ids = list(prompt)
        prompts.append(checked(ids, limit, serving.vocab_size, "prompt"))
    return prompts


async def check_grammar(call: Call, serving: Serving) -> None:
    """400 that names the field when the call's grammar is wrong, or too much."""
    text, field = call.sampling.grammar, call.grammar_field
    if not text:
        return
    if not serving.ready.grammars:
        raise bad_request(f"{field}: this model's tokenizer cannot be held to a form", field)
    checking = _checking.submit(_checker.check, text)
    try:
        await asyncio.wait_for(asyncio.wrap_future(checking), GRAMMAR_CHECK_S)
    except GrammarError as error:
        raise bad_request(f"{field}: {error}", field, "invalid_schema") from error
    except TimeoutError:
        if checking.cancelled():  # it never was its turn
            raise ApiError(
                503, f"too many requests with {field} at once", code="busy", retry_after_s=GRAMMAR_CHECK_S
            ) from None
        raise bad_request(f"{field}: it takes too long to compile", field, "invalid_schema") from None


def render_call(call: Call, tokeniser: Tokeniser) -> str:
    """The prompt of a chat, with its tools told as the model knows it, or in words."""
    messages, tools = call.messages, call.tools
    functions = tools.functions if tools else ()
    if tools and not tools.forced and not tokeniser.tags_tool_calls:
        raise bad_request(
            "tools: the chat template of this model has no tool calls that are understood here, so it cannot "
            'be left to the model (tool_choice "auto"); use tool_choice "required", or name a function',
            "tools",
        )
    if not tokeniser.knows_tools and (functions or any(m["tool_calls"] for m in messages)):
        try:
            messages, functions = told(messages, functions), ()
        except RecursionError:
            raise nested_too_deeply() from None
    return render(
        tokeniser, messages, add_generation_prompt=True, tools=functions or None, **call.template_values
    )


def render(tokeniser: Tokeniser, messages: Any, /, **values: Any) -> str:
    """The prompt of a chat; 400 when the model's template refuses it."""
    try:
        return tokeniser.render_chat(messages, **values)
    except TextError as error:
        raise bad_request(str(error), "messages", "chat_template") from error
    except RecursionError:
        raise nested_too_deeply() from None


def nested_too_deeply() -> ApiError:
    return bad_request("messages: what they or the tools contain is nested too deeply", "messages")


async def encode_text(
    tokeniser: Tokeniser, encode: Callable[[str], list[int]], text: str, limit: int, param: str
) -> list[int]:
    """Token ids; a text that must be too long is refused by its length, before any work."""
    if len(text) > (limit + 1) * tokeniser.longest_token_chars:
        raise too_long(f"at least {len(text) // tokeniser.longest_token_chars}", limit, param)
    if len(text) <= INLINE_PROMPT_CHARS:
        return encode(text)
    return await asyncio.to_thread(encode, text)


def checked(ids: list[int], limit: int, vocab_size: int, param: str) -> list[int]:
    """The ids, when they can be run."""
    if not ids:
        raise bad_request(f"{param}: must not be empty", param)
    if len(ids) > limit:
        raise too_long(str(len(ids)), limit, param)
    return known(ids, vocab_size, param)


def known(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """The ids, when the model knows them all."""
    if max(ids) >= vocab_size:
        raise bad_request(f"{param}: token id {max(ids)} is outside the vocabulary ({vocab_size})", param)
    return ids


def too_long(count: str, limit: int, param: str) -> ApiError:
    return bad_request(
        f"{param}: {count} tokens; this model takes at most {limit}, one of output aside",
        param,
        "context_length_exceeded",
    )


def new_call(sequences: int) -> str:
    """What the sequences of one call have in common, for the core; nothing when there is only one."""
    return secrets.token_hex(12) if sequences > 1 else ""


def build(
    call: Call, prompts: list[list[int]], serving: Serving, *, tenant: str, arrival_s: float
) -> tuple[list[Request], list[Choice]]:
    """One Choice for every prompt and sample, and one Request for each of them; samples for which nothing is
    generated are all the same, so their prompt has one. Raises 400 for what the model cannot do.

    The prompt's own log-probabilities are the same for all its samples: the first alone asks for them.
    """
    context = serving.ready.capacity.max_model_tokens
    tokeniser = serving.tokeniser
    asked = with_defaults(call, serving.ready)
    if asked.max_tokens > context:
        name = call.max_tokens_field
        raise bad_request(
            f"{name}: {asked.max_tokens} is above the model's context of {context} tokens", name
        )
    if any(token >= serving.vocab_size for token, _ in asked.logit_bias):
        raise bad_request("logit_bias: a token id is outside the vocabulary", "logit_bias")
    if any(token >= serving.vocab_size for token in asked.stop_token_ids):
        raise bad_request("stop_token_ids: a token id is outside the vocabulary", "stop_token_ids")
    entries = sum(map(len, prompts)) * call.n * (asked.prompt_logprobs + 1)
    if entries > MAX_SCORES:
        raise bad_request(
            f"logprobs: {entries} log-probabilities of prompts are more than {MAX_SCORES}; send fewer "
            "prompts at a time",
            "logprobs",
        )
    ends = frozenset(() if call.ignore_eos else serving.ready.stop_token_ids) | frozenset(
        asked.stop_token_ids
    )
    call_id = new_call(len(prompts) * (call.n if call.generates else 1))
    requests, choices = [], []
    for number, prompt in enumerate(prompts):
        room = context - len(prompt)
        max_tokens = min(asked.max_tokens or room, room) if call.generates else 0
        echo = tokeniser.decode(prompt) if call.echo and not call.scores else ""
        for sample in range(call.n):
            index = number * call.n + sample
            sampling = msgspec.structs.replace(
                asked,
                prompt_logprobs=-1 if sample else asked.prompt_logprobs,
                max_tokens=max_tokens,
                min_tokens=min(asked.min_tokens, max_tokens),
                top_k=min(asked.top_k, serving.vocab_size),
                seed=openai.seed_of(call, index),
                stop_token_ids=tuple(sorted(ends)),
            )
            if call.generates or not sample:
                requests.append(
                    Request(
                        id=secrets.token_hex(12),
                        prompt=tuple(prompt),
                        sampling=sampling,
                        arrival_s=arrival_s,
                        tenant=tenant,
                        priority=call.priority,
                        call=call_id,
                        cache_salt=tenant,
                    )
                )
            choices.append(
                Choice(
                    index,
                    prompt,
                    tokeniser.decode,
                    tokeniser.piece,
                    stops=call.stops,
                    stop_token_ids=ends,
                    min_tokens=sampling.min_tokens,
                    echo=echo,
                    scored=call.scores,
                    calls=_reader(call),
                )
            )
    return requests, choices


def embeddings_of(call: EmbeddingsCall, serving: Serving) -> Embeddings:
    """How the model makes vectors; 400 when it makes none, or none of the size that is asked for."""
    embeddings = serving.ready.embeddings
    if not isinstance(embeddings, Embeddings):
        raise bad_request(f"model: this model gives no embeddings: {embeddings.reason}", "model")
    check_dimensions(call, embeddings)
    return embeddings


async def encode_inputs(call: EmbeddingsCall, serving: Serving) -> list[list[int]]:
    """Token ids of each input; 400 for one that is too long or not of this model, and for too many in all."""
    tokeniser = serving.tokeniser
    chars = sum(len(one) for one in call.inputs if isinstance(one, str))
    ids = sum(len(one) for one in call.inputs if not isinstance(one, str))
    least = ids + chars // tokeniser.longest_token_chars
    if least > MAX_CALL_TOKENS:  # told before any work is spent on them
        raise _too_many(f"at least {least}")
    if chars <= INLINE_PROMPT_CHARS:
        inputs = [_encode_input(i, one, serving) for i, one in enumerate(call.inputs)]
    else:
        inputs = await asyncio.to_thread(
            lambda: [_encode_input(i, one, serving) for i, one in enumerate(call.inputs)]
        )
    if (total := sum(map(len, inputs))) > MAX_CALL_TOKENS:
        raise _too_many(str(total))
    return inputs


def _encode_input(number: int, one: Prompt, serving: Serving) -> list[int]:
    """Token ids of input `number`. Nothing is generated, so it may fill the whole context."""
    tokeniser, limit = serving.tokeniser, serving.ready.capacity.max_model_tokens
    longest = tokeniser.longest_token_chars
    over = f"at least {len(one) // longest}" if isinstance(one, str) and len(one) > limit * longest else ""
    ids: list[int] = []
    if not over:
        ids = tokeniser.encode(one) if isinstance(one, str) else list(one)
        over = str(len(ids)) if len(ids) > limit else ""
    if over:
        message = f"input[{number}]: {over} tokens; this model takes at most {limit}"
        raise bad_request(message, "input", "context_length_exceeded")
    if not ids:  # some tokenizers make nothing of a text
        raise bad_request(f"input[{number}]: has no tokens", "input")
    return known(ids, serving.vocab_size, "input")


def _too_many(tokens: str) -> ApiError:
    return bad_request(f"input: {tokens} tokens; one call takes at most {MAX_CALL_TOKENS}", "input")


def build_pooled(
    call: EmbeddingsCall, inputs: list[list[int]], embeddings: Embeddings, *, tenant: str, arrival_s: float
) -> list[Request]:
    """One Request for every input."""
    call_id = new_call(len(inputs))
    return [
        Request(
            id=secrets.token_hex(12),
            prompt=tuple(ids),
            sampling=SamplingParams(max_tokens=0),
            arrival_s=arrival_s,
            tenant=tenant,
            priority=call.priority,
            call=call_id,
            cache_salt=tenant,
            pooling=embeddings.pooling,
        )
        for ids in inputs
    ]


def with_defaults(call: Call, ready: Ready) -> SamplingParams:
    """What the client asked for, and what the model's authors recommend where it said nothing."""
    defaults = {
        name: ready.sampling_defaults[name] for name in call.unsaid if name in ready.sampling_defaults
    }
    if "top_k" in defaults:
        defaults["top_k"] = int(defaults["top_k"])
    return msgspec.structs.replace(call.sampling, **defaults)


def _reader(call: Call) -> ToolCallReader | None:
    if call.tools is None:
        return None
    return ToolCallReader(tagged=not call.tools.forced, most=1 if call.tools.one_call else None)
