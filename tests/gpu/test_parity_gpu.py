"""On an accelerator: parity with generate(), every kernel that is there, recorded steps, failures of memory.

Skipped where there is none. `check.py` beside this runs it all, and the throughput script, in one go.
"""

import logging
from typing import Any

import pytest
import torch

from headway_engine.attention import LayerShape
from headway_engine.lean.choice import CANDIDATES, Needs, needs_of, pick
from headway_engine.lean.graphs import CudaRecorder
from headway_engine.lean.kernels import Decodes, GatherKernel, PagedKernel, Prefills
from headway_engine.lean.runner import LeanRunner
from headway_engine.model import load
from headway_engine.protocol import Capacity
from headway_engine.runner import StepError, TransformersRunner, build_runner, measure_capacity
from headway_engine.sampling import sample
from support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here"),
]

SMALL = Capacity(
    max_batch_tokens=128, max_batch_sequences=32, kv_blocks=256, block_tokens=4, max_model_tokens=97
)
NAMES = [candidate.name for candidate in CANDIDATES]
SHAPE = frozenset({LayerShape(2, 64, 64)})


def device() -> torch.device:
    return torch.device("cuda")


def on_device(architecture: str, dtype: str) -> Any:
    return load(
        tiny_models.source(architecture), dtype=dtype, device="cuda", max_model_len=0, progress=lambda _: None
    )


def kernel_named(name: str, needs: Needs) -> PagedKernel | None:
    """The kernel, after its trial against the reference; the test is skipped where it cannot be had."""
    try:
        return pick(needs, device(), asked=name)
    except ValueError as error:
        pytest.skip(str(error))


def needs(dtype: torch.dtype, block_tokens: int, shapes: frozenset[LayerShape] = SHAPE) -> Needs:
    return needs_of(shapes, dtype, block_tokens, device())


def three(runner: Any, architecture: str) -> None:
    """Mixed steps: three prompts in chunks beside one another, then 20 decodes; against generate()."""
    prompts = [tuple(range(10, 30)), (5, 9, 250), tuple(range(100, 141))]
    sequences = [tiny_models.sequence(str(i), p, range(i * 24, i * 24 + 24)) for i, p in enumerate(prompts)]
    first, second, third = sequences
    tiny_models.advance(runner, (first, 7), (second, 3))
    tiny_models.advance(runner, (second, 1), (first, 13), (third, 40))
    tiny_models.advance(runner, (second, 1), (first, 1), (third, 1))
    for _ in range(17):
        tiny_models.advance(runner, *((s, 1) for s in sequences))
    for s, prompt in zip(sequences, prompts, strict=True):
        assert tuple(s.tokens[len(prompt) :]) == tiny_models.greedy(architecture, prompt, s.output_len)


@pytest.fixture(autouse=True)
def _exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_transformers_in_float32_says_what_the_cpu_reference_says(architecture: str, kernel: str) -> None:
    """Any architecture, with torch's own attention and with the kernel that takes float32."""
    shapes = frozenset({LayerShape(4 if architecture == "gpt2" else 2, 8, 8)})
    found = kernel_named(kernel, needs(torch.float32, 4, shapes))
    three(TransformersRunner(on_device(architecture, "float32"), SMALL, kernel=found), architecture)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "llama-wide"])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_lean_path_in_float32_says_what_the_cpu_reference_says(
    architecture: str, kernel: str, graphs: bool
) -> None:
    """Decodes piece by piece and replayed from CUDA graphs."""
    shape = LayerShape(1, 64, 64) if architecture == "llama-wide" else LayerShape(2, 8, 8)
    found = kernel_named(kernel, needs(torch.float32, 4, frozenset({shape})))
    recorder = CudaRecorder(device()) if graphs else None
    runner = LeanRunner(on_device(architecture, "float32"), SMALL, found, recorder)
    assert (runner.graphs > 0) == graphs
    three(runner, architecture)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [16, 256])
def test_a_kernel_in_bfloat16_stays_close_to_float32_at_real_sizes(name: str, block: int) -> None:
    """Contexts of thousands, split and not, decodes of few and of many, prefill chunks in their middle."""
    kernel = kernel_named(name, needs(torch.bfloat16, block, frozenset({LayerShape(8, 128, 128)})))
    assert kernel is not None
    reference = GatherKernel()
    generator = torch.Generator(device()).manual_seed(3)
    for rows in (1, 5, 64):
        contexts = [1 + (i * 977) % 4096 for i in range(rows)]
        contexts[0] = 4096
        width = 4096 // block
        blocks = rows * width
        tables = torch.randperm(blocks, generator=generator, device=device()).view(rows, width).int()
        keys, values = torch.randn(
            2, blocks, 8, block, 128, generator=generator, device=device(), dtype=torch.bfloat16
        )
        query = torch.randn(rows, 32, 128, generator=generator, device=device(), dtype=torch.bfloat16)
        lengths = torch.tensor(contexts, dtype=torch.int32, device=device())
        decodes = Decodes(tables, lengths, 4096)
        found = kernel.decode(query, keys, values, decodes, 128**-0.5)
        wanted = reference.decode(query.float(), keys.float(), values.float(), decodes, 128**-0.5)
        assert float((found.float() - wanted).abs().max()) < 0.02
    chunks = (300, 1, 64)
    starts = torch.tensor([0, 300, 301, 365], dtype=torch.int32, device=device())
    few, few_tables = lengths[:3].clone(), tables[:3].contiguous()
    few[1:] = torch.tensor([1, 1000], dtype=torch.int32, device=device())
    query = torch.randn(365, 32, 128, generator=generator, device=device(), dtype=torch.bfloat16)
    prefills = Prefills(starts, few, few_tables, chunks, tuple(few.tolist()))
    found = kernel.prefill(query, keys, values, prefills, 128**-0.5)
    wanted = reference.prefill(query.float(), keys.float(), values.float(), prefills, 128**-0.5)
    assert float((found.float() - wanted).abs().max()) < 0.02


