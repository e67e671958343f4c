"""The limits that the model asks for: a step as large as the ITL target allows, a queue as long as the
TTFT target allows.

    C = ((1 - margin) * target / kappa - T(0, D, K)) / b      prompt tokens a step
    B = C + D                                                 maxBatchTokens
    Q = scale * min(W C / T(C, D, K), (F + W r) L)              maxQueuedTokens

with W = 0.85 * (target - 2 T(C, D, K)) the wait that is allowed, F the slots that are free and r the requests
a second that give theirs up: a queue drains no faster than prompts are computed, nor than slots become free.

Pure arithmetic on the memory; knows nothing of trials, verdicts or time.
"""

import math
from dataclasses import dataclass, replace

from headway_engine.protocol import Capacity, Limits
from headway_engine.stepcost import StepCost
from headway_operator.resource import Batching, Bound, Slo, Tuning
from headway_operator.tuner.calm import DEVIATIONS
from headway_operator.tuner.memory import Load, Memory

MARGIN = 0.10
SMALLEST_PREFILL = 16
"""Prompt tokens a step below which a prompt hardly moves; the engine's floor is measured here."""
LARGEST_GRID = 32
TTFT_STEP_SHARE = 0.25
"""With no ITL target, the share of the TTFT target that one step may take."""
QUEUE_SHARE = 0.85
KV_SHARE = 0.9
"""Of the KV cache that is counted on: beyond it sequences are preempted, and computed again."""
NEAR = 4.0
"""Inside this factor of their present values, the caps of queue and sequences are damped; else they jump."""
SHRINK_MOST, GROW_MOST = 0.4, 1.5
LEAST_BAD = 1.5
"""Where no setting meets the ITL target, a step may take so many times what one request alone takes:
smaller ones would hardly be quicker, and would serve far fewer requests."""
USED_MOST = 2.0
"""How far above the prefill that steps really carry the budget may grow: beyond is extrapolation."""
LARGEST_QUEUE = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Point:
    """Where the engine works: what a decoding sequence shares its step with, and what lies between steps."""

    cost: StepCost
    decode_sequences: float
    kv_tokens_per_sequence: float
    overhead_s: float

    def seconds(self, prefill_tokens: float, decode_sequences: float | None = None) -> float:
        """Predicted time from one step to the next."""
        decode = self.decode_sequences if decode_sequences is None else decode_sequences
        return (
            self.cost.seconds(prefill_tokens, decode, decode * self.kv_tokens_per_sequence) + self.overhead_s
        )

    @property
    def per_sequence_s(self) -> float:
        """What one more decoding sequence adds to a step."""
        return self.cost.per_decode_s + self.cost.per_kv_token_s * self.kv_tokens_per_sequence


@dataclass(frozen=True, slots=True)
class Clamped:
    """A value after the bounds, and the bound that changed it (empty: none did)."""

    value: int
    binding: str = ""
    aim: float = 0.0
    """Where the model would go if it went the whole way at once."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Wanted values of the parameters that are tuned, each with what binds it."""

    max_batch_tokens: Clamped
    max_batch_sequences: Clamped
    prefill_chunk_tokens: Clamped
    max_queued_tokens: Clamped
    slots_free_per_s: float | None
    """Requests a second that give a slot up, where that is what the queue waits for; None where it is not."""
    prefill_tokens: float
    """The largest prefill a step may carry by the model; below SMALLEST_PREFILL where none fits."""
    step_allowed_s: float
    """Target less margin and correction."""
    predicted_s: float
    """Of a full step at `max_batch_tokens`."""
    least_bad: bool
    """Not even one request alone is inside the target."""


def point(memory: Memory) -> Point | None:
    """The present working point; None before there is a model."""
    if memory.cost is None:
        return None
    load = memory.load
    return Point(memory.cost, load.decode_sequences, load.kv_tokens_per_sequence, memory.overhead_s)


