"""Objects that a resource becomes: what they hold, and what an edit changes in them."""

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from headway_engine import config
from headway_engine.protocol import (
    CONTROL_KEY_ENV,
    HEALTH_PATH,
    READY_PATH,
    BatchingMode,
    Limits,
    Objectives,
)
from headway_operator import manifests
from headway_operator.manifests import Images, Manifest, build
from headway_operator.resource import Effect, Resource, parse, restart_class
from support.resources import UID, Json, a_body, a_resource, merged, specs

IMAGES = Images("headway-engine:1")
quick = settings(max_examples=40, deadline=None)


def built(
    resource: Resource, *, control_key: str | None = "secret", limits: Limits | None = None
) -> list[Manifest]:
    return build(
        resource, images=IMAGES, control_key=control_key, limits=limits or resource.batching.limits()
    )


def one(objects: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def template(spec: Json | None = None) -> Json:
    result: Json = manifests.pod_template(a_resource(spec=spec), IMAGES)
    return result


def container(spec: Json | None = None) -> Json:
    (found,) = template(spec)["spec"]["containers"]
    result: Json = found
    return result


def environment(spec: Json | None = None) -> dict[str, Json]:
    return {variable["name"]: variable for variable in container(spec)["env"]}


def test_a_resource_becomes_these_objects() -> None:
    """Names are derived and never generated, so that applying twice is applying once."""
    names = [(o["kind"], o["metadata"]["name"]) for o in built(a_resource())]
    assert names == [
        ("ServiceAccount", "chat"),
        ("Secret", "chat-control-key"),
        ("ConfigMap", "chat-limits"),
        ("Service", "chat"),
        ("Service", "chat-pods"),
        ("Deployment", "chat"),
    ]


def test_the_longest_allowed_name_makes_names_that_kubernetes_allows() -> None:
    longest = 63  # a Service's name and a label's value
    assert all(len(o["metadata"]["name"]) <= longest for o in built(a_resource("a" * 50)))


@quick
@given(specs())
def test_the_same_resource_gives_the_same_objects(spec: Json) -> None:
    assert built(a_resource(spec=spec)) == built(a_resource(spec=spec))


@quick
@given(specs())
def test_every_object_belongs_to_the_resource_and_goes_with_it(spec: Json) -> None:
    for manifest in built(a_resource(namespace="models", spec=spec)):
        metadata = manifest["metadata"]
        assert metadata["namespace"] == "models"
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "headway.dev/v1alpha1",
                "kind": "InferenceDeployment",
                "name": "chat",
                "uid": UID,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ]
        assert metadata["labels"] == {
            "app.kubernetes.io/name": "headway",
            "app.kubernetes.io/instance": "chat",
            "app.kubernetes.io/component": "engine",
            "app.kubernetes.io/managed-by": "headway",
            "headway.dev/inference-deployment": "chat",
        }


def test_every_selector_finds_the_pods_and_only_those() -> None:
    objects = built(a_resource())
    labels = template()["metadata"]["labels"]
    for selector in (
        one(objects, "Deployment", "chat")["spec"]["selector"]["matchLabels"],
        one(objects, "Service", "chat")["spec"]["selector"],
        one(objects, "Service", "chat-pods")["spec"]["selector"],
    ):
        assert selector == manifests.selector("chat")
        assert selector.items() <= labels.items()


@quick
@given(specs())
def test_the_engine_understands_the_arguments_it_is_given(spec: Json) -> None:
    """Round trip: what the user wrote is what the engine reads."""
    resource = a_resource(spec=spec)
    read = config.parse(manifests.pod_template(resource, IMAGES)["spec"]["containers"][0]["args"])
    batching = resource.batching
    assert read.model == resource.model.uri
    assert read.revision == resource.model.revision
    assert read.served_model_name == resource.model.name
    assert read.max_model_len == resource.model.max_model_len
    assert read.dtype == resource.model.dtype
    assert read.capacity_max_batch_tokens == batching.capacity_max_batch_tokens
    assert read.capacity_max_batch_sequences == batching.capacity_max_batch_sequences
    assert read.kv_memory_percent == batching.kv_memory_percent
    assert read.kv_block_tokens == batching.kv_block_tokens
    assert read.prefix_caching == batching.prefix_caching
    assert read.drain_timeout_s == resource.rollout.drain_timeout_s
    assert str(read.limits_file) == "/etc/headway/limits.json"
    assert str(read.objectives_file) == "/etc/headway/objectives.json"
    assert read.host == "0.0.0.0"
    assert read.log_level == ("debug" if resource.runtime.extra_args else "info")


