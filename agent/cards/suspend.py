"""Telling that the machine was asleep, from two clocks of which one stops meanwhile. Pure."""

# Reading two clocks one after the other takes microseconds; the shortest sleep of a machine takes seconds.
SLEEP_S_MIN = 1.0


class SuspendWatch:
    """Compares a clock that goes on while the machine sleeps with one that does not."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def slept_s(self, boot_s: float, awake_s: float) -> float:
        """Return how long the machine slept since the last call, 0 where it did not.

        Args:
            boot_s: `agent.clock.monotonic_s`.
            awake_s: `agent.clock.awake_s`.
        """
        ahead_s = boot_s - awake_s
        before, self._ahead_s = self._ahead_s, ahead_s
        slept_s = 0.0 if before is None else ahead_s - before
        return slept_s if slept_s >= SLEEP_S_MIN else 0.0
