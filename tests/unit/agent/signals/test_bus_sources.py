"""What logind, NetworkManager and desktops tell over D-Bus, and what becomes of a bus that misbehaves."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.owner.events import BusyObserved, InputObserved, MeteredObserved, Unknown
from agent.signals import bus as bus_module
from agent.signals.bus import Bus
from agent.signals.desktop import DesktopInhibitorSource, GameModeSource, MutterSource
from agent.signals.logind import MANAGER, MANAGER_INTERFACE, SESSION_INTERFACE, SLEEP_HOLD_S, LogindSource
from agent.signals.metered import MeteredSource
from agent.signals.printable import printable
from agent.signals.source import Source, SourceAbsent, SourceBroken
from agent.signals.testing import NoPace, Seen, listening
from agent.signals.testing_bus import CallError, FakeBus, FakeService

LOGIND = "org.freedesktop.login1"
PROPERTIES = "org.freedesktop.DBus.Properties"


@asynccontextmanager
async def watched(source: Source, seen: Seen, pace: NoPace) -> AsyncIterator["asyncio.Task[None]"]:
    task: asyncio.Task[None] = asyncio.create_task(source.watch(seen, pace))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def failure(source: Source) -> BaseException:
    """Return what a source ends with."""
    with pytest.raises((SourceAbsent, SourceBroken)) as raised:
        async with asyncio.timeout(20):
            await source.watch(Seen(), NoPace())
    return raised.value


# ---- logind


class Login:
    """A logind with sessions and inhibitors that a test changes."""

    def __init__(self) -> None:
        self.sessions: list[tuple[str, int, str, str, str]] = []
        self.inhibitors: list[tuple[str, str, str, str, int, int]] = []
        self.service = FakeService()
        self.locks: list[int] = []
        self.may_inhibit = True
        methods = {"ListSessions": self._list, "ListInhibitors": self._list_inhibitors, "Inhibit": self._inhibit}
        for member, method in methods.items():
            self.service.methods[MANAGER, MANAGER_INTERFACE, member] = method

    def open(self, name: str, uid: int = 1000, **properties: str) -> None:
        path = f"/session/{name}"
        self.sessions.append((name, uid, "anna", properties.get("seat", "seat0"), path))
        self.service.properties[path, SESSION_INTERFACE] = {
            "Type": ("s", properties.get("kind", "wayland")),
            "Class": ("s", properties.get("of_class", "user")),
            "State": ("s", properties.get("state", "active")),
            "IdleHint": ("b", False),
            "IdleSinceHintMonotonic": ("t", 0),
            "LockedHint": ("b", False),
        }

    def hint(self, name: str, idle: bool, since_s: float, locked: bool = False) -> None:
        self.service.properties[f"/session/{name}", SESSION_INTERFACE] |= {
            "IdleHint": ("b", idle),
            "IdleSinceHintMonotonic": ("t", int(since_s * 1e6)),
            "LockedHint": ("b", locked),
        }

    def _list(self, body: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        return "a(susso)", (self.sessions,)

    def _list_inhibitors(self, body: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        return "a(ssssuu)", (self.inhibitors,)

    def _inhibit(self, body: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        assert body[0] == "sleep"
        assert body[3] == "delay"
        if not self.may_inhibit:
            raise CallError("org.freedesktop.DBus.Error.AccessDenied")
        read, write = os.pipe()
        self.locks.append(read)
        asyncio.get_running_loop().call_soon(os.close, write)
        return "h", (write,)

    def locked(self) -> bool:
        """Whether the newest lock is still held: its pipe has not come to its end."""
        os.set_blocking(self.locks[-1], False)
        try:
            return os.read(self.locks[-1], 1) != b""
        except BlockingIOError:
            return True


@asynccontextmanager
async def logind(
    tmp_path: Path, login: Login, **options: Any
) -> AsyncIterator[tuple[FakeBus, Seen, NoPace, LogindSource]]:
    seen, pace = Seen(), NoPace()
    async with FakeBus(tmp_path / "bus", {LOGIND: login.service}, piece=options.pop("piece", None)) as bus:
        source = LogindSource(address=bus.address, now=lambda: 50.0, awake=lambda: 1000.0, **options)
        async with watched(source, seen, pace):
            await seen.until(lambda: seen.last("inhibitors") is not None)
            yield bus, seen, pace, source
    for lock in login.locks:
        os.close(lock)


def changed(bus: FakeBus) -> None:
    bus.emit(LOGIND, "/session/1", PROPERTIES, "PropertiesChanged", "sa{sv}as", SESSION_INTERFACE, {}, [])


async def test_a_hint_that_was_never_set_says_nothing(tmp_path: Path) -> None:
    """Mutation: believing `false` at once, a desktop that sets no hint is busy for ever and the card never lent."""
    login = Login()
    login.open("1")
    async with logind(tmp_path, login) as (_, seen, _, source):
        event = seen.last("logind")
        assert isinstance(event, InputObserved)
        assert event.idle_s is Unknown.ABSENT
        assert source.desktop_uids == {1000}


async def test_a_desktop_that_sets_its_hint_is_followed_and_its_return_is_told_by_the_signal(tmp_path: Path) -> None:
    login = Login()
    login.open("1")
    login.hint("1", True, since_s=700.0)
    async with logind(tmp_path, login) as (bus, seen, _, _):
        assert seen.last("logind") == InputObserved("logind", 300.0)
        login.hint("1", False, since_s=1000.0)
        changed(bus)
        await seen.value("logind", 0.0)
        login.hint("1", True, since_s=990.0, locked=True)
        changed(bus)
        await seen.value("logind", 10.0)
        assert seen.last("logind") == InputObserved("logind", 10.0, "locked")


@pytest.mark.parametrize(
    "session",
    [{"kind": "tty"}, {"of_class": "greeter"}, {"seat": ""}, {"seat": "seat1"}, {"state": "closing"}],
)
async def test_sessions_without_a_desktop_here_do_not_count(tmp_path: Path, session: dict[str, str]) -> None:
    """The hint of a tty session comes from its atime (systemd#14053), which the tty source reads itself."""
    login = Login()
    login.open("1", 1000, **session)
    login.hint("1", True, since_s=700.0)
    async with logind(tmp_path, login) as (_, seen, _, source):
        assert seen.last("logind") == InputObserved("logind", Unknown.ABSENT, "nobody has a desktop open")
        assert source.desktop_uids == set()


async def test_a_session_that_closes_between_two_questions_is_left_out(tmp_path: Path) -> None:
    login = Login()
    login.open("1")
    del login.service.properties["/session/1", SESSION_INTERFACE]
    async with logind(tmp_path, login) as (_, seen, _, _):
        assert seen.last("logind") == InputObserved("logind", Unknown.ABSENT, "nobody has a desktop open")


@pytest.mark.parametrize("piece", [None, 1])
async def test_films_and_calls_are_told_and_everything_else_on_the_list_is_not(
    tmp_path: Path, piece: int | None
) -> None:
    login = Login()
    login.inhibitors = [
        ("handle-lid-switch:sleep", "UPower", "pause on battery", "delay", 0, 1),
        ("shutdown", "packagekit", "updating", "block", 0, 2),
        ("sleep", "Slackwater", "gives the card back", "block", 0, 3),
        ("idle", "Caffeine", "always", "block", 1000, 4),
        ("sleep", "us", "our own process", "block", 0, os.getpid()),
        ("idle:sleep", "Firefox\x1b[2J", "playing\nvideo", "block", 1000, 5),
    ]
    async with logind(tmp_path, login, inhibitors_ignored=["caffeine"], piece=piece) as (bus, seen, _, _):
        assert seen.last("inhibitors") == BusyObserved("inhibitors", "Firefox [2J: playing video")
        login.inhibitors.clear()
        bus.emit(LOGIND, MANAGER, PROPERTIES, "PropertiesChanged", "sa{sv}as", MANAGER_INTERFACE, {}, [])
        await seen.value("inhibitors", "")


async def test_before_sleep_the_card_is_given_back_while_logind_waits(tmp_path: Path) -> None:
    """Mutation: without the lock the machine suspends with our process on the card."""
    login = Login()
    async with logind(tmp_path, login) as (bus, seen, pace, source):
        assert login.locked()
        bus.emit(LOGIND, MANAGER, MANAGER_INTERFACE, "PrepareForSleep", "b", True)
        await seen.value("sleep", "the machine goes to sleep")
        await seen.until(lambda: SLEEP_HOLD_S in pace.rests)
        await seen.until(lambda: not login.locked())
        assert len(login.locks) == 1
        bus.emit(LOGIND, MANAGER, MANAGER_INTERFACE, "PrepareForSleep", "b", False)
        await seen.value("sleep", 0.0)
        assert BusyObserved("sleep", "") in seen.events[-4:]
        assert len(login.locks) == 2
        assert login.locked()
        # If logind is lost now, what it said of the sleep must not grow stale for ever.
        assert InputObserved("sleep", Unknown.BROKEN, "gone") in source.unseen(Unknown.BROKEN, "gone")


async def test_many_inhibitors_are_not_all_named(tmp_path: Path) -> None:
    login = Login()
    login.inhibitors = [("idle", f"program {number}", "busy", "block", 1000, number) for number in range(100, 200)]
    async with logind(tmp_path, login) as (_, seen, _, _):
        assert seen.last("inhibitors") == BusyObserved(
            "inhibitors", "program 100: busy, program 101: busy, program 102: busy"
        )


async def test_where_no_lock_may_be_taken_the_rest_goes_on(tmp_path: Path) -> None:
    login = Login()
    login.may_inhibit = False
    async with logind(tmp_path, login) as (bus, seen, _, _):
        bus.emit(LOGIND, MANAGER, MANAGER_INTERFACE, "PrepareForSleep", "b", True)
        await seen.value("sleep", "the machine goes to sleep")


async def test_signals_of_strangers_are_not_believed(tmp_path: Path) -> None:
    """Mutation: without the check of the sender any program on the bus can say that the machine goes to sleep."""
    login = Login()
    async with logind(tmp_path, login) as (bus, seen, _, _):
        bus.emit_as(":1.666", MANAGER, MANAGER_INTERFACE, "PrepareForSleep", "b", True)
        login.open("1")
        login.hint("1", True, since_s=999.0)
        changed(bus)
        await seen.value("logind", 1.0)
        assert seen.last("sleep") == BusyObserved("sleep", "")


async def test_logind_that_stops_is_absent(tmp_path: Path) -> None:
    login = Login()
    seen = Seen()
    async with (
        FakeBus(tmp_path / "bus", {LOGIND: login.service}) as bus,
        watched(LogindSource(address=bus.address), seen, NoPace()) as task,
    ):
        await seen.until(lambda: seen.last("inhibitors") is not None)
        bus.stop(LOGIND)
        with pytest.raises(SourceAbsent, match="does not run"):
            await task


# ---- the bus itself


async def test_without_a_bus_the_source_is_absent(tmp_path: Path) -> None:
    error = await failure(LogindSource(address=f"unix:path={tmp_path}/none"))
    assert isinstance(error, SourceAbsent)


async def test_a_socket_on_which_nobody_listens_is_broken(tmp_path: Path) -> None:
    (tmp_path / "bus").touch()
    error = await failure(MeteredSource(address=f"unix:path={tmp_path}/bus"))
    assert isinstance(error, SourceBroken)


@pytest.mark.parametrize("address", ["tcp:host=localhost", "nonsense", ""])
async def test_an_address_that_is_none_is_broken(address: str) -> None:
    with pytest.raises((SourceBroken, SourceAbsent)):
        await Bus.connect(address)


@pytest.mark.parametrize("answer", [b"", b"REJECTED EXTERNAL\r\n", b"\xff" * 9000, b"OK \r\nmore\r\n"])
async def test_a_server_that_is_no_bus_is_broken(tmp_path: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)

    async with listening(tmp_path / "bus", serve):
        with pytest.raises(SourceBroken):
            await Bus.connect(f"unix:path={tmp_path}/bus")


@pytest.mark.parametrize(
    "garbage",
    [
        b"x" * 16,
        bytes(64),
        b"l\x04\x00\x01" + b"\xff" * 12,  # a body of 4 GiB
        b"l\x04\x00\x01\x00\x00\x00\x00\x01\x00\x00\x00\xff\xff\x0f\x00",  # a header of 1 MiB
        b"l\x09\x00\x01\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00",
    ],
)
async def test_garbage_on_the_bus_breaks_the_source_and_nothing_else(tmp_path: Path, garbage: bytes) -> None:
    """Mutation: without the bound, a wrong length is waited for, and buffered, for ever."""
    async with FakeBus(tmp_path / "bus", {}) as bus:
        client = await Bus.connect(bus.address)
        await client.follow("org.example")
        bus.send_raw(garbage * 3)
        with pytest.raises(SourceBroken):
            async with asyncio.timeout(20):
                await client.wait(60.0)
                await client.wait(60.0)
        with pytest.raises(SourceBroken):
            await client.call("org.example", "/", "org.example", "Ask")


async def test_a_bus_that_goes_away_fails_what_waits_for_it(tmp_path: Path) -> None:
    async with FakeBus(tmp_path / "bus", {}) as bus:
        client = await Bus.connect(bus.address)
        waiting = asyncio.create_task(client.wait(60.0))
        await asyncio.sleep(0)
        bus.disconnect()
        with pytest.raises(SourceBroken, match="closed"):
            await waiting


async def test_a_service_that_does_not_answer_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "CALL_TIMEOUT_S", 0.05)
    service = FakeService()
    async with FakeBus(tmp_path / "bus", {"org.example": service}) as bus:
        client = await Bus.connect(bus.address)
        bus.services["org.example"] = service
        monkeypatch.setattr(bus, "_answer", lambda *arguments: None)
        with pytest.raises(SourceBroken, match="no answer to Ask"):
            await client.call("org.example", "/", "org.example", "Ask")
        async with client:
            assert await client.wait(0.0) == []