def test_arguments_are_not_expanded_by_kubernetes() -> None:
    """`$(NAME)` would be replaced by a variable's value; a name with it in it stays itself."""
    resource = a_resource()
    odd = Resource(
        namespace="default",
        name="chat",
        uid=UID,
        generation=1,
        model=type(resource.model)(uri="hf://a/b", name="$(HOME)"),
    )
    args = manifests.pod_template(odd, IMAGES)["spec"]["containers"][0]["args"]
    assert "--served-model-name=$$(HOME)" in args


@quick
@given(specs())
def test_a_starting_engine_finds_limits_and_objectives_it_can_read(spec: Json) -> None:
    resource = a_resource(spec=spec)
    data = one(built(resource), "ConfigMap", "chat-limits")["data"]
    assert msgspec.json.decode(data["limits.json"], type=Limits) == resource.batching.limits()
    assert msgspec.json.decode(data["objectives.json"], type=Objectives) == resource.slo.objectives()


def test_a_starting_engine_begins_with_tuned_limits_where_there_are_some() -> None:
    tuned = Limits(generation=7, max_batch_tokens=333)
    data = one(built(a_resource(), limits=tuned), "ConfigMap", "chat-limits")["data"]
    assert msgspec.json.decode(data["limits.json"], type=Limits) == tuned


LIVE_EDITS: tuple[Json, ...] = (
    {"replicas": 5},
    {"batching": {"mode": "Static"}},
    {"batching": {"window": "30ms"}},
    {"batching": {"maxBatchTokens": 1000}},
    {"batching": {"maxBatchSequences": 7}},
    {"batching": {"prefillChunkTokens": 99}},
    {"batching": {"queue": {"maxRequests": 1}}},
    {"batching": {"queue": {"maxTokens": 1}}},
    {"batching": {"queue": {"timeout": "1s"}}},
    {"slo": {"ttft": {"p99": "9s"}}},
    {"slo": None},
    {"tuning": {"mode": "Off"}},
    {"tuning": {"interval": "3s"}},
    {"tuning": {"bounds": {"maxBatchTokens": {"max": 4096}}}},
    {"tuning": {"onMetricsLoss": "Static"}},
    {"rollout": {"strategy": "Recreate"}},
)

RESTART_EDITS: tuple[Json, ...] = (
    {"model": {"uri": "random://llama?hidden=128"}},
    {"model": {"name": "other"}},
    {"model": {"maxModelLen": 512}},
    {"model": {"dtype": "float32"}},
    {"runtime": {"image": "other:1"}},
    {"runtime": {"extraArgs": ["--log-level=debug"]}},
    {"runtime": {"env": [{"name": "A", "value": "1"}]}},
    {"batching": {"kvCache": {"memoryPercent": 10}}},
    {"batching": {"kvCache": {"blockTokens": 32}}},
    {"batching": {"kvCache": {"prefixCaching": False}}},
    {"batching": {"capacity": {"maxBatchTokens": 4096}}},
    {"batching": {"capacity": {"maxBatchSequences": 200}}},
    {"tenancy": {"fairness": "FirstComeFirstServed"}},
    {"tenancy": {"tenants": [{"name": "gold"}]}},
    {"tenancy": {"keysSecretRef": {"name": "chat-keys"}}},
    {"rollout": {"drainTimeout": "5s"}},
    {"resources": {"limits": {"cpu": "2"}}},
    {"podTemplate": {"labels": {"team": "a"}}},
)


def leaves(tree: Json, path: str = "") -> list[str]:
    """Dotted paths of the members that an edit sets."""
    found = []
    for key, value in tree.items():
        below = f"{path}.{key}" if path else key
        found += leaves(value, below) if isinstance(value, dict) and value else [below]
    return found


@pytest.mark.parametrize("edit", LIVE_EDITS, ids=lambda edit: leaves(edit)[0])
def test_an_edit_of_a_live_field_replaces_no_pod(edit: Json) -> None:
    assert {restart_class(path) for path in leaves(edit)} == {Effect.LIVE}
    assert template(edit) == template()


@pytest.mark.parametrize("edit", RESTART_EDITS, ids=lambda edit: leaves(edit)[0])
def test_an_edit_of_a_restart_field_replaces_pods(edit: Json) -> None:
    assert {restart_class(path) for path in leaves(edit)} == {Effect.RESTART}
    assert template(edit) != template()


