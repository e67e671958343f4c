"""What users of other engines complain about: each complaint that a CPU can show is a named test here.

The complaints are numbered in a survey of other engines; docstrings refer to it as "Row C.4 31", or "Row 31"
where the section is plain. A number that loses its test, or is written with the wrong section, fails here.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent

ROWS = {
    1: (1, 2, 4, 5, 7, 8, 10),  # head-of-line blocking, prefill against decode
    2: (13, 14, 16, 17),  # priorities, fairness, tenants
    3: (19, 20, 23),  # cancels, disconnects, leaks
    4: (25, 26, 28, 29, 31, 32, 34, 35, 37, 38),  # streams: usage, stop, text
    5: (40, 41, 43, 44, 46, 47, 49, 50, 52),  # sampling parameters
    6: (53, 55, 56, 58, 59, 61),  # lengths, empty input, overload
    7: (62, 64, 65, 67),  # preemption, prefix cache
    8: (68, 70, 71, 73, 74, 76, 77, 79, 80, 82),  # metrics, health, shutdown, start-up
    9: (83, 85, 86),  # live configuration, static and dynamic batching
}
LEFT_OUT = {
    11: "throughput against the token budget is a measurement on an accelerator, not a test",
    22: "aborts during an asynchronous load of keys and values: no cache is offloaded here",
}
SECTION_OF = {row: section for section, rows in ROWS.items() for row in rows}

_NAMED = re.compile(r"\bRows? (?:C\.\d+ )?\d+(?:(?:, | and )(?:C\.\d+ )?\d+)*")
_ONE = re.compile(r"(?:C\.(?P<section>\d+) )?(?P<row>\d+)")


def named_rows() -> dict[int, set[tuple[str, int]]]:
    """Row number to the tests that name it, each with the section it writes; 0 where it writes none."""
    found: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith(
                "test_"
            ):
                continue
            for mention in _NAMED.findall(ast.get_docstring(node) or ""):
                section = 0
                for one in _ONE.finditer(mention):
                    section = int(one["section"] or section)
                    found[int(one["row"])].add((f"{path.name}::{node.name}", section))
    return found


def test_every_complaint_has_a_test_that_names_it() -> None:
    """A complaint without a test is one we may hear again."""
    named = named_rows()
    missing = [f"C.{section} {row}" for row, section in SECTION_OF.items() if not named[row]]
    assert missing == []


def test_rows_are_written_with_their_own_section() -> None:
    """A number under the wrong heading is most likely the wrong number."""
    wrong = [
        f"{test}: row {row} is in C.{SECTION_OF[row]}, not C.{section}"
        for row, tests in named_rows().items()
        for test, section in tests
        if row in SECTION_OF and section not in (0, SECTION_OF[row])
    ]
    assert wrong == []


def test_what_is_left_out_is_left_out_for_a_reason() -> None:
    """And has not quietly got a test, which would make the reason wrong."""
    assert not LEFT_OUT.keys() & SECTION_OF.keys()
    named = named_rows()
    assert [row for row in LEFT_OUT if named[row]] == []
    assert all(len(reason) > 20 for reason in LEFT_OUT.values())
