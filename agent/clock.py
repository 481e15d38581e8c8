"""The only place where the agent reads a clock.

Durations come from a clock that cannot be set and that goes on while the
machine sleeps. A volunteer's wall clock may be years off and decides nothing:
expiry is judged on the coordinator's time (`agent.link.CoordinatorClock`).
"""

import time


def monotonic_s() -> float:
    """Seconds since the machine started, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def awake_s() -> float:
    """Seconds since the machine started, suspended time left out: what `monotonic_s` is ahead of it is sleep."""
    return time.monotonic()


def wall_ms() -> int:
    """Unix milliseconds of this machine, for boot stamps and as a hint only."""
    return time.time_ns() // 1_000_000


def until_next_s(period_s: float) -> float:
    """Return how long to wait for the next whole multiple of a period.

    Loops that wait for it wake together. An idle agent's processor time is mostly that of waking: one wake-up in
    which five loops have a look costs little more than one in which a single loop has.
    """
    return period_s - time.monotonic() % period_s
