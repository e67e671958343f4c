"""Options are judged before any work starts."""

from pathlib import Path

import pytest

from headway_cli.__main__ import main

UP = ["up", "-f", "x.yaml"]
REPLAY = ["replay", "--url", "http://127.0.0.1:1"]
DEMO = ["demo"]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0", "", "x", "1e999"])
@pytest.mark.parametrize(
    "option",
    [
        (*REPLAY, "--scale"),
        (*UP, "--scale"),
        (*REPLAY, "--duration"),
        (*REPLAY, "--timeout"),
        (*REPLAY, "--max-prompt"),
        (*REPLAY, "--max-output"),
        (*DEMO, "--minutes"),
    ],
)
def test_a_number_that_means_nothing_is_refused_by_name(
    option: tuple[str, ...], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit status 2 and no traceback."""
    with pytest.raises(SystemExit) as ended:
        main([*option[:-1], f"{option[-1]}={value}"])
    assert ended.value.code == 2
    assert f"argument {option[-1]}" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x"])
def test_a_trace_cannot_start_before_its_start(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """0 is fine there."""
    with pytest.raises(SystemExit) as ended:
        main([*REPLAY, f"--start={value}"])
    assert ended.value.code == 2
    assert "argument --start" in capsys.readouterr().err


@pytest.mark.parametrize("command", [UP, DEMO])
@pytest.mark.parametrize("value", ["-1", "65536", "99999", "http", "1.5", "9" * 30])
def test_a_port_that_cannot_be_is_refused(
    command: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is loaded for it."""
    with pytest.raises(SystemExit) as ended:
        main([*command, f"--port={value}"])
    assert ended.value.code == 2
    assert "argument --port" in capsys.readouterr().err


@pytest.mark.parametrize("command", [UP, REPLAY])
@pytest.mark.parametrize("name", ["no/such/folder/x.json", "."])
def test_a_report_that_could_not_be_written_is_refused_at_the_start(
    command: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end, the measurement would be lost."""
    with pytest.raises(SystemExit) as ended:
        main([*command, "--json", str(tmp_path / name)])
    assert ended.value.code == 2
    assert "argument --json" in capsys.readouterr().err
