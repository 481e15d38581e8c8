"""What the companion asks of a Wayland compositor and an X server, whole, byte by byte, and as garbage."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.owner.events import BusyObserved, InputObserved, Unknown
from agent.signals import x11
from agent.signals.source import Source, SourceAbsent, SourceBroken
from agent.signals.testing import Finished, NoPace, ScriptedPace, Seen, listening
from agent.signals.testing_display import FakeCompositor, FakeX
from agent.signals.wayland import IDLE_AFTER_S, NOTIFIER, MessageReader, WaylandSource, encode, socket_path
from agent.signals.x11 import Display, X11Source, read_cookie

DESKTOP = [("wl_compositor", 6), ("wl_seat", 9), (NOTIFIER, 2)]
PIECES = pytest.mark.parametrize("piece", [None, 1])


async def failure(source: Source) -> BaseException:
    """Return what a source ends with."""
    with pytest.raises((SourceAbsent, SourceBroken)) as raised:
        async with asyncio.timeout(20):
            await source.watch(Seen(), NoPace())
    return raised.value


# ---- Wayland


class Session:
    """A Wayland session with a clock."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        self.seen, self.pace = Seen(), NoPace()
        self.path = directory / "wayland-7"
        environ = {"WAYLAND_DISPLAY": "wayland-7", "XDG_RUNTIME_DIR": str(directory)}
        self.source = WaylandSource(environ, now=lambda: self.now)

    @asynccontextmanager
    async def watched(self, compositor: FakeCompositor) -> AsyncIterator["asyncio.Task[None]"]:
        async with compositor:
            task: asyncio.Task[None] = asyncio.create_task(self.source.watch(self.seen, self.pace))
            try:
                async with asyncio.timeout(20):
                    await compositor.ready.wait()
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


@PIECES
async def test_the_compositor_tells_when_the_owner_stops_and_when_they_are_back(
    session: Session, piece: int | None
) -> None:
    """Mutation: without the time that had passed when `idled` came, the idle time is too short for ever."""
    compositor = FakeCompositor(session.path, DESKTOP, piece=piece)
    async with session.watched(compositor):
        assert session.seen.last("wayland") == InputObserved("wayland", 0.0)
        compositor.idled()
        await session.seen.value("wayland", IDLE_AFTER_S)
        session.now += 60
        session.pace.ticks.release()
        await session.seen.value("wayland", 60 + IDLE_AFTER_S)
        compositor.resumed()
        await session.seen.value("wayland", 0.0)


@pytest.mark.parametrize(("version", "opcode", "bound"), [(1, 1, 1), (2, 2, 2), (7, 2, 2)])
async def test_from_version_2_on_a_film_does_not_count_as_input(
    session: Session, version: int, opcode: int, bound: int
) -> None:
    compositor = FakeCompositor(session.path, [("wl_seat", 9), (NOTIFIER, version)])
    async with session.watched(compositor):
        assert [(asked[0], asked[2]) for asked in compositor.asked] == [(opcode, IDLE_AFTER_S * 1000)]
        assert compositor.bound == [(NOTIFIER, bound), ("wl_seat", 1)]


async def test_every_seat_counts(session: Session) -> None:
    """Mutation: asking the first seat only overlooks the second keyboard."""
    compositor = FakeCompositor(session.path, [("wl_seat", 5), ("wl_seat", 5), (NOTIFIER, 1)])
    async with session.watched(compositor):
        await session.seen.until(lambda: len(compositor.asked) == 2)
        compositor.idled(0)
        await session.seen.value("wayland", 0.0)
        compositor.idled(1)
        await session.seen.value("wayland", IDLE_AFTER_S)
        compositor.resumed(1)
        await session.seen.value("wayland", 0.0)


async def test_a_compositor_that_cannot_tell_is_absent(session: Session) -> None:
    for announced in ([("wl_seat", 9)], [(NOTIFIER, 1)], []):
        session.path.unlink(missing_ok=True)
        async with FakeCompositor(session.path, announced):
            assert isinstance(await failure(session.source), SourceAbsent)


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("=II", 4, 3 << 16),  # shorter than its own head
        struct.pack("=II", 4, 13 << 16),  # no multiple of four
        struct.pack("=II", 4, 0xFFFC0000),
        encode(1, 0, 4, 1, "invalid object"),  # the protocol's own error
        encode(2, 0),  # an announcement without content
        encode(2, 0, 9, "wl_seat", 5),  # a seat that is plugged in later: ask anew
        b"\xff" * 64,
    ],
)
@PIECES
async def test_garbage_or_an_error_breaks_the_source(session: Session, garbage: bytes, piece: int | None) -> None:
    """Mutation: without the bound, a wrong length is waited for, and buffered, for ever."""
    compositor = FakeCompositor(session.path, DESKTOP, piece=piece)
    async with session.watched(compositor) as task:
        compositor.send(garbage)
        with pytest.raises(SourceBroken):
            async with asyncio.timeout(20):
                await task


async def test_a_compositor_that_ends_breaks_the_source(session: Session) -> None:
    async with session.watched(FakeCompositor(session.path, DESKTOP)) as task:
        pass
    assert task.done()


async def test_a_compositor_that_never_stops_announcing_is_broken(session: Session) -> None:
    async with FakeCompositor(session.path, [("wl_output", 1)] * 2000):
        assert isinstance(await failure(session.source), SourceBroken)


@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_are_messages_or_refused_and_pieces_make_no_difference(data: bytes, size: int) -> None:
    def read(pieces: list[bytes]) -> object:
        reader, found = MessageReader(), []
        try:
            for piece in pieces:
                found += reader.feed(piece)
        except SourceBroken:
            return "broken"
        return found

    assert read([data]) == read([data[start : start + size] for start in range(0, len(data), size)])


