"""Input and full screen on an X11 desktop, asked in X's own protocol. Runs in the session companion.

No library: Xlib's XOpenDisplay on Xwayland may block for ever (a whole process
had to be killed for it), and libXss is not installed everywhere. The five
requests that are needed are a page, and here each has a deadline.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from agent.owner.events import BusyObserved, InputObserved, OwnerEvent, Unknown
from agent.signals.source import Pace, SourceAbsent, SourceBroken, Tell

# A server that answers at all does so in a millisecond.
ANSWER_TIMEOUT_S = 3.0
# A reply of more than this (a window's list of states has a dozen words) is none of those asked for.
REPLY_BYTES_MAX = 256 * 1024
AUTHORITY_BYTES_MAX = 1024 * 1024
# A window manager's list of states; it names under twenty.
STATES_MAX = 64

# Request numbers of the core protocol, and of the one request of MIT-SCREEN-SAVER.
_INTERN_ATOM, _GET_PROPERTY, _QUERY_EXTENSION, _SAVER_QUERY_INFO = 16, 20, 98, 1
_ERROR, _REPLY, _GENERIC_EVENT = 0, 1, 35
_COOKIE = b"MIT-MAGIC-COOKIE-1"
# Families in an authority file: by host name, and for any host.
_FAMILY_LOCAL, _FAMILY_WILD = 256, 65535


class XRefused(SourceBroken):
    """The server answers a request with an error."""


@dataclass(frozen=True, slots=True)
class Display:
    """Where an X server listens on this machine."""

    number: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Display":
        """Read DISPLAY.

        Raises:
            SourceAbsent: there is none, it is Xwayland's, or it is on another machine.
        """
        name = environ.get("DISPLAY", "")
        if not name:
            raise SourceAbsent("no DISPLAY in this session")
        if environ.get("WAYLAND_DISPLAY"):
            raise SourceAbsent("a Wayland session: its X server sees only part of the input")
        host, _, rest = name.rpartition(":")
        number = rest.split(".")[0]
        if host not in ("", "unix") or not (number.isascii() and number.isdigit() and len(number) < 6):
            raise SourceAbsent(f"DISPLAY={name!r} is not on this machine")
        return cls(int(number))


class XConnection:
    """A connection to an X server on this machine.

    Raises, in each method:
        SourceBroken: the server does not answer, or not in X11.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sequence = 0
        self.root = 0

    @classmethod
    async def open(cls, path: str, cookie: bytes) -> "XConnection":
        """Connect and introduce ourselves.

        Raises:
            SourceAbsent: there is no server.
        """
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(path)
        except FileNotFoundError as error:
            raise SourceAbsent(f"no X server at {path}") from error
        except (OSError, TimeoutError) as error:
            raise SourceBroken(f"the X server at {path} takes no connection: {str(error) or 'no answer'}") from error
        connection = cls(reader, writer)
        try:
            await connection._introduce(cookie)
        except BaseException:
            writer.close()
            raise
        return connection

    def close(self) -> None:
        self._writer.close()

    async def extension(self, name: str) -> int:
        """Return the request number of an extension.

        Raises:
            SourceAbsent: the server has no such extension.
        """
        reply = await self._ask(struct.pack("<BxHHxx", _QUERY_EXTENSION, 2 + _words(name), len(name)) + _padded(name))
        if not reply[8]:
            raise SourceAbsent(f"the X server has no {name}")
        return reply[9]

    async def idle_ms(self, extension: int) -> int:
        """Return the milliseconds since the last input, by MIT-SCREEN-SAVER."""
        reply = await self._ask(struct.pack("<BBHI", extension, _SAVER_QUERY_INFO, 2, self.root))
        [idle_ms] = struct.unpack_from("<I", reply, 16)
        return int(idle_ms)

    async def atom(self, name: str) -> int:
        """Return the number of a name."""
        reply = await self._ask(struct.pack("<BBHHxx", _INTERN_ATOM, 0, 2 + _words(name), len(name)) + _padded(name))
        [atom] = struct.unpack_from("<I", reply, 8)
        return int(atom)

    async def numbers(self, window: int, name: int) -> tuple[int, ...]:
        """Return a window's property of 32-bit numbers; empty where it has none."""
        reply = await self._ask(struct.pack("<BBHIIIII", _GET_PROPERTY, 0, 6, window, name, 0, 0, STATES_MAX))
        kind, count = reply[1], struct.unpack_from("<I", reply, 16)[0]
        if kind != 32 or len(reply) < 32 + 4 * count:
            return ()
        return struct.unpack_from(f"<{count}I", reply, 32)

    # ---- the wire

    async def _introduce(self, cookie: bytes) -> None:
        name = _COOKIE if cookie else b""
        hello = struct.pack("<BxHHHHxx", ord("l"), 11, 0, len(name), len(cookie)) + _padded(name) + _padded(cookie)
        head = await self._exchange(hello, 8)
        [words] = struct.unpack_from("<H", head, 6)
        body = await self._exchange(b"", 4 * words)
        if head[0] != 1:
            reason = body[: head[1]].decode("latin-1").strip() if head[0] == 0 else "it wants more than a cookie"
            raise SourceBroken(f"the X server does not take us: {reason!r}")
        try:
            vendor, formats = struct.unpack_from("<H", body, 16)[0], body[21]
            [self.root] = struct.unpack_from("<I", body, 32 + vendor + -vendor % 4 + 8 * formats)
        except (struct.error, IndexError) as error:
            raise SourceBroken("what answers is no X server") from error

    async def _ask(self, request: bytes) -> bytes:
        """Send a request; return its reply, and drop the events before it."""
        self._sequence = (self._sequence + 1) & 0xFFFF
        outgoing = request
        while True:
            message = await self._exchange(outgoing, 32)
            outgoing = b""
            kind, [sequence, words] = message[0], struct.unpack_from("<HI", message, 2)
            if kind in (_REPLY, _GENERIC_EVENT):
                if 4 * words > REPLY_BYTES_MAX:
                    raise SourceBroken(f"a reply of {4 * words} bytes")
                message += await self._exchange(b"", 4 * words)
            if kind == _REPLY and sequence == self._sequence:
                return message
            if kind == _ERROR and sequence == self._sequence:
                raise XRefused(f"the X server refuses a request with error {message[1]}")

    async def _exchange(self, outgoing: bytes, awaited: int) -> bytes:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if outgoing:
                    self._writer.write(outgoing)
                    await self._writer.drain()
                return await self._reader.readexactly(awaited)
        except TimeoutError as error:
            raise SourceBroken(f"no answer from the X server within {ANSWER_TIMEOUT_S:g} s") from error
        except (OSError, EOFError) as error:
            raise SourceBroken("the X server closed the connection") from error


