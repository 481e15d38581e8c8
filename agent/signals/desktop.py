"""What the session bus of a desktop tells: GNOME's idle time, "do not disturb", and games. Runs in the companion."""

from collections.abc import Sequence
from typing import NoReturn

from agent.owner.events import BusyObserved, InputObserved, OwnerEvent, Unknown
from agent.signals.bus import PROPERTIES, Bus, CallRefused, session_bus_address
from agent.signals.printable import printable
from agent.signals.source import RESTING_PERIOD_S, Pace, SourceAbsent, Tell

MUTTER = "org.gnome.Mutter.IdleMonitor"
MUTTER_PATH = "/org/gnome/Mutter/IdleMonitor/Core"
GAMEMODE = "com.feralinteractive.GameMode"
GAMEMODE_PATH = "/com/feralinteractive/GameMode"
GNOME_SESSION = "org.gnome.SessionManager"
GNOME_SESSION_PATH = "/org/gnome/SessionManager"
# KDE, Xfce and MATE answer under this name.
POWER = "org.freedesktop.PowerManagement"
POWER_PATH = "/org/freedesktop/PowerManagement/Inhibit"
POWER_INTERFACE = "org.freedesktop.PowerManagement.Inhibit"

# gnome-session's flags: inhibit suspend, inhibit idle.
_GNOME_FLAGS = 4 | 8
# Below this the owner counts as present anyway, and no watch for a return is needed.
PRESENT_S = 2.0
# Signals may come in bursts; one reading answers all of a burst.
BURST_S = 0.2


async def _connect(address: str | None) -> Bus:
    address = address or session_bus_address()
    if address is None:
        raise SourceAbsent("this session has no message bus")
    return await Bus.connect(address)


class MutterSource:
    """GNOME: asks for the idle time, and has the shell tell when the owner returns."""

    name = "mutter"

    def __init__(self, *, address: str | None = None) -> None:
        self._address = address

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        async with await _connect(self._address) as bus:
            # The shell owns this name, and sends many signals that are none of ours.
            await bus.follow(MUTTER, f"interface='{MUTTER}'")
            returns: int | None = None
            while True:
                if not bus.running(MUTTER):
                    raise SourceAbsent("no GNOME shell in this session")
                [idle_ms] = await bus.call(MUTTER, MUTTER_PATH, MUTTER, "GetIdletime")
                tell(InputObserved(self.name, idle_ms / 1000))
                if returns is None and idle_ms / 1000 >= PRESENT_S:
                    [returns] = await bus.call(MUTTER, MUTTER_PATH, MUTTER, "AddUserActiveWatch")
                for signal in await bus.wait(RESTING_PERIOD_S if returns is not None else PRESENT_S):
                    if signal.member == "WatchFired" and signal.body == (returns,):
                        # It fires once, at the first input.
                        returns = None
                await pace.rest(BURST_S)

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [InputObserved(self.name, why, detail)]


class GameModeSource:
    """Feral's GameMode, which games switch on while they run; the daemon is never started by asking."""

    name = "gamemode"

    def __init__(self, *, address: str | None = None) -> None:
        self._address = address

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        async with await _connect(self._address) as bus:
            await bus.follow(GAMEMODE, f"path='{GAMEMODE_PATH}',interface='{PROPERTIES}'")
            while True:
                games = 0
                if bus.running(GAMEMODE):
                    games = await bus.property(GAMEMODE, GAMEMODE_PATH, GAMEMODE, "ClientCount")
                tell(BusyObserved(self.name, f"GameMode is on for {games} programs" if games > 0 else ""))
                await bus.wait(RESTING_PERIOD_S)
                await pace.rest(BURST_S)

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [BusyObserved(self.name, why)]


class DesktopInhibitorSource:
    """Whether a program keeps the desktop awake (films, calls, presentations), on GNOME, KDE, Xfce and MATE."""

    name = "desktop"

    def __init__(self, *, address: str | None = None) -> None:
        self._address = address

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        async with await _connect(self._address) as bus:
            await bus.follow(GNOME_SESSION, f"path='{GNOME_SESSION_PATH}'")
            await bus.follow(POWER, f"interface='{POWER_INTERFACE}'")
            while True:
                if not bus.running(GNOME_SESSION) and not bus.running(POWER):
                    raise SourceAbsent("no desktop in this session that keeps a list of inhibitors")
                asking = await self._gnome(bus) if bus.running(GNOME_SESSION) else ""
                if not asking and bus.running(POWER):
                    [inhibited] = await bus.call(POWER, POWER_PATH, POWER_INTERFACE, "HasInhibit")
                    asking = "a program keeps the desktop awake" if inhibited else ""
                tell(BusyObserved(self.name, asking))
                await bus.wait(RESTING_PERIOD_S)
                await pace.rest(BURST_S)

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [BusyObserved(self.name, why)]

    async def _gnome(self, bus: Bus) -> str:
        [inhibitors] = await bus.call(GNOME_SESSION, GNOME_SESSION_PATH, GNOME_SESSION, "GetInhibitors")
        for path in inhibitors[:64]:
            try:
                interface = f"{GNOME_SESSION}.Inhibitor"
                [flags] = await bus.call(GNOME_SESSION, path, interface, "GetFlags")
                if not flags & _GNOME_FLAGS:
                    continue
                [program] = await bus.call(GNOME_SESSION, path, interface, "GetAppId")
                [reason] = await bus.call(GNOME_SESSION, path, interface, "GetReason")
            except CallRefused:
                continue  # it ended since it was listed
            return f"{printable(program)}: {printable(reason)}"
        return ""
