"""Facts to status: conditions, figures, history, and what is worth a write. Every status fits the CRD."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from headway_engine.protocol import Limits, Metric
from headway_operator.fleet import PodRef, Unreachable
from headway_operator.freshness import differs
from headway_operator.metrics import Computing, Sample
from headway_operator.resource import Resource, parse
from headway_operator.status import Facts, Problem, build
from headway_operator.tuner.controller import Change, Decision, State, Verdict
from headway_operator.tuner.evidence import Evidence, TargetEvidence
from headway_operator.tuner.memory import Feasibility, Memory, from_status
from headway_operator.tuner.quantiles import Exceedances, Judgement
from support.observations import CAPACITY, COST, an_observation, statistics_of
from support.resources import a_stored_body

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
CRD = Path(__file__).parents[2] / "crds" / "inferencedeployments.yaml"
SCHEMA = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][
    "status"
]

Json = dict[str, Any]


def strict(schema: Json) -> Json:
    """The schema with unknown fields refused: the API server would drop them without a word."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {k: strict(v) for k, v in schema["properties"].items()}
        result["additionalProperties"] = False
    if "items" in schema:
        result["items"] = strict(schema["items"])
    return result


def a_resource(**spec: Any) -> Resource:
    return parse(a_stored_body(spec={"slo": {"ttft": {"p95": "1s"}, "itl": {"p95": "30ms"}}, **spec}))


def a_deployment(desired: int = 1, **status: Any) -> Json:
    ready = {"replicas": desired, "readyReplicas": desired, "updatedReplicas": desired}
    return {"metadata": {"generation": 3}, "status": {"observedGeneration": 3, **ready, **status}}


def a_pod(name: str = "chat-0", *, ready: bool = True) -> PodRef:
    return PodRef(name, "10.0.0.1", 8001, ready)


EDITED = Change("maxBatchTokens", 512, 601, "spec.batching was edited", edited=True)
TUNED = Change("maxQueuedTokens", 900, 400, "TTFT binds")


def a_decision(**values: Any) -> Decision:
    defaults: Json = {
        "limits": Limits(max_batch_tokens=640),
        "verdict": Verdict.HOLD,
        "state": State.ACTIVE,
        "reason": "limits stay",
        "memory": Memory(cost=COST, sums=statistics_of(COST, steps=40)),
        "at_s": NOW.timestamp(),
        "feasibility": Feasibility.FEASIBLE,
        "feasibility_reason": "a setting that meets the targets exists",
        "evidence": evidence(),
    }
    return Decision(**{**defaults, **values})


def target(
    judgement: Judgement, samples: float = 120, misses: float = 2, target_s: float = 1.0
) -> TargetEvidence:
    return TargetEvidence(target_s, "p95", judgement, Exceedances(samples, misses, misses), 60.0, 0.4)


def evidence(ttft: Judgement = Judgement.MET, itl: Judgement = Judgement.MET, **values: Any) -> Evidence:
    return Evidence(
        ttft=target(ttft),
        itl=target(itl, target_s=0.03),
        attainment=0.987,
        offered=120,
        window_s=10.0,
        offered_per_s=12.0,
        finished_per_s=11.5,
        refused_per_s=0.5,
        output_tokens_per_s=800.4,
        prompt_tokens_per_s=5000.0,
        capacity_per_s=30.0,
        replicas_needed=1,
        measured_ttft_s=0.412,
        measured_itl_s=0.0004,
        **values,
    )


def facts(**values: Any) -> Facts:
    """A settled deployment under load; any fact can be set."""
    decision = values.pop("decision", a_decision())
    in_force = decision.limits if decision is not None else Limits()
    sample = Sample(
        limits=Limits(
            **{f: getattr(in_force, f) for f in in_force.__struct_fields__ if f != "generation"}, generation=4
        ),
        capacity=CAPACITY,
        gauges={Metric.RUNNING: 3.0},
    )
    defaults: Json = {
        "resource": a_resource(),
        "deployment": a_deployment(),
        "pods": (a_pod(),),
        "samples": {"chat-0": sample},
        "observation": an_observation(),
        "decision": decision,
        "memory": decision.memory if decision is not None else Memory(),
        "endpoint": "http://chat.default.svc/v1",
    }
    return Facts(**{**defaults, **values})


