"""The accelerator's runner on a CPU: what it takes, what it refuses, which steps are replays."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway_engine.lean.graphs import EagerRecorder
from headway_engine.lean.installed import FlashAttention2
from headway_engine.lean.kernels import GatherKernel
from headway_engine.lean.runner import LeanRunner
from headway_engine.model import ModelError
from headway_engine.runner import StepError, TransformersRunner, build_runner
from headway_engine.sequence import Chunk, Step
from support import paged_functions, runners, tiny_models

SMALL = runners.capacity(tokens=128)

FLASH = FlashAttention2(paged_functions.flash2_with_kvcache, paged_functions.flash2_varlen)


class Counting(EagerRecorder):
    """Counts replays."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        again = super().record(work)

        def replay() -> None:
            self.replays += 1
            again()

        return replay


def three(runner: Any, architecture: str) -> None:
    """Three prompts in chunks beside one another, then decodes; against generate()."""
    prompts = [tuple(range(10, 30)), (5, 9, 250), tuple(range(100, 131))]
    sequences = [tiny_models.sequence(str(i), p, range(i * 16, i * 16 + 16)) for i, p in enumerate(prompts)]
    first, second, third = sequences
    tiny_models.advance(runner, (first, 7), (second, 3))
    tiny_models.advance(runner, (second, 1), (first, 13), (third, 30))
    tiny_models.advance(runner, (second, 1), (first, 1), (third, 1))
    for _ in range(6):
        tiny_models.advance(runner, *((s, 1) for s in sequences))
    for s, prompt in zip(sequences, prompts, strict=True):
        assert tuple(s.tokens[len(prompt) :]) == tiny_models.greedy(architecture, prompt, s.output_len)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "llama-wide"])
def test_flash_attention_called_through_its_signature_says_what_generate_says(architecture: str) -> None:
    """Layouts, tables and lengths are right in every layer, for eager steps and recorded ones."""
    three(LeanRunner(tiny_models.fresh(architecture), SMALL, FLASH, EagerRecorder()), architecture)


def test_other_architectures_use_the_same_kernels_through_transformers() -> None:
    """GPT-2 has no lean path, and its attention is the kernel's all the same."""
    runner = TransformersRunner(tiny_models.fresh("gpt2"), SMALL, kernel=FLASH)
    three(runner, "gpt2")


def test_decodes_alone_are_replays_and_mixed_steps_are_not() -> None:
    """Also decodes of which some do not sample; a step of the model's check is one more."""
    recorder = Counting()
    runner = LeanRunner(tiny_models.fresh("llama"), SMALL, GatherKernel(), recorder)
    before = recorder.replays
    a, b = (tiny_models.sequence(n, range(10, 16), range(i * 8, i * 8 + 8)) for i, n in enumerate("ab"))
    tiny_models.advance(runner, (a, 6), (b, 5))
    assert recorder.replays == before
    tiny_models.advance(runner, (a, 1), (b, 1))
    assert recorder.replays == before + 1
    c = tiny_models.sequence("c", range(40, 44), range(16, 20))
    out = tiny_models.advance(runner, (a, 1), (c, 1))
    assert list(out) == ["a"], "a chunk in the middle of its prompt yields nothing"
    assert recorder.replays == before + 2
    tiny_models.advance(runner, (a, 1), (c, 3))
    assert recorder.replays == before + 2
    for s in (a, b, c):
        prompt = s.request.prompt
        assert tuple(s.tokens[len(prompt) :]) == tiny_models.greedy("llama", prompt, s.output_len)


def test_padding_rows_write_to_nobodys_block() -> None:
    """Three rows in a size of four: every block but those of the three stays as it was."""
    runner = LeanRunner(tiny_models.fresh("llama"), SMALL, GatherKernel(), EagerRecorder())
    blocks = SMALL.kv_blocks
    assert runner._cache.keys[0].shape[0] == blocks + 1
    sequences = [tiny_models.sequence(str(i), range(10, 14), range(2 * i, 2 * i + 2)) for i in range(3)]
    tiny_models.advance(runner, *((s, 4) for s in sequences))
    before = [t.clone() for t in (*runner._cache.keys, *runner._cache.values)]
    tiny_models.advance(runner, *((s, 1) for s in sequences))
    own = {1, 3, 5}
    for old, new in zip(before, (*runner._cache.keys, *runner._cache.values), strict=True):
        changed = (old != new).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) - {blocks} == own


