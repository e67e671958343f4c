"""A container's environment, resolved as the kubelet does it."""

import base64
from typing import Any

import pytest

from headway_local.environment import config_map_data, expand, field_value, resolve, secret_data
from headway_local.objects import PodConfigError
from support.pods import Objects, python_pod


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(NOBODY)", "$(NOBODY)"),
        ("$A ${A} $(", "$A ${A} $("),
    ],
)
def test_references_expand_to_values_and_unknown_ones_stay(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "p"),
        ("metadata.namespace", "default"),
        ("metadata.labels['app']", "web"),
        ("metadata.labels['none']", ""),
        ("metadata.labels", 'app="web"'),
        ("status.podIP", "10.0.0.1"),
        ("status.hostIP", "10.0.0.2"),
    ],
)
def test_fields_of_the_pod(path: str, value: str) -> None:
    pod = python_pod("")
    pod["metadata"]["labels"] = {"app": "web"}
    assert field_value(path, pod, pod_ip="10.0.0.1", host_ip="10.0.0.2") == value


def test_an_unknown_field_path_is_refused() -> None:
    with pytest.raises(PodConfigError, match=r"spec\.colour"):
        field_value("spec.colour", python_pod(""), pod_ip="", host_ip="")


def test_binary_and_plain_content_are_both_read() -> None:
    coded = base64.b64encode(b"\xff").decode()
    assert config_map_data({"data": {"a": "x"}, "binaryData": {"b": coded}}) == {"a": b"x", "b": b"\xff"}
    assert secret_data({"data": {"a": coded}, "stringData": {"b": "y"}}) == {"a": b"\xff", "b": b"y"}


async def environment(container: dict[str, Any], objects: Objects) -> dict[str, str]:
    return await resolve(
        container, python_pod(""), objects, pod_ip="10.0.0.1", host_ip="10.0.0.2", base={"PATH": "/bin"}
    )


async def test_whole_objects_come_first_and_single_variables_win() -> None:
    container = {
        "envFrom": [
            {"prefix": "C_", "configMapRef": {"name": "c"}},
            {"secretRef": {"name": "gone", "optional": True}},
        ],
        "env": [{"name": "C_a", "value": "own"}, {"name": "PATHS", "value": "$(PATH):$(C_b)"}],
    }
    found = await environment(container, Objects(config_maps={"c": {"a": "1", "b": "2"}}))
    assert found == {"PATH": "/bin", "C_a": "own", "C_b": "2", "PATHS": "/bin:2"}


async def test_what_is_missing_is_named_unless_it_is_optional() -> None:
    def env(**extra: Any) -> dict[str, Any]:
        return {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", **extra}}}]}

    with pytest.raises(PodConfigError, match='secret "s" not found'):
        await environment(env(), Objects())
    with pytest.raises(PodConfigError, match="couldn't find key k"):
        await environment(env(), Objects(secrets={"s": {"other": ""}}))
    assert "A" not in await environment(env(optional=True), Objects())
