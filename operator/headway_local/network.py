"""A network namespace of our own: a loopback device on which whole private ranges are local.

With 10.244.0.0/16 on `lo`, every pod may bind an address of its own, and no packet can leave. (Addresses
of 127.0.0.0/8 will not do: the API server refuses them in EndpointSlices.) Linux only; needs CAP_SYS_ADMIN,
which a user without privileges has inside `unshare --map-root-user`.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFFLAGS = 0x8916, 0x891C, 0x8914
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40


def _libc(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _current() -> int:
    """A descriptor of the calling thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _request(device: str, code: int, payload: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, code, struct.pack("16s", device.encode()) + payload.ljust(24, b"\0"))


def _add_local_range(label: str, address: str, prefix: int) -> None:
    """Make all of `address`/`prefix` addresses of this machine."""

    def sockaddr(ip: str) -> bytes:
        return struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(ip))

    mask = socket.inet_ntoa(struct.pack("!I", (0xFFFFFFFF << (32 - prefix)) & 0xFFFFFFFF))
    _request(label, _SIOCSIFADDR, sockaddr(address))
    _request(label, _SIOCSIFNETMASK, sockaddr(mask))


def isolate(ranges: tuple[tuple[str, int], ...]) -> None:
    """Move the calling thread into a new network namespace in which these (address, prefix) ranges are local.

    Threads and processes that it starts afterwards are there too. OSError where that is not permitted.
    """
    _libc("unshare", CLONE_NEWNET)
    _request("lo", _SIOCSIFFLAGS, struct.pack("=H", _IFF_UP | _IFF_LOOPBACK | _IFF_RUNNING))
    for number, (address, prefix) in enumerate(ranges, start=1):
        _add_local_range(f"lo:{number}", address, prefix)


class NetworkNamespace:
    """A namespace that the calling thread visits: `with namespace.entered(): ...`."""

    def __init__(self, ranges: tuple[tuple[str, int], ...]) -> None:
        home = _current()
        try:
            isolate(ranges)
            self._inside = _current()
        finally:
            _libc("setns", home, CLONE_NEWNET)
            os.close(home)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside during the block."""
        home = _current()
        _libc("setns", self._inside, CLONE_NEWNET)
        try:
            yield
        finally:
            _libc("setns", home, CLONE_NEWNET)
            os.close(home)

    def close(self) -> None:
        """Let it go; the kernel removes it once nothing runs inside."""
        os.close(self._inside)
