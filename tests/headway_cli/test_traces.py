"""Readers of the published trace formats, and the properties of thinning and fitting."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_cli import traces
from headway_cli.traces import Arrival, BadTrace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 0, "input_length": 10, "output_length": 490, "hash_ids": [0, 14]}
"""
SERVEGEN = """timestamp_ms,client_id,input_length,output_length
130,14,20,1
642,12,37,2
"""
PLAIN = """# made by a script
arrival_s,prompt_tokens,output_tokens
1.5,300,20
"""

arrivals = st.lists(
    st.builds(
        Arrival,
        at_s=st.floats(0, 1000, allow_nan=False),
        prompt_tokens=st.integers(0, 20_000),
        output_tokens=st.integers(0, 2_000),
    ),
    max_size=40,
).map(lambda found: sorted(found, key=lambda a: a.at_s))


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure_times_count_from_the_first_request(tmp_path: Path) -> None:
    """Seven digits of a second, no zone; the first request is at 0."""
    found = traces.read(write(tmp_path, AZURE))
    assert [(a.prompt_tokens, a.output_tokens) for a in found] == [(374, 44), (396, 109), (879, 55)]
    assert [a.at_s for a in found] == pytest.approx([0, 4.314579, 4.541877], abs=1e-5)


def test_mooncake_lines_are_put_in_time_order(tmp_path: Path) -> None:
    """Milliseconds, one JSON object a line."""
    found = traces.read(write(tmp_path, MOONCAKE))
    assert found == [Arrival(0.0, 10, 490, (0, 14)), Arrival(3.0, 6758, 500, (0, 1))]


def test_servegen_columns_are_found_by_name(tmp_path: Path) -> None:
    """Milliseconds; a column that we do not need stands in between."""
    found = traces.read(write(tmp_path, SERVEGEN))
    assert found == [Arrival(0.0, 20, 1), Arrival(pytest.approx(0.512), 37, 2)]


def test_the_shipped_trace_reads_and_has_the_rate_its_licence_note_tells() -> None:
    """40 % of half an hour of about 5.6 requests a second."""
    found = traces.shipped()
    assert found[0].at_s == 0
    assert 1790 < found[-1].at_s <= 1800
    assert 2.2 < traces.requests_per_second(found) < 2.4


def test_plain_seconds_are_read_too(tmp_path: Path) -> None:
    """What a short script over one's own logs can write; lines with # are remarks."""
    found = traces.read(write(tmp_path, PLAIN + "2.0,5,1\n"))
    assert found == [Arrival(0.0, 300, 20), Arrival(0.5, 5, 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("a,b\n1,2\n", "unknown columns a, b"),
        (AZURE + "2023-11-16 18:15:52,x,1\n", "trace, line 5, ContextTokens: 'x' is not a whole number"),
        (AZURE + "yesterday,1,1\n", "trace, line 5, TIMESTAMP: 'yesterday' is not a time"),
        (AZURE + "2023-11-16 18:15:52,7\n", "trace, line 5, GeneratedTokens: is missing"),
        (MOONCAKE + '{"timestamp": 1}\n', "trace, line 3, input_length: is missing"),
        (MOONCAKE + '{"timestamp": 1, ', "trace, line 3: not a line of JSON"),
        (MOONCAKE + "[1]\n", "trace, line 3: not a JSON object"),
        (MOONCAKE.replace("[0, 1]", "7"), "trace, line 1, hash_ids: 7 is not a list"),
        (SERVEGEN + "700,1,-5,2\n", "trace, line 4, input_length: -5 is not between 0 and"),
        (SERVEGEN + "nan,1,5,2\n", "trace, line 4, timestamp_ms: 'nan' is not a time"),
        (PLAIN + "2.5,10,1e3\n", "trace, line 4, output_tokens: '1e3' is not a whole number"),
        ("timestamp_ms,client_id,input_length,output_length\n", "no requests"),
    ],
)
def test_a_bad_trace_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    """The message names the line, or what would have been understood."""
    with pytest.raises(BadTrace, match=says):
        traces.read(write(tmp_path, text))


