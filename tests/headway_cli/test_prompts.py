"""Prompts are real text of about the length asked for."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headway_cli import prompts


@given(st.integers(1, 9000), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_prompt_has_about_the_tokens_asked_for(tokens: int, seed: int) -> None:
    """Never more than two tokens or 2 % above; below only where a whole short question is sent."""
    text = prompts.prompt(tokens, Random(seed))
    have = prompts.estimated_tokens(text)
    assert text.strip()
    assert have <= max(tokens + 3, tokens * 1.02)
    if tokens > 60:
        assert have >= tokens * 0.95


def test_long_prompts_begin_differently_and_end_in_a_question() -> None:
    """A prefix cache must find no more in them than in strangers' prompts."""
    chance = Random(5)
    many = [prompts.prompt(400, chance) for _ in range(50)]
    assert len({text[:40] for text in many}) == 50
    assert all(text.endswith("?") for text in many)


def test_the_same_seed_gives_the_same_prompt() -> None:
    """A replay can be repeated."""
    assert prompts.prompt(300, Random(7)) == prompts.prompt(300, Random(7))


def test_the_texts_are_many() -> None:
    """Enough passages and questions that short runs hardly repeat themselves."""
    books = prompts.library()
    assert len(books.passages) >= 40
    assert len(books.questions) >= 20
    assert len(set(books.passages)) == len(books.passages)
