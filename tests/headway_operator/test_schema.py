"""The local check gives the verdicts that the API server gives."""

from copy import deepcopy

import pytest

from headway_operator.resource import InvalidSpec, parse
from headway_operator.schema import admit, apply_defaults, load_crd
from support.bad_resources import BAD, GOOD, Bad
from support.resources import a_body


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.title)
def test_a_bad_resource_is_refused_with_the_field_named(bad: Bad) -> None:
    with pytest.raises(InvalidSpec) as caught:
        admit(bad.body)
    paths = [problem.path for problem in caught.value.problems]
    assert any(path.startswith(bad.field) for path in paths), str(caught.value)


@pytest.mark.parametrize(("title", "body"), GOOD, ids=[title for title, _ in GOOD])
def test_a_good_resource_is_accepted_and_read(title: str, body: dict[str, object]) -> None:
    assert parse(admit(body)).model.uri


def test_the_tables_are_as_large_as_promised() -> None:
    assert len(BAD) >= 25
    assert len(GOOD) >= 8
    assert len({bad.title for bad in BAD}) == len(BAD)


def test_the_body_of_the_user_is_left_as_it_was() -> None:
    body = a_body()
    before = deepcopy(body)
    admit(body)
    assert body == before


def test_defaults_are_filled_once_and_for_all() -> None:
    crd = load_crd()
    once = apply_defaults(crd, a_body())
    assert apply_defaults(crd, once) == once
    assert once["spec"]["batching"]["queue"]["timeout"] == "30s"


def test_a_null_object_is_refused_and_never_crashes() -> None:
    """YAML with an empty section, which people write."""
    body = a_body()
    body["spec"]["batching"] = None
    with pytest.raises(InvalidSpec, match=r"spec\.batching"):
        admit(body)


@pytest.mark.parametrize(
    "body", [{}, {"apiVersion": "v1", "kind": "Pod", "metadata": {}}, a_body() | {"metadata": None}]
)
def test_another_kind_is_refused_and_never_crashes(body: dict[str, object]) -> None:
    with pytest.raises(InvalidSpec):
        admit(body)