def test_a_missing_file_and_a_binary_one_are_bad_traces(tmp_path: Path) -> None:
    """No traceback for what a user mistypes."""
    with pytest.raises(BadTrace, match="No such file"):
        traces.read(tmp_path / "none.csv")
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00\x80" * 10)
    with pytest.raises(BadTrace, match="not a text file"):
        traces.read(tmp_path / "image")


@given(arrivals, st.floats(0.01, 1.0), st.integers(0, 100))
def test_thinning_keeps_requests_as_they_are_and_where_they_are(
    found: list[Arrival], scale: float, seed: int
) -> None:
    """A thinned trace is a subsequence: no time is stretched, no request invented."""
    thin = traces.scaled(found, scale, Random(seed))
    rest = iter(found)
    assert all(any(a == b for b in rest) for a in thin)
    assert traces.scaled(found, 1.0, Random(seed)) == found


@given(arrivals, st.integers(1, 4), st.integers(0, 100))
def test_repeating_keeps_every_request_and_adds_near_copies(
    found: list[Arrival], scale: int, seed: int
) -> None:
    """Three times the traffic has each request three times, within the jitter, in time order."""
    more = traces.scaled(found, float(scale), Random(seed))
    assert len(more) == scale * len(found)
    assert [a.at_s for a in more] == sorted(a.at_s for a in more)
    for original in found:
        near = [
            a for a in more
            if abs(a.at_s - original.at_s) <= traces.JITTER_S + 1e-9
            and (a.prompt_tokens, a.output_tokens) == (original.prompt_tokens, original.output_tokens)
        ]  # fmt: skip
        assert original in near
        assert len(near) >= scale


def test_times_in_another_unit_are_noticed(tmp_path: Path) -> None:
    """Microseconds where seconds belong would be simulated for years."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n90000000,1,1\n")
    with pytest.raises(traces.BadTrace, match="more than a year: is the time in another unit"):
        traces.read(path)


def test_thinning_hits_the_share_asked_for() -> None:
    """A tenth of 20,000 requests is 2,000, give or take chance."""
    many = [Arrival(i / 10, 100, 10) for i in range(20_000)]
    assert 1_800 < len(traces.scaled(many, 0.1, Random(1))) < 2_200


def test_a_scale_of_nothing_is_refused() -> None:
    """It would replay nothing and look like success."""
    with pytest.raises(BadTrace, match="scale"):
        traces.scaled([], 0.0, Random(1))


@given(arrivals, st.integers(1, 4096), st.integers(1, 1024))
def test_fitted_lengths_stay_under_the_caps_and_shrink_by_one_factor(
    found: list[Arrival], max_prompt: int, max_output: int
) -> None:
    """No length grows; those not cut at a cap are the old ones times the factor of their kind."""
    fit = traces.fitted(found, max_prompt, max_output)
    assert 0 < fit.prompt_factor <= 1
    assert 0 < fit.output_factor <= 1
    for old, new in zip(found, fit.arrivals, strict=True):
        assert new.at_s == old.at_s
        assert 1 <= new.prompt_tokens <= max_prompt
        assert 1 <= new.output_tokens <= max_output
        if 1 < new.prompt_tokens < max_prompt:
            assert new.prompt_tokens == round(old.prompt_tokens * fit.prompt_factor)
    over = sum(round(a.prompt_tokens * fit.prompt_factor) > max_prompt for a in found)
    assert over <= max(1, round(0.06 * len(found)))


@given(arrivals, st.floats(0, 500), st.floats(1, 500))
def test_a_window_is_the_stretch_it_says(found: list[Arrival], start_s: float, length_s: float) -> None:
    """Times count from the start of the window, which is half open."""
    cut = traces.window(found, start_s, length_s)
    assert all(0 <= a.at_s <= length_s for a in cut)
    assert len(cut) == sum(start_s <= a.at_s < start_s + length_s for a in found)