@pytest.mark.parametrize(
    "environ", [{}, {"WAYLAND_DISPLAY": "wayland-0"}, {"XDG_RUNTIME_DIR": "/run/user/1"}, {"WAYLAND_DISPLAY": ""}]
)
def test_without_a_wayland_session_there_is_no_compositor(environ: dict[str, str]) -> None:
    with pytest.raises(SourceAbsent):
        socket_path(environ)


def test_an_absolute_display_is_the_path_itself() -> None:
    assert socket_path({"WAYLAND_DISPLAY": "/run/x"}) == "/run/x"


# ---- X11


@PIECES
async def test_idle_time_and_full_screen_are_told(tmp_path: Path, piece: int | None) -> None:
    seen = Seen()
    async with FakeX(tmp_path / "X3", idle_ms=4500, piece=piece) as server:
        source = X11Source({"DISPLAY": ":3.0"}, tmp_path)

        def play() -> None:
            server.idle_ms, server.fullscreen = 20, True

        with pytest.raises(Finished):
            await source.watch(seen, ScriptedPace(play))
    assert seen.events == [
        InputObserved("x11", 4.5),
        BusyObserved("screen", ""),
        InputObserved("x11", 0.02),
        BusyObserved("screen", "a window in full screen"),
    ]


async def test_a_server_that_wants_a_cookie_gets_the_one_of_its_display(tmp_path: Path) -> None:
    def entry(family: int, address: bytes, number: bytes, name: bytes, data: bytes) -> bytes:
        fields = (address, number, name, data)
        return struct.pack(">H", family) + b"".join(struct.pack(">H", len(field)) + field for field in fields)

    authority = tmp_path / "authority"
    name = b"MIT-MAGIC-COOKIE-1"
    authority.write_bytes(
        entry(256, b"elsewhere", b"3", name, b"wrong host")
        + entry(256, b"here", b"4", name, b"wrong display")
        + entry(256, b"here", b"3", b"OTHER", b"wrong kind")
        + entry(256, b"here", b"3", name, b"right")
    )
    environ = {"DISPLAY": ":3", "XAUTHORITY": str(authority)}
    assert read_cookie(environ, Display(3), lambda: "here") == b"right"
    authority.write_bytes(entry(65535, b"", b"", name, b"any"))
    async with FakeX(tmp_path / "X3", cookie=b"any"):
        with pytest.raises(Finished):
            await X11Source(environ, tmp_path).watch(Seen(), ScriptedPace())
    (tmp_path / "X3").unlink()
    async with FakeX(tmp_path / "X3", cookie=b"another"):
        assert "No protocol" in str(await failure(X11Source(environ, tmp_path)))


@given(st.binary(max_size=200))
def test_any_authority_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "authority"
    path.write_bytes(content)
    with contextlib.suppress(SourceBroken):
        read_cookie({"XAUTHORITY": str(path)}, Display(0))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"DISPLAY": "host:0"},
        {"DISPLAY": "host:0", "WAYLAND_DISPLAY": ""},
        {"DISPLAY": ":../../x"},
        {"DISPLAY": ":"},
        {"DISPLAY": ":99999999"},
        {"DISPLAY": ":0", "WAYLAND_DISPLAY": "wayland-0"},
    ],
)
async def test_xwayland_and_displays_elsewhere_are_not_asked(environ: dict[str, str], tmp_path: Path) -> None:
    """Mutation: asking Xwayland may block for ever (BOINC), and it sees only what happens in its own windows."""
    async with FakeX(tmp_path / "X0"):
        assert isinstance(await failure(X11Source(environ, tmp_path)), SourceAbsent)


async def test_without_the_extension_it_is_absent(tmp_path: Path) -> None:
    async with FakeX(tmp_path / "X3", has_saver=False):
        assert isinstance(await failure(X11Source({"DISPLAY": ":3"}, tmp_path)), SourceAbsent)


async def test_a_server_that_never_answers_is_broken_after_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: without the deadline this blocks for ever, as XOpenDisplay on Xwayland does."""
    monkeypatch.setattr(x11, "ANSWER_TIMEOUT_S", 0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(tmp_path / "X3", serve):
        assert "no answer" in str(await failure(X11Source({"DISPLAY": ":3"}, tmp_path)))


@pytest.mark.parametrize(
    "reply",
    [
        struct.pack("<BBHI24x", 0, 3, 5, 0),  # an error to this very question
        struct.pack("<BxHI24x", 1, 5, 0xFFFFFFF),  # a reply of a gigabyte
        b"\x01" * 40,
    ],
)
@PIECES
async def test_an_error_or_garbage_breaks_the_source(tmp_path: Path, reply: bytes, piece: int | None) -> None:
    async with FakeX(tmp_path / "X3", reply=reply, piece=piece):
        assert isinstance(await failure(X11Source({"DISPLAY": ":3"}, tmp_path)), SourceBroken)


@pytest.mark.parametrize(
    "greeting", [b"\x01" + b"\xff" * 300_000, b"\x00\xff" + bytes(6), b"HTTP/1.1 400 Bad Request\r\n"]
)
async def test_what_greets_like_no_x_server_is_broken(tmp_path: Path, greeting: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(greeting)

    async with listening(tmp_path / "X3", serve):
        assert isinstance(await failure(X11Source({"DISPLAY": ":3"}, tmp_path)), SourceBroken)


def test_what_is_unseen_is_said_of_input_and_of_the_screen() -> None:
    assert X11Source({}).unseen(Unknown.BROKEN, "gone") == [
        InputObserved("x11", Unknown.BROKEN, "gone"),
        BusyObserved("screen", Unknown.BROKEN),
    ]
