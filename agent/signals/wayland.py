"""Input on a Wayland desktop, by ext-idle-notify-v1. Runs in the session companion.

The protocol is spoken directly: four requests and three events. pywayland would
bring libwayland and cffi for them, and its connection blocks.
"""

import asyncio
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from agent.clock import monotonic_s
from agent.owner.events import InputObserved, OwnerEvent, Unknown
from agent.signals.source import Pace, SourceAbsent, SourceBroken, Tell

# The compositor tells when nothing was touched for so long. Shorter would have it tell all day long.
IDLE_AFTER_S = 2.0
ANSWER_TIMEOUT_S = 5.0
# A message's size is a 16-bit number; libwayland's own buffer has 4 KiB.
MESSAGE_BYTES_MAX = 4096
# A compositor announces some sixty things; seats are one or two.
GLOBALS_MAX = 1024

NOTIFIER = "ext_idle_notifier_v1"
# Objects that we name ourselves; later ones count on from the last.
_DISPLAY, _REGISTRY, _SYNC = 1, 2, 3
_FIRST_FREE = 4
_HEADER = struct.Struct("=II")


@dataclass(frozen=True, slots=True)
class Message:
    """An event of the compositor, or a request to it."""

    object_id: int
    opcode: int
    body: bytes


def encode(object_id: int, opcode: int, *arguments: int | str) -> bytes:
    """Return a message; numbers are 32-bit, texts are length, bytes, NUL, padding."""
    body = b"".join(
        struct.pack("=I", argument) if isinstance(argument, int) else _encode_text(argument) for argument in arguments
    )
    return _HEADER.pack(object_id, (_HEADER.size + len(body)) << 16 | opcode) + body


def _encode_text(text: str) -> bytes:
    raw = text.encode() + b"\0"
    return struct.pack("=I", len(raw)) + raw + bytes(-len(raw) % 4)


class MessageReader:
    """Cuts the bytes of a compositor into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes as they come; return the messages that they complete.

        Raises:
            SourceBroken: the bytes are no messages.
        """
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _HEADER.size:
            object_id, second = _HEADER.unpack_from(self._buffer)
            size = second >> 16
            if size < _HEADER.size or size % 4 or size > MESSAGE_BYTES_MAX:
                raise SourceBroken(f"the compositor sent a message of {size} bytes")
            if len(self._buffer) < size:
                break
            messages.append(Message(object_id, second & 0xFFFF, bytes(self._buffer[_HEADER.size : size])))
            del self._buffer[:size]
        return messages


@dataclass(slots=True)
class _Conversation:
    """What is known of the compositor, and when each seat was last touched."""

    now: Callable[[], float]
    # Name and version of each seat and of the notifier.
    seats: list[int] = field(default_factory=list)
    notifier: tuple[int, int] | None = None
    listed: bool = False
    # By notification object: since when its seat has been idle; None while it is in use.
    idle_since: dict[int, float | None] = field(default_factory=dict)
    globals_seen: int = 0

    def take(self, message: Message) -> bool:
        """Take an event; return whether it tells of the owner.

        Raises:
            SourceBroken: it is an error, or makes no sense.
        """
        match (message.object_id, message.opcode):
            case (1, 0):
                raise SourceBroken(f"the compositor refuses us: {_text(message.body, 8)}")
            case (2, 0):
                self._announced(message.body)
            case (3, 0):
                self.listed = True
            case (number, 0) if number in self.idle_since:
                # Said once, when the time has passed.
                self.idle_since[number] = self.now() - IDLE_AFTER_S
                return True
            case (number, 1) if number in self.idle_since:
                self.idle_since[number] = None
                return True
        return False

    def idle_s(self) -> float:
        """Return the time since the last input on any seat."""
        since = list(self.idle_since.values())
        if not since or None in since:
            return 0.0
        return max(0.0, self.now() - max(moment for moment in since if moment is not None))

    def requests(self) -> list[bytes]:
        """Return what asks for a notification of each seat.

        Raises:
            SourceAbsent: the compositor cannot tell.
        """
        if self.notifier is None:
            raise SourceAbsent(f"the compositor has no {NOTIFIER}")
        if not self.seats:
            raise SourceAbsent("the compositor has no seat")
        name, version = self.notifier
        # Version 2 can leave inhibitors out: a film does not count as input then, and is told as what it is.
        version = min(version, 2)
        opcode = 2 if version == 2 else 1
        number = _FIRST_FREE
        requests = [encode(_REGISTRY, 0, name, NOTIFIER, version, number)]
        for seat in self.seats:
            requests.append(encode(_REGISTRY, 0, seat, "wl_seat", 1, number + 1))
            requests.append(encode(_FIRST_FREE, opcode, number + 2, round(IDLE_AFTER_S * 1000), number + 1))
            self.idle_since[number + 2] = None
            number += 2
        return requests

    def _announced(self, body: bytes) -> None:
        self.globals_seen += 1
        if self.globals_seen > GLOBALS_MAX:
            raise SourceBroken(f"the compositor announces more than {GLOBALS_MAX} things")
        interface = _text(body, 4)
        name, version = _number(body, 0), _number(body, len(body) - 4)
        if interface == "wl_seat":
            if self.listed:
                raise SourceBroken("a seat was added; asking anew")
            self.seats.append(name)
        elif interface == NOTIFIER:
            self.notifier = (name, version)


