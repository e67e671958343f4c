"""The two sequences against an in-memory cluster and engines: each situation a resource can get into."""

import asyncio
import dataclasses
from random import Random
from typing import Any

import msgspec
import pytest

from headway_engine.protocol import Limits
from headway_operator import reconcile
from headway_operator.cluster import ClusterError, Conflict, Gone, TryAgain
from headway_operator.metrics import Computing
from headway_operator.queue import Cause, WorkQueue
from headway_operator.tuner.controller import Change, Decision, State, Verdict
from headway_operator.tuner.memory import Memory
from support.controller import KIND, Clock, World
from support.fake_cluster import Call, Fault
from support.virtual_loop import run_virtually

TEN_MINUTES = 60  # ticks of 10 s


@pytest.fixture
def world() -> World:
    world = World()
    world.create()
    return world


def set_verdict(monkeypatch: pytest.MonkeyPatch, tokens: int, *, recommend: bool = False) -> None:
    """The tuner wants this many tokens a step from now on."""

    def decide(slo: Any, tuning: Any, batching: Any, capacity: Any, current: Limits, *rest: Any) -> Decision:
        memory: Memory = rest[0]
        base = batching.limits()
        tuned = msgspec.structs.replace(base, max_batch_tokens=tokens)
        limits = base if recommend else tuned
        was = memory.tuned.max_batch_tokens if memory.tuned else base.max_batch_tokens
        changes = (Change("maxBatchTokens", was, tokens, "because"),) if was != tokens or recommend else ()
        return Decision(
            limits=limits,
            verdict=Verdict.SHRINK if changes else Verdict.HOLD,
            state=State.ACTIVE,
            reason="because",
            memory=msgspec.structs.replace(memory, base=base, tuned=tuned),
            changes=changes,
            recommended=tuned if recommend else None,
        )

    monkeypatch.setattr(reconcile, "decide", decide)


# Objects.


async def test_a_new_resource_gets_its_objects_each_with_an_owner(world: World) -> None:
    """Everything is made in one run, and deletion is left to the garbage collector."""
    await world.change()
    made = [o for o in world.cluster.all() if o["kind"] != KIND[1]]
    assert sorted({o["kind"] for o in made}) == [
        "ConfigMap",
        "Deployment",
        "Secret",
        "Service",
        "ServiceAccount",
    ]
    owner = world.cluster.peek(KIND[1], "chat")
    assert owner is not None
    for found in made:
        references = found["metadata"]["ownerReferences"]
        assert [r["uid"] for r in references] == [owner["metadata"]["uid"]]
    assert "finalizers" not in owner["metadata"]
    assert world.status["observedGeneration"] == 1


async def test_pods_that_become_ready_make_the_resource_ready(world: World) -> None:
    """Ready follows the Deployment; the limits in force are those of the spec."""
    await world.change()
    assert world.condition("Ready")["status"] == "False"
    world.cluster.run_deployments()
    await world.change()
    assert world.condition("Ready")["status"] == "True"
    assert world.fleet[world.pods[0]].limits.max_batch_tokens == 2048


async def test_an_engine_on_a_fallback_is_told_once_and_the_resource_is_ready(world: World) -> None:
    """In the condition's reason and in one event, however many ticks follow and whatever scrapes are lost."""
    await world.change()
    world.cluster.run_deployments()
    engine = world.fleet[world.pods[0]]
    engine.computing = Computing("transformers on torch", (("fused on amx", "wrong logits"),))
    await world.change()
    ready = world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("True", "ReadyOnFallback")
    for lost in (False, True, False):
        engine.lost = lost
        await world.tick()
    assert world.condition("Ready")["reason"] == "ReadyOnFallback"
    (event,) = [event for event in world.cluster.events if event["reason"] == "ReadyOnFallback"]
    assert event["type"] == "Warning"
    assert "fused on amx (wrong logits) did not pass the check at start" in event["note"]


async def test_a_settled_cluster_is_left_alone(world: World) -> None:
    """Ten minutes of ticks and a full look without traffic: not one write."""
    await world.settle()
    before = len(world.cluster.writes)
    for _ in range(TEN_MINUTES):
        await world.tick()
    await world.change()
    assert world.cluster.writes[before:] == []


