"""How fast slots become free, and how many of them are left for a class; so how long a queue takes. Pure.

Little's law: where `running` answers take `duration` each, running / duration of
them end in a time. It holds at once after a quiet hour, in which nothing ended
because nothing was asked. Of the slots that become free, classes above take as
many as they begin answers (they go first, also those that have yet to come), and
what is left is for the queue of a class: the waiting time of a queue with
priorities (Cobham, "Priority assignment in waiting line problems", 1954).
"""

import math
from typing import Final

from coordinator.scheduler.targets import BANDS
from inference.task import ServiceClass

# The share of its weight that an answer keeps with each that follows: the last five hundred count. Lengths differ so
# much that the mean of a hundred is off by a tenth, and what classes above leave, where that is little, by a half.
KEPT: Final = 0.998
# Answers that began so long ago count a third.
MEMORY_S: Final = 60.0
# However much those above take, so much is left: they move up when they have waited for long.
LEFT_SHARE_MIN: Final = 0.05


class Flow:
    """How many of something come in a second, of late."""

    __slots__ = ("_at", "_began_at", "_count")

    def __init__(self, now: float) -> None:
        self._began_at = self._at = now
        # Weighted by exp(-age / MEMORY_S).
        self._count = 0.0

    def note(self, now: float) -> None:
        """Count one more."""
        self._count = self._count * math.exp((self._at - now) / MEMORY_S) + 1.0
        self._at = now

    def per_s(self, now: float) -> float:
        """Return the rate, as of the time since the first one where that is short."""
        weight_s = MEMORY_S * (1.0 - math.exp((self._began_at - now) / MEMORY_S))
        if weight_s <= 0.0:
            return 0.0
        return self._count * math.exp((self._at - now) / MEMORY_S) / weight_s


class Turnover:
    """Counts the answers in progress with one model, and how long they took."""

    __slots__ = ("_began", "_ended", "_running", "_took_s")

    def __init__(self) -> None:
        self._running = 0
        # Weights of answers, and their weighted durations.
        self._ended = 0.0
        self._took_s = 0.0
        self._began: dict[ServiceClass, Flow] = {}

    def began(self, service_class: ServiceClass, now: float) -> None:
        self._running += 1
        flow = self._began.get(service_class)
        if flow is None:
            flow = self._began[service_class] = Flow(now)
        flow.note(now)

    def ended(self, duration_s: float, *, whole: bool) -> None:
        """Note an end. Args: whether the answer was given; one that was broken off says little about the others."""
        self._running -= 1
        if whole:
            self._ended = KEPT * self._ended + 1.0
            self._took_s = KEPT * self._took_s + duration_s

    def slot_s(self, service_class: ServiceClass, now: float) -> float:
        """Return seconds between slots that become free for a class; 0 where nothing runs, or nothing has ended."""
        if not self._running or not self._took_s:
            return 0.0
        freed_per_s = self._running * self._ended / self._took_s
        above = BANDS[: BANDS.index(service_class)]
        taken_per_s = sum(self._began[band].per_s(now) for band in above if band in self._began)
        return 1.0 / max(freed_per_s - taken_per_s, LEFT_SHARE_MIN * freed_per_s)
