"""A coordinator that stood still: what was measured meanwhile counts against nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.api.testing import FakeClock
from coordinator.store.sql import SqlStore
from coordinator.verification import outages
from coordinator.verification.outages import STALL_S, StallWatch
from coordinator.verification.service import Verification
from coordinator.verification.testing import DIGEST, NODE, audit, quiet_hooks

STALLED = "coordinator stood still"


@asynccontextmanager
async def watched(
    directory: Path, clock: FakeClock, told: list[tuple[int, int]] | None = None
) -> AsyncIterator[Verification]:
    verification = Verification(SqlStore(f"sqlite:///{directory / 'coordinator.db'}"), clock, quiet_hooks())
    stalls: list[tuple[int, int]] = [] if told is None else told
    watch = StallWatch(verification, clock, lambda began_ms, ended_ms: stalls.append((began_ms, ended_ms)))
    jobs = [asyncio.create_task(job) for job in (verification.run(), watch.run())]
    await asyncio.sleep(0)
    try:
        yield verification
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


@pytest.fixture
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch looks whenever the loop turns, so that only the clock makes it late."""
    monkeypatch.setattr(outages, "LOOK_S", 0.0)


@pytest.mark.usefixtures("always_looking")
async def test_what_was_measured_while_the_coordinator_stood_still_does_not_count(tmp_path: Path) -> None:
    """Mutations seen to fail here: nothing is told; the outage begins when it is noticed; it never ends."""
    clock, told = FakeClock(), list[tuple[int, int]]()
    async with watched(tmp_path, clock, told) as verification:
        with capture_logs() as logs:
            clock.advance(60)
            for _ in range(5):
                await asyncio.sleep(0)
        assert told == [(clock.now_ms() - 60_000, clock.now_ms())]
        meanwhile_ms = clock.now_ms() - 30_000
        await verification.tell(audit(1, hard="rank", at_ms=meanwhile_ms))
        assert verification.verdicts.record(NODE, DIGEST) is None
        clock.advance(1)
        await verification.tell(audit(2, hard="rank", at_ms=clock.now_ms()))
        assert verification.verdicts.record(NODE, DIGEST) is not None
    # Said once.
    assert [entry["seconds"] for entry in logs if entry["event"] == STALLED] == [60.0]


@pytest.mark.usefixtures("always_looking")
async def test_a_little_late_is_no_outage(tmp_path: Path) -> None:
    clock = FakeClock()
    async with watched(tmp_path, clock) as verification:
        clock.advance(STALL_S - 0.1)
        for _ in range(5):
            await asyncio.sleep(0)
        await verification.tell(audit(1, hard="rank", at_ms=clock.now_ms() - 1000))
        assert verification.verdicts.record(NODE, DIGEST) is not None
