"""The steps of the check at start: whole texts, in pieces that use every way of being computed."""

import itertools
from typing import Any

import pytest
import torch

from headway_engine.check_steps import compute, sizes, texts
from headway_engine.model import resolve
from headway_engine.model_source import default_cache_dir
from headway_engine.sequence import Chunk
from headway_engine.stepping import logit_rows
from support import runners, tiny_models


@pytest.mark.parametrize("tokens", [1, 2, 7, 23, 24, 25, 26, 27, 51, 300])
def test_every_token_of_both_texts_is_computed_once(tokens: int) -> None:
    """However short or long they are."""
    steps = sizes(tokens)
    assert [sum(step[n] for step in steps) for n in range(2)] == [tokens, tokens]
    assert all(any(step) and min(step) >= 0 for step in steps)


@pytest.mark.parametrize("tokens", [24, 51])
def test_steps_are_of_every_kind(tokens: int) -> None:
    """Two chunks, a chunk beside a decode of either sequence, and decodes alone; chunks end inside blocks."""
    steps = sizes(tokens)
    assert any(a > 1 and b > 1 for a, b in steps)
    assert any(a > 1 and b == 1 for a, b in steps)
    assert any(a == 1 and b > 1 for a, b in steps)
    assert any(a == b == 1 for a, b in steps)
    for n in range(2):
        ends = [sum(step[n] for step in steps[:i]) for i in range(1, len(steps))]
        assert sum(end % 16 > 0 for end in ends) > len(ends) // 2


def test_a_decode_is_the_last_thing() -> None:
    assert sizes(51)[-1] == (1, 1)


class Recording:
    """Notes the chunks that a real runner is given."""

    def __init__(self) -> None:
        self.runner: Any = runners.fresh("padded", "llama", runners.capacity())
        self.cache, self.chunks = self.runner.cache, []

    def logits(self, chunks: list[Chunk]) -> torch.Tensor:
        self.chunks.append(list(chunks))
        logits: torch.Tensor = self.runner.logits(chunks)
        return logits


def test_rows_are_where_the_runner_says_they_are() -> None:
    """All of the first sequence, those of each chunk's last token of the second."""
    recording: Any = Recording()
    ids = torch.tensor([[(i * 7 + n) % 300 for i in range(40)] for n in range(2)])
    rows = compute(recording, ids, torch.arange(300), 64)
    assert len(rows.logits) == sum(len(logit_rows(chunks)) for chunks in recording.chunks)
    places = list(zip(rows.sequences.tolist(), rows.positions.tolist(), strict=True))
    assert sorted(p for n, p in places if n == 0) == list(range(40))
    ends = [c.start + c.length - 1 for chunks in recording.chunks for c in chunks if c.sequence.id == "1"]
    assert [p for n, p in places if n == 1] == ends
    plain = tiny_models.plain("llama")
    with torch.inference_mode():
        expected = plain(input_ids=ids).logits[rows.sequences, rows.positions]
    assert torch.allclose(rows.logits, expected, atol=1e-4)


def test_blocks_are_in_no_order_and_hold_other_numbers_before() -> None:
    """A table is no row of neighbours, no two share a block, and what nobody wrote is not zero. Afterwards
    the blocks are empty."""
    recording: Any = Recording()
    seen: list[torch.Tensor] = []
    forward = recording.runner._forward
    recording.runner._forward = lambda chunks: seen.append(recording.cache.keys[0].clone()) or forward(chunks)
    compute(recording, torch.zeros((2, 40), dtype=torch.long), torch.arange(300), 64)
    tables = {c.sequence.id: c.sequence.block_table for chunks in recording.chunks for c in chunks}
    used = [*tables["0"], *tables["1"]]
    assert len(set(used)) == len(used) == 20
    for table in tables.values():
        assert sum(b - a == 1 for a, b in itertools.pairwise(table)) < 3
    assert (seen[0][used] != 0).all()
    assert all((tensor == 0).all() for tensor in (*recording.cache.keys, *recording.cache.values))


def test_texts_are_real_text_in_the_models_own_tokens() -> None:
    """The random models' tokenizer has one token a byte."""
    model = tiny_models.fresh("llama")
    first, second = texts(model, 30).tolist()
    assert bytes(id - 3 for id in first) != bytes(id - 3 for id in second)
    tokenizer_dir = resolve(tiny_models.uri("llama"), "main", default_cache_dir()).tokenizer_dir
    assert model.tokenizer_dir == tokenizer_dir
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
    assert tokenizer.decode(first).startswith("The harbour master counted")


def test_texts_that_are_too_short_go_round() -> None:
    """For blocks of a thousand tokens."""
    assert texts(tiny_models.fresh("llama"), 1000).shape == (2, 1000)
