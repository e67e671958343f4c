"""A node for the plane: process kubelet and service proxy, in a thread inside the plane's network."""

import asyncio
import dataclasses
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from cluster.plane import NODE_IP, SERVICE_IP, Plane
from headway_local.images import ENGINE, OPERATOR, Image, Images
from headway_local.kube_api import KubeApi
from headway_local.kubelet import Kubelet
from headway_local.pod import BackOff, PodOptions, inherited_env, mounts_work
from headway_local.proxy import ServiceProxy

T = TypeVar("T")
NAME = "proc-0"
PYTHON = Image("python:*", ("{python}",))
# All pods share one network stack here, so each controller must take its own address only.
CONTROLLER = dataclasses.replace(OPERATOR, env={"HEADWAY_OPERATOR_HOST": "{pod_ip}"})
# An image brings its kernels along; here they are those of this machine's cache, where there are any.
CACHE = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache" / "headway")
MODEL_SERVER = dataclasses.replace(ENGINE, env={"HEADWAY_KERNELS": str(CACHE / "kernels")})
IMAGES = Images(rules=(MODEL_SERVER, CONTROLLER, PYTHON))
IN_CLUSTER = {
    "KUBERNETES_SERVICE_HOST": SERVICE_IP,
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_SERVICE_PORT_HTTPS": "443",
}


class Node:
    """Runs until `stop`. `kubelet` may be read from other threads; what awaits goes through `call`."""

    kubelet: Kubelet

    def __init__(
        self, plane: Plane, *, images: Images = IMAGES, gpus: int = 4, claims: Path | None = None
    ) -> None:
        self._plane = plane
        self._images = images
        self._capacity = {"nvidia.com/gpu": str(gpus)}
        self._claims = claims or plane.folder / "claims"
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._user = plane.authority.client("node", f"system:node:{NAME}", "system:nodes")
        self._proxy_user = plane.authority.client("proxy", "system:kube-proxy")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)
        with plane.network.entered():
            self._thread.start()
        if not self._ready.wait(30):
            raise RuntimeError("the node did not register within 30 s")
        if self._failure is not None:
            raise RuntimeError("the node ended at once") from self._failure

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        """Run a coroutine in the node's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def stop(self) -> None:
        """End every pod, then the node."""
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        options = PodOptions(
            images=self._images,
            host_ip=NODE_IP,
            claims=self._claims,
            # Ten seconds between restarts teach a test nothing.
            back_off=BackOff(first_s=0.5, most_s=5.0),
            bind_mounts=await mounts_work(),
            base_env={**inherited_env(), **IN_CLUSTER},
        )
        async with KubeApi(self._user) as api, KubeApi(self._proxy_user) as proxy_api:
            self.kubelet = Kubelet(
                api, name=NAME, folder=self._plane.folder / "pods", options=options, capacity=self._capacity
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(self.kubelet.run())
                group.create_task(ServiceProxy(proxy_api).run())
                await self.kubelet.registered.wait()
                self._ready.set()
