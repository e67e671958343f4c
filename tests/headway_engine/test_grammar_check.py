"""The process that checks grammars: it answers, it ends itself in time, and another one follows."""

import subprocess
import sys

import pytest

from headway_engine.grammar import GrammarError
from headway_engine.grammar_check import Checker
from headway_engine.structured import json_grammar
from support.eventually import eventually
from support.hostile_schemas import COSTLY, ENDLESS, WRONG

FINE = json_grammar({"type": "integer"})


@pytest.fixture(scope="module")
def checker():
    c = Checker()
    yield c
    c.close()


def test_a_grammar_that_is_never_compiled_is_refused_and_the_next_one_is_checked(checker):
    """Row C.8 79: a thread could not be stopped."""
    for schema in ENDLESS.values():
        checker.check(FINE)
        with pytest.raises(GrammarError, match="too long"):
            checker.check(json_grammar(schema))
    checker.check(json_grammar({"type": "boolean"}))


@pytest.mark.parametrize("name", WRONG | COSTLY)
def test_what_is_wrong_is_said_in_words(checker, name):
    with pytest.raises(GrammarError) as caught:
        checker.check(json_grammar((WRONG | COSTLY)[name]))
    assert str(caught.value)


def test_a_grammar_that_was_fine_is_not_checked_again(checker):
    checker.check(FINE)
    checker.close()
    checker.check(FINE)
    assert checker._process is None


def test_a_process_that_was_killed_from_outside_is_replaced(checker):
    checker.check(json_grammar({"const": 1}))
    killed = checker._process
    killed.kill()
    checker.check(json_grammar({"const": 2}))  # whether its end has been noticed already or not
    assert checker._process is not killed


async def test_the_process_ends_with_the_one_that_asks():
    """However that one ends: its end of the pipe is closed."""
    code = (
        "import os; from headway_engine.grammar_check import Checker; c = Checker(); "
        "c._running(); print(c._process.pid, flush=True); os._exit(9)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    pid = int(out.stdout)
    assert out.returncode == 9

    def gone():
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    await eventually(gone)
