"""One InferenceDeployment on the plane, as a test handles it: apply, wait, ask, look."""

import json
import time
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from cluster.node import Node
from cluster.plane import Plane
from headway_local.pod import PodProcess
from support.resources import a_body, merged

Json = dict[str, Any]
READY_TIMEOUT_S = 240
MODEL = "random://llama?hidden=64&layers=2&heads=4&kv_heads=2&vocab=512&context=8192&seed=7"
SMALL: Json = {
    "model": {"uri": MODEL, "maxModelLen": 4096},
    "batching": {
        "maxBatchTokens": 256,
        "maxBatchSequences": 16,
        "prefillChunkTokens": 128,
        "kvCache": {"memoryPercent": 10},
        "capacity": {"maxBatchTokens": 512, "maxBatchSequences": 32},
    },
    # The plain runner: the fused one compiles its kernels at the first start of every pod.
    "runtime": {"extraArgs": ["--threads=1", "--runner=transformers"]},
    "tuning": {"mode": "Off"},
}
OWNED = "deployments,replicasets,pods,services,configmaps,secrets,serviceaccounts"


def small(name: str = "chat", **spec: Any) -> Json:
    """A resource with a tiny random model and limits that only the user moves."""
    return a_body(name, spec=merged(SMALL, spec))


class Served:
    """The resource `name` in `namespace`."""

    def __init__(self, plane: Plane, node: Node, namespace: str, body: Json) -> None:
        self.plane = plane
        self.node = node
        self.namespace = namespace
        self.name: str = body["metadata"]["name"]
        plane.apply({**body, "metadata": {**body["metadata"], "namespace": namespace}})

    def kubectl(self, *arguments: str, check: bool = True) -> str:
        """kubectl in the resource's namespace; its output."""
        return self.plane.kubectl("-n", self.namespace, *arguments, check=check).stdout

    def wait_ready(self) -> "Served":
        """Until the condition Ready is True for the latest generation."""
        try:
            self.kubectl(
                "wait", "--for=condition=Ready", f"infd/{self.name}", f"--timeout={READY_TIMEOUT_S}s"
            )
        except AssertionError as error:
            logs = "\n".join(pod.log_tail(30) for pod in self.processes())
            raise AssertionError(f"{error}\n{logs}") from None
        return self

    def body(self) -> Json:
        """The resource as it stands in the API."""
        return dict(self.plane.objects("-n", self.namespace, "infd", self.name))

    def condition(self, kind: str) -> Json:
        """One condition of the status; empty where there is none."""
        return next((c for c in self.body().get("status", {}).get("conditions", ()) if c["type"] == kind), {})

    def patch(self, spec: Json) -> None:
        """A merge patch of the spec, as `kubectl edit` makes one."""
        self.kubectl("patch", "infd", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def pods(self) -> list[Json]:
        """Its pods, without those on their way out."""
        found = self.plane.objects(
            "-n", self.namespace, "pods", "-l", f"headway.dev/inference-deployment={self.name}"
        )
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def processes(self) -> list[PodProcess]:
        """Its pods' processes."""
        return self.node.kubelet.pods(self.namespace)

    def owned(self) -> list[str]:
        """Everything that carries its label, as KIND/NAME."""
        label = f"headway.dev/inference-deployment={self.name}"
        return self.kubectl("get", OWNED, "-l", label, "-o", "name").split()

    def url(self) -> str:
        """The OpenAI API at the Service's address."""
        service = self.plane.objects("-n", self.namespace, "service", self.name)
        return f"http://{service['spec']['clusterIP']}/v1"

    def client(self) -> openai.AsyncOpenAI:
        """The official client, with no retries: what fails must be seen."""
        return openai.AsyncOpenAI(base_url=self.url(), api_key="none", max_retries=0, timeout=120)

    async def metrics(self, pod: Json) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Samples of one pod's /metrics by name and sorted labels."""
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://{pod['status']['podIP']}:8001/metrics")
        answer.raise_for_status()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    async def limit(self, pod: Json, parameter: str) -> float:
        """A limit in force in one pod."""
        return (await self.metrics(pod))["headway_limit", (("parameter", parameter),)]

    def wait_gone(self, timeout_s: float = 60.0) -> None:
        """Until nothing that it owned is left, in the API and among processes."""
        self.plane.wait_for(lambda: not self.owned(), f"end of what {self.name} owned", timeout_s)
        self.plane.wait_for(lambda: not self.processes(), f"end of the processes of {self.name}", timeout_s)


async def stream(
    client: openai.AsyncOpenAI, model: str, tokens: int, *, prompt: str = "once upon a time"
) -> tuple[int, str | None]:
    """One streamed completion of exactly `tokens` tokens: tokens reported, and the finish reason."""
    reported, reason = 0, None
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in answer:
        if chunk.usage is not None:
            reported = chunk.usage.completion_tokens
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
    return reported, reason


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began