def test_what_is_no_number_in_one_sequence_stays_there() -> None:
    """Beside it in a replay, others go on; its blocks can be wiped before someone else gets them."""
    runner = LeanRunner(tiny_models.fresh("llama"), SMALL, GatherKernel(), EagerRecorder())
    good, bad = (tiny_models.sequence(n, range(10, 16), range(i * 8, i * 8 + 8)) for i, n in enumerate("gb"))
    tiny_models.advance(runner, (good, 6), (bad, 6))
    runner._cache.keys[0][bad.block_table[0]] = float("nan")
    with pytest.raises(StepError) as caught:
        tiny_models.advance(runner, (good, 1), (bad, 1))
    assert caught.value.sequence_ids == ("b",)
    assert caught.value.lost_blocks == tuple(bad.block_table[:2])
    runner.run(Step((Chunk(good, 6, 1, samples=True),), wiped=caught.value.lost_blocks))
    assert all(torch.isfinite(t).all() for t in (*runner._cache.keys, *runner._cache.values))
    tiny_models.advance(runner, (good, 1))
    assert tuple(good.tokens[6:]) == tiny_models.greedy("llama", tuple(range(10, 16)), 2)


def test_the_module_gives_its_weights_up() -> None:
    """What was fused is not there twice."""
    model = tiny_models.fresh("llama")
    attention = model.module.model.layers[0].self_attn  # type: ignore[union-attr, index]
    LeanRunner(model, SMALL)
    assert attention.q_proj.weight.numel() == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("token", [-1, 300, 1 << 40])
def test_a_token_outside_the_vocabulary_is_an_error_before_it_reaches_the_device(token: int) -> None:
    """There it would end every later step too; in a mixed step and in a replay."""
    runner = LeanRunner(tiny_models.fresh("llama"), SMALL, GatherKernel(), EagerRecorder())
    for prompt in ([5, token], [token]):
        s = tiny_models.sequence("a", prompt, range(2))
        with pytest.raises(StepError, match="outside the vocabulary of 300"):
            tiny_models.advance(runner, (s, len(prompt)))


def test_half_precision_stays_close_to_float32() -> None:
    """Same weights, rounded: log-probabilities differ by no more than rounding does."""
    found = []
    for dtype in ("bfloat16", "float32"):
        runner = LeanRunner(tiny_models.fresh("llama-wide", dtype=dtype), SMALL, GatherKernel())
        s = tiny_models.sequence("a", range(10, 40), range(10), logprobs=5)
        tiny_models.advance(runner, (s, 17))
        out = tiny_models.advance(runner, (s, 13))["a"].logprob
        assert out is not None
        found.append(out.logprob)
    assert found[0] == pytest.approx(found[1], abs=0.15)


def test_running_out_of_memory_is_said_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's error of a device becomes a step that a smaller one may replace."""
    runner = LeanRunner(tiny_models.fresh("llama"), SMALL)
    s = tiny_models.sequence("a", range(10, 16), range(2))

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner._llama, "hidden", full)
        with pytest.raises(StepError) as caught:
            tiny_models.advance(runner, (s, 6))
    assert caught.value.out_of_memory
    assert list(tiny_models.advance(runner, (s, 6))) == ["a"]


def test_the_command_line_can_ask_for_it_on_a_cpu() -> None:
    """By name; `auto` keeps the C++ kernels there. What it cannot serve is refused with the reason."""
    runner = build_runner(tiny_models.engine_config(runner="lean"), tiny_models.fresh("llama"), SMALL)
    assert runner.name == "lean, torch attention, 0 decode graphs"
    three(runner, "llama")
    with pytest.raises(ModelError, match=r"^runner: no lean path .* GPT2LMHeadModel is not one of"):
        build_runner(tiny_models.engine_config(runner="lean"), tiny_models.fresh("gpt2"), SMALL)


def test_a_kernel_for_accelerators_is_refused_on_a_cpu() -> None:
    """And not put aside in silence."""
    asked = tiny_models.engine_config(runner="lean", attention="triton")
    with pytest.raises(ModelError, match=r"^attention: triton is for accelerators"):
        build_runner(asked, tiny_models.fresh("llama"), SMALL)


def test_recording_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """How many sizes, and how long it took."""
    with caplog.at_level(logging.INFO, logger="headway_engine"):
        runner = LeanRunner(tiny_models.fresh("llama"), SMALL, None, EagerRecorder())
    assert "decode-graphs recorded=8 of=8 seconds=" in caplog.text
    assert runner.name == "lean, torch attention, 8 decode graphs"
