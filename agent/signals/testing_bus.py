"""A message bus with scripted services, for the readers that ask one."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jeepney import HeaderFields, Message, MessageFlag, MessageType, Parser, new_error, new_method_return
from jeepney.low_level import Endianness, Header

from agent.signals.testing import PATIENCE_S, Sender, listening

Answer = tuple[str, tuple[Any, ...]]
Method = Callable[[tuple[Any, ...]], Answer]


class CallError(Exception):
    """Raised by a method to answer with an error of this name."""


@dataclass
class FakeService:
    """One service on a bus: methods by (path, interface, member), and properties by (path, interface)."""

    methods: dict[tuple[str, str, str], Method] = field(default_factory=dict)
    properties: dict[tuple[str, str], dict[str, tuple[str, Any]]] = field(default_factory=dict)

    def answer(self, message: Message) -> Answer:
        """Answer a method call.

        Raises:
            CallError: there is no such method.
        """
        fields = message.header.fields
        path, interface = fields[HeaderFields.path], fields.get(HeaderFields.interface, "")
        member = fields[HeaderFields.member]
        if interface == "org.freedesktop.DBus.Properties":
            found = self.properties.get((path, message.body[0]))
            if found is None or (member == "Get" and message.body[1] not in found):
                raise CallError("org.freedesktop.DBus.Error.UnknownProperty")
            return ("v", (found[message.body[1]],)) if member == "Get" else ("a{sv}", (found,))
        method = self.methods.get((path, interface, member))
        if method is None:
            raise CallError("org.freedesktop.DBus.Error.UnknownMethod")
        return method(message.body)


def signal_message(
    sender: str, path: str, interface: str, member: str, signature: str, body: tuple[Any, ...]
) -> Message:
    """Return a signal as a bus delivers it."""
    fields = {
        HeaderFields.path: path,
        HeaderFields.interface: interface,
        HeaderFields.member: member,
        HeaderFields.sender: sender,
    }
    if signature:
        fields[HeaderFields.signature] = signature
    return Message(Header(Endianness.little, MessageType.signal, MessageFlag(0), 1, 0, 0, fields), body)


class FakeBus:
    """A message bus with scripted services, for clients that connect to `address`.

    Args:
        path: of its socket.
        piece: how many bytes are sent at once; None sends messages whole.
    """

    def __init__(self, path: Path, services: Mapping[str, FakeService], *, piece: int | None = None) -> None:
        self.address = f"unix:path={path}"
        self.services = dict(services)
        self._path = path
        self._piece = piece
        self._listening = AsyncExitStack()
        self._writers: list[Sender] = []
        self._serial = 1
        # (service, member) of every call, and whether it forbade starting the service.
        self.calls: list[tuple[str, str]] = []
        self.starts: list[str] = []
        self.rules: list[str] = []
        self._called = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._listening.enter_async_context(listening(self._path, self._serve))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._listening.aclose()

    async def until_called(self, service: str, member: str) -> None:
        """Wait for a call."""
        async with asyncio.timeout(PATIENCE_S):
            while (service, member) not in self.calls:
                self._called.clear()
                await self._called.wait()

    def emit(self, service: str, path: str, interface: str, member: str, signature: str, *body: Any) -> None:
        """Send a signal of a service to every client."""
        self._send_all(signal_message(_unique(service), path, interface, member, signature, body))

    def emit_as(self, sender: str, path: str, interface: str, member: str, signature: str, *body: Any) -> None:
        """Send a signal of anybody."""
        self._send_all(signal_message(sender, path, interface, member, signature, body))

    def start(self, name: str, service: FakeService) -> None:
        """Have a service appear."""
        self.services[name] = service
        self._owner_changed(name, "", _unique(name))

    def stop(self, name: str) -> None:
        """Have a service vanish."""
        del self.services[name]
        self._owner_changed(name, _unique(name), "")

    def send_raw(self, data: bytes) -> None:
        """Send bytes that need not be a message."""
        for writer in self._writers:
            writer.write(data)

    def disconnect(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def _owner_changed(self, name: str, before: str, after: str) -> None:
        bus = "org.freedesktop.DBus"
        body = (name, before, after)
        self._send_all(signal_message(bus, "/org/freedesktop/DBus", bus, "NameOwnerChanged", "sss", body))

    def _send_all(self, message: Message) -> None:
        for writer in self._writers:
            self._send(writer, message)

    def _send(self, writer: Sender, message: Message) -> None:
        self._serial += 1
        writer.write(message.serialise(self._serial))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        await reader.readline()
        writer.write(b"OK 0123456789abcdef0123456789abcdef\r\n")
        await reader.readline()
        writer.write(b"AGREE_UNIX_FD\r\n")
        await reader.readline()
        sender = Sender(writer, self._piece)
        self._writers.append(sender)
        parser = Parser()
        while data := await reader.read(4096):
            parser.add_data(data)
            while (message := parser.get_next_message()) is not None:
                self._answer(sender, writer, message)

    def _answer(self, sender: Sender, writer: asyncio.StreamWriter, message: Message) -> None:
        fields = message.header.fields
        destination, member = fields[HeaderFields.destination], fields[HeaderFields.member]
        self.calls.append((destination, member))
        self._called.set()
        if not message.header.flags & MessageFlag.no_auto_start:
            self.starts.append(destination)
        try:
            if destination == "org.freedesktop.DBus":
                signature, body = self._bus_answer(member, message.body)
            elif destination in self.services:
                signature, body = self.services[destination].answer(message)
            else:
                raise CallError("org.freedesktop.DBus.Error.ServiceUnknown")
        except CallError as error:
            self._send(sender, new_error(message, str(error), "s", ("refused",)))
            return
        reply = new_method_return(message, signature or None, body)
        if signature == "h":
            _send_with_descriptor(writer, reply, body[0])
        else:
            self._send(sender, reply)

    def _bus_answer(self, member: str, body: tuple[Any, ...]) -> Answer:
        if member == "Hello":
            return "s", (":1.1",)
        if member == "AddMatch":
            self.rules.append(body[0])
            return "", ()
        if member == "GetNameOwner":
            if body[0] not in self.services:
                raise CallError("org.freedesktop.DBus.Error.NameHasNoOwner")
            return "s", (_unique(body[0]),)
        raise CallError("org.freedesktop.DBus.Error.UnknownMethod")


def _unique(name: str) -> str:
    return f":9.{sum(name.encode())}"


def _send_with_descriptor(writer: asyncio.StreamWriter, reply: Message, descriptor: int) -> None:
    """Send a reply whose body is one file descriptor."""
    fields = reply.header.fields
    fields[HeaderFields.unix_fds] = 1
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
        # The body of a message with one descriptor is its index, 0.
        reply.header.body_length = 4
        header = reply.header.serialise(serial=1)
        data = header + bytes(-len(header) % 8) + struct.pack("<I", 0)
        socket.send_fds(connection, [data], [descriptor])
