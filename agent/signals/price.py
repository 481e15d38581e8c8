"""What electricity costs now: a fixed price, a table of windows, or a file that something else keeps up to date."""

import asyncio
import csv
import datetime
import io
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

from agent.clock import wall_ms
from agent.owner.events import OwnerEvent, PriceObserved, Unknown
from agent.signals.local_time import LocalZone, local_moment
from agent.signals.settings import DAYS, PriceWindow, SignalSettings
from agent.signals.source import RESTING_PERIOD_S, Pace, SourceAbsent, SourceBroken, Tell

# A year of quarter hours in the longest form.
FILE_BYTES_MAX = 4 * 1024 * 1024
# The last row of a file holds as long as the one before it did, and this long where it is the only one.
LAST_ROW_MS = 3_600_000


class PriceRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a price file; `start` is ISO 8601 with its offset from UTC."""

    start: str
    price_per_kwh: float


class PriceSource:
    """The price in force, told every few seconds.

    Where a file is given it alone counts, and a time that it does not cover is
    unknown: an old price must not pass for today's.
    """

    name = "price"

    def __init__(
        self, settings: SignalSettings, zone: LocalZone | None = None, *, wall: Callable[[], int] = wall_ms
    ) -> None:
        self._settings = settings
        self._zone = zone or LocalZone()
        self._wall = wall

    async def watch(self, tell: Tell, pace: Pace) -> NoReturn:
        settings = self._settings
        if not settings.price_file and settings.price_per_kwh is None and not settings.price_windows:
            raise SourceAbsent("no electricity price is configured")
        rows: list[tuple[int, float]] = []
        seen: tuple[int, int, int] | None = None
        while True:
            if settings.price_file:
                path = Path(settings.price_file)
                found = await asyncio.to_thread(_identify, path)
                if found != seen:
                    rows, seen = await asyncio.to_thread(read_price_file, path), found
                price = price_in_file(rows, self._wall(), path)
            else:
                moment = local_moment(self._wall(), self._zone.zone())
                price = price_in_windows(settings, moment)
            tell(PriceObserved(price))
            await pace.rest(RESTING_PERIOD_S)

    def unseen(self, why: Unknown, detail: str) -> Sequence[OwnerEvent]:
        return [PriceObserved(why)]


def price_in_windows(settings: SignalSettings, moment: datetime.datetime) -> float:
    """Return the price of the first window that covers a local moment, else the price outside of windows.

    Raises:
        SourceAbsent: no window covers it and there is no price outside of windows.
    """
    minute = moment.hour * 60 + moment.minute
    for window in settings.price_windows:
        if _covers(window, moment.weekday(), minute):
            return window.price_per_kwh
    if settings.price_per_kwh is None:
        raise SourceAbsent("no price is configured for this hour")
    return settings.price_per_kwh


def _covers(window: PriceWindow, weekday: int, minute: int) -> bool:
    start, until = _minute(window.start), _minute(window.until)
    if start < until:
        return DAYS[weekday] in window.days and start <= minute < until
    # Over midnight (or all round the clock): the part after midnight belongs to the day on which the window began.
    began_today = minute >= start
    return (began_today or minute < until) and DAYS[weekday if began_today else weekday - 1] in window.days


def _minute(clock: str) -> int:
    return int(clock[:2]) * 60 + int(clock[3:])


def price_in_file(rows: Sequence[tuple[int, float]], now_ms: int, path: Path) -> float:
    """Return the price in force at a time, of rows in order of their start.

    Raises:
        SourceBroken: the rows do not cover the time.
    """
    index = bisect_right(rows, (now_ms, math.inf)) - 1
    if index < 0:
        raise SourceBroken(f"the prices in {path} begin later than now")
    if index == len(rows) - 1:
        length_ms = rows[index][0] - rows[index - 1][0] if index else LAST_ROW_MS
        if now_ms >= rows[index][0] + length_ms:
            raise SourceBroken(f"the prices in {path} end before now; what keeps the file up to date has stopped")
    return rows[index][1]


def read_price_file(path: Path) -> list[tuple[int, float]]:
    """Read a price file; return (Unix milliseconds, price) in order of time.

    Raises:
        SourceBroken: unreadable, too long, or a line is no price with a start.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise SourceBroken(f"{path} is longer than {FILE_BYTES_MAX} bytes")
        rows = parse_prices(content.decode("utf-8-sig"))
    except OSError as error:
        raise SourceBroken(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise SourceBroken(f"{path}: {error}") from error
    if not rows:
        raise SourceBroken(f"{path} has no price")
    return rows


def parse_prices(text: str) -> list[tuple[int, float]]:
    """Parse JSON lines, or CSV with the columns start and price_per_kwh.

    Raises:
        ValueError: a line is neither; the message names it.
    """
    rows: list[tuple[int, float]] = []
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                with _at_line(number):
                    rows.append(_row(msgspec.json.decode(line, type=PriceRow)))
    else:
        for number, entry in enumerate(csv.DictReader(io.StringIO(text)), start=2):
            with _at_line(number):
                rows.append(_row(msgspec.convert(entry, PriceRow, strict=False)))
    return sorted(rows)


def _row(row: PriceRow) -> tuple[int, float]:
    start = datetime.datetime.fromisoformat(row.start)
    if start.tzinfo is None:
        raise ValueError(f"{row.start} has no offset from UTC, as in 2026-12-02T00:00+01:00")
    if not math.isfinite(row.price_per_kwh):
        raise ValueError(f"a price of {row.price_per_kwh}")
    return round(start.timestamp() * 1000), row.price_per_kwh


@contextmanager
def _at_line(number: int) -> Iterator[None]:
    """Name the line in whatever is wrong with it. msgspec's errors are ValueErrors."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise ValueError(f"line {number}: {error}") from error


def _identify(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise SourceBroken(f"cannot read {path}: {error.strerror}") from error
    return status.st_ino, status.st_mtime_ns, status.st_size
