"""Random requests for a soak: what may be asked, as it is drawn. Chance is an argument; nothing is sent.

A `Law` draws asks: prompts that share beginnings, every sampling parameter, several samples, streams or
not, schemas, embeddings, tenants and priorities, bodies that are no requests, clients that leave and clients
that stop reading. Knows nothing of sockets and of what an engine answers.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from support import hostile_schemas

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
MODEL_NAME = "tiny"  # what support.engine_server serves every model as

TENANTS = {"gold": {"weight": 4, "priority": 10}, "batch": {"priority": -10, "max_queued_requests": 20}}
"""For --tenants-file; a quarter of the traffic comes from others."""

SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "boolean"},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
)
"""Small, bounded, and each with an answer of few tokens."""


class Manner(Enum):
    """How a client behaves."""

    WAITS = "waits"
    LEAVES = "leaves"  # hangs up after `after_s`
    PAUSES = "pauses"  # stops reading for `after_s`, then reads on
    STALLS = "stalls"  # never reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request and the manner of who sends it."""

    path: str
    body: bytes
    sequences: int = 1  # that arrive at the engine when the body is taken
    stream: bool = False
    schema: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    bad: bool = False  # may be answered with 4xx only
    manner: Manner = Manner.WAITS
    after_s: float = 0.0
    expects: tuple[str, ...] | None = None  # the texts of all choices, where the model is that simple
    twins: tuple[int, int] = (0, 0)  # of embeddings, two places that have the same input


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """What is drawn, in tokens and shares. `prompt` draws a prompt, and the text that follows it if known."""

    prompt: Callable[[random.Random, int], tuple[Any, str | None]]
    most_prompt_tokens: int
    most_output_tokens: int
    schemas: bool = True
    embeddings_share: float = 0.1
    most_inputs: int = 60  # of one call, more than a queue of the soak may hold
    leave_share: float = 0.2
    bad_share: float = 0.05
    slow_share: float = 0.02
    stalls: bool = True
    patience_s: float = 4.0  # mean, of those who leave
    pause_s: float = 5.0
    most_model_tokens: int = 1024

    def draw(self, chance: random.Random) -> Ask:
        """The next request of some client."""
        if chance.random() < self.bad_share:
            return self._bad(chance)
        if chance.random() < self.slow_share:
            return self._slow(chance)
        if chance.random() < self.embeddings_share:
            ask = self._embeddings(chance)
        elif self.schemas and chance.random() < 0.1:
            ask = self._with_schema(chance)
        else:
            ask = self._plain(chance)
        if chance.random() >= self.leave_share:
            return ask
        patience_s = chance.expovariate(1 / self.patience_s)
        return replace(ask, manner=Manner.LEAVES, after_s=patience_s)

    def _plain(self, chance: random.Random) -> Ask:
        prompt, follows = self.prompt(chance, _log_uniform(chance, 1, self.most_prompt_tokens))
        n = chance.choice([1, 1, 1, 1, 2, 4])
        most = _log_uniform(chance, 1, self.most_output_tokens)
        stream = chance.random() < 0.6
        body = {"model": MODEL_NAME, "max_tokens": most, "n": n, "stream": stream, **_sampling(chance)}
        chat = follows is None and chance.random() < 0.3
        if chat:
            body["messages"] = [{"role": "user", "content": f"Tell me of {chance.randrange(10**6)}"}]
            body.pop("logprobs", None)
        else:
            body["prompt"] = prompt
        if stream and chance.random() < 0.7:
            body["stream_options"] = {"include_usage": True}
        headers = _who(chance, body)
        return Ask(
            path=CHAT if chat else COMPLETIONS,
            body=json.dumps(body).encode(),
            sequences=n,
            stream=stream,
            headers=headers,
            expects=None if follows is None else (follows[:most],) * n,
        )

    def _embeddings(self, chance: random.Random) -> Ask:
        """Vectors of one input or many, of which one is there twice."""
        count = _log_uniform(chance, 1, self.most_inputs)
        most = max(1, self.most_prompt_tokens // 8)  # in all as much as a few prompts
        inputs = [self.prompt(chance, _log_uniform(chance, 1, most))[0] for _ in range(count)]
        twins = (chance.randrange(count), chance.randrange(count))
        inputs[twins[1]] = inputs[twins[0]]
        body: dict[str, Any] = {"model": MODEL_NAME, "input": inputs}
        if chance.random() < 0.5:
            body["encoding_format"] = chance.choice(["float", "base64"])
        headers = _who(chance, body)
        return Ask(
            path=EMBEDDINGS,
            body=json.dumps(body).encode(),
            sequences=count,
            headers=headers,
            twins=twins,
        )

    def _with_schema(self, chance: random.Random) -> Ask:
        schema = chance.choice(SCHEMAS)
        stream = chance.random() < 0.5
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": f"Answer in JSON, {chance.randrange(1000)}"}],
            "max_tokens": 40,
            "stream": stream,
            "temperature": chance.choice([0, 0.8]),
            "response_format": hostile_schemas.response_format(schema),
        }
        headers = _who(chance, body)
        return Ask(path=CHAT, body=json.dumps(body).encode(), stream=stream, schema=schema, headers=headers)

    def _slow(self, chance: random.Random) -> Ask:
        """An answer of about a megabyte that nobody reads, for a while or for ever."""
        prompt, follows = self.prompt(chance, 8)
        n, most = 2, min(200, self.most_model_tokens // 2)
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": most, "n": n, "stream": True}
        body |= {"logprobs": 20, "ignore_eos": True}
        return Ask(
            path=COMPLETIONS,
            body=json.dumps(body).encode(),
            sequences=n,
            stream=True,
            manner=chance.choice([Manner.PAUSES, Manner.STALLS]) if self.stalls else Manner.PAUSES,
            after_s=self.pause_s,
            expects=None if follows is None else (follows[:most],) * n,
        )

    def _bad(self, chance: random.Random) -> Ask:
        """A body that can never work; each is a 4xx."""
        good = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 4}
        changes: tuple[dict[str, Any], ...] = (
            {"max_tokens": -1},
            {"max_tokens": 1 << 40},
            {"temperature": "hot"},
            {"temperature": -0.1},
            {"top_p": 0},
            {"n": 100_000},
            {"prompt": None},
            {"prompt": []},
            {"prompt": [-1]},
            {"prompt": [1 << 30]},
            {"prompt": list(range(10, 10 + self.most_model_tokens))},
            {"logit_bias": {"x": 1}},
            {"model": "somebody else's"},
            {"stop": [""]},
            {"no_such_field": 1},
            {"min_tokens": 9},
        )
        bodies = [json.dumps(good | change).encode() for change in changes]
        bodies += [b"", b"{", b"[1]", b'{"prompt": NaN}', b"\xff\xfe", b'{"a":' * 5000, b'"' + b"x" * 100_000]
        bodies += [chance.randbytes(chance.randrange(200))]
        path = COMPLETIONS
        body = chance.choice(bodies)
        if chance.random() < 0.2:
            wrong: tuple[Any, ...] = ("", [], ["x", ""], [1.5], [-1], [1 << 30], ["x"] * 2049, None)
            path, body = EMBEDDINGS, json.dumps({"model": MODEL_NAME, "input": chance.choice(wrong)}).encode()
        if self.schemas and chance.random() < 0.2:
            schema = chance.choice(list(hostile_schemas.WRONG.values()))
            messages = [{"role": "user", "content": "x"}]
            wanted = {"messages": messages, "response_format": hostile_schemas.response_format(schema)}
            path, body = CHAT, json.dumps({"model": MODEL_NAME, **wanted}).encode()
        return Ask(path=path, body=body, bad=True)


