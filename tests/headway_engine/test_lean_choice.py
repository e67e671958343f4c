"""Which kernel of attention is chosen: a table of what is installed and what the model needs, and a trial."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway_engine import config
from headway_engine.attention import LayerShape
from headway_engine.lean import choice
from headway_engine.lean.choice import CANDIDATES, Candidate, Needs, disagreement, pick
from headway_engine.lean.kernels import Decodes, GatherKernel
from support import paged_functions

CPU = torch.device("cpu")

FLASH_3 = "flash_attn_interface"
FLASH_2 = "flash_attn"
VARLEN = "torch.nn.attention.varlen"
TRITON = "triton"


def needs(**changes: Any) -> Needs:
    values: dict[str, Any] = {
        "dtype": torch.float16,
        "shapes": frozenset({LayerShape(2, 16, 16)}),
        "block_tokens": 16,
        "compute_capability": (9, 0),
    }
    return Needs(**(values | changes))


def importer(*installed: str) -> Any:
    """Imports what is said to be there: functions of the real signatures, computed by the definition."""
    modules: dict[str, Any] = {
        FLASH_3: SimpleNamespace(flash_attn_with_kvcache=paged_functions.flash3_with_kvcache),
        FLASH_2: SimpleNamespace(
            flash_attn_with_kvcache=paged_functions.flash2_with_kvcache,
            flash_attn_varlen_func=paged_functions.flash2_varlen,
        ),
        VARLEN: SimpleNamespace(varlen_attn=_varlen),
        TRITON: SimpleNamespace(),
        "headway_engine.lean.triton_kernel": SimpleNamespace(TritonKernel=_Triton),
    }

    def find(name: str) -> Any:
        if name in installed or name.startswith("headway_engine"):
            return modules[name]
        raise ImportError(name)

    return find


class _Triton(GatherKernel):
    name = "triton"


def _varlen(*args: Any, block_table: Any = None, **kwargs: Any) -> torch.Tensor:
    return paged_functions.torch_varlen(*args, block_table=block_table, **kwargs)


EVERYTHING = (FLASH_3, FLASH_2, VARLEN, TRITON)

TABLE = [
    # what is needed, what is installed, what is chosen
    ({}, EVERYTHING, "flash-attn 3"),
    ({}, (FLASH_2, VARLEN, TRITON), "torch varlen"),  # blocks of 16 are not for flash-attn 2
    ({"block_tokens": 256}, (FLASH_2, VARLEN, TRITON), "flash-attn 2"),
    ({}, (VARLEN, TRITON), "torch varlen"),
    ({}, (TRITON,), "triton"),
    ({}, (), None),
    ({"compute_capability": (8, 0)}, EVERYTHING, "triton"),
    ({"compute_capability": (8, 6), "block_tokens": 256}, EVERYTHING, "flash-attn 2"),
    ({"compute_capability": (10, 0)}, EVERYTHING, "torch varlen"),
    ({"compute_capability": (7, 5)}, EVERYTHING, None),
    ({"dtype": torch.float32}, EVERYTHING, "triton"),
    ({"shapes": frozenset({LayerShape(2, 20, 20)})}, EVERYTHING, "triton"),
    ({"shapes": frozenset({LayerShape(2, 16, 8)})}, EVERYTHING, "triton"),
    ({"shapes": frozenset({LayerShape(1, 192, 192)})}, EVERYTHING, "flash-attn 3"),
    ({"shapes": frozenset({LayerShape(1, 192, 192)})}, (VARLEN, TRITON), "triton"),
    ({"shapes": frozenset({LayerShape(1, 512, 512)})}, EVERYTHING, None),
    ({"block_tokens": 12}, (VARLEN, TRITON), "triton"),
]


@pytest.mark.parametrize(("asked", "installed", "chosen"), TABLE)
def test_the_table(asked: dict[str, Any], installed: tuple[str, ...], chosen: str | None) -> None:
    """The first that is installed and takes it; torch's own attention where none does."""
    kernel = pick(needs(**asked), CPU, importer=importer(*installed))
    assert (kernel.name if kernel else None) == chosen


