"""The channel between the API front end and the engine core: whole messages over one socket pair.

A frame is four bytes of length and one MessagePack message of `messages`. The core's end blocks in
threads, the front end's end awaits. The end of the stream means that the other process is gone; that
is the only way either learns of it. Knows nothing of what the messages mean.
"""

import asyncio
import socket
import struct
import threading

import msgspec

from headway_engine.messages import Command, Report

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 4 << 20
"""Socket buffers: room for some hundred steps, so that a short pause of one side does not stop the other."""


class ChannelClosed(Exception):
    """The process at the other end is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: the front end's and the core's."""
    front, core = socket.socketpair()
    for end in (front, core):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return front, core


class CoreEnd:
    """The core's end: `receive` belongs to one thread, `send` may be called from any."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Command).decode
        self._sending = threading.Lock()

    def receive(self) -> Command:
        """The next command; raises ChannelClosed when the front end is gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._decode(self._exactly(length))

    def send(self, report: Report) -> None:
        """Blocks while the front end is behind: a slow reader slows the steps and never grows memory."""
        body = self._encode(report)
        with self._sending:
            try:
                self._socket.sendall(_LENGTH.pack(len(body)) + body)
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        filled = 0
        while filled < count:
            try:
                got = self._socket.recv_into(view[filled:])
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not got:
                raise ChannelClosed("end of stream")
            filled += got
        return bytes(data)


class FrontEnd:
    """The front end's end, on its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Report).decode

    @classmethod
    async def open(cls, sock: socket.socket) -> "FrontEnd":
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=_BUFFER_BYTES)
        return cls(reader, writer)

    async def receive(self) -> Report:
        """The next report; raises ChannelClosed when the core is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed(str(error)) from error

    def send(self, command: Command) -> None:
        """Queue a command. What is queued is bounded by the requests that the front end lets in."""
        body = self._encode(command)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        self._writer.close()