class WaylandSource:
    """Has the compositor tell when the owner stops and starts.

    Args:
        environ: WAYLAND_DISPLAY, XDG_RUNTIME_DIR.
    """

    name = "wayland"

    def __init__(self, environ: Mapping[str, str] = os.environ, *, now: Callable[[], float] = monotonic_s) -> None:
        self._environ = environ
        self._now = now

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        path = socket_path(self._environ)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(path)
        except FileNotFoundError as error:
            raise SourceAbsent(f"no Wayland compositor at {path}") from error
        except (OSError, TimeoutError) as error:
            raise SourceBroken(f"the compositor at {path} takes no connection: {str(error) or 'no answer'}") from error
        try:
            await self._converse(reader, writer, tell, pace)
        except (OSError, EOFError) as error:
            raise SourceBroken("the compositor closed the connection") from error
        finally:
            writer.close()
        raise AssertionError("a conversation ends by an exception")

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [InputObserved(self.name, why, detail)]

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tell: Tell, pace: Pace
    ) -> None:
        conversation = _Conversation(self._now)
        messages = MessageReader()
        writer.write(encode(_DISPLAY, 1, _REGISTRY) + encode(_DISPLAY, 0, _SYNC))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                while not conversation.listed:
                    await _take_more(reader, messages, conversation)
        except TimeoutError as error:
            raise SourceBroken(f"the compositor does not answer within {ANSWER_TIMEOUT_S:g} s") from error
        writer.write(b"".join(conversation.requests()))
        tell(InputObserved(self.name, conversation.idle_s()))
        repeating = asyncio.create_task(self._repeat(conversation, tell, pace))
        try:
            while True:
                if await _take_more(reader, messages, conversation):
                    tell(InputObserved(self.name, conversation.idle_s()))
        finally:
            repeating.cancel()

    async def _repeat(self, conversation: _Conversation, tell: Tell, pace: Pace) -> NoReturn:
        while True:
            await pace.tick()
            tell(InputObserved(self.name, conversation.idle_s()))


async def _take_more(reader: asyncio.StreamReader, messages: MessageReader, conversation: _Conversation) -> bool:
    data = await reader.read(MESSAGE_BYTES_MAX)
    if not data:
        raise EOFError
    told = [conversation.take(message) for message in messages.feed(data)]
    return any(told)


def socket_path(environ: Mapping[str, str]) -> str:
    """Return where the compositor of this session listens.

    Raises:
        SourceAbsent: this session has none.
    """
    name = environ.get("WAYLAND_DISPLAY", "")
    if name.startswith("/"):
        return name
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if not name or not runtime:
        raise SourceAbsent("no WAYLAND_DISPLAY in this session")
    return f"{runtime}/{name}"


def _number(body: bytes, offset: int) -> int:
    try:
        [number] = struct.unpack_from("=I", body, offset)
    except struct.error as error:
        raise SourceBroken("the compositor sent a message that is too short") from error
    return int(number)


def _text(body: bytes, offset: int) -> str:
    length = _number(body, offset)
    return body[offset + 4 : offset + 4 + length].rstrip(b"\0").decode("utf-8", "replace")
