"""Paged attention by every kernel, against the definition: shapes, block tables, lengths, causal borders.

Kernels that need an accelerator are called through functions of the same signature; the one in Triton runs
in Triton's interpreter, in a process of its own.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway_engine.attention import KeyValueCache, LayerShape, make_batch
from headway_engine.lean.installed import FlashAttention2, FlashAttention3, TorchVarlen
from headway_engine.lean.kernels import GatherKernel, PagedKernel, kernel_batch, send
from support import paged_functions
from support.paged_cases import HALF, LENGTHS, LONG, SHAPES, Case, Shape, case

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]

KERNELS: dict[str, PagedKernel] = {
    "torch": GatherKernel(),
    "flash-attn-3": FlashAttention3(paged_functions.flash3_with_kvcache),
    "flash-attn-2": FlashAttention2(paged_functions.flash2_with_kvcache, paged_functions.flash2_varlen),
    "torch-varlen": TorchVarlen(paged_functions.torch_varlen),
}


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=5 * tolerance)


def decodes_wanted(c: Case) -> torch.Tensor:
    return c.expected(c.one, (1,) * len(c.contexts))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_decodes_are_those_of_the_definition(name: str, shape: Shape) -> None:
    """Contexts of one token, inside a block, at its end, and over several."""
    c = case(shape)
    close(c.decode(KERNELS[name]), decodes_wanted(c))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_prefills_are_those_of_the_definition(name: str, shape: Shape) -> None:
    """Whole prompts and chunks in their middle: the causal border lies at the end of the context."""
    c = case(shape)
    close(c.prefill(KERNELS[name]), c.expected(c.many, LENGTHS))


@pytest.fixture(scope="module")
def triton_answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("triton") / "answers"
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT / "tests"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "support.paged_cases", str(out)]
    subprocess.run(command, env=environment, check=True, timeout=240)
    return torch.load(out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_triton_kernel_gives_the_definitions_answers(triton_answers: Any, shape: Shape) -> None:
    """Decodes and prefills, grouped heads and single ones, widths that fill no power of two."""
    c = case(shape)
    close(triton_answers[f"decode {shape}"], decodes_wanted(c))
    close(triton_answers[f"prefill {shape}"], c.expected(c.many, LENGTHS))


def test_the_triton_kernel_reads_views_splits_contexts_and_sums_in_float32(triton_answers: Any) -> None:
    """Queries inside a wider row; parts that are joined again, some of them empty; float16."""
    close(triton_answers["view"], decodes_wanted(case(SHAPES[0])))
    close(triton_answers["split"], decodes_wanted(case(SHAPES[0], contexts=LONG)))
    close(triton_answers["half"], decodes_wanted(case(SHAPES[2], torch.float16, HALF)), 2e-3)


def test_splits_fill_the_device_and_are_few() -> None:
    """Powers of two: each number is a kernel to compile. Short contexts and many rows are not split."""
    pytest.importorskip("triton")
    from headway_engine.lean.triton_kernel import decode_splits

    assert decode_splits(8, 100_000) == 16
    assert decode_splits(64, 100_000) == 4
    assert decode_splits(256 * 8, 100_000) == 1
    assert decode_splits(8, 400) == 1
    found = {decode_splits(programs, longest) for programs in range(1, 400) for longest in (1, 700, 9000)}
    assert found == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("single", [True, False], ids=["decode", "prefill"])
def test_the_triton_kernel_compiles_for_a_device_that_is_not_here(
    single: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton and its assembler make machine code of compute capability 9.0 in bfloat16, with matrix
    instructions: what the interpreter cannot show."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headway_engine.lean import triton_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants: dict[str, Any] = {
        "SINGLE": single, "BLOCK": 16, "GROUP": 4, "KV_HEADS": 8, "WIDTH": 64, "VALUE_WIDTH": 64,
        "WIDTH_PAD": 64, "VALUE_PAD": 64, "QUERIES": 1 if single else 16, "ROWS": 16 if single else 64,
        "KEYS": 64, "SPLITS": 4 if single else 1, "PRECISION": "tf32",
    }  # fmt: skip
    types = dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("query", "keys", "values"), "*bf16")
    types |= {"out": "*fp32" if single else "*bf16", "logs": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("starts", "contexts", "tables"), "*i32")
    names = list(inspect.signature(triton_kernel._attend_body).parameters)
    signature = {name: types.get(name, "i32") for name in names}
    source = ASTSource(triton_kernel._attend, signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True}
    )
    assert "mma" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000
    assert compiled.metadata.shared <= 99 << 10, "fits in the shared memory of smaller devices too"


def test_what_is_sent_together_arrives_apart() -> None:
    """Shapes, empty ones too, and beginnings at whole 16 bytes."""
    arrays = [np.arange(3), np.zeros((0, 2)), np.arange(6).reshape(2, 3), np.array([7])]
    parts = send(arrays, CPU)
    assert [p.tolist() for p in parts] == [[0, 1, 2], [], [[0, 1, 2], [3, 4, 5]], [7]]
    assert all(p.dtype is torch.int32 for p in parts)
    base = parts[0].data_ptr()
    assert all((p.data_ptr() - base) % 16 == 0 for p in parts if p.numel())


@pytest.mark.parametrize("name", KERNELS)
def test_a_mixed_step_is_that_of_torchs_own_attention(name: str) -> None:
    """The whole batch, with what is written to the cache, against PaddedBatch; layers of different shapes."""
    shapes = [LayerShape(2, 8, 8), LayerShape(4, 16, 16)]
    decodes = [(6, [3, 1]), (1, [7]), (12, [9, 5, 2])]
    prefills = [(0, 5, [4, 6]), (3, 4, [8, 10])]
    tokens = 3 + 5 + 4
    caches = [KeyValueCache(shapes, 12, 4, torch.float32, CPU) for _ in range(2)]
    for layer in range(2):
        torch.manual_seed(layer)
        old = torch.randn_like(caches[0].keys[layer])
        for one in caches:
            one.keys[layer].copy_(old)
            one.values[layer].copy_(old.flip(0))
    batches = (
        make_batch(caches[0], decodes, prefills, CPU),
        kernel_batch(caches[1], KERNELS[name], decodes, prefills, CPU),
    )
    for layer, shape in enumerate(shapes):
        query = torch.randn(1, 4, tokens, shape.key_width)
        key, value = torch.randn(2, 1, shape.heads, tokens, shape.key_width)
        for scale in (None, 0.7):
            wanted, found = (batch.attend(layer, query, key, value, scale) for batch in batches)
            close(found, wanted)
        close(caches[0].keys[layer], caches[1].keys[layer])
        close(caches[0].values[layer], caches[1].values[layer])


def test_a_step_of_decodes_alone_hands_the_kernels_own_result_on() -> None:
    """Nothing is copied together where there is one part."""
    cache = KeyValueCache([LayerShape(1, 8, 8)], 4, 4, torch.float32, CPU)

    class Remembering(GatherKernel):
        def decode(self, *args: Any) -> torch.Tensor:
            self.last = super().decode(*args)
            return self.last

    kernel = Remembering()
    batch = kernel_batch(cache, kernel, [(2, [1]), (3, [2])], [], CPU)
    numbers = torch.randn(1, 1, 2, 8)
    assert batch.prefills is None
    assert batch.attend(0, numbers, numbers, numbers, None) is kernel.last