def made(given: Facts, before: Json | None = None, *, after_s: float = 0) -> Json:
    """The status, checked against the schema."""
    status = build(given, before, NOW + timedelta(seconds=after_s))
    jsonschema.validate(status, strict(SCHEMA))
    return status


def condition(status: Json, type_: str) -> Json | None:
    return next((c for c in status["conditions"] if c["type"] == type_), None)


def states(status: Json) -> dict[str, str]:
    return {c["type"]: c["status"] for c in status["conditions"]}


def test_a_settled_deployment_that_meets_its_targets() -> None:
    status = made(facts())
    assert states(status) == {
        "Ready": "True",
        "MetricsAvailable": "True",
        "SLOMet": "True",
        "SLOFeasible": "True",
        "TuningActive": "True",
        "ParametersDrifted": "False",
    }
    assert status["observedGeneration"] == 1
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (1, 1, 1)
    assert status["selector"] == "headway.dev/inference-deployment=chat"
    assert status["slo"]["ttft"] == {
        "targetMilliseconds": 1000,
        "percentile": "p95",
        "measuredMilliseconds": 412,
        "verdict": "Met",
        "samples": 120,
        "misses": 2,
    }
    assert status["slo"]["itl"]["measuredMilliseconds"] == 1, "less than a millisecond is not nothing"
    assert status["slo"]["attainmentPercent"] == 99
    assert status["throughput"]["outputTokensPerSecond"] == 800
    assert status["throughput"]["rejectionsPerMinute"] == 30
    assert status["capacity"]["requestsPerMinute"] == 1800
    assert status["tuning"]["generation"] == 4
    assert status["tuning"]["stepCost"]["perPrefillTokenNanoseconds"] == 33_000
    assert from_status(status["tuning"]["state"]).cost == COST


LEFT = Computing("transformers on amx", (("fused on amx", "wrong logits"), ("fused on avx2", "wrong logits")))
FALLBACK_WORDS = (
    "in chat-0 fused on amx (wrong logits), fused on avx2 (wrong logits) did not pass the check at start, "
    "transformers on amx serves: see runner-fallback in its log"
)


def with_computing(**pods: Computing | None) -> Facts:
    """Ready pods of these names, scraped (None: silent)."""
    count = len(pods)
    samples = {
        name.replace("_", "-"): Sample(computing=found) if found else Unreachable("no answer")
        for name, found in pods.items()
    }
    return facts(
        resource=a_resource(replicas=count),
        deployment=a_deployment(count),
        pods=tuple(replace(a_pod(), name=name) for name in samples),
        samples=samples,
    )


def test_a_resource_that_serves_on_a_fallback_says_so_and_is_ready() -> None:
    """Which ways failed, why, and what serves; nothing else about the resource is otherwise."""
    status = made(with_computing(chat_0=LEFT))
    ready = condition(status, "Ready")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("True", "ReadyOnFallback")
    assert ready["message"] == f"1 of 1 replicas serve; {FALLBACK_WORDS}"
    assert {"Reconciling", "Stalled"}.isdisjoint(states(status)), "kstatus: Current"
    plain = condition(made(with_computing(chat_0=Computing("fused on amx"))), "Ready")
    assert plain is not None
    assert plain["reason"] == "Serving"


def test_pods_on_the_same_fallback_are_named_together() -> None:
    """On machines that are alike; a pod of another machine may serve as it should."""
    status = made(with_computing(chat_0=LEFT, chat_1=Computing("fused on avx2"), chat_2=LEFT))
    ready = condition(status, "Ready")
    assert ready is not None
    assert ready["message"].startswith("3 of 3 replicas serve; in chat-0, chat-2 fused on amx (wrong logits)")


