"""How fast the agent may fetch: a token bucket over all fetches together. Pure."""


class Bandwidth:
    """Lets `limit_bytes_per_s` through on average, and one second's worth at once.

    What has arrived has arrived: `take` never refuses, it says how long to
    wait before reading on.
    """

    def __init__(self, limit_bytes_per_s: int | None) -> None:
        self._limit = limit_bytes_per_s
        self._available = float(limit_bytes_per_s or 0)
        self._updated_at: float | None = None

    def take(self, count_bytes: int, now: float) -> float:
        """Account for bytes that arrived; return the seconds to wait before the next are read."""
        if self._limit is None:
            return 0.0
        if self._updated_at is not None:
            refill = max(0.0, now - self._updated_at) * self._limit
            self._available = min(float(self._limit), self._available + refill)
        self._updated_at = now
        self._available -= count_bytes
        return max(0.0, -self._available / self._limit)