@quick
@given(specs(), specs())
def test_pods_are_replaced_for_nothing_but_restart_fields(one_spec: Json, other_spec: Json) -> None:
    """Two specs with the same restart fields make the same pods, whatever their live fields."""
    live_batching = ("mode", "window", "maxBatchTokens", "maxBatchSequences", "prefillChunkTokens", "queue")
    mixed = merged(
        other_spec,
        {
            **{key: one_spec[key] for key in ("replicas", "slo", "tuning")},
            "batching": {key: one_spec["batching"][key] for key in live_batching},
            "rollout": {"strategy": one_spec["rollout"]["strategy"]},
        },
    )

    def pods(spec: Json) -> Json:
        # Straight from the spec: the mixture may break rules between fields, which is not the point here.
        result: Json = manifests.pod_template(parse(a_body(spec=spec)), IMAGES)
        return result

    assert pods(mixed) == pods(other_spec)


def test_the_control_key_reaches_the_engine_through_the_secret_only() -> None:
    objects = built(a_resource(), control_key="s3cr3t")
    secret = one(objects, "Secret", "chat-control-key")
    assert base64.b64decode(secret["data"]["key"]) == b"s3cr3t"
    carriers = [o["kind"] for o in objects if "s3cr3t" in str(o) or secret["data"]["key"] in str(o)]
    assert carriers == ["Secret"]
    reference = environment()[CONTROL_KEY_ENV]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "chat-control-key", "key": "key"}


def test_a_control_key_that_exists_is_left_alone() -> None:
    assert "Secret" not in [o["kind"] for o in built(a_resource(), control_key=None)]


def test_a_hugging_face_token_comes_from_the_users_secret() -> None:
    assert "HF_TOKEN" not in environment()
    spec = {"model": {"uri": "hf://org/gated", "hfTokenSecretRef": {"name": "hf"}}}
    assert environment(spec)["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hf", "key": "token"}}


def test_a_variable_of_the_user_stands_once_even_where_we_set_it_too() -> None:
    """The API refuses a list with one name twice."""
    spec = {"runtime": {"env": [{"name": "HF_HOME", "value": "/mine"}, {"name": "B", "value": ""}]}}
    names = [variable["name"] for variable in container(spec)["env"]]
    assert len(names) == len(set(names))
    assert environment(spec)["HF_HOME"] == {"name": "HF_HOME", "value": "/mine"}
    assert environment(spec)["B"] == {"name": "B", "value": ""}


