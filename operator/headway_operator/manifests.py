"""Resource to Kubernetes objects, pure: the same input gives the same objects, byte for byte.

What needs a restart stands in the pod template and nothing else does, so that a change of live limits
never replaces a pod. Knows nothing of the API server, of status or of what runs already.
"""

import base64
import math
from dataclasses import dataclass
from typing import Any

import msgspec

from headway_engine.protocol import Limits
from headway_operator.engines import Engine, Probe, engine
from headway_operator.resource import API_VERSION, KIND, Resource, RolloutStrategy

Manifest = dict[str, Any]

OWNER_LABEL = "headway.dev/inference-deployment"
TENANTS_ANNOTATION = "headway.dev/tenants-hash"
"""On pods: the engine reads its tenants at start, and an edit of a ConfigMap alone would replace no pod."""
CONTROL_KEY = "key"  # in the Secret NAME-control-key
CONFIG_FOLDER = "/etc/headway"
KEYS_FOLDER = "/etc/headway-keys"
CACHE_FOLDER = "/cache"
LIMITS_FILE = "limits.json"
OBJECTIVES_FILE = "objectives.json"
TENANTS_FILE = "tenants.json"

USER_ID = 65532
PRE_STOP_S = 5
"""Pause before SIGTERM, in which load balancers learn that the pod leaves."""
STOP_MARGIN_S = 15
"""What stopping may take beyond the drain: closing sockets, freeing device memory."""


@dataclass(frozen=True, slots=True)
class Images:
    """The engine's image where the resource names none."""

    engine: str
    pull_policy: str = "IfNotPresent"


def service_name(name: str) -> str:
    """Service of the OpenAI API."""
    return name


def pods_service_name(name: str) -> str:
    """Headless Service that gives every pod a name of its own, ready or not."""
    return f"{name}-pods"


def control_key_name(name: str) -> str:
    """Secret with the bearer key of the engines' control API."""
    return f"{name}-control-key"


def limits_name(name: str) -> str:
    """ConfigMap with the limits, objectives and tenants that a starting engine begins with."""
    return f"{name}-limits"


def selector(name: str) -> dict[str, str]:
    """Labels that every pod of this deployment carries and no other pod does."""
    return {OWNER_LABEL: name}


def endpoint(resource: Resource) -> str:
    """Base URL of the OpenAI API inside the cluster."""
    return f"http://{service_name(resource.name)}.{resource.namespace}.svc/v1"


def labels(name: str) -> dict[str, str]:
    """Labels of every object that belongs to the deployment."""
    return {
        "app.kubernetes.io/name": "headway",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": "engine",
        "app.kubernetes.io/managed-by": "headway",
        **selector(name),
    }


def build(resource: Resource, *, images: Images, control_key: str | None, limits: Limits) -> list[Manifest]:
    """Every object that should exist for the resource, in the order in which to apply them.

    `limits` are those that a starting engine begins with. With `control_key` None the Secret is left
    out: it exists already and its content is not ours to read again.
    """
    objects = [_service_account(resource)]
    if control_key is not None:
        objects.append(_control_key(resource, control_key))
    return [
        *objects,
        _limits(resource, limits),
        _service(resource),
        _pods_service(resource),
        _deployment(resource, images),
    ]


def _object(resource: Resource, api_version: str, kind: str, name: str, **content: Any) -> Manifest:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": resource.namespace,
            "labels": labels(resource.name),
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": resource.name,
                    "uid": resource.uid,
                    "controller": True,
                    # Blocking would need the right to change finalizers of the resource.
                    "blockOwnerDeletion": False,
                }
            ],
        },
        **content,
    }


def _service_account(resource: Resource) -> Manifest:
    return _object(resource, "v1", "ServiceAccount", resource.name, automountServiceAccountToken=False)


def _control_key(resource: Resource, key: str) -> Manifest:
    name = control_key_name(resource.name)
    # Not stringData: it is write-only, so server-side apply could not see that nothing changed.
    data = {CONTROL_KEY: base64.b64encode(key.encode()).decode()}
    return _object(resource, "v1", "Secret", name, type="Opaque", data=data)


