"""The block pool: who holds what, what is found again, and what is thrown out first."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.blocks import BlockPool
from headway_engine.sequence import Sequence
from support.engine_builders import a_prompt, a_request


def a_sequence(prompt: int | tuple[int, ...], id: str = "s", salt: str = "") -> Sequence:
    request = a_request(id, prompt, cache_salt=salt)
    return Sequence(request, list(request.prompt))


def computed(pool: BlockPool, sequence: Sequence) -> Sequence:
    """Open a sequence, compute all its known tokens, and publish them."""
    pool.open(sequence, pool.match(sequence))
    before = sequence.computed
    sequence.computed = len(sequence.tokens)
    pool.publish(sequence, before)
    return sequence


def released(pool: BlockPool, sequence: Sequence) -> None:
    pool.release(sequence)
    sequence.computed = 0


def test_a_new_pool_is_all_free() -> None:
    pool = BlockPool(5, 4)
    assert (pool.free_blocks, pool.used_blocks, pool.cached_blocks) == (5, 0, 0)
    pool.check([])


@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_that_can_hold_nothing_is_refused(blocks: int, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        BlockPool(blocks, block_tokens)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_opening_takes_blocks_for_all_known_tokens(tokens: int, blocks: int) -> None:
    pool = BlockPool(5, 4)
    sequence = a_sequence(tokens)
    pool.open(sequence, [])
    assert len(sequence.block_table) == pool.used_blocks == blocks
    pool.check([sequence])


def test_extending_takes_a_block_only_when_the_last_is_full() -> None:
    pool = BlockPool(3, 4)
    sequence = a_sequence(7)
    pool.open(sequence, [])
    assert pool.extend(sequence, 8)
    assert pool.used_blocks == 2
    assert pool.extend(sequence, 9)
    assert pool.used_blocks == 3


def test_extending_beyond_what_is_free_changes_nothing() -> None:
    pool = BlockPool(3, 4)
    sequence = a_sequence(7)
    pool.open(sequence, [])
    table = list(sequence.block_table)
    assert not pool.extend(sequence, 17)
    assert sequence.block_table == table
    pool.check([sequence])


def test_opening_without_room_is_an_error_that_changes_nothing() -> None:
    pool = BlockPool(1, 4)
    sequence = a_sequence(5)
    with pytest.raises(ValueError, match="does not fit"):
        pool.open(sequence, [])
    pool.check([sequence])


def test_opening_twice_is_an_error() -> None:
    pool = BlockPool(4, 4)
    sequence = a_sequence(5)
    pool.open(sequence, [])
    with pytest.raises(ValueError, match="already"):
        pool.open(sequence, [])


def test_an_equal_beginning_is_shared_while_it_is_held() -> None:
    pool = BlockPool(8, 4)
    first = computed(pool, a_sequence((*range(8), 50), "first"))
    second = a_sequence((*range(8), 60, 61), "second")
    hits = pool.match(second)
    assert hits == first.block_table[:2]
    pool.open(second, hits)
    assert second.computed == 8
    assert pool.used_blocks == 4
    pool.check([first, second])


def test_an_equal_beginning_is_found_after_its_sequence_ended() -> None:
    pool = BlockPool(8, 4)
    released(pool, computed(pool, a_sequence(tuple(range(9)), "first")))
    assert pool.used_blocks == 0
    assert len(pool.match(a_sequence(tuple(range(12)), "second"))) == 2


@pytest.mark.parametrize(("length", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_the_last_prompt_token_is_always_computed_again(length: int, hits: int) -> None:
    """There must be a logit to sample from, even when the whole prompt is cached."""
    pool = BlockPool(8, 4)
    computed(pool, a_sequence(tuple(range(12)), "first"))
    assert len(pool.match(a_sequence(tuple(range(length)), "again"))) == hits


def test_blocks_are_found_only_once_they_are_full_and_computed() -> None:
    pool = BlockPool(8, 4)
    sequence = a_sequence(tuple(range(10)))
    pool.open(sequence, [])
    again = a_sequence(tuple(range(10)), "again")
    assert pool.match(again) == []
    sequence.computed = 7
    pool.publish(sequence, 0)
    assert pool.match(again) == sequence.block_table[:1]
    sequence.computed = 10
    pool.publish(sequence, 7)
    assert pool.match(again) == sequence.block_table[:2]


def test_equal_tokens_after_different_beginnings_are_different() -> None:
    pool = BlockPool(8, 4)
    computed(pool, a_sequence((1, 1, 1, 1, 5, 6, 7, 8, 0), "first"))
    assert pool.match(a_sequence((2, 2, 2, 2, 5, 6, 7, 8, 0), "second")) == []


def test_salts_do_not_share() -> None:
    pool = BlockPool(8, 4)
    computed(pool, a_sequence(tuple(range(9)), "first", salt="gold"))
    assert pool.match(a_sequence(tuple(range(9)), "second", salt="batch")) == []
    assert len(pool.match(a_sequence(tuple(range(9)), "third", salt="gold"))) == 2


def test_nothing_is_found_with_prefix_caching_off() -> None:
    pool = BlockPool(8, 4, prefix_caching=False)
    computed(pool, a_sequence(tuple(range(9)), "first"))
    assert pool.match(a_sequence(tuple(range(9)), "second")) == []
    assert pool.cached_blocks == 0


def test_the_longest_unused_is_thrown_out_first_and_blank_blocks_before_it() -> None:
    pool = BlockPool(4, 4)
    old, new = a_sequence((1,) * 5, "old"), a_sequence((2,) * 5, "new")
    for sequence in (old, new):
        released(pool, computed(pool, sequence))
    assert pool.cached_blocks == 2
    taker = a_sequence((9,) * 12, "taker")  # two blank blocks, then one cached
    pool.open(taker, [])
    assert pool.match(a_sequence((1,) * 5, "o")) == []
    assert len(pool.match(a_sequence((2,) * 5, "n"))) == 1


def test_of_one_sequence_the_end_is_thrown_out_before_the_beginning() -> None:
    pool = BlockPool(3, 4)
    released(pool, computed(pool, a_sequence(tuple(range(12)), "first")))
    pool.open(a_sequence((9,) * 4, "taker"), [])
    assert len(pool.match(a_sequence((*range(12), 7), "again"))) == 2


def test_a_hit_that_nobody_holds_counts_as_a_block_to_take() -> None:
    """Reviving an idle block uses up a free one: forgetting that over-commits the pool."""
    pool = BlockPool(3, 4)
    released(pool, computed(pool, a_sequence(tuple(range(8)), "first")))
    again = a_sequence((*range(8), 1, 2, 3, 4, 5), "again")  # 4 blocks, 2 of them hits
    hits = pool.match(again)
    assert len(hits) == 2
    assert not pool.fits(again, hits)
    shorter = a_sequence((*range(8), 1), "shorter")
    assert pool.fits(shorter, pool.match(shorter))
    assert not pool.fits(shorter, pool.match(shorter), spare=1)


def test_two_that_compute_the_same_prefix_side_by_side_are_both_released_right() -> None:
    pool = BlockPool(8, 4)
    twins = [a_sequence(tuple(range(9)), name) for name in ("one", "two")]
    for twin in twins:
        pool.open(twin, pool.match(twin))
    for twin in twins:
        twin.computed = 9
        pool.publish(twin, 0)
    pool.check(twins)
    for twin in twins:
        released(pool, twin)
        pool.check(twins)
    assert (pool.used_blocks, pool.cached_blocks) == (0, 2)


def test_what_was_withdrawn_is_not_found_and_what_is_shared_stays() -> None:
    pool = BlockPool(8, 4)
    first = computed(pool, a_sequence((1,) * 5, "first"))
    wrong = computed(pool, a_sequence((1,) * 4 + (2,) * 5, "wrong"))
    pool.withdraw(wrong)
    released(pool, wrong)
    pool.check([first])
    again = a_sequence((1,) * 4 + (2,) * 5, "again")
    assert pool.match(again) == first.block_table[:1]


def test_what_is_unpublished_is_not_found_whoever_holds_it_and_is_free_again() -> None:
    """In use, or idle since its sequence left."""
    pool = BlockPool(8, 4)
    held = computed(pool, a_sequence((1,) * 9, "held"))
    left = computed(pool, a_sequence((2,) * 9, "left"))
    blocks = [*held.block_table, *left.block_table]
    released(pool, left)
    pool.unpublish(blocks)
    pool.check([held])
    assert (pool.cached_blocks, pool.free_blocks) == (0, 5)
    assert pool.match(a_sequence((1,) * 9, "again")) == []
    released(pool, held)
    pool.check([])
    assert pool.free_blocks == 8


def lose_a_block(pool: BlockPool, sequence: Sequence) -> None:
    sequence.block_table.pop()
    sequence.computed = 8


def name_a_block_twice(pool: BlockPool, sequence: Sequence) -> None:
    sequence.block_table.append(sequence.block_table[0])


def free_a_held_block(pool: BlockPool, sequence: Sequence) -> None:
    pool._blank.append(sequence.block_table[-1])


def count_beyond_the_table(pool: BlockPool, sequence: Sequence) -> None:
    sequence.computed = 100


def forget_a_hash(pool: BlockPool, sequence: Sequence) -> None:
    pool._block_of.clear()


def leak_a_free_block(pool: BlockPool, sequence: Sequence) -> None:
    pool._blank.pop()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lose_a_block, "counts 1 holders, tables name 0"),
        (name_a_block_twice, "names a block twice"),
        (free_a_held_block, "stands 1 times among the free"),
        (count_beyond_the_table, "100 computed tokens in 3 blocks"),
        (forget_a_hash, "not found by its hash"),
        (leak_a_free_block, "is held 0 times and stands 0 times among the free"),
    ],
)
def test_check_finds(fault: Callable[[BlockPool, Sequence], None], words: str) -> None:
    """The proof is worth something: each kind of wrong bookkeeping is seen and named."""
    pool = BlockPool(8, 4)
    sequence = computed(pool, a_sequence(tuple(range(9))))
    pool.check([sequence])
    fault(pool, sequence)
    with pytest.raises(AssertionError, match=words):
        pool.check([sequence])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_hits_are_what_a_slow_search_finds_and_blocks_always_add_up(data: st.DataObject) -> None:
    """Against the obvious cache: a dictionary from (salt, whole prefix) to the block that holds its end."""
    pool = BlockPool(data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3)))
    live: list[Sequence] = []
    contents: dict[int, tuple[str, tuple[int, ...]]] = {}
    shared = a_prompt(20, seed=1)
    for number in range(data.draw(st.integers(1, 30))):
        if live and data.draw(st.booleans()):
            pool.release(live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            prompt = shared[: data.draw(st.integers(0, 15))] + a_prompt(
                data.draw(st.integers(1, 4)), seed=data.draw(st.integers(2, 3))
            )
            salt = data.draw(st.sampled_from(["", "x"]))
            sequence = a_sequence(prompt, f"s{number}", salt)
            hits = pool.match(sequence)
            for index, block in enumerate(hits):
                assert contents[block] == (salt, prompt[: (index + 1) * pool.block_tokens])
            if pool.fits(sequence, hits):
                pool.open(sequence, hits)
                for index in range(len(hits), len(sequence.block_table)):
                    contents[sequence.block_table[index]] = (salt, prompt[: (index + 1) * pool.block_tokens])
                before, sequence.computed = sequence.computed, len(prompt)
                pool.publish(sequence, before)
                live.append(sequence)
        pool.check(live)
