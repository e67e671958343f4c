"""One answer in the making: text, counts, finish reasons and log-probabilities of a choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_engine.generation import Choice, Usage, usage
from headway_engine.sequence import Finished, FinishReason, PromptOut, Started, TokenLogprob, TokenOut
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


# Prompts with log-probabilities.


def scored(prompt, **changes):
    """A choice that echoes `prompt`, and the event with its scores: token i has -i."""
    c = Choice(
        0, list(prompt), decode, piece, **{"stop_token_ids": frozenset([EOS]), "scored": True, **changes}
    )
    return c, PromptOut("r", tuple(TokenLogprob(-float(i), ((65, -0.5),)) for i in range(1, len(prompt))))


def test_a_scored_prompt_is_the_beginning_of_the_text_token_by_token():
    """Row C.5 47: the first token has no value, each other its own, and offsets are where the text begins."""
    c, scores = scored("a€b".encode())
    c.push(scores)
    deltas = [c.take(), *feed(c, "xy", FinishReason.LENGTH, logprobs=True)]
    infos = [info for d in deltas for info in d.logprobs]
    assert text_of(deltas) == "a€bxy"
    assert [i.logprob for i in infos] == [None, -1.0, -2.0, -3.0, -4.0, -1.0, -1.0]
    assert [i.offset for i in infos] == [0, 1, 1, 1, 2, 3, 4]
    assert [i.raw for i in infos] == [bytes([b]) for b in "a€bxy".encode()]
    assert infos[0].top == ()
    assert c.completion_tokens == 2


def test_scores_may_come_in_any_pieces():
    """Chunks of the prompt: the deltas add up to the same."""
    c, scores = scored(b"prompt")
    deltas = [c.take()]
    for score in scores.scores:
        c.push(PromptOut("r", (score,)))
        deltas.append(c.take())
    c.push(Finished("r", FinishReason.LENGTH))
    deltas.append(c.take())
    assert text_of(deltas) == "prompt"
    assert [len(d.logprobs) for d in deltas] == [1] * 6 + [0]
    assert deltas[-1].finish_reason == "length"


def test_a_prompt_that_ends_inside_a_character_is_echoed_to_its_end():
    """Nothing is held back for a rest that does not come."""
    c, scores = scored("a€".encode()[:-1])
    c.push(scores)
    c.push(Finished("r", FinishReason.LENGTH))
    delta = c.take()
    assert delta.text == "a\ufffd"
    assert [i.offset for i in delta.logprobs] == [0, 1, 1]


def test_a_stop_string_is_looked_for_in_the_output_only():
    """The prompt is the client's own, and its entries are never dropped."""
    c, scores = scored(b"STOP", stops=["STOP"])
    c.push(scores)
    deltas = [c.take(), *feed(c, "STOP", logprobs=True)]
    assert text_of(deltas) == "STOP"
    assert [i.logprob for d in deltas for i in d.logprobs] == [None, -1.0, -2.0, -3.0]
    assert deltas[-1].finish_reason == "stop"


def test_the_token_that_ends_a_scored_answer_has_an_entry():
    """Who scores a prompt with one token of output takes the entries but the last: there must be one."""
    c, scores = scored(b"ab")
    c.push(scores)
    deltas = [c.take(), *feed(c, [EOS], FinishReason.STOP, logprobs=True)]
    infos = [i for d in deltas for i in d.logprobs]
    assert [i.raw for i in infos] == [b"a", b"b", bytes([EOS])]
    assert infos[-1].offset == 2
    assert text_of(deltas) == "ab"


WORDS = (
    b" a",
    b" bc",
    b"d",
    b" ",
    b"\n",
    "\u20ac".encode(),
    " \u4e16".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
)


def stripping(ids):
    """As SentencePiece decodes: the space before the first word is not shown."""
    return b"".join(WORDS[i] for i in ids).decode("utf-8", "replace").removeprefix(" ")


@given(st.lists(st.sampled_from([(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7, 8)]), min_size=1, max_size=40))
def test_a_scored_prompts_text_is_the_prompt_whatever_the_tokenizer_does_with_spaces(words):
    """Offsets count in the echoed text; a token begins where its text does, a character's second half where
    the character does."""
    prompt = [id for word in words for id in word]
    c = Choice(0, prompt, stripping, lambda id: (stripping([id]), WORDS[id]), scored=True)
    c.push(PromptOut("r", tuple(TokenLogprob(-1.0) for _ in prompt[1:])))
    c.push(Finished("r", FinishReason.LENGTH))
    delta = c.take()
    assert delta.text == stripping(prompt)
    assert len(delta.logprobs) == len(prompt)
    for place, info in enumerate(delta.logprobs):
        before = b"".join(WORDS[id] for id in prompt[:place]).decode("utf-8", "ignore").removeprefix(" ")
        assert info.offset == len(before)