# ---- NetworkManager


@pytest.mark.parametrize(
    ("value", "metered"),
    [(0, Unknown.ABSENT), (1, True), (2, False), (3, True), (4, False), (9, Unknown.ABSENT)],
)
async def test_a_guess_of_metered_counts_as_metered(tmp_path: Path, value: int, metered: bool | Unknown) -> None:
    """Mutation: taking 1 alone for yes lends over a phone's hotspot."""
    name, path = "org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager"
    service = FakeService(properties={(path, name): {"Metered": ("u", value)}})
    seen = Seen()
    async with (
        FakeBus(tmp_path / "bus", {name: service}) as bus,
        watched(MeteredSource(address=bus.address), seen, NoPace()),
    ):
        await seen.until(lambda: bool(seen.events))
        assert seen.events == [MeteredObserved(metered)]
        service.properties[path, name]["Metered"] = ("u", 2)
        bus.emit(name, path, PROPERTIES, "PropertiesChanged", "sa{sv}as", name, {}, [])
        await seen.until(lambda: seen.events[-1] == MeteredObserved(False))


async def test_without_network_manager_metered_is_absent_and_none_is_started(tmp_path: Path) -> None:
    async with FakeBus(tmp_path / "bus", {}) as bus:
        assert isinstance(await failure(MeteredSource(address=bus.address)), SourceAbsent)
        assert {service for service, _ in bus.calls} == {"org.freedesktop.DBus"}


