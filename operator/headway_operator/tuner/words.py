"""Numbers as people read them, for reasons and messages."""

from headway_engine.stepcost import StepCost


def span(seconds: float) -> str:
    """A time in the unit that suits it: `33 us`, `7.1 ms`, `30 ms`, `1.2 s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(seconds) >= size or unit == "ns":
            return f"{_short(seconds / size)} {unit}"
    raise AssertionError("the last unit takes everything")


def per_second(rate: float) -> str:
    return f"{_short(rate)} requests/s"


def step_in_words(cost: StepCost, decode_sequences: float, kv_per_sequence: float, overhead_s: float) -> str:
    """The model at a working point: `Step = 7.1 ms + 33 us x prefill tokens + 3.4 ms for 61 sequences`."""
    decode_s = decode_sequences * (cost.per_decode_s + cost.per_kv_token_s * kv_per_sequence)
    words = f"Step = {span(cost.base_s)} + {span(cost.per_prefill_token_s)} x prefill tokens"
    if decode_sequences >= 0.5 and decode_s > 0:
        words += f" + {span(decode_s)} for {decode_sequences:.0f} sequences"
    if overhead_s > 0.02 * (cost.base_s + decode_s):
        words += f" + {span(overhead_s)} between steps"
    return words


def _short(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.0f}"