def _limits(resource: Resource, limits: Limits) -> Manifest:
    data = {
        LIMITS_FILE: msgspec.json.encode(limits).decode(),
        OBJECTIVES_FILE: msgspec.json.encode(resource.slo.objectives()).decode(),
    }
    if (tenants := resource.tenancy.policy()) is not None:
        data[TENANTS_FILE] = tenants
    return _object(resource, "v1", "ConfigMap", limits_name(resource.name), data=data)


def _service(resource: Resource) -> Manifest:
    port = {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    spec = {
        "type": "ClusterIP",
        "internalTrafficPolicy": "Cluster",
        "selector": selector(resource.name),
        "ports": [port],
    }
    return _object(resource, "v1", "Service", service_name(resource.name), spec=spec)


def _pods_service(resource: Resource) -> Manifest:
    table = engine(resource.runtime.engine)
    port = {
        "name": "management",
        "port": table.management_port,
        "targetPort": "management",
        "protocol": "TCP",
        "appProtocol": "http",
    }
    spec = {
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(resource.name),
        "ports": [port],
    }
    return _object(resource, "v1", "Service", pods_service_name(resource.name), spec=spec)


def _deployment(resource: Resource, images: Images) -> Manifest:
    spec = {
        "replicas": resource.replicas,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": _startup_s(engine(resource.runtime.engine)) + 300,
        "selector": {"matchLabels": selector(resource.name)},
        "strategy": _strategy(resource),
        "template": pod_template(resource, images),
    }
    return _object(resource, "apps/v1", "Deployment", resource.name, spec=spec)


def _startup_s(table: Engine) -> int:
    return table.startup.period_s * table.startup.failures


def _strategy(resource: Resource) -> dict[str, Any]:
    match resource.rollout.strategy:
        case RolloutStrategy.RECREATE:
            return {"type": "Recreate"}
        case RolloutStrategy.ROLLING:
            surge = True
        case RolloutStrategy.AUTO:
            # A second pod beside the old one needs a spare accelerator, and there may be none.
            surge = not accelerators(resource)
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": int(surge), "maxUnavailable": int(not surge)},
    }


def accelerators(resource: Resource) -> tuple[str, ...]:
    """Names of the extended resources (`nvidia.com/gpu`) that a pod asks for."""
    asked = {**resource.resources.get("requests", {}), **resource.resources.get("limits", {})}
    return tuple(sorted(name for name in asked if "/" in name and str(asked[name]) != "0"))


def pod_template(resource: Resource, images: Images) -> dict[str, Any]:
    """The pod template: everything that needs a restart, and nothing that does not."""
    overlay = resource.pod_template
    # The deployment's own labels win: the selectors hang on them.
    metadata: dict[str, Any] = {"labels": {**overlay.get("labels", {}), **labels(resource.name)}}
    annotations = dict(overlay.get("annotations", {}))
    if (tenants := resource.tenancy.digest()) is not None:
        annotations[TENANTS_ANNOTATION] = tenants
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": _pod(resource, images)}


def _pod(resource: Resource, images: Images) -> dict[str, Any]:
    overlay = resource.pod_template
    pod: dict[str, Any] = {
        "serviceAccountName": resource.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(
            PRE_STOP_S + resource.rollout.drain_timeout_s + STOP_MARGIN_S
        ),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(resource, images)],
        "volumes": _volumes(resource),
    }
    for key in (
        "nodeSelector",
        "tolerations",
        "affinity",
        "priorityClassName",
        "runtimeClassName",
        "schedulerName",
        "imagePullSecrets",
    ):
        if overlay.get(key):
            pod[key] = overlay[key]
    if overlay.get("topologySpreadConstraints"):
        mine = {"matchLabels": selector(resource.name)}
        pod["topologySpreadConstraints"] = [
            {"labelSelector": mine, **constraint} for constraint in overlay["topologySpreadConstraints"]
        ]
    return pod