# ---- desktops


GAMEMODE, GAMEMODE_PATH = "com.feralinteractive.GameMode", "/com/feralinteractive/GameMode"


async def test_a_game_is_told_when_game_mode_comes_and_asking_never_starts_it(tmp_path: Path) -> None:
    """Mutation: any call without NO_AUTO_START starts gamemoded (aphotic-hypr PR 73)."""
    seen = Seen()
    service = FakeService(properties={(GAMEMODE_PATH, GAMEMODE): {"ClientCount": ("i", 1)}})
    async with (
        FakeBus(tmp_path / "bus", {}) as bus,
        watched(GameModeSource(address=bus.address), seen, NoPace()),
    ):
        await seen.value("gamemode", "")
        assert GAMEMODE not in {service for service, _ in bus.calls}
        bus.start(GAMEMODE, service)
        await seen.value("gamemode", "GameMode is on for 1 programs")
        service.properties[GAMEMODE_PATH, GAMEMODE]["ClientCount"] = ("i", 0)
        bus.emit(GAMEMODE, GAMEMODE_PATH, PROPERTIES, "PropertiesChanged", "sa{sv}as", GAMEMODE, {}, [])
        await seen.value("gamemode", "")
        bus.stop(GAMEMODE)
        assert bus.starts == []


async def test_gnome_tells_the_return_by_a_signal_and_not_by_the_next_look(tmp_path: Path) -> None:
    name, path = "org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core"
    idle_ms = 60_000
    watches = iter(range(5, 99))
    service = FakeService(
        {
            (path, name, "GetIdletime"): lambda body: ("t", (idle_ms,)),
            (path, name, "AddUserActiveWatch"): lambda body: ("u", (next(watches),)),
        }
    )
    seen = Seen()
    async with (
        FakeBus(tmp_path / "bus", {name: service}) as bus,
        watched(MutterSource(address=bus.address), seen, NoPace()),
    ):
        await seen.value("mutter", 60.0)
        await bus.until_called(name, "AddUserActiveWatch")
        idle_ms = 10
        bus.emit(name, path, name, "WatchFired", "u", 5)
        await seen.value("mutter", 0.01)
        assert any("arg" not in rule and f"interface='{name}'" in rule for rule in bus.rules)


