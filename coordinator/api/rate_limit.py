"""Token buckets, one per caller and method. Pure: time is handed in."""

from collections import OrderedDict

# Callers times methods seen lately, about 3 MB; the one unused for longest goes first, and would be full by then
# unless more strangers than this call within a minute.
BUCKETS_MAX = 20_000


class RateLimits:
    """A bucket holds one minute's calls and fills evenly."""

    def __init__(self) -> None:
        # By caller and method: calls left, and when that was so.
        self._buckets: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def take(self, caller: str, method: str, calls_per_minute: int, now: float) -> float:
        """Count a call; return 0.0 if it may go on, else the seconds until one may."""
        key = (caller, method)
        per_second = calls_per_minute / 60
        left, at = self._buckets.get(key, (float(calls_per_minute), now))
        left = min(float(calls_per_minute), left + (now - at) * per_second)
        allowed = left >= 1.0
        self._buckets[key] = (left - 1.0 if allowed else left, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > BUCKETS_MAX:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - left) / per_second