def test_one_line_says_which_and_what_spoke_against_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """The line an operator looks for when a device is slower than another."""
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        pick(needs(dtype=torch.float32, compute_capability=(8, 0)), CPU, importer=importer(TRITON))
    (line,) = caplog.messages
    assert line.startswith('attention kernel=triton passed_over="flash-attn-3: no kernel for float32; flash-')
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        pick(needs(), CPU, importer=importer())
    (line,) = caplog.messages
    assert line.startswith('attention kernel=torch passed_over="flash-attn-3: not installed;')
    assert line.endswith('triton: not installed"')


def test_a_library_that_breaks_or_answers_wrongly_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """Built for another torch; no code for this device; answers that are not torch's."""

    class Wrong(GatherKernel):
        def decode(self, query: torch.Tensor, keys: Any, values: Any, rows: Decodes, scale: float) -> Any:
            late = Decodes(rows.tables, (rows.contexts - 1).clamp(min=1), rows.longest)
            return super().decode(query, keys, values, late, scale)

    class NotANumber(GatherKernel):
        def prefill(self, *args: Any) -> torch.Tensor:
            return super().prefill(*args) * float("nan")

    def no_code(*_: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device\nand forty lines more")

    def undefined(_: Any) -> Any:
        raise OSError("undefined symbol: _ZN3c104cuda")

    candidates = (
        Candidate("broken", lambda _: None, undefined),
        Candidate("foreign", lambda _: None, lambda _: _with_decode(no_code)),
        Candidate("wrong", lambda _: None, lambda _: Wrong()),
        Candidate("nan", lambda _: None, lambda _: NotANumber()),
        Candidate("good", lambda _: None, lambda _: GatherKernel()),
    )
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        assert pick(needs(), CPU, candidates=candidates) is not None
    (line,) = caplog.messages
    assert line.startswith('attention kernel=good passed_over="broken: OSError: undefined symbol')
    assert "foreign: failed on this device: RuntimeError: no kernel image" in line
    assert "forty lines" not in line
    assert "wrong: its answers differ from torch's by" in line
    assert "nan: its answers differ from torch's by" in line


def _with_decode(function: Any) -> Any:
    kernel: Any = GatherKernel()
    kernel.decode = function
    return kernel


def test_a_torch_without_block_tables_is_passed_over() -> None:
    """Older versions have the module and not the argument."""

    def old(query: Any, key: Any, value: Any) -> None:
        raise AssertionError("must not be called")

    modules = {VARLEN: SimpleNamespace(varlen_attn=old)}

    def find(name: str) -> Any:
        if name in modules:
            return modules[name]
        raise ImportError(name)

    assert pick(needs(), CPU, importer=find) is None


def test_what_is_asked_for_by_name_is_had_or_an_error() -> None:
    """Never something else in silence; `torch` is always there."""
    everything = importer(*EVERYTHING)
    found = pick(needs(), CPU, asked="triton", importer=everything)
    assert found is not None
    assert found.name == "triton"
    assert pick(needs(), CPU, asked="torch", importer=everything) is None
    with pytest.raises(ValueError, match=r"^flash-attn-2: blocks of 16 tokens are no multiple of 256$"):
        pick(needs(), CPU, asked="flash-attn-2", importer=everything)
    with pytest.raises(ValueError, match=r"^triton: not installed$"):
        pick(needs(), CPU, asked="triton", importer=importer())


def test_the_command_line_offers_what_there_is() -> None:
    """auto, every candidate in order, and torch."""
    assert ("auto", *(c.name for c in CANDIDATES), "torch") == config.ATTENTIONS


def test_float32_is_held_to_its_own_precision() -> None:
    """A kernel that rounds to ten bits on the way is fine for half precision, and not for float32."""

    class Rounding(GatherKernel):
        def decode(self, *args: Any) -> torch.Tensor:
            return super().decode(*args).bfloat16().to(args[0].dtype)

    assert disagreement(Rounding(), needs(dtype=torch.bfloat16), CPU) is None
    assert disagreement(Rounding(), needs(dtype=torch.float32), CPU) is not None
    assert choice.disagreement(GatherKernel(), needs(dtype=torch.float32), CPU) is None
