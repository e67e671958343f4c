"""Who holds which block of the KV cache, and which blocks hold a known prefix. Integers only.

A block is *held* by the sequences whose tables name it (a reference count), or *free*. Full blocks of
computed tokens are *cached* under a hash chained over their whole prefix, begun with the sequence's salt,
so a hit means equal tokens at equal positions inside one salt. A cached block that nobody holds is free and
still findable until it is handed out again; the longest unused goes first.

Knows nothing of tensors, of limits, or of why a sequence wants room.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

from headway_engine.sequence import Sequence


def chain_hash(parent: bytes, tokens: list[int]) -> bytes:
    """Hash of a full block given its parent's: equal only for equal tokens after equal prefixes."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def root_hash(salt: str) -> bytes:
    """The parent of a first block: different salts never share anything."""
    return hashlib.sha256(salt.encode()).digest()


class BlockPool:
    """All blocks of one cache. Sequences' tables change only through this class."""

    def __init__(self, blocks: int, block_tokens: int, prefix_caching: bool = True) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"a cache of {blocks} blocks of {block_tokens} tokens holds nothing")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self._references = [0] * blocks
        self._hash_of: list[bytes | None] = [None] * blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(blocks - 1, -1, -1))  # free, holding nothing known
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and cached, longest unused first

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones that nobody holds included."""
        return len(self._blank) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return self.blocks - len(self._blank) - len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """Blocks that a newcomer's prefix could hit, held or not."""
        return len(self._block_of)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_tokens)

    def match(self, sequence: Sequence) -> list[int]:
        """Cached blocks that hold the beginning of a sequence without a table, longest run from the start.

        The last token is never among them: it is computed again, for there must be a logit to sample from;
        so are tokens that are yet to be scored.
        Nothing is reserved; pass the answer to `fits` and `open` before anything else changes.
        """
        if not self.prefix_caching:
            return []
        limit = sequence.reusable // self.block_tokens
        hits: list[int] = []
        for index in range(limit):
            block = self._block_of.get(self._hash(sequence, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def fits(self, sequence: Sequence, hits: list[int], spare: int = 0) -> bool:
        """Whether all known tokens of a sequence without a table can be held, leaving `spare` blocks free."""
        return self.needed(sequence, hits) + spare <= self.free_blocks

    def needed(self, sequence: Sequence, hits: Iterable[int]) -> int:
        """Free blocks that opening a sequence uses up: fresh ones, and hits that nobody else holds."""
        held = sum(1 for block in hits if self._references[block])
        return self.blocks_for(len(sequence.tokens)) - held

    def freed_by(self, sequence: Sequence, kept: frozenset[int]) -> int:
        """Blocks that only this sequence holds, and that are not among those kept for somebody."""
        return sum(1 for b in sequence.block_table if self._references[b] == 1 and b not in kept)

    def open(self, sequence: Sequence, hits: list[int]) -> None:
        """Give a sequence its first table: the hits, then fresh blocks for the rest of its known tokens."""
        if sequence.block_table:
            raise ValueError(f"sequence {sequence.id} holds blocks already")
        if not self.fits(sequence, hits):
            raise ValueError(f"sequence {sequence.id} does not fit: ask fits() first")
        for block in hits:
            if not self._references[block]:
                del self._idle[block]
            self._references[block] += 1
        sequence.block_table.extend(hits)
        sequence.computed = len(hits) * self.block_tokens
        self.extend(sequence, len(sequence.tokens))

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        """Make the table cover so many tokens. False, and nothing changed, when there is no room."""
        missing = self.blocks_for(tokens) - len(sequence.block_table)
        if missing <= 0:
            return True
        if missing > self.free_blocks:
            return False
        for _ in range(missing):
            sequence.block_table.append(self._take())
        return True

    def publish(self, sequence: Sequence, before: int) -> None:
        """Make findable the blocks that filled with computed tokens since `before` were computed."""
        if not self.prefix_caching:
            return
        for index in range(before // self.block_tokens, sequence.computed // self.block_tokens):
            block = sequence.block_table[index]
            digest = self._hash(sequence, index)
            # Two sequences may compute the same prefix side by side; the first to finish is the one found.
            if self._hash_of[block] is None and digest not in self._block_of:
                self._hash_of[block] = digest
                self._block_of[digest] = block

    def withdraw(self, sequence: Sequence) -> None:
        """Make unfindable what this sequence alone holds: it went wrong, and nobody is to go on from it."""
        self.unpublish([block for block in sequence.block_table if self._references[block] == 1])

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Make these blocks unfindable. Of those that several hold, all but one must let go at once."""
        for block in blocks:
            digest = self._hash_of[block]
            if digest is None:
                continue
            del self._block_of[digest]
            self._hash_of[block] = None
            if block in self._idle:
                del self._idle[block]
                self._blank.append(block)

    def release(self, sequence: Sequence) -> None:
        """Take back every block of a sequence; what is cached stays findable until it is handed out again."""
        # Tail first: beginnings are shared by more prompts than ends, so they shall live longest.
        for block in reversed(sequence.block_table):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                self._blank.append(block)
            else:
                self._idle[block] = None
        sequence.block_table.clear()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError, with words, unless each block is free once or held by just these tables."""
        sequences = list(sequences)
        held: Counter[int] = Counter()
        for s in sequences:
            assert len(set(s.block_table)) == len(s.block_table), (
                f"{s.id} names a block twice: {s.block_table}"
            )
            assert len(s.block_table) >= self.blocks_for(s.computed), (
                f"{s.id} has {s.computed} computed tokens in {len(s.block_table)} blocks"
            )
            held.update(s.block_table)
        free = Counter([*self._blank, *self._idle])
        for block in range(self.blocks):
            assert self._references[block] == held[block], (
                f"block {block} counts {self._references[block]} holders, tables name {held[block]}"
            )
            expected = 0 if held[block] else 1
            assert free[block] == expected, (
                f"block {block} is held {held[block]} times and stands {free[block]} times among the free"
            )
            digest = self._hash_of[block]
            assert digest is not None or block not in self._idle, f"block {block} is idle but not cached"
            assert digest is None or self._block_of.get(digest) == block, (
                f"block {block} is not found by its hash"
            )
            assert digest is not None or held[block] < 2, f"block {block} is shared but was never published"
        assert held.keys() <= set(range(self.blocks)), (
            f"tables name blocks outside the pool: {sorted(held)[-1]}"
        )
        for block in self._blank:
            assert self._hash_of[block] is None, f"block {block} is blank but cached"
        cached = sum(1 for digest in self._hash_of if digest is not None)
        assert cached == len(self._block_of), (
            f"{cached} blocks are cached, {len(self._block_of)} hashes known"
        )

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            digest = self._hash_of[block]
            assert digest is not None
            del self._block_of[digest]
            self._hash_of[block] = None
        self._references[block] = 1
        return block

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """Hash of the sequence's full block `index`; each is computed once in a sequence's life."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_tokens
            parent = hashes[-1] if hashes else root_hash(sequence.request.cache_salt)
            hashes.append(chain_hash(parent, sequence.tokens[start : start + self.block_tokens]))
        return hashes[index]