def test_a_pod_that_does_not_answer_for_once_does_not_take_the_reason_away() -> None:
    """It would come and go with every lost scrape, and be told of each time."""
    before = made(with_computing(chat_0=LEFT))
    silent = condition(made(with_computing(chat_0=None), before), "Ready")
    assert silent is not None
    assert (silent["reason"], silent["message"]) == (
        "ReadyOnFallback",
        f"1 of 1 replicas serve; {FALLBACK_WORDS}",
    )
    mended = condition(made(with_computing(chat_0=Computing("fused on amx")), before), "Ready")
    assert mended is not None
    assert mended["reason"] == "Serving"


def test_what_ails_a_pod_is_told_where_nothing_serves() -> None:
    """A wrong model shows in `kubectl describe infd`, and not as a start that never ends."""
    pod = replace(a_pod(ready=False), trouble="pod chat-0: container engine ended")
    none_ready = a_deployment(readyReplicas=0)
    status = made(facts(deployment=none_ready, pods=(pod,), samples={}, observation=None, decision=None))
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"], ready["message"]) == ("False", "PodsFailing", pod.trouble)
    starting = next(c for c in status["conditions"] if c["type"] == "Reconciling")
    assert starting["message"] == f"0 of 1 replicas are ready; {pod.trouble}"


def test_a_resource_just_created_is_reconciling_and_not_ready() -> None:
    status = made(facts(deployment=None, pods=(), samples={}, observation=None, decision=None))
    assert states(status)["Ready"] == "False"
    assert states(status)["Reconciling"] == "True"
    assert states(status)["MetricsAvailable"] == "Unknown"
    assert states(status)["SLOMet"] == "Unknown"
    assert states(status)["TuningActive"] == "Unknown"


@pytest.mark.parametrize(
    ("deployment", "reason"),
    [
        (a_deployment(observedGeneration=2), "RollingOut"),
        (a_deployment(updatedReplicas=0), "RollingOut"),
        (a_deployment(replicas=2), "RollingOut"),
        (a_deployment(readyReplicas=0), "Starting"),
    ],
)
def test_reconciling_is_there_while_pods_are_on_their_way(deployment: Json, reason: str) -> None:
    found = condition(made(facts(deployment=deployment)), "Reconciling")
    assert found is not None
    assert found["reason"] == reason


def test_pods_that_make_no_progress_are_stalled_and_no_longer_reconciling() -> None:
    late = {
        "type": "Progressing",
        "status": "False",
        "reason": "ProgressDeadlineExceeded",
        "message": "too late",
    }
    status = made(facts(deployment=a_deployment(readyReplicas=0, conditions=[late])))
    assert states(status)["Stalled"] == "True"
    assert "Reconciling" not in states(status)
    ready = condition(status, "Ready")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", "ProgressDeadlineExceeded")


def test_a_problem_of_the_spec_stalls_and_does_not_hide_that_pods_serve() -> None:
    status = made(facts(problems=(Problem("NameTaken", "a Service of that name belongs to another"),)))
    assert states(status)["Stalled"] == "True"
    assert states(status)["Ready"] == "True"
    assert made(facts(problems=(Problem("Odd", "but works", fatal=False),)))
    assert "Stalled" not in states(made(facts(problems=(Problem("Odd", "but works", fatal=False),))))


def test_no_replicas_asked_for_is_settled() -> None:
    given = facts(
        resource=a_resource(replicas=0), deployment=a_deployment(0), pods=(), samples={}, decision=None
    )
    status = made(given)
    assert "Reconciling" not in states(status)
    assert condition(status, "Ready") is not None
    assert states(status)["Ready"] == "True"


def test_transition_times_move_with_the_status_only() -> None:
    first = made(facts())
    later = made(facts(), first, after_s=60)
    assert [c["lastTransitionTime"] for c in later["conditions"]] == [
        c["lastTransitionTime"] for c in first["conditions"]
    ]
    missed = made(facts(decision=a_decision(evidence=evidence(Judgement.VIOLATED))), later, after_s=120)
    moved = [c["type"] for c in missed["conditions"] if c["lastTransitionTime"] == "2026-03-01T12:02:00Z"]
    assert moved == ["SLOMet"]


