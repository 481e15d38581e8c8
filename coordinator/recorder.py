"""Writes ended tasks and attempts to the store in batches, off the event loop.

A batch every fifth of a second is one transaction and one fsync, whatever the
load; a crash loses at most that much of the accounting, and nothing else.
"""

import asyncio

import structlog

from coordinator.store.port import AttemptRow, Store, TaskRow

FLUSH_INTERVAL_S = 0.2
# Rows kept while the database does not answer: half an hour at 50 tasks a
# second. Beyond it the oldest are given up, loudly.
PENDING_ROWS_MAX = 100_000

log = structlog.get_logger()


class Recorder:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: list[TaskRow] = []
        self._attempts: list[AttemptRow] = []

    def add_task(self, row: TaskRow) -> None:
        self._tasks.append(row)

    def add_attempt(self, row: AttemptRow) -> None:
        self._attempts.append(row)

    async def run(self) -> None:
        """Flush for ever; on cancellation flush once more."""
        try:
            while True:
                await asyncio.sleep(FLUSH_INTERVAL_S)
                await self.flush()
        finally:
            # The loop is still running while this task is being cancelled.
            await self.flush()

    async def flush(self) -> None:
        if not self._tasks and not self._attempts:
            return
        tasks, attempts = self._tasks, self._attempts
        self._tasks, self._attempts = [], []
        try:
            await asyncio.to_thread(self._store.record, tasks, attempts)
        except Exception as error:
            log.error("accounting_write_failed", error=str(error), tasks=len(tasks), attempts=len(attempts))
            self._tasks = (tasks + self._tasks)[-PENDING_ROWS_MAX:]
            self._attempts = (attempts + self._attempts)[-PENDING_ROWS_MAX:]
