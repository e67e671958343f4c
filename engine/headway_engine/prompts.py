"""A call becomes requests: prompts as token ids, one Request and one Choice for each sample.

Refuses what the model cannot do, and long prompts before any work is spent on them. Knows nothing of
sockets and of the core.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headway_engine import openai
from headway_engine.answers import ApiError, bad_request
from headway_engine.generation import Choice
from headway_engine.messages import Ready
from headway_engine.openai import Call
from headway_engine.protocol import Limits
from headway_engine.sequence import Request
from headway_engine.text import TextError, Tokeniser

INLINE_PROMPT_CHARS = 2_000
"""Longer prompts are tokenised in a thread: other requests' tokens go out meanwhile."""


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
    """Token ids of each prompt; 400 for one that is empty, over-long or not of this model."""
    tokeniser = serving.tokeniser
    limit = serving.ready.capacity.max_model_tokens - 1  # room for one token of output
    if call.messages:
        text = render(tokeniser, call.messages, add_generation_prompt=True, **call.template_values)
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


def render(tokeniser: Tokeniser, messages: Any, **values: Any) -> str:
    """The prompt of a chat; 400 when the model's template refuses it."""
    try:
        return tokeniser.render_chat(messages, **values)
    except TextError as error:
        raise bad_request(str(error), "messages", "chat_template") from error


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
    if max(ids) >= vocab_size:
        raise bad_request(f"{param}: token id {max(ids)} is outside the vocabulary ({vocab_size})", param)
    return ids


def too_long(count: str, limit: int, param: str) -> ApiError:
    return bad_request(
        f"{param}: {count} tokens; this model takes at most {limit} and one of output",
        param,
        "context_length_exceeded",
    )


def build(
    call: Call, prompts: list[list[int]], serving: Serving, *, tenant: str, arrival_s: float
) -> tuple[list[Request], list[Choice]]:
    """One Request and one Choice for every prompt and sample. Raises 400 for what the model cannot do."""
    context = serving.ready.capacity.max_model_tokens
    tokeniser = serving.tokeniser
    asked = call.sampling
    if asked.max_tokens > context:
        name = call.max_tokens_field
        raise bad_request(
            f"{name}: {asked.max_tokens} is above the model's context of {context} tokens", name
        )
    if any(token >= serving.vocab_size for token, _ in asked.logit_bias):
        raise bad_request("logit_bias: a token id is outside the vocabulary", "logit_bias")
    ends = frozenset(() if call.ignore_eos else serving.ready.stop_token_ids) | frozenset(
        asked.stop_token_ids
    )
    requests, choices = [], []
    for number, prompt in enumerate(prompts):
        room = context - len(prompt)
        max_tokens = min(asked.max_tokens or room, room)
        for sample in range(call.n):
            index = number * call.n + sample
            sampling = msgspec.structs.replace(
                asked,
                max_tokens=max_tokens,
                min_tokens=min(asked.min_tokens, max_tokens),
                top_k=min(asked.top_k, serving.vocab_size),
                seed=openai.seed_of(call, index),
                stop_token_ids=tuple(sorted(ends)),
            )
            requests.append(
                Request(
                    id=secrets.token_hex(12),
                    prompt=tuple(prompt),
                    sampling=sampling,
                    arrival_s=arrival_s,
                    tenant=tenant,
                    priority=call.priority,
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
                    echo=tokeniser.decode(prompt) if call.echo else "",
                )
            )
    return requests, choices
