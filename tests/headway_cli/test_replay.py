"""`headway replay` as a user runs it."""

import json
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from headway_cli.__main__ import main
from support.openai_fake import fake_endpoint

TRACE = "timestamp_ms,client_id,input_length,output_length\n" + "".join(
    f"{n * 20},1,60,{3 + n % 3}\n" for n in range(12)
)


async def headway(*words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the command."""
    process = await create_subprocess_exec(
        sys.executable, "-m", "headway_cli", *words, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_trace_is_played_and_reported_as_table_and_json(tmp_path: Path) -> None:
    """Twelve requests of which the last two are turned away: they count."""
    trace, out = tmp_path / "trace.csv", tmp_path / "out.json"
    trace.write_text(TRACE)
    async with fake_endpoint(refuse_after=10) as fake:
        rc, said, err = await headway(
            "replay", "--url", f"{fake.url}/v1", "--trace", str(trace), "--ttft", "10s", "--json", str(out)
        )
    assert rc == 0, err
    assert "10 finished, 2 rejected" in said
    assert "attainment 83.3%" in said
    summary = json.loads(out.read_text())["summary"]
    assert (summary["offered"], summary["met_slo"]) == (12, 10)
    assert len(json.loads(out.read_text())["requests"]) == 12


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trace", "none.csv"], "No such file"),
        (["--start", "99999"], "no requests are left"),
        (["--ttft", "soon"], "--ttft soon: not a duration"),
    ],
)
def test_what_a_user_can_mend_is_said_and_ends_with_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is sent."""
    assert main(["replay", "--url", "http://127.0.0.1:9", *words]) == 2
    assert says in capsys.readouterr().err


def test_an_endpoint_that_is_not_there_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the command line's fault."""
    assert main(["replay", "--url", "http://127.0.0.1:9", "--duration", "5"]) == 1
    assert "cannot list models" in capsys.readouterr().err