class X11Source:
    """Asks for idle time and whether the window in front fills the screen.

    Args:
        environ: DISPLAY, WAYLAND_DISPLAY, XAUTHORITY.
        sockets: the directory of X servers' sockets.
    """

    name = "x11"

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        sockets: Path = Path("/tmp/.X11-unix"),
    ) -> None:
        self._environ = environ
        self._sockets = sockets

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        display = Display.of(self._environ)
        cookie = read_cookie(self._environ, display)
        connection = await XConnection.open(str(self._sockets / f"X{display.number}"), cookie)
        try:
            extension = await connection.extension("MIT-SCREEN-SAVER")
            active = await connection.atom("_NET_ACTIVE_WINDOW")
            states = await connection.atom("_NET_WM_STATE")
            fullscreen = await connection.atom("_NET_WM_STATE_FULLSCREEN")
            while True:
                tell(InputObserved(self.name, await connection.idle_ms(extension) / 1000))
                [window] = (await connection.numbers(connection.root, active) or (0,))[:1]
                filled = bool(window) and fullscreen in await self._states(connection, window, states)
                tell(BusyObserved("screen", "a window in full screen" if filled else ""))
                await pace.tick()
        finally:
            connection.close()

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [InputObserved(self.name, why, detail), BusyObserved("screen", why)]

    async def _states(self, connection: XConnection, window: int, states: int) -> tuple[int, ...]:
        try:
            return await connection.numbers(window, states)
        except XRefused:
            return ()  # the window was closed between the two questions


def read_cookie(environ: Mapping[str, str], display: Display, host: Callable[[], str] = socket.gethostname) -> bytes:
    """Return the cookie that lets this user in; empty where there is none, which many servers accept.

    Raises:
        SourceBroken: the authority file is none.
    """
    home = environ.get("HOME")
    path = environ.get("XAUTHORITY") or (f"{home}/.Xauthority" if home else "")
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            content = file.read(AUTHORITY_BYTES_MAX)
    except OSError:
        return b""
    try:
        return _find_cookie(content, str(display.number).encode(), os.fsencode(host()))
    except struct.error as error:
        raise SourceBroken(f"{path} is no X authority file") from error


def _find_cookie(content: bytes, number: bytes, host: bytes) -> bytes:
    offset = 0
    while offset < len(content):
        [family] = struct.unpack_from(">H", content, offset)
        offset += 2
        fields: list[bytes] = []
        for _ in range(4):
            [length] = struct.unpack_from(">H", content, offset)
            fields.append(content[offset + 2 : offset + 2 + length])
            offset += 2 + length
        address, display, name, data = fields
        ours = family == _FAMILY_WILD or (family == _FAMILY_LOCAL and address == host)
        if ours and name == _COOKIE and display in (b"", number):
            return data
    return b""


def _words(text: str) -> int:
    return (len(text) + 3) // 4


def _padded(text: str | bytes) -> bytes:
    raw = text.encode("ascii") if isinstance(text, str) else text
    return raw + bytes(-len(raw) % 4)
