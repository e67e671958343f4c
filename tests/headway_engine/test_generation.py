"""One answer in the making: text, counts, finish reasons and log-probabilities of a choice."""

import pytest

from headway_engine.generation import Choice, Usage, usage
from headway_engine.sequence import Finished, FinishReason, Started, TokenLogprob, TokenOut
from headway_engine.tool_calls import ToolCallReader, joined

EOS = 0


def decode(ids):
    return bytes(id for id in ids if id != EOS).decode("utf-8", "replace")


def piece(id):
    return decode([id]), bytes([id])


def choice(**changes):
    values = {"stop_token_ids": frozenset([EOS]), **changes}
    return Choice(0, list(b"prompt"), decode, piece, **values)


def feed(c, text, finish=None, logprobs=False):
    """Push a text byte by byte, and collect what could be sent after each."""
    sent = []
    for byte in text if isinstance(text, list) else text.encode():
        c.push(TokenOut("r", byte, TokenLogprob(-1.0, ((byte, -1.0),)) if logprobs else None))
        sent.append(c.take())
    if finish:
        c.push(Finished("r", finish))
        sent.append(c.take())
    return [d for d in sent if d]


def text_of(deltas):
    return "".join(d.text for d in deltas)


def test_end_of_sequence_is_counted_and_not_shown():
    """Row C.4 25: usage equals the number of sampled ids."""
    c = choice()
    deltas = feed(c, [*b"hi", EOS], FinishReason.STOP)
    assert text_of(deltas) == "hi"
    assert [d.finish_reason for d in deltas] == [None, None, "stop"]
    assert c.completion_tokens == 3


def test_a_stop_string_ends_the_choice_here_and_later_tokens_do_not_count():
    """The core is a step ahead: what it still sends is ignored."""
    c = choice(stops=["DE"])
    deltas = feed(c, "ABCDEFG")
    assert text_of(deltas) == "ABC"
    assert deltas[-1].finish_reason == "stop"
    assert c.stopped_here
    assert c.completion_tokens == 5


def test_stop_string_before_end_of_sequence_in_the_same_step_wins():
    """Row C.4 34: the earlier event wins."""
    c = choice(stops=["X"])
    for event in (TokenOut("r", ord("X")), TokenOut("r", EOS), Finished("r", FinishReason.STOP)):
        c.push(event)
    delta = c.take()
    assert (delta.text, delta.finish_reason, c.completion_tokens) == ("", "stop", 1)


def test_held_back_text_is_sent_at_a_length_stop():
    """Row C.4 31."""
    c = choice(stops=["DEFG"])
    deltas = feed(c, "ABCDE", FinishReason.LENGTH)
    assert text_of(deltas) == "ABCDE"
    assert deltas[-1].finish_reason == "length"


def test_stop_strings_are_not_looked_for_before_min_tokens():
    """Row C.5 40."""
    c = choice(stops=["B"], min_tokens=3)
    assert text_of(feed(c, "ABCAB", FinishReason.LENGTH)) == "ABCA"
    assert c.completion_tokens == 5


def test_logprobs_of_a_stop_string_are_dropped_and_the_others_aligned():
    """Row C.5 47: one entry per token of the text, at its place."""
    c = choice(stops=["DE"])
    deltas = feed(c, "ABCDE", logprobs=True)
    infos = [info for d in deltas for info in d.logprobs]
    assert [(i.text, i.offset) for i in infos] == [("A", 0), ("B", 1), ("C", 2)]


def test_logprobs_are_all_there_at_the_end():
    """Entries whose text was held back come with it."""
    c = choice(stops=["DEFG"])
    deltas = feed(c, "ABDE", FinishReason.LENGTH, logprobs=True)
    infos = [info for d in deltas for info in d.logprobs]
    assert [i.text for i in infos] == ["A", "B", "D", "E"]


def test_tokens_that_pile_up_go_out_as_one_delta():
    """Coalescing: a slow reader gets one piece, not many."""
    c = choice()
    for byte in b"hello":
        c.push(TokenOut("r", byte))
    delta = c.take()
    assert (delta.text, delta.first) == ("hello", True)
    assert c.take() is None


def test_a_failure_is_kept_for_the_answer():
    """Errors, aborts and timeouts are no finish reasons of OpenAI's."""
    c = choice()
    c.push(Finished("r", FinishReason.ERROR, "no luck"))
    assert c.done
    assert c.failure is not None
    assert c.failure.message == "no luck"


def test_usage_counts_prompts_once_and_outputs_of_all_samples():
    """Row C.5 52: two samples of one prompt."""
    pair = [choice(), choice()]
    for c in pair:
        c.push(Started("r", 4))
        feed(c, "ab", FinishReason.LENGTH)
    assert usage(pair, 2) == Usage(prompt_tokens=6, completion_tokens=4, cached_tokens=4)


def test_after_its_end_a_choice_has_nothing_new():
    """Its siblings go on, and its last chunk must not be sent again with each of theirs."""
    c = choice()
    assert [d.finish_reason for d in feed(c, "hi", FinishReason.STOP)] == [None, None, "stop"]
    assert c.take() is None


CALL = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        (CALL, FinishReason.STOP, "tool_calls"),
        (CALL[:-5], FinishReason.LENGTH, "length"),
        (CALL, FinishReason.LENGTH, "length"),
        (CALL[:12], FinishReason.LENGTH, "length"),
        ("", FinishReason.LENGTH, "length"),
    ],
)
def test_a_tool_call_that_is_cut_ends_with_length(text, finish, reason):
    """Row C.4 37: a client that sees tool_calls runs them, so half a call must not say it is one."""
    c = choice(calls=ToolCallReader(tagged=False))
    assert feed(c, text, finish)[-1].finish_reason == reason


def test_a_stop_string_in_the_middle_of_a_call_is_not_the_end_of_a_call():
    c = choice(calls=ToolCallReader(tagged=False), stops=["x"])
    deltas = feed(c, CALL)
    assert deltas[-1].finish_reason == "stop"
    assert joined(sum((d.calls for d in deltas), ()))[0].arguments == '{"'


def test_text_beside_calls_stays_text():
    c = choice(calls=ToolCallReader(tagged=True))
    deltas = feed(c, f"So: <tool_call>{CALL}</tool_call>", FinishReason.STOP)
    assert text_of(deltas) == "So:"
    (call,) = joined(sum((d.calls for d in deltas), ()))
    assert (call.name, call.arguments) == ("f", '{"x": 1}')
    assert deltas[-1].finish_reason == "tool_calls"


def test_an_answer_without_calls_is_an_answer():
    c = choice(calls=ToolCallReader(tagged=True))
    deltas = feed(c, "2 < 3 <tool", FinishReason.STOP)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("2 < 3 <tool", "stop")
