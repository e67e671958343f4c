"""Random cases of paged attention, and the answers of the Triton kernel to them in Triton's interpreter.

    TRITON_INTERPRET=1 python -m support.paged_cases OUT

writes the answers to OUT. That takes a process of its own: whether Triton interprets is settled when it is
imported, which torch may have done long ago.
"""

import sys
from dataclasses import dataclass

import torch

from headway_engine.lean.kernels import Decodes, PagedKernel, Prefills
from support import paged_functions


@dataclass(frozen=True)
class Shape:
    """Heads, widths and block size of a case."""

    heads: int
    kv_heads: int
    width: int
    block: int

    def __str__(self) -> str:
        return f"{self.heads}-{self.kv_heads}-{self.width}-{self.block}"


SHAPES = (
    Shape(heads=4, kv_heads=2, width=8, block=4),  # grouped
    Shape(heads=3, kv_heads=3, width=24, block=8),  # as many, no power of two wide
    Shape(heads=7, kv_heads=1, width=16, block=16),  # one for all
)

CONTEXTS = (1, 5, 16, 33)
LENGTHS = (1, 3, 16, 20)
SCALE = 0.3
LONG = (1, 40, 150, 33)
HALF = (1, 200, 64, 33)


@dataclass(frozen=True)
class Case:
    """Random numbers of a shape, tables in no order."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    one: torch.Tensor  # queries of decodes
    many: torch.Tensor  # queries of prefills

    def decode(self, kernel: PagedKernel) -> torch.Tensor:
        """The kernel's answer for one query a sequence."""
        rows = Decodes(self.tables, self.contexts, int(self.contexts.max()))
        return kernel.decode(self.one, self.keys, self.values, rows, SCALE)

    def prefill(self, kernel: PagedKernel) -> torch.Tensor:
        """The kernel's answer for LENGTHS queries."""
        starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
        rows = Prefills(starts, self.contexts, self.tables, LENGTHS, tuple(self.contexts.tolist()))
        return kernel.prefill(self.many, self.keys, self.values, rows, SCALE)

    def expected(self, query: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """By the definition."""
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        layout = (self.keys.transpose(1, 2), self.values.transpose(1, 2))
        contexts, tables = self.contexts.tolist(), self.tables.tolist()
        return paged_functions.by_definition(query, *layout, starts, contexts, tables, SCALE)


def case(shape: Shape, dtype: torch.dtype = torch.float32, contexts: tuple[int, ...] = CONTEXTS) -> Case:
    """The same numbers for the same arguments, in any process."""
    generator = torch.Generator().manual_seed(5)
    used = [-(-context // shape.block) for context in contexts]
    blocks = sum(used) + 2
    order = torch.randperm(blocks, generator=generator).tolist()
    tables = []
    for count in used:
        own, order = order[:count], order[count:]
        tables.append(own + [own[0]] * (max(used) - count))

    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    return Case(
        keys=noise(blocks, shape.kv_heads, shape.block, shape.width),
        values=noise(blocks, shape.kv_heads, shape.block, shape.width),
        tables=torch.tensor(tables, dtype=torch.int32),
        contexts=torch.tensor(contexts, dtype=torch.int32),
        one=noise(len(contexts), shape.heads, shape.width),
        many=noise(sum(LENGTHS), shape.heads, shape.width),
    )


def triton_answers() -> dict[str, torch.Tensor]:
    """What the Triton kernel says, by name."""
    from headway_engine.lean import triton_kernel

    kernel = triton_kernel.TritonKernel()
    answers = {}
    for shape in SHAPES:
        answers[f"decode {shape}"] = case(shape).decode(kernel)
        answers[f"prefill {shape}"] = case(shape).prefill(kernel)
    answers["half"] = case(SHAPES[2], torch.float16, HALF).decode(kernel)
    # q, k and v come out of one product: a row of queries is followed by keys.
    c = case(SHAPES[0])
    wide = torch.cat((c.one, torch.full_like(c.one, float("nan"))), dim=1)[:, : SHAPES[0].heads]
    answers["view"] = kernel.decode(wide, c.keys, c.values, Decodes(c.tables, c.contexts, 33), SCALE)
    # Parts of a context, made small: some sequences fill every part, some leave parts with nothing at all.
    triton_kernel.SPLIT_TOKENS, triton_kernel.ENOUGH_PROGRAMS = 32, 40
    assert triton_kernel.decode_splits(4 * 2, 150) == 4
    answers["split"] = case(SHAPES[0], contexts=LONG).decode(kernel)
    return answers


if __name__ == "__main__":
    torch.save(triton_answers(), sys.argv[1])