def slots(capacity: Capacity, max_batch_sequences: int, at: Point) -> float:
    """Sequences that can be in a pod at once: by their limit, and by the KV cache at their present length."""
    most = float(min(capacity.max_batch_sequences, max_batch_sequences))
    if at.kv_tokens_per_sequence > 0 and capacity.kv_tokens > 0:
        most = min(most, KV_SHARE * capacity.kv_tokens / at.kv_tokens_per_sequence)
    return most


def work_s(at: Point, load: Load) -> float:
    """Seconds that one request adds to steps: w = L b + G (c + d k), for L prompt tokens and G decodes.

    The first of O output tokens comes with the last of the prompt, so G = O - 1.
    """
    return load.prompt_tokens * at.cost.per_prefill_token_s + _decodes(load) * at.per_sequence_s


def slots_per_s(at: Point, load: Load, most: float, chunk_tokens: float) -> float:
    """Requests a second that one pod serves with its `most` slots always taken.

    A request holds its slot for S = ceil(L / chunk) steps of prompt and G steps of decoding, so N slots end
    N / (S + G) requests a step, each of them work w (see `work_s`) for some step. A step of base cost a then
    takes T = a + w N / (S + G), and N / ((S + G) T) = 1 / (w + a (S + G) / N) requests end a second: by
    Little's law, with nothing assumed about how lengths are distributed.
    """
    steps = math.ceil(load.prompt_tokens / max(1.0, chunk_tokens)) + _decodes(load)
    return _per_s(work_s(at, load) + at.seconds(0, 0) * steps / max(1.0, most))


def tokens_per_s(at: Point, load: Load, step_tokens: float) -> float:
    """Requests a second that one pod serves with `step_tokens` in every step.

    As above: B tokens a step are B / (L + G) requests a step, hence 1 / (w + a (L + G) / B).
    """
    tokens = load.prompt_tokens + _decodes(load)
    return _per_s(work_s(at, load) + at.seconds(0, 0) * tokens / max(1.0, step_tokens))


def _decodes(load: Load) -> float:
    return max(0.0, load.output_tokens - 1)


