"""A connection to a D-Bus message bus: calls, and signals of the services that one follows.

jeepney encodes and decodes; the socket is ours, since its asyncio connection
passes no file descriptors and bounds nothing. No call starts a service: asking
GameMode how many games run would start it (NO_AUTO_START on every message).
"""

import asyncio
import os
import socket
from collections import deque
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Self

from jeepney import (
    DBusAddress,
    HeaderFields,
    MatchRule,
    Message,
    MessageFlag,
    MessageType,
    Parser,
    message_bus,
    new_method_call,
)
from jeepney.auth import BEGIN, AuthenticationError, Authenticator
from jeepney.bus import get_connectable_addresses
from jeepney.fds import FileDescriptor

from agent.signals.source import SourceAbsent, SourceBroken

# A service that takes longer hangs; its source is then broken, and tried again.
CALL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
# The longest answer we ask for, a list of inhibitors, has a few kilobytes. The protocol allows 128 MiB.
MESSAGE_BYTES_MAX = 1024 * 1024
READ_BYTES = 64 * 1024
# One per answer is what we ask for.
DESCRIPTORS_MAX = 4
# Signals that wait for a source; each only says "look again", so that old ones may fall off.
SIGNALS_MAX = 256

SYSTEM_BUS = "unix:path=/run/dbus/system_bus_socket"
PROPERTIES = "org.freedesktop.DBus.Properties"
_BUS_NAME = "org.freedesktop.DBus"
_NO_OWNER = "org.freedesktop.DBus.Error.NameHasNoOwner"


class CallRefused(SourceBroken):
    """A service answered a call with an error; `name` is the error's."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal of a service that is followed."""

    path: str
    interface: str
    member: str
    body: tuple[Any, ...]


def system_bus_address() -> str:
    """Return where the system bus is."""
    return os.environ.get("DBUS_SYSTEM_BUS_ADDRESS") or SYSTEM_BUS


def session_bus_address() -> str | None:
    """Return where the bus of this user's session is; None where no session says."""
    if address := os.environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return address
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"unix:path={runtime}/bus" if runtime else None