def test_the_order_of_conditions_never_changes() -> None:
    order = ["Ready", "Reconciling", "Stalled", "MetricsAvailable", "SLOMet", "SLOFeasible", "TuningActive"]
    for given in (facts(), facts(deployment=None), facts(problems=(Problem("A", "b"),))):
        types = [c["type"] for c in made(given)["conditions"]]
        assert types == [t for t in (*order, "ParametersDrifted") if t in types]


# MetricsAvailable.


def test_one_silent_pod_is_named_and_the_rest_still_measured() -> None:
    given = facts(pods=(a_pod(), a_pod("chat-1")))
    given = replace(given, samples={**given.samples, "chat-1": Unreachable("no answer in 3 s")})
    found = condition(made(given), "MetricsAvailable")
    assert found is not None
    assert found["status"] == "True"
    assert "chat-1: no answer in 3 s" in found["message"]


def test_silence_is_news_at_the_third_time() -> None:
    before = made(facts())
    for missed, expected in ((1, "True"), (2, "True"), (3, "False")):
        given = facts(samples={"chat-0": Unreachable("refused")}, observation=None)
        before = made(replace(given, memory=Memory(missed=missed)), before)
        assert states(before)["MetricsAvailable"] == expected


# SLOMet and SLOFeasible.


@pytest.mark.parametrize(
    ("ttft", "itl", "expected"),
    [
        (Judgement.MET, Judgement.MET, "True"),
        (Judgement.MET, Judgement.VIOLATED, "False"),
        (Judgement.VIOLATED, Judgement.UNDECIDED, "False"),
        (Judgement.MET, Judgement.UNDECIDED, "Unknown"),
    ],
)
def test_the_promise_is_kept_when_every_target_is(ttft: Judgement, itl: Judgement, expected: str) -> None:
    status = made(facts(decision=a_decision(evidence=evidence(ttft, itl))))
    found = condition(status, "SLOMet")
    assert found is not None
    assert found["status"] == expected
    assert "TTFT p95 target 1000 ms: 2 of 120 over it" in found["message"]


def test_thin_evidence_leaves_the_last_verdict_standing() -> None:
    undecided = facts(decision=a_decision(evidence=evidence(Judgement.UNDECIDED)))
    for verdict, expected in ((Judgement.MET, "True"), (Judgement.VIOLATED, "False")):
        before = made(facts(decision=a_decision(evidence=evidence(verdict))))
        found = condition(made(undecided, before), "SLOMet")
        assert found is not None
        assert found["status"] == expected
        assert found["message"].startswith("undecided at present")


def test_a_verdict_does_not_outlive_the_spec_that_it_was_about() -> None:
    before = made(facts())
    edited = replace(a_resource(), generation=2)
    given = facts(resource=edited, decision=a_decision(evidence=evidence(Judgement.UNDECIDED)))
    assert states(made(given, before))["SLOMet"] == "Unknown"


def test_without_targets_there_is_nothing_to_meet() -> None:
    resource = replace(a_resource(), slo=type(a_resource().slo)())
    status = made(facts(resource=resource, decision=a_decision(state=State.NO_TARGET, evidence=Evidence())))
    for type_ in ("SLOMet", "SLOFeasible"):
        found = condition(status, type_)
        assert found is not None
        assert (found["status"], found["reason"]) == ("Unknown", "NoTarget")
    assert "feasibility" not in status


@pytest.mark.parametrize("verdict", [Feasibility.BELOW_ENGINE_FLOOR, Feasibility.CAPACITY_LIMITED])
def test_an_infeasible_promise_says_why_and_what_is_possible(verdict: Feasibility) -> None:
    best = {"best_itl_s": 0.0091} if verdict is Feasibility.BELOW_ENGINE_FLOOR else {}
    decision = a_decision(
        feasibility=verdict, feasibility_reason="because of this", evidence=evidence(**best)
    )
    status = made(facts(decision=decision))
    found = condition(status, "SLOFeasible")
    assert found is not None
    assert (found["status"], found["reason"], found["message"]) == ("False", verdict.value, "because of this")
    assert status["feasibility"]["verdict"] == verdict.value
    assert status["feasibility"].get("bestItlMilliseconds") == (9 if best else None)