async def test_a_restarted_controller_writes_nothing_in_a_settled_cluster(world: World) -> None:
    """All it needs to know is in the cluster."""
    await world.settle()
    before = len(world.cluster.writes)
    world.start_controller()
    await world.change()
    for _ in range(6):
        await world.tick()
    assert world.cluster.writes[before:] == []
    assert world.randomness.asked == 1, "the control key was made anew"


async def test_a_deleted_resource_is_forgotten_and_its_objects_go(world: World) -> None:
    """Nothing is written for it any more."""
    await world.settle()
    before = len(world.cluster.writes)
    world.cluster.remove((*KIND, "default", "chat"))
    assert await world.change() is None
    assert world.cluster.all() == []
    assert world.cluster.writes[before:] == []


async def test_a_resource_made_again_under_the_same_name_starts_afresh(world: World) -> None:
    """Another uid is another resource: nothing of the old one's state is used."""
    await world.settle()
    world.cluster.remove((*KIND, "default", "chat"))
    world.create({"batching": {"maxBatchTokens": 1024}})
    world.fleet.engines.clear()
    await world.settle()
    assert world.fleet[world.pods[0]].limits.max_batch_tokens == 1024
    assert world.randomness.asked == 2


async def test_someone_elses_edit_of_our_object_is_undone(world: World) -> None:
    """A declared field is ours; a field that we do not declare is theirs."""
    await world.settle()

    def meddle(deployment: dict[str, Any]) -> None:
        deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "evil"
        deployment["metadata"]["annotations"]["theirs"] = "kept"

    world.cluster.edit(("apps/v1", "Deployment", "default", "chat"), meddle)
    await world.change()
    deployment = world.cluster.peek("Deployment", "chat")
    assert deployment is not None
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "example.invalid/headway-engine:1"
    assert deployment["metadata"]["annotations"]["theirs"] == "kept"


async def test_a_deleted_object_of_ours_is_made_again(world: World) -> None:
    """Whatever it was."""
    await world.settle()
    before = {(o["kind"], o["metadata"]["name"]) for o in world.cluster.all()}
    for kind, version in (("Service", "v1"), ("ConfigMap", "v1"), ("ServiceAccount", "v1")):
        for found in world.cluster.all(kind):
            world.cluster.remove((version, kind, "default", found["metadata"]["name"]))
    await world.change()
    assert {(o["kind"], o["metadata"]["name"]) for o in world.cluster.all()} == before


async def test_an_object_of_another_owner_is_never_overwritten(world: World) -> None:
    """The user has a Service of that name: nothing is written, and the status says which object it is."""
    theirs = world.cluster.put(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": "default", "name": "chat"},
            "spec": {"a": 1},
        }
    )
    await world.change()
    assert world.cluster.peek("Service", "chat") == theirs
    assert world.cluster.all("Deployment") == []
    assert "Service chat" in world.condition("Stalled")["message"]
    world.cluster.remove(("v1", "Service", "default", "chat"))
    await world.change()
    assert len(world.cluster.all("Deployment")) == 1
    assert [c for c in world.status["conditions"] if c["type"] == "Stalled"] == []


async def test_another_owners_deployment_does_not_make_the_resource_ready(world: World) -> None:
    """Its replicas are not ours."""
    world.cluster.put(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"namespace": "default", "name": "chat"},
            "spec": {"replicas": 1},
            "status": {"readyReplicas": 1, "updatedReplicas": 1, "replicas": 1},
        }
    )
    await world.change()
    ready = world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NameTaken")
    assert "Deployment chat" in ready["message"]


SHARED = {"tenancy": {"tenants": [{"name": "gold"}], "keysSecretRef": {"name": "chat-keys"}}}
KEYS = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"namespace": "default", "name": "chat-keys"},
    "data": {"gold": "Zw=="},
}


