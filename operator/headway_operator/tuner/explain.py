"""Why limits are what they are, in sentences with numbers. These are what users read."""

from headway_engine.protocol import Limits
from headway_operator.resource import Slo
from headway_operator.tuner.memory import Memory
from headway_operator.tuner.solve import (
    LEAST_BAD,
    MARGIN,
    TTFT_STEP_SHARE,
    Solution,
    alone_s,
    point,
    step_target_s,
)
from headway_operator.tuner.words import span, step_in_words


def explain(slo: Slo, memory: Memory, solution: Solution, old: Limits, new: Limits) -> dict[str, str]:
    """One reason per tunable field of Limits, for a move from `old` to `new`."""
    return {
        "max_batch_tokens": f"{_binding(slo, solution)}. {_model(slo, memory)}",
        "max_batch_sequences": _or(solution.max_batch_sequences.binding, "back to what the spec asks for"),
        "prefill_chunk_tokens": _or(solution.prefill_chunk_tokens.binding, "back to what the spec asks for"),
        "max_queued_tokens": _queue(slo, memory, solution, new),
    }


def standing(slo: Slo, memory: Memory, solution: Solution, frozen: bool) -> str:
    """Why nothing moves."""
    words = (
        f"limits stay: a full step is predicted to take {span(solution.predicted_s)}. {_model(slo, memory)}"
    )
    if solution.max_batch_tokens.binding:
        words += f". What limits maxBatchTokens now: {solution.max_batch_tokens.binding}"
    if frozen:
        words += ". Growth is off for a while after a change that was undone"
    return words


def _binding(slo: Slo, solution: Solution) -> str:
    binding = solution.max_batch_tokens.binding
    name = "ITL" if slo.itl is not None else "TTFT"
    if binding.startswith(("tuning.bounds", "capacity")):
        return f"{binding} binds, before {name}"
    if binding:
        return f"{name} binds ({binding})"
    return f"{name} binds"


def _model(slo: Slo, memory: Memory) -> str:
    at, target_s = point(memory), step_target_s(slo)
    assert at is not None
    assert target_s is not None
    words = step_in_words(at.cost, at.decode_sequences, at.kv_tokens_per_sequence, at.overhead_s)
    words += f"; target {span(target_s)}"
    if alone_s(at) > target_s:
        return f"{words}, which not even one request alone meets: a step may take {LEAST_BAD:g} times as long"
    if slo.itl is None:
        words += f" ({TTFT_STEP_SHARE:.0%} of the TTFT target)"
    words += f" less {MARGIN * 100:.0f} %"
    if memory.kappa > 1.01:
        words += f", measured {memory.kappa:.2f} times as long as modelled"
    return words


def _queue(slo: Slo, memory: Memory, solution: Solution, new: Limits) -> str:
    if slo.ttft is None:
        return "no TTFT target"
    if solution.max_queued_tokens.binding:
        return f"{solution.max_queued_tokens.binding} binds, before TTFT"
    prefill = max(1.0, new.max_batch_tokens - memory.load.decode_sequences)
    rate = prefill / solution.predicted_s if solution.predicted_s > 0 else 0.0
    speed = f"{rate:.0f} prompt tokens/s can be computed"
    if solution.slots_free_per_s is not None:
        tokens_per_s = solution.slots_free_per_s * memory.load.prompt_tokens
        speed += f", but only {tokens_per_s:.0f} of them find a slot"
    return (
        f"TTFT binds. {speed}, and the target is {span(slo.ttft.target_s)} with two steps of "
        f"{span(solution.predicted_s)} in it"
    )


def _or(words: str, otherwise: str) -> str:
    return words or otherwise
