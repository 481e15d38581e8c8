"""The only place of the coordinator that reads time."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Two times: one that is compared with other machines, and one that never jumps."""

    def now_ms(self) -> int:
        """Return UTC as Unix milliseconds."""
        ...

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start; for durations and deadlines."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


def utc(unix_ms: int) -> datetime:
    """Return Unix milliseconds as an aware datetime, whole seconds, as X.509 wants it."""
    return datetime.fromtimestamp(unix_ms // 1000, UTC)
