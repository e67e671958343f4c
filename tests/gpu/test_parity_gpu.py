"""On an accelerator: parity with generate(), bfloat16 sanity, capacity from device memory, step failure.

Skipped where there is none. The runner is the transformers one with torch's own attention.
"""

from typing import Any

import pytest
import torch

from headway_engine.model import load
from headway_engine.protocol import Capacity
from headway_engine.runner import StepError, TransformersRunner, build_runner, measure_capacity
from support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here"),
]

SMALL = Capacity(
    max_batch_tokens=128, max_batch_sequences=32, kv_blocks=256, block_tokens=4, max_model_tokens=97
)


def on_device(architecture: str, dtype: str) -> Any:
    return load(
        tiny_models.source(architecture), dtype=dtype, device="cuda", max_model_len=0, progress=lambda _: None
    )


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_greedy_output_in_float32_is_that_of_the_cpu_reference(architecture: str) -> None:
    """Mixed steps: three prompts in chunks beside one another, then 20 decodes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    runner = TransformersRunner(on_device(architecture, "float32"), SMALL)
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


def test_auto_dtype_runs_and_answers() -> None:
    """bfloat16 on the device: a token inside the vocabulary, finite log-probabilities."""
    model = on_device("llama", "auto")
    runner = build_runner(tiny_models.engine_config(runner="auto"), model, SMALL)
    s = tiny_models.sequence("a", range(10, 30), range(20), logprobs=3, temperature=0.8, top_p=0.9)
    out = tiny_models.advance(runner, (s, 20))["a"]
    assert 0 <= out.token < 300
    assert out.logprob is not None
    assert out.logprob.logprob <= 0


def test_capacity_comes_from_device_memory() -> None:
    """A tiny model on any device has room for all that is useful."""
    config = tiny_models.engine_config(kv_blocks=0, kv_memory_percent=50)
    assert measure_capacity(on_device("llama", "auto"), config).kv_blocks == 16 * 25


def test_running_out_of_device_memory_fails_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real allocation failure inside a step is a StepError, and the next step works."""
    runner = TransformersRunner(on_device("llama", "float32"), SMALL)
    s = tiny_models.sequence("a", range(10, 30), range(20))
    original = runner._forward

    def greedy_for_memory(chunks: Any) -> torch.Tensor:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return original(chunks)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_forward", greedy_for_memory)
        with pytest.raises(StepError) as caught:
            tiny_models.advance(runner, (s, 20))
    assert caught.value.out_of_memory
    assert list(tiny_models.advance(runner, (s, 20))) == ["a"]