# Parameters, drift, recommendation.


def parameter(status: Json, name: str) -> Json:
    return next(p for p in status["parameters"] if p["name"] == name)


def test_a_parameter_says_what_is_wanted_what_is_in_force_and_why() -> None:
    change = Change("maxBatchTokens", 2048, 640, "ITL binds")
    status = made(facts(decision=a_decision(verdict=Verdict.SHRINK, changes=(change,))))
    assert parameter(status, "maxBatchTokens") == {
        "name": "maxBatchTokens",
        "unit": "tokens",
        "desired": 640,
        "applied": 640,
        "capacity": 8192,
        "support": "Live",
        "reason": "ITL binds",
    }
    later = made(facts(), status)
    assert parameter(later, "maxBatchTokens")["reason"] == "ITL binds", "until it changes again"
    assert parameter(later, "window")["reason"] == "as spec.batching says"


def test_limits_that_differ_between_pods_are_not_reported_as_applied() -> None:
    given = facts(pods=(a_pod(), a_pod("chat-1")))
    other = Sample(limits=Limits(max_batch_tokens=64, max_batch_sequences=64), capacity=CAPACITY)
    status = made(replace(given, samples={**given.samples, "chat-1": other}))
    assert "applied" not in parameter(status, "maxBatchTokens")
    assert parameter(status, "maxQueuedRequests")["applied"] == 1024
    found = condition(status, "ParametersDrifted")
    assert found is not None
    assert found["status"] == "True"
    assert "chat-1" in found["message"]


def test_after_an_edit_and_before_the_next_decision_the_edit_is_what_is_wanted() -> None:
    """One limit was edited; another, that the tuner moved, stays where it is."""
    resource = a_resource(batching={"window": "5ms"})
    tuned = Limits(max_batch_tokens=640)
    memory = Memory(base=Limits(), tuned=tuned)
    in_force = Sample(limits=Limits(generation=9, window_ms=5, max_batch_tokens=640), capacity=CAPACITY)
    status = made(facts(resource=resource, decision=None, memory=memory, samples={"chat-0": in_force}))
    assert parameter(status, "window")["desired"] == 5
    assert parameter(status, "maxBatchTokens")["desired"] == 640
    assert states(status)["ParametersDrifted"] == "False"


def test_a_pod_that_refuses_limits_is_named_with_its_reason() -> None:
    found = condition(made(facts(refused={"chat-0": "PUT answered 422: too much"})), "ParametersDrifted")
    assert found is not None
    assert (found["status"], found["reason"]) == ("True", "LimitsRefused")
    assert "chat-0: PUT answered 422: too much" in found["message"]


def test_a_recommendation_is_shown_and_keeps_its_time_until_it_changes() -> None:
    resource = a_resource(tuning={"mode": "Recommend"})
    decision = a_decision(
        limits=Limits(), recommended=Limits(max_batch_tokens=640), reason="ITL binds", state=State.ADVISORY
    )
    first = made(facts(resource=resource, decision=decision))
    assert first["recommendation"]["changes"] == [{"name": "maxBatchTokens", "from": 2048, "to": 640}]
    assert parameter(first, "maxBatchTokens")["recommended"] == 640
    assert states(first)["TuningActive"] == "False"
    assert "history" not in first["tuning"], "nothing was changed"
    later = made(facts(resource=resource, decision=decision), first, after_s=60)
    assert later["recommendation"] == first["recommendation"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State.ACTIVE, "True"),
        (State.LEARNING, "True"),
        (State.INSUFFICIENT_TRAFFIC, "True"),
        (State.NO_TARGET, "False"),
        (State.METRICS_LOST, "False"),
    ],
)
def test_tuning_active_says_what_the_tuner_is_doing(state: State, expected: str) -> None:
    found = condition(made(facts(decision=a_decision(state=state))), "TuningActive")
    assert found is not None
    assert (found["status"], found["reason"]) == (expected, state.value)


# History.


