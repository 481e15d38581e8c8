"""How fast slots become free, and so how long a queue takes. Pure.

Little's law: where `running` answers take `duration` each, running / duration of
them end in a time. It holds at once after a quiet hour, in which nothing ended
because nothing was asked.
"""

from typing import Final

# The share of the mean that an answer keeps with each that follows: about the last twenty count.
KEPT: Final = 0.95


class Turnover:
    """Counts the answers in progress with one model, and how long they took."""

    __slots__ = ("_duration_s", "_running")

    def __init__(self) -> None:
        self._running = 0
        self._duration_s: float | None = None

    def began(self) -> None:
        self._running += 1

    def ended(self, duration_s: float, *, whole: bool) -> None:
        """Note an end. Args: whether the answer was given; one that was broken off says little about the others."""
        self._running -= 1
        if whole:
            mean_s = duration_s if self._duration_s is None else self._duration_s
            self._duration_s = KEPT * mean_s + (1.0 - KEPT) * duration_s

    def slot_s(self) -> float:
        """Return seconds until a slot becomes free; 0 where nothing runs, or nothing has ended."""
        if not self._running or not self._duration_s:
            return 0.0
        return self._duration_s / self._running
