"""Which quarantines of an owner are one mistake. Pure."""

from collections.abc import Iterable
from typing import Final

# Quarantines of one owner that lie closer are one occasion: one wrong setting on ten machines.
OCCASION_MS: Final = 24 * 3600 * 1000


def count_occasions(times_ms: Iterable[int]) -> int:
    """Return how many occasions these moments, in order, belong to."""
    occasions, began_ms = 0, None
    for at_ms in times_ms:
        if began_ms is None or at_ms - began_ms >= OCCASION_MS:
            occasions, began_ms = occasions + 1, at_ms
    return occasions
