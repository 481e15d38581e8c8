"""Tells the verdicts and the churn model when this coordinator was not there itself: that counts against nobody."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from coordinator.clock import Clock
from coordinator.errors import SlackwaterError
from coordinator.verification.events import OutageBegan, OutageEnded
from coordinator.verification.service import Verification

LOOK_S = 1.0
# A loop that comes so late was starved, suspended or stopped. What is timed meanwhile was timed by nobody.
STALL_S = 2.0

log = structlog.get_logger()


class StallWatch:
    """Looks every second whether the second took much longer. Stalls alone: what the database fails is kept for it.

    Args:
        on_stall: told when a stall began and when it ended, in Unix milliseconds.
    """

    def __init__(self, verification: Verification, clock: Clock, on_stall: Callable[[int, int], None]) -> None:
        self._verification = verification
        self._clock = clock
        self._on_stall = on_stall

    async def run(self) -> NoReturn:
        """Watch for ever."""
        while True:
            began = self._clock.monotonic()
            await asyncio.sleep(LOOK_S)
            took_s = self._clock.monotonic() - began
            if took_s >= LOOK_S + STALL_S:
                self._tell(took_s)

    def _tell(self, took_s: float) -> None:
        ended_ms = self._clock.now_ms()
        log.warning("coordinator stood still", seconds=round(took_s, 1))
        self._on_stall(ended_ms - round(took_s * 1000), ended_ms)
        try:
            self._verification.tell(OutageBegan(ended_ms - round(took_s * 1000)))
            self._verification.tell(OutageEnded(ended_ms))
        except SlackwaterError as error:
            # Then nothing is taken for a fault either: what waits for the database is full.
            log.warning("outage_lost", why=error.message)
