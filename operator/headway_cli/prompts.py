"""Real text of about so many tokens: passages and questions that ship with Headway, put together at random.

Lengths are estimates (no tokenizer here): English words and punctuation marks cost close to one token each
in today's vocabularies. Every prompt opens differently, so that a prefix cache finds no more to reuse than
it would in the traffic of strangers. Knows nothing of traces and HTTP.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random

TOKENS_PER_PIECE = 1.06
"""Tokens per word or punctuation mark in these texts; measured on SmolLM2's vocabulary of 49,152."""

_PIECE = re.compile(r"\d|[^\W\d]+|[^\w\s]")  # a digit each: vocabularies split numbers


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has."""
    return round(len(_PIECE.findall(text)) * TOKENS_PER_PIECE)


@dataclass(frozen=True, slots=True)
class Library:
    """Passages to read, and questions to ask about them or for their own sake."""

    passages: tuple[str, ...]
    questions: tuple[str, ...]


@cache
def library() -> Library:
    """The texts that ship with Headway."""
    text = (files("headway_cli") / "data" / "passages.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    blocks = [block.strip() for block in "\n".join(lines).split("\n\n") if block.strip()]
    return Library(
        passages=tuple(b for b in blocks if not b.endswith("?")),
        questions=tuple(b for b in blocks if b.endswith("?")),
    )


def prompt(tokens: int, chance: Random) -> str:
    """Text of about `tokens` tokens, never much more: passages in random order, then a question.

    Very short prompts are cut in mid-sentence, as an exact length matters more to a load test than manners.
    """
    books = library()
    question = chance.choice(books.questions)
    opening = f"Note {chance.randrange(1000, 9999)}."
    room = tokens - estimated_tokens(question) - estimated_tokens(opening)
    if room < 20:
        return _cut(question if tokens >= estimated_tokens(question) else f"{opening} {question}", tokens)
    parts = [opening]
    while room > 0:
        for passage in chance.sample(books.passages, len(books.passages)):
            piece = passage if estimated_tokens(passage) <= room else _cut(passage, room)
            parts.append(piece)
            room -= max(1, estimated_tokens(piece))
            if room <= 0:
                break
    return "\n\n".join([*parts, question])


def _cut(text: str, tokens: int) -> str:
    """The first words of a text, about `tokens` tokens of them; at least one word."""
    pieces = list(_PIECE.finditer(text))
    keep = max(1, round(tokens / TOKENS_PER_PIECE))
    return text if keep >= len(pieces) else text[: pieces[keep - 1].end()]
