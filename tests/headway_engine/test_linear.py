"""Products with packed matrices of every element type, in every instruction set, beside torch in float64."""

import ctypes
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from headway_engine.fused import modules, native
from headway_engine.fused.native import Element
from headway_engine.fused.packing import Packer, Weight, alike, stacked
from headway_engine.grouped_codes import GroupedCodes
from support import kernels

pytestmark = kernels.needs_compiler

ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 200)
"""One row, rests of tiles of every instruction set, whole ones, and several groups of tiles."""


@dataclass(frozen=True)
class Kind:
    """How weights are held, and by how much a product may be off: a share of its largest value."""

    element: Element
    short: bool  # products may be of bfloat16 and of integers
    tolerance: float
    group: int = 0

    def __str__(self) -> str:
        return f"{self.element.name}{'-short' if self.short else ''}{f'-{self.group}' if self.group else ''}"


KINDS = (
    Kind(Element.SINGLE, False, 2e-6),
    Kind(Element.BRAIN, False, 2e-6),
    Kind(Element.HALF, False, 2e-6),
    Kind(Element.PAIRS, True, 8e-3),
    *(
        Kind(element, short, 8e-3 if short else 2e-6, group)
        for element in (Element.FOUR, Element.FOUR_OFFSET, Element.EIGHT, Element.EIGHT_OFFSET)
        for group in (16, 32)
        for short in (False, True)
    ),
)


def grouped(n: int, k: int, bits: int, offsets: bool, group: int, seed: int = 0) -> GroupedCodes:
    """Random codes; a group of scale 0 and negative scales among them."""
    chance = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n, k), generator=chance, dtype=torch.uint8)
    scales = torch.randn(n, k // group, generator=chance) * 0.05
    scales[0, 0] = 0.0
    own = torch.randn(n, k // group, generator=chance) * 0.1 if offsets else None
    return GroupedCodes(bits, codes, scales.half(), None if own is None else own.half())


def weight_of(kind: Kind, n: int, k: int) -> tuple[Weight, torch.Tensor]:
    """What is packed, and the weights that it stands for in float64."""
    if kind.group:
        bits = 4 if kind.element in (Element.FOUR, Element.FOUR_OFFSET) else 8
        offsets = kind.element in (Element.FOUR_OFFSET, Element.EIGHT_OFFSET)
        codes = grouped(n, k, bits, offsets, kind.group)
        return codes, codes.weights().double()
    plain = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    held = {Element.SINGLE: torch.float32, Element.HALF: torch.float16}.get(kind.element, torch.bfloat16)
    return plain.to(held), plain.to(held).double()


def product(
    library: ctypes.CDLL, matrix: native.CMatrix, x: torch.Tensor, bias: torch.Tensor | None, short: bool
) -> torch.Tensor:
    out = torch.full((x.shape[0], matrix.rows), float("nan"), dtype=x.dtype)
    rows = native.CRows(x.data_ptr(), out.data_ptr(), x.shape[0], x.dtype is torch.bfloat16)
    assert library.hw_linear(matrix, rows, None if bias is None else bias.data_ptr(), short, 2) == 0
    return out


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("chosen", kernels.SETS)
def test_a_product_is_what_torch_says(chosen: str, kind: Kind) -> None:
    """Sizes that leave a rest in panels, tiles and pairs; a bias; float32 and bfloat16 rows."""
    library = native.declare(kernels.loaded(chosen))
    packer = Packer(library)
    if kind.element is Element.PAIRS and not packer.multiplies_bf16:
        pytest.skip(f"{chosen} has no products of bfloat16")
    for n, k in ((70, 96), (33, 1056), (64, 50 if not kind.group else 64)):
        weight, exact = weight_of(kind, n, k)
        matrix = packer.matrix(weight, kind.element)
        assert (matrix.rows, matrix.columns, matrix.element) == (n, k, kind.element)
        bias = torch.randn(n, generator=torch.Generator().manual_seed(2))
        for number in ROWS:
            x = torch.randn(number, k, generator=torch.Generator().manual_seed(number))
            wanted = x.double() @ exact.T + bias.double()
            found = product(library, matrix, x, bias, kind.short).double()
            assert (found - wanted).abs().max() <= kind.tolerance * wanted.abs().max(), (n, k, number)
            narrow = x.bfloat16()
            wanted = narrow.double() @ exact.T
            found = product(library, matrix, narrow, None, kind.short).double()
            assert (found - wanted).abs().max() <= 8e-3 * wanted.abs().max(), (n, k, number)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.group and kind.short], ids=str)
@pytest.mark.parametrize("chosen", kernels.SETS)
def test_few_rows_lose_next_to_nothing_as_integers(chosen: str, kind: Kind) -> None:
    """Rows of 15 bits: a hundredth of what bfloat16 would lose, also where one value dwarfs its group."""
    library = native.declare(kernels.loaded(chosen))
    weight, exact = weight_of(kind, 64, 256)
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(3))
    x[0, 7] = 40.0
    x[0, 64:96] = 0.0
    packer = Packer(library)
    found = product(library, packer.matrix(weight, kind.element), x, None, True).double()
    wanted = x.double() @ exact.T
    assert (found - wanted).norm() <= 2e-4 * wanted.norm()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("chosen", kernels.SETS)
