"""The owner's wall clock: what hour and day it is where the machine stands."""

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from agent.clock import wall_ms
from agent.owner.events import LocalTimeObserved, OwnerEvent, Unknown
from agent.signals.source import Pace, SourceBroken, Tell


class LocalZone:
    """The machine's time zone, read again whenever /etc/localtime changes.

    The C library reads it once per process, so that `time.localtime` of a
    daemon stays where the machine was when it started.

    Args:
        localtime: a zone file, or a link to one.
        environ: TZ in it wins where it names a zone, as for all programs.
    """

    def __init__(self, localtime: Path = Path("/etc/localtime"), environ: Mapping[str, str] = os.environ) -> None:
        self._path = localtime
        self._name = environ.get("TZ", "").lstrip(":")
        self._seen: tuple[int, int, int] | None = None
        self._zone: datetime.tzinfo = datetime.UTC

    def zone(self) -> datetime.tzinfo:
        """Return the zone in force now; UTC where the machine has none.

        Raises:
            SourceBroken: TZ names no zone, or the zone file is none.
        """
        if self._name:
            try:
                return ZoneInfo(self._name)
            except (ZoneInfoNotFoundError, ValueError, OSError) as error:
                raise SourceBroken(f"TZ={self._name!r} names no time zone of this machine") from error
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_dev)
            if seen != self._seen:
                with self._path.open("rb") as file:
                    self._zone = ZoneInfo.from_file(file)
                self._seen = seen
        except FileNotFoundError:
            return datetime.UTC
        except (OSError, ValueError) as error:
            raise SourceBroken(f"{self._path} is no time zone: {error}") from error
        return self._zone


def local_moment(wall_ms_now: int, zone: datetime.tzinfo) -> datetime.datetime:
    """Return a moment as the owner's clock shows it."""
    return datetime.datetime.fromtimestamp(wall_ms_now / 1e3, zone)


class LocalTimeSource:
    """Tells each new minute."""

    name = "local time"

    def __init__(self, zone: LocalZone | None = None, *, wall: Callable[[], int] = wall_ms) -> None:
        self._zone = zone or LocalZone()
        self._wall = wall
        self._last: LocalTimeObserved | None = None

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        while True:
            try:
                zone = self._zone.zone()
            except SourceBroken:
                # A wrong hour is better told, and corrected, than none: UTC until the zone can be read.
                self._tell_new(datetime.UTC, tell)
                raise
            self._tell_new(zone, tell)
            await pace.tick()

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        # The vocabulary has no unknown hour; the log has the reason.
        return []

    def _tell_new(self, zone: datetime.tzinfo, tell: Tell) -> None:
        moment = local_moment(self._wall(), zone)
        observed = LocalTimeObserved(moment.weekday(), moment.hour * 60 + moment.minute, moment.date().isoformat())
        if observed != self._last:
            self._last = observed
            tell(observed)
