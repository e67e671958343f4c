"""Resource files: what is read, and the errors a user meets, each with the field and the way out."""

from pathlib import Path

import pytest

from headway_cli.documents import read_resources
from headway_cli.errors import UserError

MINIMAL = """apiVersion: headway.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: chat}
spec:
  model: {uri: "random://llama"}
"""
SECRET = """---
apiVersion: v1
kind: Secret
metadata: {name: hf}
data: {token: aGVsbG8=}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "resource.yaml"
    path.write_text(text)
    return path


def test_a_minimal_resource_comes_with_its_defaults_and_a_namespace(tmp_path: Path) -> None:
    """As the API server would store it."""
    resource, others = read_resources(write(tmp_path, MINIMAL))
    assert resource["spec"]["batching"]["maxBatchTokens"] == 2048
    assert resource["metadata"]["namespace"] == "default"
    assert others == []


def test_secrets_may_stand_beside_it(tmp_path: Path) -> None:
    """The resource can refer to them."""
    _, others = read_resources(write(tmp_path, MINIMAL + SECRET + "---\n"))
    assert [(o["kind"], o["metadata"]["namespace"]) for o in others] == [("Secret", "default")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINIMAL.replace("  model: {uri", "  modell: {uri"), "spec.modell: is not a field"),
        (MINIMAL + "  replicas: many\n", "spec.replicas: must be of type integer"),
        (MINIMAL + "  batching: {window: 20}\n", "spec.batching.window"),
        (MINIMAL + "  batching: {maxBatchTokens: 9000}\n", "spec.batching.maxBatchTokens"),
        (MINIMAL.replace("v1alpha1", "v9"), "apiVersion: must be headway.dev/v1alpha1"),
        (MINIMAL.replace("metadata: {name: chat}\n", ""), "metadata: is required"),
        (MINIMAL + "---\n" + MINIMAL, "exactly one InferenceDeployment"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n", "found Pod"),
        (MINIMAL + SECRET.replace("Secret", "Service"), "Service needs a cluster"),
        (MINIMAL + SECRET.replace("name: hf", "nam: hf"), "Secret without metadata.name"),
        ("", "found nothing"),
        ("- a\n- b\n", "document 1: not a Kubernetes object"),
        ("a: [", "not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_the_field(tmp_path: Path, text: str, says: str) -> None:
    """Never a traceback."""
    with pytest.raises(UserError) as caught:
        read_resources(write(tmp_path, text))
    assert says in caught.value.message


def test_a_bare_off_is_explained(tmp_path: Path) -> None:
    """YAML reads it as false, which no user expects."""
    with pytest.raises(UserError, match=r"spec\.tuning\.mode") as caught:
        read_resources(write(tmp_path, MINIMAL + "  tuning: {mode: Off}\n"))
    assert 'mode: "Off"' in caught.value.hint


def test_a_missing_file_says_where_examples_are(tmp_path: Path) -> None:
    """The commonest mistake of all."""
    with pytest.raises(UserError, match="no such file") as caught:
        read_resources(tmp_path / "nothing.yaml")
    assert "examples" in caught.value.hint