def a_change(number: int) -> Decision:
    change = Change("maxBatchTokens", 1000 + number, 1001 + number, "because")
    return a_decision(verdict=Verdict.GROW, changes=(change,), at_s=NOW.timestamp() + 10 * number)


def test_history_holds_the_latest_twenty_newest_first() -> None:
    status: Json | None = None
    for number in range(25):
        status = made(facts(decision=a_change(number)), status)
    assert status is not None
    history = status["tuning"]["history"]
    assert [entry["changes"][0]["from"] for entry in history] == [1000 + n for n in range(24, 4, -1)]
    assert status["tuning"]["lastChangeTime"] == history[0]["time"] == "2026-03-01T12:04:00Z"


def test_a_decision_is_entered_once_however_often_it_is_told() -> None:
    first = made(facts(decision=a_change(1)))
    again = made(facts(decision=a_change(1)), first, after_s=5)
    assert len(again["tuning"]["history"]) == 1
    held = made(facts(), again, after_s=10)
    assert held["tuning"]["history"] == again["tuning"]["history"]
    assert held["tuning"]["lastChangeTime"] == again["tuning"]["lastChangeTime"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((EDITED,), "maxBatchTokens 512 -> 601: spec.batching was edited"),
        ((EDITED, TUNED), "maxBatchTokens 512 -> 601: spec.batching was edited; TTFT binds"),
        ((TUNED,), "TTFT binds"),
    ],
)
def test_history_gives_the_reason_of_the_change_and_not_of_the_tick(
    changes: tuple[Change, ...], message: str
) -> None:
    """An edit under sparse traffic was made because the user edited, not because requests are few."""
    decision = a_decision(verdict=Verdict.EDIT, changes=changes, reason="TTFT binds")
    assert made(facts(decision=decision))["tuning"]["history"][0]["message"] == message


def test_history_says_which_generation_a_change_led_to() -> None:
    entry = made(facts(decision=a_change(1)))["tuning"]["history"][0]
    assert entry["generation"] == 4
    assert entry["verdict"] == "Grow"


# What is worth a write.


def test_figures_alone_are_not_worth_a_write() -> None:
    first = made(facts())
    busier = replace(
        evidence(), output_tokens_per_s=999.0, measured_ttft_s=0.5, ttft=target(Judgement.MET, 400, 3)
    )
    second = made(facts(decision=a_decision(evidence=busier, reason="limits stay, too")), first, after_s=10)
    assert second != first
    assert not differs(first, second)


@pytest.mark.parametrize(
    "news",
    [
        {"decision": a_change(1)},
        {"decision": a_decision(evidence=evidence(Judgement.VIOLATED))},
        {"decision": a_decision(feasibility=Feasibility.CAPACITY_LIMITED)},
        {"deployment": a_deployment(readyReplicas=0)},
        {"resource": replace(a_resource(), generation=2)},
        {"refused": {"chat-0": "no"}},
        {"endpoint": "http://elsewhere/v1"},
        {"problems": (Problem("A", "b"),)},
    ],
    ids=lambda news: next(iter(news)),
)
def test_news_is_worth_a_write(news: Json) -> None:
    first = made(facts())
    assert differs(first, made(facts(**news), first))


def test_nothing_new_is_nothing_to_write() -> None:
    first = made(facts())
    assert not differs(first, made(facts(), first, after_s=300))
    assert differs(None, first)


def test_without_a_new_measurement_the_old_figures_stay() -> None:
    first = made(facts())
    quiet = made(facts(decision=None, observation=None), first, after_s=10)
    for part in ("slo", "throughput", "feasibility"):
        assert quiet[part] == first[part]
    assert quiet["capacity"]["requestsPerMinute"] == first["capacity"]["requestsPerMinute"]
    assert states(quiet)["SLOMet"] == "True"


def test_figures_about_an_old_target_go_with_it() -> None:
    first = made(facts())
    stricter = a_resource(slo={"ttft": {"p95": "200ms"}})
    status = made(facts(resource=stricter, decision=None, observation=None), first)
    assert status["slo"]["ttft"] == {"targetMilliseconds": 200, "percentile": "p95"}
