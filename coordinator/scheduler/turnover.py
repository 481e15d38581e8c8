"""How fast slots become free, and so how long a queue takes. Pure."""

import math
from typing import Final

# Turnover of so long ago counts a third. Several answers' time, and short enough to follow owners who come and go.
MEMORY_S: Final = 30.0


class Turnover:
    """Counts what ended, the recent more than the old."""

    __slots__ = ("_at", "_ended", "_since")

    def __init__(self, now: float) -> None:
        self._since = self._at = now
        self._ended = 0.0

    def ended(self, now: float) -> None:
        """Note that a slot became free."""
        self._ended = self._ended * math.exp((self._at - now) / MEMORY_S) + 1.0
        self._at = now

    def per_second(self, now: float) -> float:
        """Return how many slots become free in a second; 0 where none has yet."""
        seen_s = MEMORY_S * (1.0 - math.exp((self._since - now) / MEMORY_S))
        # What ended within the first second says nothing about the next.
        return self._ended * math.exp((self._at - now) / MEMORY_S) / max(seen_s, 1.0)
