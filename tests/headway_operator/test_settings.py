"""The controller's environment: everything that can be set, and every way to get it wrong."""

import pytest

from headway_operator.settings import PullPolicy, SettingsError, read

LEAST = {"HEADWAY_ENGINE_IMAGE": "example.invalid/headway-engine:1"}


def test_an_image_is_all_that_must_be_named() -> None:
    """Everything else has a default that works in a cluster."""
    settings = read(LEAST)
    assert settings.engine_image == "example.invalid/headway-engine:1"
    assert settings.watch_namespaces == ()
    assert (settings.host, settings.port) == ("0.0.0.0", 8080)
    assert settings.engine_pull_policy is PullPolicy.IF_NOT_PRESENT
    assert settings.identity


def test_every_variable_is_read() -> None:
    """Spaces and doubles in lists do no harm."""
    settings = read(
        LEAST
        | {
            "HEADWAY_WATCH_NAMESPACES": "team-a, team-b,,team-a",
            "HEADWAY_ENGINE_PULL_POLICY": "Always",
            "HEADWAY_OPERATOR_HOST": "127.0.0.1",
            "HEADWAY_OPERATOR_PORT": "0",
            "HEADWAY_LEASE_NAME": "mine",
            "POD_NAMESPACE": "headway-system",
            "POD_NAME": "headway-operator-0",
            "HEADWAY_LOG_LEVEL": "DEBUG",
            "HEADWAY_LOG_FORMAT": " JSON",
        }
    )
    assert settings.watch_namespaces == ("team-a", "team-b")
    assert settings.engine_pull_policy is PullPolicy.ALWAYS
    assert (settings.host, settings.port) == ("127.0.0.1", 0)
    assert (settings.lease_name, settings.namespace, settings.identity) == (
        "mine",
        "headway-system",
        "headway-operator-0",
    )
    assert (settings.log_level, settings.log_format) == ("debug", "json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADWAY_ENGINE_IMAGE", ""),
        ("HEADWAY_WATCH_NAMESPACES", "team-*"),
        ("HEADWAY_WATCH_NAMESPACES", "Team"),
        ("HEADWAY_ENGINE_PULL_POLICY", "Sometimes"),
        ("HEADWAY_OPERATOR_PORT", "http"),
        ("HEADWAY_OPERATOR_PORT", "65536"),
        ("HEADWAY_OPERATOR_PORT", "-1"),
        ("HEADWAY_LEASE_NAME", "a_b"),
        ("POD_NAMESPACE", "a/b"),
        ("HEADWAY_LOG_LEVEL", "loud"),
        ("HEADWAY_LOG_FORMAT", "xml"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    """The message starts with the variable, so that a pod's log says what to change."""
    with pytest.raises(SettingsError) as caught:
        read(LEAST | {name: value})
    assert [problem.split("=")[0] for problem in caught.value.problems] == [name]


def test_all_wrong_variables_are_named_at_once() -> None:
    """Nobody has to restart a pod once per mistake."""
    with pytest.raises(SettingsError) as caught:
        read({"HEADWAY_OPERATOR_PORT": "x", "HEADWAY_LOG_LEVEL": "y"})
    assert len(caught.value.problems) == 3
