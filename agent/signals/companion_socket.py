"""Where companions in users' sessions report: a Unix socket in the agent's runtime directory.

Whoever connects can only report signals: there is nothing to ask and nothing to
command, and nothing is ever sent back. A user who lies can keep this machine
from lending, as a key press can; claiming to be idle hides nobody else, since
every source counts by itself.
"""

import asyncio
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import structlog

from agent.clock import monotonic_s
from agent.owner.events import BusyObserved, InputObserved, OwnerEvent, Unknown
from agent.signals.companion_report import (
    LINE_BYTES_MAX,
    REPORT_PERIOD_S,
    SILENT_S_MAX,
    ReportRefused,
    SessionEvent,
    decode_report,
    report_events,
)
from agent.signals.source import Pace, SourceAbsent, SourceBroken, Tell

# One per user who has a session; connections of others are refused at once.
CONNECTIONS_MAX = 16
# A restarted companion may connect before its predecessor's end is noticed. One user must not take all the places.
CONNECTIONS_PER_USER_MAX = 4
# A companion reports each change, of which a busy user makes a few a second, and every 5 s.
REPORTS_PER_S = 10.0
REPORTS_BURST = 40.0
# Users and reasons of refusals that are logged; then silence, so that nobody fills the disk.
COMPLAINTS_MAX = 32

# struct ucred: pid, uid, gid.
_CREDENTIALS = struct.Struct("iII")

log = structlog.get_logger()


@dataclass(slots=True)
class _Companion:
    """The companion of one user."""

    heard_at: float
    writer: asyncio.StreamWriter | None
    allowance: float = REPORTS_BURST
    # Latest event of each source.
    events: dict[tuple[type, str], SessionEvent] = field(default_factory=dict)
    lost: bool = False


