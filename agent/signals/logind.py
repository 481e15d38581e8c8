"""What systemd-logind knows of the owner: idle desktops, inhibitors, and that the machine goes to sleep."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jeepney.fds import FileDescriptor

from agent.clock import monotonic_s
from agent.owner.events import BusyObserved, InputObserved, OwnerEvent, Unknown
from agent.signals.bus import Bus, CallRefused, Signal, system_bus_address
from agent.signals.printable import printable
from agent.signals.source import RESTING_PERIOD_S, Pace, SourceAbsent, Tell

SERVICE = "org.freedesktop.login1"
MANAGER = "/org/freedesktop/login1"
MANAGER_INTERFACE = "org.freedesktop.login1.Manager"
SESSION_INTERFACE = "org.freedesktop.login1.Session"

# Signals may come in bursts (a login sends a dozen); one reading answers all of a burst.
BURST_S = 0.2
# A give-back has 2 s, and logind waits 5 s for us at most (InhibitDelayMaxSec).
SLEEP_HOLD_S = 3.0
# More sessions of one seat than that are nobody's.
SESSIONS_MAX = 64
# One is enough to keep the card; more than these are not read by anybody.
INHIBITORS_NAMED_MAX = 3
_DESKTOPS = frozenset({"x11", "wayland", "mir"})
# Our own lock that delays sleep is none of the owner's wishes.
_WHO = "Slackwater"


@dataclass(frozen=True, slots=True)
class _Hint:
    """What one desktop session says of its user."""

    uid: int
    idle: bool
    # CLOCK_MONOTONIC microseconds of the last change; 0 where there was none.
    since_us: int
    locked: bool
    # Whether the desktop is known to set the hint.
    trusted: bool


class LogindSource:
    """Follows logind over the system bus.

    IdleHint is set by the desktop, after the owner's own "screen off" delay. A
    desktop that never sets it looks busy for ever, so that `false` is believed
    only of a session that was seen idle once; otherwise it says nothing. The
    hint of a text session comes from its terminal's atime (systemd#14053),
    which the tty source reads itself.
    """

    name = "logind"

    def __init__(
        self,
        *,
        inhibitors_ignored: Sequence[str] = (),
        address: str | None = None,
        now: Callable[[], float] = monotonic_s,
        awake: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._ignored = frozenset(name.casefold() for name in (*inhibitors_ignored, _WHO))
        self._now = now
        # The clock of IdleSinceHintMonotonic, which stands still in sleep.
        self._awake = awake
        # Object paths of sessions that were seen idle.
        self._trusted: set[str] = set()
        self._woke_at: float | None = None
        self._desktop_uids: frozenset[int] = frozenset()

    @property
    def desktop_uids(self) -> frozenset[int]:
        """Users who have a desktop open on this machine's own screen now."""
        return self._desktop_uids

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        async with await Bus.connect(self._address or system_bus_address()) as bus:
            await bus.follow(SERVICE)
            lock: FileDescriptor | None = None
            try:
                lock = await self._delay_sleep(bus)
                tell(BusyObserved("sleep", ""))
                while True:
                    if not bus.running(SERVICE):
                        raise SourceAbsent("systemd-logind does not run")
                    for event in await self._read(bus):
                        tell(event)
                    for signal in await bus.wait(RESTING_PERIOD_S):
                        lock = await self._on_signal(signal, bus, lock, tell, pace)
                    await pace.rest(BURST_S)
            finally:
                self._desktop_uids = frozenset()
                if lock is not None:
                    lock.close()

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        # What was said of the last sleep would otherwise grow stale, which passes for a reader that died.
        woke = [] if self._woke_at is None else [InputObserved("sleep", why, detail)]
        return [
            InputObserved(self.name, why, detail),
            BusyObserved("inhibitors", why),
            BusyObserved("sleep", why),
            *woke,
        ]

    # ---- sleep

    async def _on_signal(
        self, signal: Signal, bus: Bus, lock: FileDescriptor | None, tell: Tell, pace: Pace
    ) -> FileDescriptor | None:
        if signal.member != "PrepareForSleep" or len(signal.body) != 1:
            return lock
        if signal.body[0]:
            tell(BusyObserved("sleep", "the machine goes to sleep"))
            # Cards are given back meanwhile: a process that computes through a suspend may find its driver broken.
            await pace.rest(SLEEP_HOLD_S)
            if lock is not None:
                lock.close()
            return None
        self._woke_at = self._now()
        tell(BusyObserved("sleep", ""))
        if lock is not None:
            lock.close()
        return await self._delay_sleep(bus)

    async def _delay_sleep(self, bus: Bus) -> FileDescriptor | None:
        """Take a lock that makes logind wait a little before it suspends; None where we may not."""
        try:
            [lock] = await bus.call(
                SERVICE,
                MANAGER,
                MANAGER_INTERFACE,
                "Inhibit",
                "ssss",
                "sleep",
                _WHO,
                "gives the graphics card back first",
                "delay",
            )
        except CallRefused:
            # An old polkit rule may forbid it. Then the signal alone has to do.
            return None
        assert isinstance(lock, FileDescriptor), "the signature of Inhibit is h"
        return lock

    # ---- reading

    async def _read(self, bus: Bus) -> list[OwnerEvent]:
        hints = await self._hints(bus)
        self._desktop_uids = frozenset(hint.uid for hint in hints)
        events: list[OwnerEvent] = [self._input(hints)]
        if self._woke_at is not None:
            # Mostly a person wakes a machine; a timer that does costs the fleet some minutes.
            events.append(InputObserved("sleep", max(0.0, self._now() - self._woke_at), "since the machine woke"))
        [inhibitors] = await bus.call(SERVICE, MANAGER, MANAGER_INTERFACE, "ListInhibitors")
        events.append(BusyObserved("inhibitors", self._inhibitors(inhibitors)))
        return events

    async def _hints(self, bus: Bus) -> list[_Hint]:
        [sessions] = await bus.call(SERVICE, MANAGER, MANAGER_INTERFACE, "ListSessions")
        hints: list[_Hint] = []
        paths: set[str] = set()
        for _, uid, _, seat, path in sessions[:SESSIONS_MAX]:
            if seat != "seat0":
                continue
            try:
                found = await bus.properties(SERVICE, path, SESSION_INTERFACE)
            except CallRefused:
                continue  # closed since it was listed
            if found.get("Type") not in _DESKTOPS or found.get("Class") != "user" or found.get("State") == "closing":
                continue
            paths.add(path)
            if found["IdleHint"]:
                self._trusted.add(path)
            hints.append(
                _Hint(
                    uid=uid,
                    idle=found["IdleHint"],
                    since_us=found.get("IdleSinceHintMonotonic", 0),
                    locked=found.get("LockedHint", False),
                    trusted=path in self._trusted,
                )
            )
        self._trusted &= paths
        return hints

    def _input(self, hints: Sequence[_Hint]) -> InputObserved:
        if not hints:
            return InputObserved(self.name, Unknown.ABSENT, "nobody has a desktop open")
        if any(hint.trusted and not hint.idle for hint in hints):
            return InputObserved(self.name, 0.0, "the desktop says that it is in use")
        if not all(hint.trusted for hint in hints):
            return InputObserved(self.name, Unknown.ABSENT, "the desktop was never seen to set its idle hint")
        awake_us = self._awake() * 1e6
        idle_s = min(max(0.0, awake_us - hint.since_us) / 1e6 for hint in hints)
        return InputObserved(self.name, idle_s, "locked" if all(hint.locked for hint in hints) else "")

    def _inhibitors(self, inhibitors: Sequence[tuple[Any, ...]]) -> str:
        asking = [
            f"{printable(who)}: {printable(why)}"
            for what, who, why, mode, _, pid in inhibitors
            if mode == "block"
            and not {"idle", "sleep"}.isdisjoint(what.split(":"))
            and who.casefold() not in self._ignored
            and pid != os.getpid()
        ]
        return ", ".join(sorted(asking)[:INHIBITORS_NAMED_MAX])
