"""A Wayland compositor and an X server, as far as the session companion asks them."""

import asyncio
import struct
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.signals.testing import Sender, listening
from agent.signals.wayland import MessageReader, encode


class FakeCompositor:
    """A compositor that announces some globals and tells of idle seats when the test says so.

    Args:
        path: of its socket.
        announced: (interface, version) of its globals.
        piece: how many bytes are sent at once; None sends messages whole.
    """

    def __init__(self, path: Path, announced: Sequence[tuple[str, int]], *, piece: int | None = None) -> None:
        self._path = path
        self._announced = announced
        self._piece = piece
        self._listening = AsyncExitStack()
        self._writer: Sender | None = None
        # (opcode, notification object, timeout) of each notification that was asked for.
        self.asked: list[tuple[int, int, int]] = []
        self.bound: list[tuple[str, int]] = []
        self.ready = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._listening.enter_async_context(listening(self._path, self._serve))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._listening.aclose()

    def idled(self, which: int = 0) -> None:
        self.send(encode(self.asked[which][1], 0))

    def resumed(self, which: int = 0) -> None:
        self.send(encode(self.asked[which][1], 1))

    def send(self, data: bytes) -> None:
        """Send bytes that need not be a message."""
        assert self._writer is not None
        self._writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = Sender(writer, self._piece)
        requests = MessageReader()
        notifier = 0
        while data := await reader.read(4096):
            for request in requests.feed(data):
                if (request.object_id, request.opcode) == (1, 1):
                    for name, (interface, version) in enumerate(self._announced, start=1):
                        self.send(encode(2, 0, name, interface, version))
                elif (request.object_id, request.opcode) == (1, 0):
                    self.send(encode(3, 0, 7))
                elif (request.object_id, request.opcode) == (2, 0):
                    name, version, number = _bound(request.body)
                    self.bound.append((self._announced[name - 1][0], version))
                    if self._announced[name - 1][0].startswith("ext_idle"):
                        notifier = number
                elif request.object_id == notifier:
                    number, timeout_ms, _ = struct.unpack("=III", request.body)
                    self.asked.append((request.opcode, number, timeout_ms))
                    self.ready.set()


def _bound(body: bytes) -> tuple[int, int, int]:
    """Return name, version and new object of a bind request."""
    name, length = struct.unpack_from("=II", body)
    version, number = struct.unpack_from("=II", body, 8 + length + -length % 4)
    return name, version, number


@dataclass
class FakeX:
    """An X server with a screen saver extension and one window in front.

    Args:
        path: of its socket.
        piece: how many bytes are sent at once; None sends replies whole.
    """

    path: Path
    idle_ms: int = 0
    fullscreen: bool = False
    window: int = 77
    has_saver: bool = True
    cookie: bytes = b""
    # Instead of a reply to the screen saver question.
    reply: bytes | None = None
    piece: int | None = None
    _atoms: list[str] = field(default_factory=list)
    _listening: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        await self._listening.enter_async_context(listening(self.path, self._serve))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._listening.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sender = Sender(writer, self.piece)
        hello = await reader.readexactly(12)
        name_bytes, data_bytes = struct.unpack_from("<HH", hello, 6)
        await reader.readexactly(name_bytes + -name_bytes % 4)
        cookie = (await reader.readexactly(data_bytes + -data_bytes % 4))[:data_bytes]
        if cookie != self.cookie:
            sender.write(struct.pack("<BBHHH", 0, 12, 11, 0, 3) + b"No protocol\0")
            return
        vendor = b"fake"
        body = struct.pack("<IIIIHHBBBBBBBB4x", 1, 0, 0, 0, len(vendor), 65535, 1, 1, 0, 0, 32, 32, 8, 255)
        body += vendor + bytes(8) + struct.pack("<I", 5) + bytes(36)
        sender.write(struct.pack("<BxHHH", 1, 11, 0, len(body) // 4) + body)
        sequence = 0
        while True:
            opcode, detail, words = struct.unpack("<BBH", await reader.readexactly(4))
            request = await reader.readexactly(4 * words - 4)
            sequence += 1
            # An event in between, as a real server sends them.
            sender.write(struct.pack("<BxH28x", 12, sequence))
            sender.write(self._answer(opcode, detail, request, sequence))

    def _answer(self, opcode: int, detail: int, request: bytes, sequence: int) -> bytes:
        if opcode == 98:
            return struct.pack("<BxHIBB22x", 1, sequence, 0, self.has_saver, 140)
        if opcode == 16:
            name = request[4 : 4 + struct.unpack_from("<H", request)[0]].decode()
            if name not in self._atoms:
                self._atoms.append(name)
            return struct.pack("<BxHII20x", 1, sequence, 0, 100 + self._atoms.index(name))
        if opcode == 140:
            if self.reply is not None:
                return self.reply
            return struct.pack("<BBHIIIII8x", 1, 0, sequence, 0, 5, 0, self.idle_ms, 0)
        window, atom = struct.unpack_from("<II", request)
        values: tuple[int, ...] = ()
        if window == 5 and self._atoms[atom - 100] == "_NET_ACTIVE_WINDOW":
            values = (self.window,)
        elif window == self.window and self.fullscreen:
            values = (999, 100 + self._atoms.index("_NET_WM_STATE_FULLSCREEN"))
        head = struct.pack("<BBHIIII12x", 1, 32, sequence, len(values), 4, 0, len(values))
        return head + struct.pack(f"<{len(values)}I", *values)