def test_pods_run_under_the_restricted_standard() -> None:
    pod = template()["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container()["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["readOnlyRootFilesystem"] is True


def test_the_engine_can_write_its_cache_and_tmp_and_nothing_else() -> None:
    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == {"/cache", "/tmp"}
    assert environment()["HEADWAY_CACHE"]["value"] == "/cache"
    sources = {volume["name"]: volume for volume in template()["spec"]["volumes"]}
    assert set(sources) == {mount["name"] for mount in mounts.values()}


def test_a_volume_of_the_user_can_be_the_model_cache() -> None:
    spec = {
        "podTemplate": {
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
            "volumeMounts": [{"name": "models", "mountPath": "/cache"}],
        }
    }
    mounts = [mount for mount in container(spec)["volumeMounts"] if mount["mountPath"] == "/cache"]
    assert mounts == [{"name": "models", "mountPath": "/cache"}]
    assert "headway-cache" not in [volume["name"] for volume in template(spec)["spec"]["volumes"]]


@pytest.mark.parametrize("drain", ["0s", "1s", "90s", "1500ms", "1h"])
def test_streams_are_not_cut_inside_the_drain_time(drain: str) -> None:
    """Row C.8 74: the three numbers; and the engine itself drains as long as the pod lets it, no longer."""
    pod = template({"rollout": {"drainTimeout": drain}})["spec"]
    drain_s = a_resource(spec={"rollout": {"drainTimeout": drain}}).rollout.drain_timeout_s
    pause_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + 5
    assert pause_s > 0, "endpoints need a moment to hear that the pod goes"
    own = config.parse(pod["containers"][0]["args"])
    assert own.drain_timeout_s == drain_s


def test_probes_ask_the_management_port() -> None:
    probes = container()
    for name, path in (
        ("startupProbe", "/readyz"),
        ("readinessProbe", "/readyz"),
        ("livenessProbe", "/healthz"),
    ):
        assert probes[name]["httpGet"] == {"path": path, "port": "management", "scheme": "HTTP"}
    assert {port["name"]: port["containerPort"] for port in probes["ports"]} == {
        "http": 8000,
        "management": 8001,
    }


def test_nothing_kills_a_pod_that_loads_a_large_model() -> None:
    """Row C.8 77: liveness is not asked before the startup probe has passed once, and that one is patient:
    half an hour is a 140 GB model at 80 MB/s."""
    probes = container()
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert startup["httpGet"]["path"] == READY_PATH, "ready means loaded; alive does not"
    assert "initialDelaySeconds" not in probes["livenessProbe"], (
        "a guess of the load time is no startup probe"
    )
    liveness = probes["livenessProbe"]
    assert liveness["httpGet"]["path"] == HEALTH_PATH
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30


def test_a_rollout_is_not_given_up_while_a_slow_model_loads() -> None:
    deployment = one(built(a_resource()), "Deployment", "chat")["spec"]
    startup = container()["startupProbe"]
    assert deployment["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]


GPU: Json = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
SURGE: Json = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
ONE_AT_A_TIME: Json = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


@pytest.mark.parametrize(
    ("spec", "strategy"),
    [
        ({}, SURGE),
        ({"resources": {"limits": {"cpu": "2", "memory": "1Gi"}}}, SURGE),
        (GPU, ONE_AT_A_TIME),
        ({"resources": {"requests": {"amd.com/gpu": 1}, "limits": {"amd.com/gpu": 1}}}, ONE_AT_A_TIME),
        (GPU | {"rollout": {"strategy": "RollingUpdate"}}, SURGE),
        (GPU | {"rollout": {"strategy": "Recreate"}}, {"type": "Recreate"}),
    ],
    ids=["no resources", "cpu only", "gpu", "gpu as a number", "gpu, surge wanted", "recreate"],
)
def test_pods_are_replaced_in_this_way(spec: Json, strategy: Json) -> None:
    """A surge needs a spare accelerator, so Auto does without where pods hold one."""
    assert one(built(a_resource(spec=spec)), "Deployment", "chat")["spec"]["strategy"] == strategy


def test_replicas_are_those_of_the_spec() -> None:
    for replicas in (0, 1, 4):
        deployment = one(built(a_resource(spec={"replicas": replicas})), "Deployment", "chat")
        assert deployment["spec"]["replicas"] == replicas


def test_the_overlay_is_laid_over_the_pods() -> None:
    overlay: dict[str, Any] = {
        "labels": {"team": "a"},
        "annotations": {"a/b": "c"},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "schedulerName": "mine",
        "imagePullSecrets": [{"name": "login"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
    }
    result = template({"podTemplate": overlay})
    assert result["metadata"]["labels"] == {**manifests.labels("chat"), "team": "a"}
    assert result["metadata"]["annotations"] == {"a/b": "c"}
    for key in overlay.keys() - {"labels", "annotations", "topologySpreadConstraints"}:
        assert result["spec"][key] == overlay[key]
    (spread,) = result["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"] == {"matchLabels": manifests.selector("chat")}


def test_our_labels_win_over_an_overlay_that_slipped_through() -> None:
    resource = Resource(
        namespace="default",
        name="chat",
        uid=UID,
        generation=1,
        model=a_resource().model,
        pod_template={"labels": {manifests.OWNER_LABEL: "other"}},
    )
    assert manifests.pod_template(resource, IMAGES)["metadata"]["labels"][manifests.OWNER_LABEL] == "chat"


def test_the_service_answers_on_port_80_for_ready_pods_only() -> None:
    service = one(built(a_resource()), "Service", "chat")["spec"]
    assert service["ports"] == [
        {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    ]
    assert "publishNotReadyAddresses" not in service
    assert manifests.endpoint(a_resource(namespace="models")) == "http://chat.models.svc/v1"


def test_pods_that_are_not_ready_can_still_be_measured() -> None:
    service = one(built(a_resource()), "Service", "chat-pods")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["ports"][0]["port"] == 8001


def test_the_image_is_the_users_or_ours() -> None:
    assert container()["image"] == "headway-engine:1"
    assert container({"runtime": {"image": "mine:2"}})["image"] == "mine:2"
    assert container()["imagePullPolicy"] == "IfNotPresent"


def test_mode_is_part_of_the_starting_limits() -> None:
    data = one(built(a_resource(spec={"batching": {"mode": "Dynamic"}})), "ConfigMap", "chat-limits")["data"]
    assert msgspec.json.decode(data["limits.json"], type=Limits).mode is BatchingMode.DYNAMIC