class Bus:
    """One connection; open it with `connect`, use it as a context manager.

    Raises, in each method:
        SourceBroken: the bus or the service does not answer, or not in D-Bus.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._parser = Parser()
        self._serials = count(1)
        self._sending = asyncio.Lock()
        self._replies: dict[int, asyncio.Future[Message]] = {}
        # Unique names of the owners of followed names.
        self._owners: dict[str, str | None] = {}
        self._signals: deque[Signal] = deque(maxlen=SIGNALS_MAX)
        self._arrived = asyncio.Event()
        self._failure: str | None = None

    @classmethod
    async def connect(cls, address: str) -> Self:
        """Open a connection.

        Raises:
            SourceAbsent: there is no bus at this address.
            SourceBroken: there is one, and it does not take us.
        """
        try:
            path = next(get_connectable_addresses(address))
        except (RuntimeError, ValueError) as error:
            raise SourceBroken(f"cannot use the bus address {address!r}: {error}") from error
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(connection, path)
                await _authenticate(connection)
                bus = cls(connection)
                bus._start()
                await bus._request(message_bus.Hello())
        except FileNotFoundError as error:
            connection.close()
            raise SourceAbsent(f"no message bus at {path}") from error
        except (OSError, EOFError, AuthenticationError, TimeoutError) as error:
            connection.close()
            raise SourceBroken(f"the message bus at {path} does not take us: {str(error) or 'no answer'}") from error
        except BaseException:
            connection.close()
            raise
        return bus

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._fail("the connection was closed")

    async def follow(self, name: str, narrowing: str = "") -> None:
        """Receive the signals of a service from now on, and learn when it comes and goes.

        Args:
            name: well-known name of the service, which need not exist yet.
            narrowing: further conditions of the match rule; a name owned by a whole desktop sends many signals.
        """
        coming = MatchRule(type="signal", sender=_BUS_NAME, interface=_BUS_NAME, member="NameOwnerChanged")
        coming.add_arg_condition(0, name)
        await self._request(message_bus.AddMatch(coming))
        rule = f"type='signal',sender='{name}'"
        await self._request(message_bus.AddMatch(f"{rule},{narrowing}" if narrowing else rule))
        try:
            [owner] = await self._request(message_bus.GetNameOwner(name))
        except CallRefused as error:
            if error.name != _NO_OWNER:
                raise
            owner = None
        self._owners[name] = owner

    def running(self, name: str) -> bool:
        """Return whether a followed service is there."""
        return self._owners[name] is not None

    async def call(
        self, service: str, path: str, interface: str, member: str, signature: str = "", *arguments: Any
    ) -> tuple[Any, ...]:
        """Call a method; return what it answers. File descriptors in it are the caller's to close.

        Raises:
            CallRefused: the service answers with an error, or does not exist.
        """
        return await self._request(
            new_method_call(DBusAddress(path, service, interface), member, signature or None, arguments)
        )

    async def properties(self, service: str, path: str, interface: str) -> dict[str, Any]:
        """Return all properties of an interface by name, values only."""
        [properties] = await self.call(service, path, PROPERTIES, "GetAll", "s", interface)
        return {name: value for name, (_, value) in properties.items()}

    async def property(self, service: str, path: str, interface: str, name: str) -> Any:
        """Return the value of one property."""
        [(_, value)] = await self.call(service, path, PROPERTIES, "Get", "ss", interface, name)
        return value

    async def wait(self, timeout_s: float) -> list[Signal]:
        """Return the signals of followed services that came since the last call; wait for one if there is none.

        A service that comes or goes counts as one too (NameOwnerChanged). The list is empty after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        if self._failure is not None:
            raise SourceBroken(self._failure)
        self._arrived.clear()
        signals = list(self._signals)
        self._signals.clear()
        return signals

    # ---- the wire

    def _start(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket, self._readable)

    async def _request(self, message: Message) -> tuple[Any, ...]:
        if self._failure is not None:
            raise SourceBroken(self._failure)
        message.header.flags = MessageFlag.no_auto_start
        serial = next(self._serials)
        self._replies[serial] = reply = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                async with self._sending:
                    await asyncio.get_running_loop().sock_sendall(self._socket, message.serialise(serial))
                answer = await reply
        except TimeoutError as error:
            called = message.header.fields.get(HeaderFields.member, "a call")
            raise SourceBroken(f"no answer to {called} within {CALL_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise SourceBroken(f"the message bus is gone: {error}") from error
        finally:
            del self._replies[serial]
        if answer.header.message_type is MessageType.error:
            text = answer.body[0] if answer.body and isinstance(answer.body[0], str) else ""
            raise CallRefused(answer.header.fields.get(HeaderFields.error_name, "error"), text)
        body: tuple[Any, ...] = answer.body
        return body

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, READ_BYTES, DESCRIPTORS_MAX)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"the message bus is gone: {error}")
            return
        if not data:
            self._fail("the message bus closed the connection")
            return
        self._parser.add_data(data, [FileDescriptor(number) for number in descriptors])
        try:
            while (message := self._parser.get_next_message()) is not None:
                self._dispatch(message)
        except Exception as error:
            # jeepney raises whatever a wrong byte leads to: struct.error, KeyError, ValueError, UnicodeDecodeError, ...
            self._fail(f"the message bus sent what is no D-Bus message ({type(error).__name__})")
            return
        if (self._parser.next_msg_size or 0) > MESSAGE_BYTES_MAX:
            self._fail(f"the message bus sent a message of more than {MESSAGE_BYTES_MAX} bytes")

    def _dispatch(self, message: Message) -> None:
        fields = message.header.fields
        if message.header.message_type is not MessageType.signal:
            reply = self._replies.get(fields.get(HeaderFields.reply_serial, 0))
            if reply is not None and not reply.done():
                reply.set_result(message)
            return
        sender = fields.get(HeaderFields.sender)
        member = fields.get(HeaderFields.member, "")
        if sender == _BUS_NAME and member == "NameOwnerChanged":
            name, _, owner = message.body
            if name not in self._owners:
                return
            self._owners[name] = owner or None
        elif sender not in self._owners.values():
            # Anybody may send us a signal; only followed services are believed.
            return
        path, interface = fields.get(HeaderFields.path, ""), fields.get(HeaderFields.interface, "")
        self._signals.append(Signal(path, interface, member, message.body))
        self._arrived.set()

    def _fail(self, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = reason
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for descriptor in self._parser.fds:
            descriptor.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(SourceBroken(reason))
        self._arrived.set()


async def _authenticate(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    conversation = Authenticator(enable_fds=True)
    for line in conversation:
        await loop.sock_sendall(connection, line)
        data = await loop.sock_recv(connection, 1024)
        if not data:
            raise EOFError("it closed the connection during authentication")
        conversation.feed(data)
    await loop.sock_sendall(connection, BEGIN)