async def test_a_missing_secret_of_keys_is_said_where_people_look_until_it_is_there(world: World) -> None:
    """A pod that waits for a volume says so in events only. The Secret sends no event: a tick must see it."""
    world.create(SHARED)
    await world.change()
    world.cluster.run_deployments(ready=False)
    await world.change()
    ready = world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "KeysSecretMissing")
    assert "spec.tenancy.keysSecretRef: the Secret chat-keys" in ready["message"]
    assert [c for c in world.status["conditions"] if c["type"] == "Stalled"] == [], "it may come at any time"
    world.cluster.put(KEYS)
    await world.tick()
    assert world.condition("Ready")["reason"] == "NoReplicaReady"
    world.cluster.run_deployments()
    await world.change()
    assert world.condition("Ready")["reason"] == "Serving"


async def test_the_secret_of_keys_is_read_by_us_and_written_by_nobody(world: World) -> None:
    world.cluster.put(KEYS)
    world.create(SHARED)
    await world.settle()
    stored = world.cluster.peek("Secret", "chat-keys")
    assert stored is not None
    assert stored["data"] == KEYS["data"]
    assert "ownerReferences" not in stored["metadata"]


async def test_an_edit_of_tenants_replaces_the_pods(world: World) -> None:
    await world.settle()
    before = world.cluster.peek("Deployment", "chat")
    world.edit({"tenancy": {"tenants": [{"name": "gold", "weight": 4}]}})
    await world.change()
    after = world.cluster.peek("Deployment", "chat")
    assert before is not None
    assert after is not None
    assert before["spec"]["template"] != after["spec"]["template"]
    data = world.cluster.peek("ConfigMap", "chat-limits")
    assert data is not None
    assert '"gold":{"weight":4' in data["data"]["tenants.json"]


async def test_an_object_no_longer_wanted_is_removed(world: World) -> None:
    """Left over from an older version of the controller: ours by owner and label, but not declared."""
    await world.settle()
    wanted = world.cluster.peek("Service", "chat")
    assert wanted is not None
    old = {**wanted, "metadata": {**wanted["metadata"], "name": "chat-old"}}
    world.cluster.put(old)
    labelled = {**old, "metadata": {**old["metadata"], "name": "labelled", "ownerReferences": []}}
    world.cluster.put(labelled)
    await world.change()
    assert world.cluster.peek("Service", "chat-old") is None
    assert world.cluster.peek("Service", "labelled") is not None, "a label alone is no ownership"


# Edits.


async def test_a_live_edit_reaches_the_engine_in_the_same_run(world: World) -> None:
    """No tick is waited for, no pod is replaced, and new pods will start with it."""
    await world.settle()
    pods = world.pods
    template = world.cluster.peek("Deployment", "chat")
    world.edit({"batching": {"maxBatchTokens": 512, "maxBatchSequences": 7}})
    await world.change()
    limits = world.fleet[pods[0]].limits
    assert (limits.max_batch_tokens, limits.max_batch_sequences) == (512, 7)
    assert world.cluster.peek("Deployment", "chat") == template
    config = world.cluster.peek("ConfigMap", "chat-limits")
    assert config is not None
    assert '"max_batch_tokens":512' in config["data"]["limits.json"]
    assert world.status["observedGeneration"] == 2


async def test_an_edit_that_no_event_told_of_is_found_at_the_tick(world: World) -> None:
    """A dead watch costs at most one interval."""
    await world.settle()
    world.edit({"batching": {"maxBatchTokens": 512}})
    await world.tick()
    assert world.fleet[world.pods[0]].limits.max_batch_tokens == 512


async def test_an_edited_target_moves_the_engines_histogram_boundaries(world: World) -> None:
    """Objectives are read back and corrected like limits."""
    await world.settle()
    world.edit({"slo": {"itl": {"p95": "80ms"}}})
    await world.change()
    assert world.fleet[world.pods[0]].objectives.itl_ms == 80


async def test_a_restart_edit_changes_the_pod_template(world: World) -> None:
    """The Deployment rolls the pods; new ones get the limits."""
    await world.settle()
    before = world.pods
    world.edit({"batching": {"kvCache": {"blockTokens": 32}}})
    await world.change()
    world.cluster.run_deployments()
    await world.change()
    assert set(world.pods).isdisjoint(before)
    assert world.condition("Ready")["status"] == "True"


