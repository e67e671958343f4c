"""`headway explain`: words for each limit, and edits answered by the tuner itself."""

from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from headway_cli import traces
from headway_cli.__main__ import main
from headway_cli.explain import words
from headway_cli.simulation import Setup, simulate
from headway_cli.whatif import what_ifs
from headway_operator import status
from headway_operator.metrics import Sample
from headway_operator.resource import parse
from headway_operator.schema import admit
from support.observations import CAPACITY, COST


def a_body(**spec: Any) -> dict[str, Any]:
    """A resource and the status that it has after a minute of traffic, by the controller's own code."""
    body = admit(
        {
            "apiVersion": "headway.dev/v1alpha1",
            "kind": "InferenceDeployment",
            "metadata": {"name": "chat", "namespace": "team", "uid": "1"},
            "spec": {
                "model": {"uri": "random://llama"},
                "slo": {"ttft": {"p95": "500ms"}, "itl": {"p95": "50ms"}},
                "tuning": {"interval": "5s"},
                **spec,
            },
        }
    )
    resource = parse(body)
    arrivals = traces.poisson(15, 60, 400, 40, Random(1))
    outcome = simulate(Setup(resource=resource, capacity=CAPACITY, cost=COST), arrivals)
    decision = [tick.decision for tick in outcome.ticks if tick.at_s <= 60][-1]
    samples = {"chat-0": Sample(limits=decision.limits, capacity=CAPACITY)}
    facts = status.Facts(
        resource=resource, deployment=None, samples=samples, decision=decision, memory=decision.memory
    )
    told = status.build(facts, None, datetime(2026, 1, 1, tzinfo=UTC))
    history = [
        {
            "time": "2026-01-01T00:00:00Z",
            "changes": [{"name": "maxBatchTokens", "from": 2048, "to": decision.limits.max_batch_tokens}],
        }
    ]
    return {**body, "status": {**told, "tuning": {**told["tuning"], "history": history}}}


@pytest.fixture(scope="module")
def body() -> dict[str, Any]:
    return a_body()


def test_every_limit_is_told_with_what_it_is_and_why(body: dict[str, Any]) -> None:
    """All six, where the value comes from, and who may move it."""
    text = "\n".join(words(body))
    for name in ("maxBatchTokens", "maxBatchSequences", "prefillChunkTokens", "maxQueuedTokens", "window"):
        assert f"\n{name}: " in f"\n{text}"
    assert "spec.batching.maxBatchTokens asks for 2048; the tuner may move it (no bounds)" in text
    assert "8192 are reserved, and more needs a restart; an edit is live" in text
    assert "the tuner does not move it" in text


def test_one_limit_alone_tells_what_more_and_less_of_it_do(body: dict[str, Any]) -> None:
    """And when it moved."""
    text = "\n".join(words(body, "maxBatchTokens"))
    assert "more     prompts get in sooner" in text
    assert "moved    2026-01-01T00:00:00Z  2048 -> " in text
    assert "window" not in text


def test_a_looser_target_would_give_larger_steps_and_a_tighter_one_smaller_ones(
    body: dict[str, Any],
) -> None:
    """By the tuner's own model, which predicts a full step inside the new target."""
    found = {(w.path, w.new): w for w in what_ifs(body)}
    tight = found["spec.slo.itl.p95", "25ms"]
    (tokens,) = [m for m in tight.moves if m.parameter == "maxBatchTokens"]
    assert tokens.new < tokens.old
    assert "target 25 ms" in tokens.why
    assert tight.predicted_step_s is not None
    assert tight.predicted_step_s <= 0.025
    loose = found["spec.slo.ttft.p95", "1000ms"]
    (queue,) = [m for m in loose.moves if m.parameter == "maxQueuedTokens"]
    assert queue.new > queue.old
    assert "spec.slo.itl.p95 50ms -> 25ms: maxBatchTokens " in "\n".join(words(body))


def test_a_bound_that_a_limit_stands_at_is_asked_about() -> None:
    """Without it the limit would grow; the others are not named."""
    bound = a_body(tuning={"interval": "5s", "bounds": {"maxBatchTokens": {"max": 256}}})
    (found,) = [w for w in what_ifs(bound) if "bounds" in w.path]
    assert (found.path, found.old, found.new) == ("spec.tuning.bounds.maxBatchTokens.max", "256", "none")
    (move,) = [m for m in found.moves if m.parameter == "maxBatchTokens"]
    assert (move.old, move.new > 256) == (256, True)
    assert "the tuner may move it (max 256)" in "\n".join(words(bound))


def test_the_resource_itself_is_left_as_it_was(body: dict[str, Any]) -> None:
    """Asking twice gives the same answer."""
    before = yaml.safe_dump(body)
    assert words(body) == words(body)
    assert yaml.safe_dump(body) == before


def test_edits_are_values_that_the_resource_takes(body: dict[str, Any]) -> None:
    """Half of an odd target, and twice a very long one, could be pasted as they stand."""
    spec = {**body["spec"], "slo": {"ttft": {"p95": "600s"}, "itl": {"p95": "25ms"}}}
    new = {what_if.new for what_if in what_ifs({**body, "spec": spec})}
    assert new >= {"50ms", "12ms", "1200s", "300s"}


def test_before_anything_is_known_that_is_said(body: dict[str, Any]) -> None:
    """No status, and a status without a model."""
    (said,) = words({**body, "status": {}})
    assert "has not looked at it yet" in said
    unlearnt = {**body, "status": {**body["status"], "tuning": {}}}
    assert "nothing can be said yet" in words(unlearnt)[-1]


def test_a_saved_resource_is_explained_without_a_cluster(
    body: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What kubectl printed, whole or for one limit."""
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump(body))
    assert main(["explain", "-f", str(path)]) == 0
    assert capsys.readouterr().out == "\n".join(words(body)) + "\n"
    assert main(["explain", "-f", str(path), "maxQueuedTokens"]) == 0
    assert capsys.readouterr().out == "\n".join(words(body, "maxQueuedTokens")) + "\n"


SAVED = "apiVersion: headway.dev/v1alpha1\nkind: InferenceDeployment\nmetadata: {name: a}\n"


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("kind: Pod\n", (), "not one InferenceDeployment"),
        ("kind: InferenceDeployment\nmetadata: {name: a}\n", (), "spec is missing"),
        ("a: [", (), "not YAML"),
        ("kind: InferenceDeployment\nmetadata: {name: a}\nspec: {}\n", ("b",), "it is about a, not about b"),
        (SAVED + "spec: {model: {uri: 'random://llama'}, bathing: {}}\n", (), "spec.bathing: is not a field"),
        (
            SAVED + "spec: {model: {uri: 'random://llama'}}\nstatus: {tuning: 7}\n",
            (),
            "status.tuning: must be",
        ),
    ],
)
def test_a_file_that_is_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, arguments: tuple[str, ...], says: str
) -> None:
    """Exit status 2, with the reason."""
    path = tmp_path / "saved.yaml"
    path.write_text(text)
    assert main(["explain", *arguments, "-f", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_without_a_name_it_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Not for a login."""
    assert main(["explain"]) == 2
    assert "which deployment?" in capsys.readouterr().err