def test_rows_of_a_matrix_are_read_back_exactly(chosen: str, kind: Kind) -> None:
    """How embeddings are looked up in the weights of a tied head."""
    library = native.declare(kernels.loaded(chosen))
    weight, exact = weight_of(kind, 70, 96)
    packer = Packer(library)  # owns the memory
    matrix = packer.matrix(weight, kind.element)
    ids = torch.tensor([0, 69, 31, 32, 5])
    out = torch.empty(5, 96)
    assert library.hw_gather_rows(matrix, ids.data_ptr(), native.CRows(None, out.data_ptr(), 5, 0), 2) == 0
    torch.testing.assert_close(out.double(), exact[ids], atol=1e-6, rtol=1e-6)


def test_what_is_no_number_stays_in_its_row() -> None:
    """In every instruction set's best path, neighbours in a tile are not touched."""
    for chosen in kernels.SETS:
        try:
            library = native.declare(kernels.loaded(chosen))
        except pytest.skip.Exception:
            continue
        for kind in KINDS:
            if kind.element is Element.PAIRS and not Packer(library).multiplies_bf16:
                continue
            weight, _ = weight_of(kind, 40, 64)
            packer = Packer(library)
            matrix = packer.matrix(weight, kind.element)
            x = torch.randn(20, 64, generator=torch.Generator().manual_seed(4))
            clean = product(library, matrix, x, None, kind.short)
            x[3, 5] = float("nan")
            found = product(library, matrix, x, None, kind.short)
            others = [row for row in range(20) if row != 3]
            assert torch.equal(found[others], clean[others]), (chosen, str(kind))
            assert torch.isnan(found[3]).any(), (chosen, str(kind))


def test_matrices_that_share_panels_take_the_form_that_holds_all() -> None:
    """A GGUF file may hold keys in 4 bits and values in 6: no weight changes."""
    four = grouped(4, 64, 4, False, 32)
    offset = grouped(4, 64, 4, True, 32, seed=1)
    six = grouped(4, 64, 8, False, 16, seed=2)
    for parts in ([four, offset], [four, six], [offset, six], [four, offset, six], [six, six]):
        same = alike(parts)
        assert (
            len({(one.bits, one.group, one.offsets is None) for one in same if isinstance(one, GroupedCodes)})
            == 1
        )
        whole = stacked(parts)
        assert isinstance(whole, GroupedCodes)
        torch.testing.assert_close(
            whole.weights(), torch.cat([p.weights() for p in parts]), atol=2e-4, rtol=1e-3
        )
    plain = torch.randn(4, 64)
    mixed = stacked([four, plain])
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed, torch.cat([four.weights(), plain]))


class Tied(nn.Module):
    """A head that is tied to its embedding, and a layer with a bias between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.middle = nn.Linear(24, 24)
        self.turned = Conv1D(24, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.turned(self.middle(self.embed(ids)).tanh()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", kernels.SETS)
def test_a_module_computes_the_same_with_its_layers_taken_over(chosen: str, dtype: torch.dtype) -> None:
    """GPT-2's Conv1D too. A tied embedding reads the head's panels; weights are in memory once."""
    torch.manual_seed(5)
    model = Tied().to(dtype).requires_grad_(False)
    ids = torch.tensor([[0, 49, 7], [3, 3, 11]])
    exact = Tied().double()
    exact.load_state_dict(model.state_dict())
    wanted = exact(ids)
    assert modules.take_over(model, kernels.loaded(chosen), threads=2) is (
        torch.float32 if dtype is torch.float32 else torch.bfloat16
    )
    assert not list(model.parameters()), "plain weights are gone"
    found = model(ids)
    assert found.dtype is dtype
    assert found.shape == wanted.shape
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    with pytest.raises(IndexError, match="outside the vocabulary of 50"):
        model(torch.tensor([[50]]))
    with pytest.raises(TypeError, match="float16"):
        model.middle(torch.zeros(1, 24, dtype=torch.float16))


def test_layers_whose_weights_are_shared_otherwise_stay() -> None:
    """Two linear layers with the same weights, and subclasses that may compute something else."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight

    class Other(nn.Linear):
        """May do anything."""

    model = nn.Sequential(first, second, Other(8, 8), nn.Linear(8, 8).half()).requires_grad_(False)
    chosen = next(name for name in kernels.SETS if name in kernels.RUNNABLE)
    assert modules.take_over(model, kernels.loaded(chosen), threads=1) is None


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("chosen", kernels.SETS)
def test_a_row_that_is_not_finite_gives_none_that_is(chosen: str, kind: Kind, number: float) -> None:
    """Alone, where rows become integers, and among many: whoever samples must see it. Others are right."""
    library = native.declare(kernels.loaded(chosen))
    packer = Packer(library)
    if kind.element is Element.PAIRS and not packer.multiplies_bf16:
        pytest.skip(f"{chosen} has no products of bfloat16")
    weight, _ = weight_of(kind, 64, 256)
    matrix = packer.matrix(weight, kind.element)
    for rows in (1, 3, 40):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(3))
        x[0, 77] = number
        found = product(library, matrix, x, None, kind.short)
        assert not found[0].isfinite().any(), rows
        assert found[1:].isfinite().all(), rows
