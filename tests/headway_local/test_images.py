"""What runs where a container image would: command, args and the address as Kubernetes has them."""

import pytest

from headway_local.images import ENGINE, OPERATOR, Image, Images
from headway_local.objects import PodConfigError

IMAGES = Images(
    rules=(
        ENGINE,
        OPERATOR,
        Image("tool:*", ("{python}", "tool.py"), default_arguments=("--serve",), env={"HOST": "{pod_ip}"}),
    ),
    python="/venv/python",
)


def argv(image: str, **container: object) -> list[str]:
    return IMAGES.argv({"name": "c", "image": image, **container}, "10.244.1.5")


def test_args_replace_the_default_arguments_and_the_address_stays() -> None:
    engine = ["/venv/python", "-m", "headway_engine", "--host", "10.244.1.5"]
    assert argv("registry.example/headway-engine:1", args=["--model=x"]) == [*engine, "--model=x"]
    assert argv("tool:1") == ["/venv/python", "tool.py", "--serve"]
    assert argv("tool:1", args=["--once"]) == ["/venv/python", "tool.py", "--once"]


def test_a_command_replaces_entry_point_and_default_arguments() -> None:
    assert argv("tool:1", command=["python", "-c", "1"]) == ["/venv/python", "-c", "1"]
    assert argv("tool:1", command=["sh"], args=["-c", "true"]) == ["sh", "-c", "true"]


def test_an_image_may_set_variables() -> None:
    assert IMAGES.env("tool:1", "10.244.1.5") == {"HOST": "10.244.1.5"}
    assert IMAGES.env("headway-operator:1", "10.244.1.5") == {}


def test_an_unknown_image_is_said_by_name() -> None:
    with pytest.raises(PodConfigError, match="nginx:1"):
        argv("nginx:1")