async def test_scaling_up_gives_new_pods_the_tuned_limits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the ConfigMap when they start, so that not even the first step is taken with others."""
    set_verdict(monkeypatch, 640)
    await world.settle()
    world.edit({"replicas": 3})
    await world.change()
    world.cluster.run_deployments()
    assert [world.fleet[pod].limits.max_batch_tokens for pod in world.pods] == [640, 640, 640]


async def test_an_invalid_spec_is_named_and_what_runs_goes_on(world: World) -> None:
    """The schema should refuse it; if one gets through, the status names the field."""
    await world.settle()
    objects = [o for o in world.cluster.all() if o["kind"] != KIND[1]]

    def spoil(body: dict[str, Any]) -> None:
        body["spec"]["batching"]["window"] = "soon"

    world.cluster.edit((*KIND, "default", "chat"), spoil)
    await world.change()
    assert [o for o in world.cluster.all() if o["kind"] != KIND[1]] == objects
    for type_, value in (("Ready", "False"), ("Stalled", "True")):
        condition = world.condition(type_)
        assert (condition["status"], condition["reason"]) == (value, "InvalidSpec")
        assert "spec.batching.window" in condition["message"]
    assert world.status["observedGeneration"] == 2
    writes = len(world.cluster.writes)
    await world.change()
    assert len(world.cluster.writes) == writes

    world.edit({})
    await world.change()
    assert world.condition("Ready")["status"] == "True"


# Limits.


async def test_a_decision_reaches_every_engine_and_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines, ConfigMap, status and event agree; the event is posted once."""
    world.edit({"replicas": 2})
    await world.settle()
    set_verdict(monkeypatch, 640)
    for _ in range(3):
        await world.tick()
    engines = [world.fleet[pod] for pod in world.pods]
    assert [(e.limits.max_batch_tokens, e.limits.generation) for e in engines] == [(640, 1), (640, 1)]
    config = world.cluster.peek("ConfigMap", "chat-limits")
    assert config is not None
    assert '"max_batch_tokens":640' in config["data"]["limits.json"]
    assert [(e["reason"], e["note"]) for e in world.cluster.events] == [
        ("Serving", "Ready: 2 of 2 replicas serve"),
        ("LimitsChanged", "maxBatchTokens 2048 → 640: because"),
    ]
    parameter = next(p for p in world.status["parameters"] if p["name"] == "maxBatchTokens")
    assert str(parameter["applied"]) == "640"