def token_prompts(vocabulary: int, shared: int = 6, first_plain_id: int = 300) -> Callable[..., Any]:
    """Prompts of token ids; half of them begin with one of a few beginnings, so the prefix cache is hit."""
    fixed = random.Random(5)
    beginnings = [[fixed.randrange(first_plain_id, vocabulary) for _ in range(400)] for _ in range(shared)]

    def prompt(chance: random.Random, tokens: int) -> tuple[list[int], None]:
        common = chance.choice(beginnings)[: chance.randrange(tokens)] if chance.random() < 0.5 else []
        own = [chance.randrange(first_plain_id, vocabulary) for _ in range(tokens - len(common))]
        return common + own, None

    return prompt


def alphabet_prompts(chance: random.Random, tokens: int) -> tuple[str, str]:
    """Prompts for the toy of `support.fake_engine`, with what it will say."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    start = chance.randrange(20)
    return "x " * (tokens // 2) + alphabet[start], (alphabet * 20)[start + 1 :]


def _sampling(chance: random.Random) -> dict[str, Any]:
    """None to all of the parameters that shape how tokens are drawn."""
    wanted: dict[str, Any] = {
        "temperature": chance.choice([0, 0, 0.7, 1.3]),
        "top_p": chance.choice([0.5, 0.95]),
        "top_k": chance.choice([1, 40]),
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": chance.randrange(1000),
        "logit_bias": {"50": 5, "60": -100},
        "logprobs": chance.choice([0, 3]),
        "stop": ["\n\n", "§"],
        "ignore_eos": True,
        "user": "somebody",
    }
    return {name: value for name, value in wanted.items() if chance.random() < 0.3}


def _who(chance: random.Random, body: dict[str, Any]) -> dict[str, str]:
    if chance.random() < 0.2:
        body["priority"] = chance.randint(-3, 3)
    tenant = chance.choice(["gold", "batch", "", f"visitor-{chance.randrange(200)}"])
    return {"x-headway-tenant": tenant} if tenant else {}


def _log_uniform(chance: random.Random, low: int, high: int) -> int:
    return round(math.exp(chance.uniform(math.log(low), math.log(high))))
