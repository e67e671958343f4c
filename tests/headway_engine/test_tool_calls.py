"""Tool calls are read from text as it grows, and however it is cut, the same calls come out."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from headway_engine.tool_calls import CallPart, ToolCallReader, joined

CALL = '{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {"c": null}]}}'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {"c": null}]}'
TAGGED = f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"


def reader(tagged=True, most=None):
    numbers = itertools.count()
    return ToolCallReader(tagged=tagged, most=most, new_id=lambda: f"call_{next(numbers)}")


def read(text, pieces=None, **options):
    """What came out of a text: the free text, the calls, and the reader."""
    r = reader(**options)
    said, parts = [], ()
    for piece in pieces if pieces is not None else [text]:
        words, new = r.push(piece)
        said.append(words)
        parts += new
    words, new = r.flush()
    return "".join([*said, words]), joined(parts + new), r


def names_and_arguments(calls):
    return [(c.name, c.arguments) for c in calls]


def test_a_forced_call_is_one_object():
    text, calls, r = read(CALL, tagged=False)
    assert text == ""
    assert calls == [CallPart(0, ARGUMENTS, "call_0", "f")]
    assert r.whole


def test_forced_calls_are_a_list():
    text, calls, r = read(f"[{CALL}, {CALL}]", tagged=False)
    assert (text, [c.index for c in calls]) == ("", [0, 1])
    assert [c.id for c in calls] == ["call_0", "call_1"]
    assert r.whole


def test_text_around_tagged_calls_is_told_and_the_space_between_is_not():
    text, calls, r = read(f"{TAGGED}\n<tool_call>\n{CALL}\n</tool_call>\n")
    assert text == "Let me see."
    assert names_and_arguments(calls) == [("f", ARGUMENTS)] * 2
    assert r.whole


def test_text_without_calls_is_told_whole():
    text = "  a < b, <tool, <tool_cal and a newline at the end\n\n"
    assert read(text, pieces=list(text))[:2] == (text, [])


def test_a_list_inside_one_tag_is_several_calls():
    """As SmolLM writes them."""
    _, calls, r = read(f"<tool_call>[{CALL}, {CALL}]</tool_call>")
    assert names_and_arguments(calls) == [("f", ARGUMENTS)] * 2
    assert r.whole


def test_a_call_in_another_order_is_read_when_it_is_whole():
    for call in (
        '{"arguments": {"x": 1}, "name": "f"}',
        '{"id": 7, "name": "f", "arguments": {"x": 1}}',
        '{"name": "f", "arguments": "{\\"x\\":1}"}',
    ):
        text, calls, r = read(f"<tool_call>{call}</tool_call>")
        assert text == ""
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [("f", {"x": 1})]
        assert r.whole


def test_parameters_is_another_word_for_arguments():
    _, calls, _ = read('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>')
    assert names_and_arguments(calls) == [("f", '{"x": 1}')]


def test_what_stands_behind_a_tag_and_is_no_call_is_text():
    for text in ("<tool_call>hello</tool_call>", '<tool_call>{"a": 1}</tool_call>', "<tool_call> {{ }}"):
        said, calls, _ = read(text, pieces=list(text))
        assert (said, calls) == (text, [])


def test_a_call_that_is_cut_in_its_arguments_is_told_as_far_as_it_went():
    _, calls, r = read(TAGGED[:-30])
    assert ARGUMENTS.startswith(calls[0].arguments)
    assert calls[0].arguments
    assert not r.whole


def test_a_tagged_call_that_is_cut_before_its_arguments_is_text():
    said, calls, _ = read('Well.\n<tool_call>\n{"name": "f"')
    assert (said, calls) == ('Well.\n<tool_call>\n{"name": "f"', [])


def test_a_forced_call_that_is_cut_before_its_arguments_is_nothing():
    assert read('[{"name": "f", "argu', tagged=False)[:2] == ("", [])


def test_only_the_first_call_is_told_where_one_was_asked_for():
    _, calls, _ = read(f"{TAGGED}<tool_call>{CALL}</tool_call>", most=1)
    assert len(calls) == 1


def test_a_long_object_that_is_no_call_is_looked_at_once():
    """Character by character, in a time that grows with the text and not with its square."""
    text = '<tool_call>{"a": "' + "x" * 200_000
    said, calls, r = read(text, pieces=[text[:12], *(text[i : i + 4] for i in range(12, len(text), 4))])
    assert (said, calls, r.started) == (text, [], 0)


def test_the_first_part_of_a_call_has_its_id_and_the_others_do_not():
    r = reader(tagged=False)
    parts = [part for c in CALL for part in r.push(c)[1]]
    assert [bool(p.id) for p in parts] == [True] + [False] * (len(parts) - 1)
    assert all(p.arguments for p in parts[1:])


ATOMS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            " ",
            "\n",
            "text",
            CALL,
        ),
        *('{"name": "g", "arguments": {}}', '{"arguments": {}, "name": "h"}', '{"name": 3}', '"name": "x"'),
    ]
)


@given(st.lists(ATOMS, max_size=12).map("".join), st.booleans(), st.data())
def test_however_text_is_cut_the_same_comes_out(text, tagged, data):
    """Row C.4 38: a stream, put together, equals the whole answer; whatever a model writes."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole, in_pieces = read(text, tagged=tagged), read(text, pieces, tagged=tagged)
    assert in_pieces[:2] == whole[:2]
    assert in_pieces[2].whole == whole[2].whole
