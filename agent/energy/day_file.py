"""The day's counts on disk, so that a restart neither forgets the owner's daily limit nor what was drawn.

The file is written every few seconds while something changes: a crash forgets
at most that much, and what worked meanwhile. It is replaced as a whole, so no
crash tears it; where it cannot be read all the same, the day's counts are lost,
which counts as a daily limit that is used up.
"""

import asyncio
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path

import msgspec
import structlog

from agent.energy.day_counts import DayRecord

FILE = "today.json"
# What a crash may forget; a write with its fsync takes a disk some milliseconds.
SAVE_PERIOD_S = 5.0
# Hundreds of models of a hundred bytes; a longer file is none of ours.
FILE_BYTES_MAX = 256 * 1024

log = structlog.get_logger()


def load_day(state_dir: Path) -> DayRecord:
    """Return the counts as saved, of whatever day; empty ones of no day where there are none, or they are lost."""
    path = state_dir / FILE
    try:
        with path.open("rb") as file:
            record = msgspec.json.decode(file.read(FILE_BYTES_MAX), type=DayRecord)
        if record.day:
            date.fromisoformat(record.day)
    except FileNotFoundError:
        return DayRecord()
    except (OSError, ValueError) as error:
        log.error(
            "the counts of the day are lost: a daily limit counts as used up until tomorrow",
            path=str(path),
            reason=str(error),
        )
        return DayRecord(lost=True)
    return record


def save_day(record: DayRecord, state_dir: Path) -> None:
    """Replace the file as a whole; after this returns, a power cut does not undo it."""
    path = state_dir / FILE
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(state_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


async def keep_day(snapshot: Callable[[], DayRecord], state_dir: Path, period_s: float = SAVE_PERIOD_S) -> None:
    """Save the counts while they change, for ever; once more on cancellation."""
    saved: DayRecord | None = None
    while True:
        saving = asyncio.ensure_future(_save_if_changed(snapshot(), saved, state_dir))
        try:
            saved = await asyncio.shield(saving)
            await asyncio.sleep(period_s)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: its write is over before the last one begins.
            await _save_if_changed(snapshot(), await saving, state_dir)
            raise


async def _save_if_changed(record: DayRecord, saved: DayRecord | None, state_dir: Path) -> DayRecord | None:
    if record == saved:
        return saved
    try:
        await asyncio.to_thread(save_day, record, state_dir)
    except OSError as error:
        # A full disk ends no answer that runs; the next period tries again.
        log.error("cannot save the counts of the day", reason=error.strerror)
        return saved
    return record
