"""Service addresses by forwarding: connections to a service go round-robin to its ready endpoints.

`Forwarder` is one listening address with a function that names its backends, and is all that `headway up`
needs. `ServiceProxy` keeps one per cluster address and port, from Services and EndpointSlices: what
kube-proxy does in a cluster, TCP only.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Mapping, Sequence

from headway_local.kube_api import KubeApi
from headway_local.objects import Manifest

Backend = tuple[str, int]
_CHUNK_BYTES = 65536


class Forwarder:
    """Accepts on one address; a new connection goes to the next backend, or is cut where there is none."""

    def __init__(self, host: str, port: int, backends: Callable[[], Sequence[Backend]]) -> None:
        self._host = host
        self._port = port
        self._backends = backends
        self._next = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket | None = None) -> int:
        """Listen, on a socket of the caller's where one is given; returns the port (useful with port 0)."""
        if listening is not None:
            self._server = await asyncio.start_server(self._accept, sock=listening)
        else:
            self._server = await asyncio.start_server(self._accept, self._host, self._port)
        self._port = int(self._server.sockets[0].getsockname()[1])
        return self._port

    async def close(self) -> None:
        """Stop listening and cut what is open."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio complains about one that it made and that is cancelled.
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backends = self._backends()
        if not backends:
            writer.transport.abort()
            return
        host, port = backends[self._next % len(backends)]
        self._next += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, far_writer))
                group.create_task(_pump(far_reader, writer))
        except* OSError:
            # One side was reset; the other hears it as a reset too.
            writer.transport.abort()
            far_writer.transport.abort()
        finally:
            for end in (writer, far_writer):
                end.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy until the end of `source`, and pass the end on (half-close)."""
    while data := await source.read(_CHUNK_BYTES):
        sink.write(data)
        await sink.drain()
    with contextlib.suppress(OSError):
        if sink.can_write_eof():
            sink.write_eof()


def backends_of(port: Manifest, slices: Sequence[Manifest]) -> list[Backend]:
    """Ready endpoints of one service port, sorted, from the service's EndpointSlices."""
    found: set[Backend] = set()
    for piece in slices:
        numbers = [
            p["port"] for p in piece.get("ports") or () if (p.get("name") or "") == (port.get("name") or "")
        ]
        for endpoint in piece.get("endpoints") or ():
            if (endpoint.get("conditions") or {}).get("ready", True):
                found |= {(address, number) for address in endpoint["addresses"] for number in numbers}
    return sorted(found)


class ServiceProxy:
    """Makes cluster addresses work on this machine; they must be local to it (see `network`)."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._services: dict[str, Manifest] = {}
        self._slices: dict[str, Manifest] = {}
        self._forwarders: dict[Backend, Forwarder] = {}
        self._ports: dict[Backend, tuple[str, Manifest]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow("/api/v1/services", self._services))
                group.create_task(self._follow("/apis/discovery.k8s.io/v1/endpointslices", self._slices))
                group.create_task(self._serve())
        finally:
            await asyncio.gather(*(f.close() for f in self._forwarders.values()), return_exceptions=True)

    async def _follow(self, path: str, store: dict[str, Manifest]) -> None:
        async for event in self._api.watch(path):
            if event.type == "SYNCED":
                continue
            meta = event.object["metadata"]
            key = f"{meta['namespace']}/{meta['name']}"
            if event.type == "DELETED":
                store.pop(key, None)
            else:
                store[key] = event.object
            self._changed.set()

    async def _serve(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._ports = dict(_addresses(self._services))
            for address in self._forwarders.keys() - self._ports.keys():
                await self._forwarders.pop(address).close()
            for address in self._ports.keys() - self._forwarders.keys():
                forwarder = Forwarder(*address, functools.partial(self._backends, address))
                await forwarder.start()
                self._forwarders[address] = forwarder

    def _backends(self, address: Backend) -> list[Backend]:
        if address not in self._ports:
            return []
        service, port = self._ports[address]
        namespace, name = service.split("/")
        mine = [
            piece
            for piece in self._slices.values()
            if piece["metadata"]["namespace"] == namespace
            and (piece["metadata"].get("labels") or {}).get("kubernetes.io/service-name") == name
        ]
        return backends_of(port, mine)


def _addresses(services: Mapping[str, Manifest]) -> list[tuple[Backend, tuple[str, Manifest]]]:
    """Every TCP (cluster address, port) with the service it belongs to."""
    return [
        ((service["spec"]["clusterIP"], int(port["port"])), (key, port))
        for key, service in services.items()
        if service["spec"].get("clusterIP") not in (None, "", "None")
        for port in service["spec"].get("ports") or ()
        if port.get("protocol", "TCP") == "TCP"
    ]
