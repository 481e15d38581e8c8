"""Hours of the week in which an owner allows something, written as the owner would say them. Pure.

One text a window: `"22:00-07:00"` is every day; `"mon-fri 22:00-07:00"` and
`"sat,sun 00:00-24:00"` name days. A window over midnight belongs to the day on
which it begins, so the first of these ends on a Saturday morning.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
# One window for each hour of a week would be 168; more is a mistake.
WINDOWS_MAX = 200

_WINDOW = re.compile(r"(?:(?P<days>[a-z, -]+?)\s+)?(?P<start>\d{1,2}:\d{2})\s*-\s*(?P<end>\d{1,2}:\d{2})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Windows as minutes of the week, [start, end), start before end; one over the week's end has end > WEEK_MINUTES.

    Without any window it is always open: an owner who names no hours sets none.
    """

    windows: tuple[tuple[int, int], ...] = ()

    def open_at(self, weekday: int, minute: int) -> bool:
        """Whether this minute (since local midnight; 0 is Monday) lies in a window."""
        at = weekday * DAY_MINUTES + minute
        return not self.windows or any(
            start <= moment < end for start, end in self.windows for moment in (at, at + WEEK_MINUTES)
        )

    def minutes_until_change(self, weekday: int, minute: int) -> int | None:
        """Return how long it stays as it is now; None where it never changes."""
        at = weekday * DAY_MINUTES + minute
        now_open = self.open_at(weekday, minute)
        edges = {edge % WEEK_MINUTES for window in self.windows for edge in window}
        changes = [
            (edge - at) % WEEK_MINUTES
            for edge in edges
            if self.open_at(edge // DAY_MINUTES, edge % DAY_MINUTES) != now_open
        ]
        return min(changes, default=None)


def parse_schedule(texts: Sequence[str]) -> Schedule:
    """Read windows.

    Raises:
        ValueError: a text that is no window; the message names it and shows one.
    """
    if len(texts) > WINDOWS_MAX:
        raise ValueError(f"{len(texts)} windows, at most {WINDOWS_MAX} are allowed")
    return Schedule(tuple(window for text in texts for window in _windows(text)))


def _windows(text: str) -> list[tuple[int, int]]:
    found = _WINDOW.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f'{text!r} is no window of hours; write "22:00-07:00" or "mon-fri 22:00-07:00"')
    start, end = _minute(found["start"], text), _minute(found["end"], text)
    if start == end:
        raise ValueError(f'{text!r} begins when it ends; write "00:00-24:00" for a whole day')
    if end <= start:
        end += DAY_MINUTES
    return [(day * DAY_MINUTES + start, day * DAY_MINUTES + end) for day in _days(found["days"], text)]


def _minute(clock: str, text: str) -> int:
    hours, minutes = (int(part) for part in clock.split(":"))
    if minutes > 59 or hours * 60 + minutes > DAY_MINUTES:
        raise ValueError(f"{text!r}: there is no {clock} in a day")
    return hours * 60 + minutes


def _days(names: str | None, text: str) -> list[int]:
    if names is None:
        return list(range(7))
    days: set[int] = set()
    for part in names.split(","):
        first, _, last = (name.strip() for name in part.partition("-"))
        for name in (first, last or first):
            if name not in WEEKDAYS:
                raise ValueError(f"{text!r}: {name!r} is no day; days are {', '.join(WEEKDAYS)}")
        start = WEEKDAYS.index(first)
        days.update((start + more) % 7 for more in range((WEEKDAYS.index(last or first) - start) % 7 + 1))
    return sorted(days)