class CompanionSource:
    """Listens for companions, checks who they are and what they say, and passes it on.

    Heard are root, the agent's own user, the users named in the settings, and
    whoever is logged in (has a runtime directory that the system made). The
    newest connection of a user counts.

    Args:
        path: of the socket; its directory is made by the service manager.
        runtimes: the directory of users' runtime directories, /run/user.
    """

    name = "companion"

    def __init__(
        self,
        path: Path,
        *,
        uids: Sequence[int] = (),
        runtimes: Path = Path("/run/user"),
        now: Callable[[], float] = monotonic_s,
    ) -> None:
        self._path = path
        self._uids = frozenset({0, os.geteuid(), *uids})
        self._runtimes = runtimes
        self._now = now
        self._companions: dict[int, _Companion] = {}
        # Open connections and whose they are.
        self._connections: dict[asyncio.StreamWriter, int] = {}
        self._complaints: set[tuple[int, str]] = set()

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        listener = _listen(self._path)

        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(reader, writer, tell))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_unix_server(accept, sock=listener, limit=LINE_BYTES_MAX)
        try:
            tell(InputObserved(self.name, Unknown.ABSENT, "no companion has reported yet"))
            while True:
                await pace.rest(REPORT_PERIOD_S)
                self._find_silent(tell)
        finally:
            server.close()
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._path.unlink(missing_ok=True)

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        lost = [event for one in self._companions.values() for event in _unknown(one, why, detail)]
        return [InputObserved(self.name, why, detail), *lost]

    # ---- one connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tell: Tell) -> None:
        uid = peer_uid(writer.get_extra_info("socket"))
        self._connections[writer] = uid
        try:
            if len(self._connections) > CONNECTIONS_MAX or self._of_user(uid) > CONNECTIONS_PER_USER_MAX:
                raise ReportRefused("too many connections at once")
            if not self._heard(uid):
                raise ReportRefused("this user is not logged in and is not in companion_uids")
            await self._listen_to(uid, reader, writer, tell)
        except (ReportRefused, ValueError) as error:
            # ValueError: StreamReader's, for a line over its limit.
            self._complain(uid, str(error))
        except TimeoutError:
            self._complain(uid, f"nothing said for {SILENT_S_MAX:g} s")
        except OSError as error:
            self._complain(uid, f"connection lost: {error}")
        finally:
            del self._connections[writer]
            writer.close()
            companion = self._companions.get(uid)
            if companion is not None and companion.writer is writer:
                companion.writer = None

    async def _listen_to(
        self, uid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tell: Tell
    ) -> None:
        companion: _Companion | None = None
        while True:
            async with asyncio.timeout(SILENT_S_MAX):
                line = await reader.readline()
            if not line.endswith(b"\n"):
                return  # closed; half a line says nothing
            report = decode_report(line)
            if companion is None:
                companion = self._take_over(uid, writer)
            if companion.writer is not writer or self._companions.get(uid) is not companion:
                return  # a newer companion of this user has taken over
            self._charge(companion)
            if companion.lost:
                companion.lost = False
                log.info("a companion reports again", uid=uid)
            self._replace(companion, report_events(report, uid), tell)
            if report.leaving:
                self._forget(uid, "the session has ended", tell)
                return

    def _heard(self, uid: int) -> bool:
        if uid in self._uids:
            return True
        try:
            # Made by the system at login, for this user; nobody else can make it.
            status = os.lstat(self._runtimes / str(uid))
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == uid

    def _take_over(self, uid: int, writer: asyncio.StreamWriter) -> _Companion:
        """Make this connection the one that counts for its user."""
        companion = self._companions.get(uid)
        if companion is None:
            companion = self._companions[uid] = _Companion(heard_at=self._now(), writer=writer)
        elif companion.writer is not None:
            companion.writer.close()
        companion.writer = writer
        return companion

    def _charge(self, companion: _Companion) -> None:
        now = self._now()
        companion.allowance += (now - companion.heard_at) * REPORTS_PER_S
        companion.allowance = min(REPORTS_BURST, companion.allowance) - 1
        companion.heard_at = now
        if companion.allowance < 0:
            raise ReportRefused(f"more than {REPORTS_PER_S:g} reports a second")

    def _of_user(self, uid: int) -> int:
        return sum(other == uid for other in self._connections.values())

    def _replace(self, companion: _Companion, events: Sequence[SessionEvent], tell: Tell) -> None:
        """Pass a report on; a source that it leaves out is gone."""
        reported = {(type(event), event.source): event for event in events}
        for key, event in companion.events.items():
            if key not in reported:
                tell(_without_value(event, Unknown.ABSENT, "not reported any more"))
        companion.events = reported
        for event in events:
            tell(event)

    # ---- companions that say nothing

    def _find_silent(self, tell: Tell) -> None:
        now = self._now()
        for uid, companion in tuple(self._companions.items()):
            if companion.lost:
                # At the end of a session its companion may be killed before it can say so.
                if self._logged_out(uid):
                    self._forget(uid, "the user has logged out", tell)
                continue
            if now - companion.heard_at < SILENT_S_MAX:
                continue
            if self._logged_out(uid):
                self._forget(uid, "the user has logged out", tell)
                continue
            companion.lost = True
            detail = f"the companion of user {uid} has been silent for {SILENT_S_MAX:g} s"
            log.warning("a companion is silent", uid=uid, detail=detail)
            for event in _unknown(companion, Unknown.BROKEN, detail):
                tell(event)

    def _logged_out(self, uid: int) -> bool:
        return self._runtimes.is_dir() and not (self._runtimes / str(uid)).exists()

    def _forget(self, uid: int, detail: str, tell: Tell) -> None:
        for event in _unknown(self._companions.pop(uid), Unknown.ABSENT, detail):
            tell(event)

    def _complain(self, uid: int, reason: str) -> None:
        if (uid, reason) not in self._complaints and len(self._complaints) < COMPLAINTS_MAX:
            self._complaints.add((uid, reason))
            log.warning("a companion was not heard", uid=uid, reason=reason)


def peer_uid(connection: socket.socket) -> int:
    """Return the user at the other end of a Unix socket, as the kernel knows it."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _unknown(companion: _Companion, why: Unknown, detail: str) -> list[OwnerEvent]:
    return [_without_value(event, why, detail) for event in companion.events.values()]


def _without_value(event: SessionEvent, why: Unknown, detail: str) -> OwnerEvent:
    if isinstance(event, InputObserved):
        return replace(event, idle_s=why, detail=detail)
    return BusyObserved(event.source, why)


def _listen(path: Path) -> socket.socket:
    """Bind the socket, over one that a killed agent left."""
    if not path.parent.is_dir():
        raise SourceAbsent(f"no directory {path.parent} for the companions' socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if path.is_socket():
            path.unlink()
        listener.bind(str(path))
        # Everybody may connect; who is heard is decided by the kernel's word on who they are.
        path.chmod(0o666)
        listener.listen(CONNECTIONS_MAX)
    except OSError as error:
        listener.close()
        raise SourceBroken(f"cannot listen on {path}: {error}") from error
    return listener