def _per_s(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else math.inf


def alone_s(at: Point) -> float:
    """The smallest useful step: one sequence decodes and a little of a prompt is computed."""
    return at.seconds(SMALLEST_PREFILL, 1.0)


def step_target_s(slo: Slo) -> float | None:
    """What a step may take by the targets, before margin and correction."""
    if slo.itl is not None:
        return slo.itl.target_s
    if slo.ttft is not None:
        return TTFT_STEP_SHARE * slo.ttft.target_s
    return None


def grid(tokens: float) -> int:
    """The step in which a budget moves: about a sixteenth of it, 32 at most, for tiny engines 1."""
    return min(LARGEST_GRID, 1 << math.floor(math.log2(max(1.0, tokens / 16))))


def on_grid(tokens: float) -> int:
    """The budget rounded down to its grid."""
    step = grid(tokens)
    return max(1, math.floor(tokens / step + 1e-9) * step)


def solve(
    slo: Slo,
    tuning: Tuning,
    batching: Batching,
    capacity: Capacity,
    start: Limits,
    memory: Memory,
    *,
    free: bool,
) -> Solution | None:
    """Wanted values, moving from `start` by no more than the trust region, or at once when `free`.

    None when there is neither a model nor a target that a step could be held to.
    """
    at, target_s = point(memory), step_target_s(slo)
    if at is None or target_s is None:
        return None
    bounds = tuning.bounds
    allowed_s = (1 - MARGIN) * target_s / memory.kappa
    least_bad = alone_s(at) > target_s
    if least_bad:
        allowed_s = LEAST_BAD * alone_s(at)
    decode = at.decode_sequences
    per_token_s = at.cost.per_prefill_token_s
    room_s = allowed_s - at.seconds(0)
    prefill = room_s / per_token_s if per_token_s > 0 else math.copysign(math.inf, room_s)
    wanted = min(max(prefill, SMALLEST_PREFILL) + decode, capacity.max_batch_tokens)
    trusted = wanted if free else _trusted(wanted, start.max_batch_tokens, decode)
    used = USED_MOST * _prefill_of_a_step(memory) + decode
    unused = trusted > max(used, start.max_batch_tokens)
    if unused:
        trusted = max(used, min(trusted, start.max_batch_tokens))
    smallest = max(bounds.max_batch_sequences.min or 1, 1)
    tokens = _clamp(
        on_grid(trusted),
        Bound(max(bounds.max_batch_tokens.min or 1, smallest), bounds.max_batch_tokens.max),
        capacity.max_batch_tokens,
        "maxBatchTokens",
    )
    if not tokens.binding and unused:
        tokens = Clamped(tokens.value, "steps carry too few prompt tokens to use, or to foresee, larger ones")
    elif not tokens.binding and trusted != wanted:
        tokens = Clamped(tokens.value, f"one step of x{SHRINK_MOST:g} to x{GROW_MOST:g} at a time")
    tokens = replace(tokens, aim=wanted)
    full = max(0.0, tokens.value - decode)
    predicted_s = at.seconds(full)
    sequences = _sequences(
        at,
        None if least_bad else allowed_s,
        bounds.max_batch_sequences,
        min(batching.max_batch_sequences, capacity.max_batch_sequences),
        capacity.max_batch_sequences,
        tokens.value,
        None if free else start.max_batch_sequences,
    )
    chunk = _chunk(slo, at, bounds.prefill_chunk_tokens, batching, capacity, memory, full)
    most = slots(capacity, sequences.value, at)
    freed = _by_slots(at, memory.load, most, min(chunk.value, max(full, SMALLEST_PREFILL)))
    max_queued_tokens, waits_for_slots = _queue(
        slo, at, bounds.max_queued_tokens, start, memory, full, freed, free=free
    )
    return Solution(
        max_batch_tokens=tokens,
        max_batch_sequences=sequences,
        prefill_chunk_tokens=chunk,
        max_queued_tokens=max_queued_tokens,
        slots_free_per_s=freed.per_s / memory.load.prompt_tokens if waits_for_slots else None,
        prefill_tokens=prefill,
        step_allowed_s=allowed_s,
        predicted_s=predicted_s,
        least_bad=least_bad,
    )


def _prefill_of_a_step(memory: Memory) -> float:
    """Prompt tokens of the step that a prompt token is computed in, on average."""
    sums = memory.sums
    return sums.pp / sums.p if sums.p > 0 else 0.0


def _trusted(wanted: float, now: int, decode: float) -> float:
    """No further than the region in which a linear model can be believed. It is about the prefill share."""
    prefill = max(now - decode, SMALLEST_PREFILL)
    low = SHRINK_MOST * prefill + decode
    high = max(GROW_MOST * prefill, prefill + SMALLEST_PREFILL) + decode
    return min(max(wanted, low), high)


def _damped(wanted: float, now: float) -> float:
    """Near its present value a cap goes half of the way (of its logarithm): it is a product of estimates, and
    on a machine whose speed is noisy it would otherwise swing by factors from tick to tick."""
    return math.sqrt(wanted * now) if 1 / NEAR < wanted / max(now, 1) < NEAR else wanted


def _clamp(value: int, bound: Bound, ceiling: int, name: str) -> Clamped:
    if value > ceiling:
        value, binding = ceiling, f"capacity {ceiling}"
    else:
        binding = ""
    if bound.max is not None and value > bound.max:
        value, binding = bound.max, f"tuning.bounds.{name}.max"
    if bound.min is not None and value < bound.min:
        value, binding = min(bound.min, ceiling), f"tuning.bounds.{name}.min"
    return Clamped(value, binding)


def _sequences(
    at: Point,
    allowed_s: float | None,
    bound: Bound,
    most: int,
    ceiling: int,
    tokens: int,
    now: int | None,
) -> Clamped:
    """A safety limit: as many sequences as can decode inside the target, never fewer than decode now.

    It is no means to regulate latency: a tight cap only moves the wait in front of the first token.
    """
    binding = ""
    aim = float(most)
    if at.per_sequence_s > 0 and allowed_s is not None:
        safe = math.floor((allowed_s - at.seconds(SMALLEST_PREFILL / 2, 0)) / at.per_sequence_s)
        aim = float(min(max(safe, math.ceil(at.decode_sequences), 1), most))
        if now is not None:
            safe = math.floor(_damped(max(safe, 1), now))
        safe = max(safe, math.ceil(at.decode_sequences), 1)
        # Far beyond what was seen the slope is a guess, and a guess must not close the door.
        if safe < most and at.decode_sequences >= safe / 4:
            most, binding = safe, "decoding more of them at once breaks the ITL target"
    clamped = _clamp(most, bound, ceiling, "maxBatchSequences")
    if clamped.value > tokens:
        return Clamped(tokens, "a step holds no more sequences than tokens", aim)
    return Clamped(clamped.value, clamped.binding or binding, aim)


def _chunk(
    slo: Slo, at: Point, bound: Bound, batching: Batching, capacity: Capacity, memory: Memory, full: float
) -> Clamped:
    """The user's chunk, unless it alone makes a mean prompt take more than half the TTFT target."""
    chunk, binding = batching.prefill_chunk_tokens, ""
    prompt = memory.load.prompt_tokens
    if slo.ttft is not None and prompt > chunk and full > chunk:
        alone_s = math.ceil(prompt / chunk) * at.seconds(chunk)
        if alone_s > 0.5 * slo.ttft.target_s:
            chunk = on_grid(full)
            binding = (
                f"in chunks of {batching.prefill_chunk_tokens} a mean prompt alone takes {alone_s:.2g} s"
            )
    clamped = _clamp(chunk, bound, capacity.max_batch_tokens, "prefillChunkTokens")
    return Clamped(clamped.value, clamped.binding or binding, float(clamped.value))


@dataclass(frozen=True, slots=True)
class _Slots:
    """What slots let through, in prompt tokens: at once, and a second."""

    at_once: float = math.inf
    per_s: float = math.inf


def _by_slots(at: Point, load: Load, most: float, chunk_tokens: float) -> _Slots:
    """Slots bind where the sequences that run may take all of them before the next look."""
    if load.prompt_tokens <= 0:
        return _Slots()
    # Who comes and goes by chance is there in Poisson numbers: so many slots are free 19 times in 20.
    free = max(0.0, most - at.decode_sequences - DEVIATIONS * math.sqrt(at.decode_sequences))
    per_s = slots_per_s(at, load, most, chunk_tokens)
    return _Slots(free * load.prompt_tokens, per_s * load.prompt_tokens)


def _queue(
    slo: Slo,
    at: Point,
    bound: Bound,
    start: Limits,
    memory: Memory,
    full: float,
    freed: _Slots,
    *,
    free: bool,
) -> tuple[Clamped, bool]:
    """Prompt tokens that can be begun and computed inside the TTFT target; without one, as it is.

    Beside it whether they wait for slots rather than to be computed.
    """
    if slo.ttft is None:
        return Clamped(start.max_queued_tokens, aim=float(start.max_queued_tokens)), False
    prefill = max(full, 1.0)
    step_s = at.seconds(prefill)
    wait_s = QUEUE_SHARE * max(0.0, slo.ttft.target_s - 2 * step_s)
    computed = wait_s * prefill / step_s if step_s > 0 else LARGEST_QUEUE
    begun = freed.at_once + wait_s * freed.per_s
    tokens = memory.queue_scale * min(computed, begun)
    # Two ordinary prompts always have room: a queue that admits nobody serves nobody.
    least = max(2 * memory.load.prompt_tokens, full)
    wanted = min(max(tokens, least), LARGEST_QUEUE)
    whole = _clamp(on_grid(wanted), bound, LARGEST_QUEUE, "maxQueuedTokens")
    if free:
        return replace(whole, aim=float(whole.value)), begun < computed
    damped = max(_damped(wanted, start.max_queued_tokens), least)
    found = _clamp(on_grid(min(damped, LARGEST_QUEUE)), bound, LARGEST_QUEUE, "maxQueuedTokens")
    return replace(found, aim=float(whole.value)), begun < computed
