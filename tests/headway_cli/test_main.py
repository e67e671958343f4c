"""The top of the command line."""

import subprocess
import sys

import pytest

from headway_cli.__main__ import COMMANDS, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """With a sentence each."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in (*COMMANDS, "version"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own options, and exit 0."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: headway {command}" in capsys.readouterr().out


def test_no_command_and_a_wrong_one_end_with_2() -> None:
    """As argparse does it."""
    for arguments in ([], ["fly"], ["up"], ["replay", "--url"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways to ask."""
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("headway 0.")


def test_help_needs_no_heavy_import() -> None:
    """`headway --help` answers at once: no HTTP client, no Kubernetes client, no torch."""
    code = (
        "import sys\nfrom headway_cli.__main__ import parser\nparser().format_help()\n"
        "heavy = {'torch', 'kubernetes', 'aiohttp', 'rich'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_had_enough_is_no_traceback() -> None:
    """`headway ... | head` closes the pipe while we write."""
    program = (
        "import sys, types\n"
        "fake = types.ModuleType('headway_cli.status')\n"
        "fake.add_arguments = lambda parser: None\n"
        "fake.run = lambda args: print('x' * 1_000_000) or 0\n"
        "sys.modules['headway_cli.status'] = fake\n"
        "from headway_cli.__main__ import main\n"
        "sys.exit(main(['status']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read().decode()
    assert (process.returncode, said) == (1, "")