@pytest.mark.parametrize("name", ["torch", *NAMES])
def test_replays_in_bfloat16_are_the_steps_they_were_recorded_from(name: str) -> None:
    """Random starts and ends of 20 sequences: every step's distribution is close to the eager one's."""
    kernel = kernel_named(name, needs(torch.bfloat16, 4, frozenset({LayerShape(1, 64, 64)})))
    eager = LeanRunner(on_device("llama-wide", "bfloat16"), SMALL, kernel)
    replayed = LeanRunner(on_device("llama-wide", "bfloat16"), SMALL, kernel, CudaRecorder(device()))
    assert replayed.graphs > 0
    pairs = []
    for i in range(20):
        prompt = [(7 * i + 3 * j) % 290 + 3 for j in range(1 + i % 9)]
        pair = [tiny_models.sequence(str(i), prompt, range(i * 8, i * 8 + 8), logprobs=0) for _ in "er"]
        pairs.append(pair)
    for k, runner in enumerate((eager, replayed)):
        tiny_models.advance(runner, *((pair[k], len(pair[k].tokens)) for pair in pairs))
    for turn in range(16):
        active = [pair for i, pair in enumerate(pairs) if (i + turn) % 5]
        outs = [
            tiny_models.advance(runner, *((pair[k], 1) for pair in active))
            for k, runner in enumerate((eager, replayed))
        ]
        for one, other in active:
            found, wanted = outs[1][other.id].logprob, outs[0][one.id].logprob
            assert found is not None
            assert wanted is not None
            if one.tokens == other.tokens:
                assert found.logprob == pytest.approx(wanted.logprob, abs=0.1)
            other.tokens[:] = one.tokens  # two tokens that are all but equally likely may change places


def test_auto_takes_the_lean_path_with_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """bfloat16, a kernel of paged attention, one log line that says which; a token inside the vocabulary."""
    model = on_device("llama-wide", "auto")
    capacity = Capacity(
        max_batch_tokens=128, max_batch_sequences=32, kv_blocks=64, block_tokens=16, max_model_tokens=97
    )
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        runner = build_runner(tiny_models.engine_config(runner="auto", kv_block_tokens=16), model, capacity)
    assert runner.name.startswith("lean, ")
    assert not runner.name.endswith(" 0 decode graphs")
    assert any(line.startswith("attention kernel=") for line in caplog.messages)
    s = tiny_models.sequence("a", range(10, 30), range(6), logprobs=3, temperature=0.8, top_p=0.9)
    for length in (20, 1, 1):
        out = tiny_models.advance(runner, (s, length))["a"]
        assert 0 <= out.token < 331
        assert out.logprob is not None
        assert out.logprob.logprob <= 0


def test_the_same_logits_are_sampled_alike_on_every_device() -> None:
    """Greedy and drawn, cut and whole, seeded."""
    torch.manual_seed(4)
    logits = torch.randn(40, 5000) * 3
    sequences = [
        tiny_models.sequence(
            str(i),
            [1, 2],
            temperature=(0.0, 0.7, 1.0)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            top_k=(0, 20)[i // 2 % 2],
            seed=i,
        )
        for i in range(40)
    ]
    here = [s.token for s in sample(logits, sequences)]
    there = [s.token for s in sample(logits.cuda(), sequences)]
    assert sum(a == b for a, b in zip(here, there, strict=True)) >= 39, "sums are rounded in another order"


def test_capacity_comes_from_device_memory() -> None:
    """A tiny model on any device has room for all that is useful."""
    config = tiny_models.engine_config(kv_blocks=0, kv_memory_percent=50)
    assert measure_capacity(on_device("llama", "auto"), config).kv_blocks == 16 * 25


def test_running_out_of_device_memory_fails_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real allocation failure inside a step is a StepError, and the next step, a replay too, works."""
    runner = LeanRunner(on_device("llama", "float32"), SMALL, None, CudaRecorder(device()))
    s = tiny_models.sequence("a", range(10, 30), range(20))
    original = runner._forward

    def greedy_for_memory(chunks: Any) -> torch.Tensor:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return original(chunks)

    for length in (20, 1):
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_forward", greedy_for_memory)
            with pytest.raises(StepError) as caught:
                tiny_models.advance(runner, (s, length))
        assert caught.value.out_of_memory
        assert list(tiny_models.advance(runner, (s, length))) == ["a"]
    assert tuple(s.tokens[20:]) == tiny_models.greedy("llama", tuple(range(10, 30)), 2)