async def test_a_recommendation_is_published_and_not_applied(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine keeps the spec's limits; one event for many ticks."""
    world.edit({"tuning": {"mode": "Recommend"}})
    await world.settle()
    set_verdict(monkeypatch, 640, recommend=True)
    for _ in range(3):
        await world.tick()
    assert world.fleet[world.pods[0]].limits.max_batch_tokens == 2048
    assert [e["reason"] for e in world.cluster.events] == ["Serving", "LimitsRecommended"]


async def test_turning_the_tuner_off_restores_the_spec(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: the user wants the values written there."""
    set_verdict(monkeypatch, 640)
    await world.settle()
    assert world.fleet[world.pods[0]].limits.max_batch_tokens == 640
    monkeypatch.undo()
    world.edit({"tuning": {"mode": "Off"}})
    await world.change()
    await world.tick()
    assert world.fleet[world.pods[0]].limits.max_batch_tokens == 2048


async def test_an_engine_that_restarts_with_old_limits_is_corrected(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is from before the last decision; the next tick sees that it differs."""
    await world.settle()
    set_verdict(monkeypatch, 640)
    await world.tick()
    engine = world.fleet[world.pods[0]]
    engine.restart(Limits())
    await world.tick()
    assert engine.limits.max_batch_tokens == 640


async def test_a_restarted_controller_goes_on_with_the_tuned_limits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the status: not even for one run does an engine get the spec's."""
    set_verdict(monkeypatch, 640)
    await world.settle()
    puts = world.fleet[world.pods[0]].puts
    world.start_controller()
    await world.change()
    await world.tick()
    assert world.fleet[world.pods[0]].limits.max_batch_tokens == 640
    assert world.fleet[world.pods[0]].puts == puts


async def test_a_lowered_capacity_never_meets_limits_above_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New engines reserve less: the tuned limits of before would keep them from starting."""
    set_verdict(monkeypatch, 6000)
    await world.settle()
    world.edit({"batching": {"capacity": {"maxBatchTokens": 4096}}})
    await world.change()
    config = world.cluster.peek("ConfigMap", "chat-limits")
    assert config is not None
    assert '"max_batch_tokens":2048' in config["data"]["limits.json"]


async def test_an_edit_while_the_controller_was_away_wins_over_the_tuned_limits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state in the status was about another spec."""
    set_verdict(monkeypatch, 640)
    await world.settle()
    world.edit({"batching": {"maxBatchTokens": 1024}})
    world.start_controller()
    monkeypatch.undo()
    await world.change()
    assert world.fleet[world.pods[0]].limits.max_batch_tokens == 1024


async def test_lost_metrics_hold_the_limits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is not zero load: the tuner hears that nothing was seen, and nothing moves."""
    seen: list[object] = []
    real = reconcile.decide

    def listening(*arguments: Any) -> Decision:
        seen.append(arguments[6])
        return real(*arguments)

    monkeypatch.setattr(reconcile, "decide", listening)
    await world.settle()
    engine = world.fleet[world.pods[0]]
    limits = engine.limits
    engine.lost = True
    for _ in range(3):
        await world.tick()
        assert seen[-1] is None
    assert world.condition("MetricsAvailable")["status"] == "False"
    engine.lost = False
    await world.tick()
    assert engine.limits == limits
    assert world.condition("MetricsAvailable")["status"] == "True"


async def test_a_pod_that_refuses_is_told_of_and_tried_again(world: World) -> None:
    """The others have the limits; the one that does not is named, and gets them when it can."""
    world.edit({"replicas": 2})
    await world.settle()
    stubborn, willing = world.pods
    world.fleet[stubborn].refuses = True
    world.edit({"replicas": 2, "batching": {"maxBatchTokens": 512}})
    await world.change()
    assert world.fleet[willing].limits.max_batch_tokens == 512
    assert world.fleet[stubborn].limits.max_batch_tokens == 2048
    assert stubborn in str(world.status)
    assert world.heard.refusals == 1
    world.fleet[stubborn].refuses = False
    await world.tick()
    assert world.fleet[stubborn].limits.max_batch_tokens == 512


async def test_pods_that_are_not_ready_or_on_their_way_out_are_left_alone(world: World) -> None:
    """A loading engine has no limits to change, a draining one no use for them."""
    await world.settle()
    (pod,) = world.pods
    engine = world.fleet[pod]
    world.cluster.edit(
        ("v1", "Pod", "default", pod),
        lambda body: body["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"),
    )
    world.edit({"batching": {"maxBatchTokens": 512}})
    await world.change()
    await world.tick()
    assert engine.puts == 0


def test_a_hanging_pod_does_not_hold_up_an_edit_for_the_others() -> None:
    """Each pod is asked and corrected at its own pace."""

    async def test() -> None:
        world = World()
        world.create({"replicas": 2})
        await world.settle()
        hanging, healthy = world.pods
        world.fleet[hanging].hangs = True
        world.edit({"replicas": 2, "batching": {"maxBatchTokens": 512}})
        run = asyncio.create_task(world.change())
        await asyncio.sleep(0.1)
        assert world.fleet[healthy].limits.max_batch_tokens == 512
        assert not run.done()
        await run

    run_virtually(test())


def test_a_resource_whose_pods_all_hang_does_not_hold_up_another() -> None:
    """Through the real queue: the edit of one is in force at once while the other waits for its pods."""

    class LoopClock(Clock):
        def wall_s(self) -> float:
            return 1_800_000_000.0 + asyncio.get_running_loop().time()

        def monotonic_s(self) -> float:
            return asyncio.get_running_loop().time()

    async def test() -> None:
        world = World(clock=LoopClock())

        async def work(key: tuple[str, str], cause: Cause) -> float | None:
            return (await world.reconciler.reconcile(*key, tick_only=cause is Cause.TICK)).after_s

        queue = WorkQueue(work, chance=lambda: 0.5, workers=4)
        running = asyncio.create_task(queue.run())
        world.create({"replicas": 3}, name="sick")
        world.create(name="well")
        keys = [("default", "sick"), ("default", "well")]
        for _ in range(2):
            for key in keys:
                queue.add(key)
            await asyncio.sleep(1)
            world.cluster.run_deployments()
        await asyncio.sleep(30)
        (well,) = [pod for pod in world.pods if pod.startswith("well")]
        for pod in world.pods:
            world.fleet[pod].hangs = pod != well
        await asyncio.sleep(30)
        world.edit({"batching": {"maxBatchTokens": 512}}, name="well")
        queue.add(keys[1])
        await asyncio.sleep(0.01)
        assert world.fleet[well].limits.max_batch_tokens == 512
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run_virtually(test())


async def test_ticks_keep_the_interval_whatever_else_happens(world: World) -> None:
    """A full look between two ticks does not move the next one."""
    await world.settle()
    world.clock.now_s += 4.0
    assert await world.change() == 6.0
    assert await world.tick(6.0) == 10.0


# Figures.


async def test_figures_are_written_at_most_once_a_minute_and_only_under_traffic(world: World) -> None:
    """Ten minutes of steady traffic: ten status writes or so, and nothing else."""
    await world.settle()
    engine = world.fleet[world.pods[0]]
    for _ in range(12):
        engine.serve(400)
        await world.tick()
    before = len(world.cluster.writes)
    for _ in range(TEN_MINUTES):
        engine.serve(400)
        await world.tick()
    writes = world.cluster.writes[before:]
    assert {call.verb for call in writes} <= {"apply_status", "post_event", "apply"}
    assert len([call for call in writes if call.verb == "apply_status"]) <= 14


def status_writes(world: World) -> int:
    return sum(call.verb == "apply_status" for call in world.cluster.writes)


@pytest.mark.parametrize("per_minute", [1, 3, 4, 5])
async def test_an_hour_of_sparse_traffic_is_told_in_a_few_writes(world: World, per_minute: int) -> None:
    """Single requests, some of them around the count from which targets can be judged.

    Attainment is all or nothing and rates differ by factors from look to look; none of it is news. Figures
    are refreshed every five minutes.
    """
    await world.settle()
    engine, chance = world.fleet[world.pods[0]], Random(per_minute)
    before = status_writes(world)
    for _ in range(360):
        engine.serve(sum(chance.random() < per_minute / 6 / 10 for _ in range(10)))
        await world.tick()
    assert 10 <= status_writes(world) - before <= 24


async def test_a_real_change_in_sparse_traffic_is_written_in_the_same_tick(world: World) -> None:
    """A pod that is lost, an edit, a replica: whatever was written a moment ago."""
    await world.settle()
    engine = world.fleet[world.pods[0]]
    for _ in range(30):
        engine.serve(1)
        await world.tick()
    before = status_writes(world)
    engine.refuses = True
    world.edit({"batching": {"maxBatchTokens": 777}})
    await world.change()
    assert status_writes(world) == before + 1
    assert world.condition("ParametersDrifted")["status"] == "True"
    engine.refuses = False
    await world.tick()
    assert status_writes(world) == before + 2
    assert world.condition("ParametersDrifted")["status"] == "False"


async def test_figures_of_traffic_that_ended_right_after_a_write_do_not_stand_for_ever(world: World) -> None:
    """The last request came in the very interval that was written; that no more came is news, once."""
    await world.settle()
    engine = world.fleet[world.pods[0]]
    for tick in range(400):
        before = status_writes(world)
        engine.serve(tick % 3 == 0)
        await world.tick()
        if tick > 100 and tick % 3 == 0 and status_writes(world) > before:
            break
    assert world.status["throughput"]["requestsPerMinute"] > 0
    for _ in range(40):
        await world.tick()
    assert world.status["throughput"]["requestsPerMinute"] == 0
    assert status_writes(world) == before + 2


async def test_traffic_that_grows_tenfold_is_told_within_a_minute(world: World) -> None:
    """Figures that moved by more than chance do not wait for the refresh."""
    await world.settle()
    engine = world.fleet[world.pods[0]]
    for _ in range(40):
        engine.serve(60)
        await world.tick()
    before = world.status["throughput"]["requestsPerMinute"]
    for _ in range(7):
        engine.serve(600)
        await world.tick()
    assert world.status["throughput"]["requestsPerMinute"] > 5 * before


async def test_what_the_controller_does_is_reported(world: World) -> None:
    """Its own metrics hear of scrapes, decisions, writes and generations."""
    await world.settle()
    assert world.heard.scrapes >= 3
    assert world.heard.verdicts
    assert world.heard.status_writes >= 2
    assert set(world.heard.reads) == {1}


# Faults.


def normal(world: World) -> list[dict[str, Any]]:
    """Every object without what differs between two runs of the same story."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            hidden = {
                "uid",
                "resourceVersion",
                "lastTransitionTime",
                "key",
                "headway.dev/declared",
                "generation",
            }
            return {k: clean(v) for k, v in value.items() if k not in hidden}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return [clean(o) for o in world.cluster.all() if o["kind"] not in (KIND[1], "Pod")]


async def story(fault: Fault | None) -> World:
    """Create, pods start, live edit, restart edit; with one fault armed from the first call on."""
    world = World()
    world.create()
    world.cluster.fault = fault
    await world.persist()
    world.cluster.run_deployments()
    await world.persist()
    world.edit({"batching": {"maxBatchTokens": 512}})
    await world.persist()
    world.edit({"batching": {"maxBatchTokens": 512, "kvCache": {"blockTokens": 32}}})
    await world.persist()
    world.cluster.run_deployments()
    await world.persist()
    return world


@pytest.mark.parametrize("after_effect", [False, True])
async def test_a_failure_at_any_call_ends_in_the_same_state(after_effect: bool) -> None:
    """Every call of a whole life fails once, before or after its effect: the end is the same."""
    plain = await story(None)
    calls = plain.cluster._call_number
    assert calls > 40
    for n in range(1, calls + 1):
        error = TryAgain("cut off") if n % 2 else Conflict("someone was faster")
        world = await story(Fault(n, error, after_effect))
        assert normal(world) == normal(plain), f"call {n}: {world.cluster.calls[n - 1]}"
        engine = world.fleet[world.pods[0]]
        assert engine.limits.max_batch_tokens == 512
        assert world.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("after_effect", [False, True])
async def test_a_controller_killed_at_any_call_is_completed_by_the_next(after_effect: bool) -> None:
    """The same, but the process dies with the call and a new one starts with nothing."""

    class Killed(BaseException):
        pass

    plain = await story(None)
    for n in range(1, plain.cluster._call_number + 1, 3):
        world = World()
        world.create()
        world.cluster.fault = Fault(n, Killed(), after_effect)  # type: ignore[arg-type]

        async def live(world: World = world) -> None:
            try:
                await world.change()
            except Killed:
                world.start_controller()
                await world.change()

        await live()
        world.cluster.run_deployments()
        await live()
        world.edit({"batching": {"maxBatchTokens": 512}})
        await live()
        world.edit({"batching": {"maxBatchTokens": 512, "kvCache": {"blockTokens": 32}}})
        await live()
        world.cluster.run_deployments()
        await live()
        assert normal(world) == normal(plain), f"killed at call {n}"
        assert world.fleet[world.pods[0]].limits.max_batch_tokens == 512


@pytest.mark.parametrize("error", [TryAgain("events are full"), Gone("the namespace is being deleted")])
async def test_an_event_that_cannot_be_posted_is_not_worth_a_failure(
    world: World, monkeypatch: pytest.MonkeyPatch, error: ClusterError
) -> None:
    """Limits and status are what counts."""
    await world.settle()
    set_verdict(monkeypatch, 640)

    async def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(world.cluster, "post_event", broken)
    await world.tick()
    assert world.fleet[world.pods[0]].limits.max_batch_tokens == 640


async def test_only_reads_happen_for_an_unknown_name() -> None:
    """A key whose resource is gone costs one read."""
    world = World()
    assert await world.change("nobody") is None
    assert world.cluster.calls == [Call("get", KIND[1], "nobody")]
    assert dataclasses.astuple(world.heard) == ([], 0, 0, 0, [])
