"""Tokens to text: characters are never split, stop strings never leak."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_engine.detokenise import Detokeniser, StopMatcher


def bytes_decode(ids: Sequence[int]) -> str:
    """A byte-level decoder: ids are bytes."""
    return bytes(ids).decode("utf-8", "replace")


def fallback_decode(ids: Sequence[int]) -> str:
    """A byte-fallback decoder: one bad byte spoils the whole run, as sentencepiece models have it."""
    try:
        return bytes(ids).decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


def streamed(decode, ids, context=()):
    detokeniser = Detokeniser(decode, context)
    return [*(detokeniser.push(id) for id in ids), detokeniser.flush()]


@pytest.mark.parametrize("decode", [bytes_decode, fallback_decode])
@settings(deadline=None)
@given(st.text(max_size=60), st.text(max_size=6))
def test_valid_text_comes_out_whole_and_no_piece_has_half_a_character(decode, text, before):
    """Row C.4 33: UTF-8 is never split in streams, with and without a prompt before."""
    if "\ufffd" in text:
        return
    pieces = streamed(decode, text.encode(), before.encode())
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_text_come_out_as_the_decoder_has_them(raw):
    """A random model says random bytes: nothing is lost, and nothing is held back for ever."""
    pieces = streamed(bytes_decode, raw)
    assert "".join(pieces) == bytes_decode(raw)


def test_endless_bytes_are_not_held_back_for_ever():
    """256 continuation bytes in a row: something is sent long before the end."""
    pieces = streamed(bytes_decode, [0x80] * 256)
    assert sum(map(len, pieces[:64])) > 32
    assert "".join(pieces) == "\ufffd" * 256


def test_a_cut_character_becomes_a_replacement_sign_at_the_end():
    """Length stop in the middle of a euro sign."""
    assert streamed(bytes_decode, "a€".encode()[:-1]) == ["a", "", "", "\ufffd"]


def test_a_leading_space_depends_on_the_prompt():
    """Sentencepiece decoders drop the space of the very first token; not after a prompt."""

    def decode(ids: Sequence[int]) -> str:
        return "".join(f" w{id}" for id in ids).lstrip()

    assert streamed(decode, [1, 2]) == ["w1", " w2", ""]
    assert streamed(decode, [1, 2], context=[7]) == [" w1", " w2", ""]


def match(stops, pieces):
    matcher = StopMatcher(stops)
    out = []
    for piece in pieces:
        out.append(matcher.push(piece))
        if matcher.matched is not None:
            return out, matcher.matched
    out.append(matcher.flush())
    return out, None


def test_no_part_of_a_stop_string_over_many_tokens_is_sent():
    """Row C.4 28."""
    assert match(["DEFGHIJ"], "ABCDEFGHIJK") == (["A", "B", "C", "", "", "", "", "", "", ""], "DEFGHIJ")


def test_a_stop_string_inside_a_token_is_seen():
    """Row C.4 29."""
    assert match(["DE"], ["ABC", "xDEFy"]) == (["ABC", "x"], "DE")


def test_text_held_back_for_a_stop_string_that_does_not_come_is_sent():
    """Row C.4 31."""
    assert match(["DEFG"], ["ABC", "DEF", "X"]) == (["ABC", "", "DEFX", ""], None)
    assert match(["DEFG"], ["ABC", "DEF"]) == (["ABC", "", "DEF"], None)


def test_the_earliest_of_several_stop_strings_wins():
    """Two matches in one piece of text."""
    assert match(["Z", "DE"], ["ABCDEFZ"]) == (["ABC"], "DE")


@settings(deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=5)),
)
def test_streaming_with_stops_equals_cutting_the_whole_text(stops, pieces):
    """The slow, obvious version: find the first place in the growing text where a stop string is complete."""
    out, matched = match(stops, pieces)
    text = ""
    for piece in pieces:
        text += piece
        hits = [text.find(stop) for stop in stops if stop in text]
        if hits:
            assert matched is not None
            assert "".join(out) == text[: min(hits)]
            return
    assert matched is None
    assert "".join(out) == text
