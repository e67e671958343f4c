"""A network of our own: whole ranges are local in it, and nothing outside is reachable."""

import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from headway_local.network import NetworkNamespace

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="making network namespaces needs root on Linux"
)


@pytest.fixture(scope="module")
def namespace() -> Iterator[NetworkNamespace]:
    try:
        made = NetworkNamespace((("10.244.0.1", 16), ("10.96.0.1", 16)))
    except PermissionError as error:
        pytest.skip(f"not permitted here: {error}")
    yield made
    made.close()


@pytest.mark.parametrize("address", ["10.244.0.1", "10.244.200.7", "10.96.3.4", "127.0.0.1"])
def test_every_address_of_a_range_can_be_served_and_reached(
    namespace: NetworkNamespace, address: str
) -> None:
    with (
        namespace.entered(),
        socket.create_server((address, 0)) as server,
        socket.create_connection(server.getsockname(), timeout=5) as client,
    ):
        assert client.getpeername()[0] == address


def test_nothing_outside_is_reachable(namespace: NetworkNamespace) -> None:
    with namespace.entered(), pytest.raises(OSError, match="unreachable"):
        socket.create_connection(("192.0.2.1", 80), timeout=5)


def test_outside_it_the_addresses_do_not_exist_and_a_thread_started_inside_stays(
    namespace: NetworkNamespace,
) -> None:
    found: list[str] = []

    def serve() -> None:
        inside.wait(10)
        with socket.create_server(("10.244.7.7", 0)) as server:
            found.append(server.getsockname()[0])

    inside = threading.Event()
    with namespace.entered():
        thread = threading.Thread(target=serve)
        thread.start()
    with pytest.raises(OSError, match="assign requested address"), socket.create_server(("10.244.7.7", 0)):
        found.append("outside")
    inside.set()
    thread.join(10)
    assert found == ["10.244.7.7"]