async def test_a_film_on_gnome_and_a_call_on_kde_keep_the_desktop_awake(tmp_path: Path) -> None:
    gnome, power = "org.gnome.SessionManager", "org.freedesktop.PowerManagement"
    inhibited = True

    def inhibitor(path: str, flags: int, program: str) -> dict[tuple[str, str, str], Any]:
        interface = "org.gnome.SessionManager.Inhibitor"
        return {
            (path, interface, "GetFlags"): lambda body: ("u", (flags,)),
            (path, interface, "GetAppId"): lambda body: ("s", (program,)),
            (path, interface, "GetReason"): lambda body: ("s", ("Playing",)),
        }

    paths = ["/gone", "/i/1", "/i/2"]
    gnome_service = FakeService(
        {
            ("/org/gnome/SessionManager", gnome, "GetInhibitors"): lambda body: ("ao", (paths,)),
            **inhibitor("/i/1", 1, "updater"),  # against logging out only
            **inhibitor("/i/2", 8, "vlc"),
        }
    )
    inhibit = ("/org/freedesktop/PowerManagement/Inhibit", "org.freedesktop.PowerManagement.Inhibit", "HasInhibit")
    kde_service = FakeService({inhibit: lambda body: ("b", (inhibited,))})
    seen = Seen()
    async with (
        FakeBus(tmp_path / "bus", {gnome: gnome_service}) as bus,
        watched(DesktopInhibitorSource(address=bus.address), seen, NoPace()),
    ):
        await seen.value("desktop", "vlc: Playing")
        paths.clear()
        bus.emit(gnome, "/org/gnome/SessionManager", gnome, "InhibitorRemoved", "o", "/i/2")
        await seen.value("desktop", "")
        bus.start(power, kde_service)
        await seen.value("desktop", "a program keeps the desktop awake")
        inhibited = False
        bus.emit(power, inhibit[0], inhibit[1], "HasInhibitChanged", "b", False)
        await seen.value("desktop", "")


@pytest.mark.parametrize("source", [MutterSource, DesktopInhibitorSource])
async def test_on_another_desktop_the_sources_of_this_one_are_absent(
    tmp_path: Path, source: type[MutterSource] | type[DesktopInhibitorSource]
) -> None:
    async with FakeBus(tmp_path / "bus", {}) as bus:
        assert isinstance(await failure(source(address=bus.address)), SourceAbsent)


@pytest.mark.parametrize("source", [MutterSource, GameModeSource, DesktopInhibitorSource])
async def test_without_a_session_bus_they_are_absent(
    monkeypatch: pytest.MonkeyPatch, source: type[MutterSource]
) -> None:
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert isinstance(await failure(source()), SourceAbsent)


def test_names_that_others_choose_reach_no_terminal_unchanged() -> None:
    assert printable("a\x1b[31m\u202eb\n\tc") == "a [31m b c"
    assert printable("ä" * 1000) == "ä" * 99 + "…"