def _volumes(resource: Resource) -> list[dict[str, Any]]:
    volumes = [
        {"name": "headway-limits", "configMap": {"name": limits_name(resource.name)}},
        {"name": "headway-tmp", "emptyDir": {}},
    ]
    if not _user_cache(resource):
        volumes.append({"name": "headway-cache", "emptyDir": {}})
    if resource.tenancy.keys_secret:
        # Not optional: without its keys an engine does not start, and never with an open API.
        keys = {"secretName": resource.tenancy.keys_secret, "defaultMode": 0o440}
        volumes.append({"name": "headway-keys", "secret": keys})
    return [*volumes, *resource.pod_template.get("volumes", [])]


def _user_cache(resource: Resource) -> bool:
    """Whether the user mounts a volume of their own as the model cache."""
    return any(mount["mountPath"] == CACHE_FOLDER for mount in resource.pod_template.get("volumeMounts", []))


def _mounts(resource: Resource) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "headway-limits", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "headway-tmp", "mountPath": "/tmp"},
    ]
    if not _user_cache(resource):
        mounts.append({"name": "headway-cache", "mountPath": CACHE_FOLDER})
    if resource.tenancy.keys_secret:
        mounts.append({"name": "headway-keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    return [*mounts, *resource.pod_template.get("volumeMounts", [])]


def _container(resource: Resource, images: Images) -> dict[str, Any]:
    table = engine(resource.runtime.engine)
    container: dict[str, Any] = {
        "name": "engine",
        "image": resource.runtime.image or images.engine,
        "imagePullPolicy": images.pull_policy,
        # `kubectl describe pod` then shows the engine's last words when it could not start.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "args": _arguments(resource, table),
        "env": _environment(resource, table),
        "ports": [
            {"name": "http", "containerPort": table.public_port, "protocol": "TCP"},
            {"name": "management", "containerPort": table.management_port, "protocol": "TCP"},
        ],
        "startupProbe": _probe(table.startup),
        "readinessProbe": _probe(table.readiness),
        "livenessProbe": _probe(table.liveness),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": _mounts(resource),
    }
    if resource.resources:
        container["resources"] = resource.resources
    return container


def _arguments(resource: Resource, table: Engine) -> list[str]:
    tenancy = resource.tenancy
    files = (
        (table.limits_flag, f"{CONFIG_FOLDER}/{LIMITS_FILE}"),
        (table.objectives_flag, f"{CONFIG_FOLDER}/{OBJECTIVES_FILE}"),
        (table.tenants_flag if tenancy.policy() else None, f"{CONFIG_FOLDER}/{TENANTS_FILE}"),
        (table.keys_flag if tenancy.keys_secret else None, KEYS_FOLDER),
    )
    return [
        *table.arguments(resource),
        *table.required_flags,
        *(f"{flag}={path}" for flag, path in files if flag),
        *resource.runtime.extra_args,
    ]


def _environment(resource: Resource, table: Engine) -> list[dict[str, Any]]:
    def secret(name: str, key: str) -> dict[str, Any]:
        return {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}

    def pod_field(path: str) -> dict[str, Any]:
        return {"valueFrom": {"fieldRef": {"fieldPath": path}}}

    variables: dict[str, dict[str, Any]] = {
        "POD_NAME": pod_field("metadata.name"),
        "POD_IP": pod_field("status.podIP"),
        # The root file system is read-only; libraries that write below home find a place here.
        "HOME": {"value": "/tmp"},
        "HF_HOME": {"value": f"{CACHE_FOLDER}/huggingface"},
    }
    if table.control_key_env:
        variables[table.control_key_env] = secret(control_key_name(resource.name), CONTROL_KEY)
    if table.cache_env:
        variables[table.cache_env] = {"value": CACHE_FOLDER}
    if resource.model.hf_token:
        variables["HF_TOKEN"] = secret(resource.model.hf_token.name, resource.model.hf_token.key)
    # One entry per name, the user's last: the API refuses a name that stands twice.
    for variable in resource.runtime.env:
        variables[variable["name"]] = {key: value for key, value in variable.items() if key != "name"}
    return [{"name": name, **source} for name, source in variables.items()]


def _probe(probe: Probe) -> dict[str, Any]:
    return {
        "httpGet": {"path": probe.path, "port": probe.port, "scheme": "HTTP"},
        "periodSeconds": probe.period_s,
        "timeoutSeconds": probe.timeout_s,
        "failureThreshold": probe.failures,
        "successThreshold": 1,
    }
