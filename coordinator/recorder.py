"""Writes ended tasks and attempts to the store in batches, off the event loop.

A batch every fifth of a second is one transaction and one fsync, whatever the
load; a crash loses at most that much of the accounting, and nothing else.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import structlog

from coordinator.store.port import AttemptRow, LateStatementRow, Store, TaskRow

FLUSH_INTERVAL_S = 0.2
# Rows of a kind kept while the database does not answer: half an hour at 50 tasks a
# second. Beyond it the oldest are given up, loudly.
PENDING_ROWS_MAX = 100_000

_Row = TypeVar("_Row")

log = structlog.get_logger()


class Recorder:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: _Pending[TaskRow] = _Pending()
        self._attempts: _Pending[AttemptRow] = _Pending()
        self._late: _Pending[LateStatementRow] = _Pending()
        # One batch at a time, so that rows are written in order.
        self._writing = asyncio.Lock()

    def add_task(self, row: TaskRow) -> None:
        self._tasks.add(row)

    def add_attempt(self, row: AttemptRow) -> None:
        self._attempts.add(row)

    def add_late_statement(self, row: LateStatementRow) -> None:
        self._late.add(row)

    async def run(self) -> None:
        """Flush for ever; on cancellation finish the batch under way and flush once more."""
        try:
            while True:
                await asyncio.sleep(FLUSH_INTERVAL_S)
                # A thread cannot be cancelled; without the shield nobody would learn how it ended.
                await asyncio.shield(self.flush())
        finally:
            # The loop is still running while this task is being cancelled.
            await self.flush()

    async def flush(self) -> None:
        """Write what waits; where the store fails, keep it for the next time."""
        async with self._writing:
            tasks, attempts, late = self._tasks.take(), self._attempts.take(), self._late.take()
            if not tasks and not attempts and not late:
                return
            try:
                await asyncio.to_thread(self._write, tasks, attempts, late)
            except Exception as error:
                self._tasks.put_back(tasks)
                self._attempts.put_back(attempts)
                self._late.put_back(late)
                log.error(
                    "accounting_write_failed",
                    error=str(error),
                    tasks=len(tasks),
                    attempts=len(attempts),
                    late_statements=len(late),
                    rows_given_up=self._tasks.given_up + self._attempts.given_up + self._late.given_up,
                )

    def _write(
        self, tasks: Sequence[TaskRow], attempts: Sequence[AttemptRow], late: Sequence[LateStatementRow]
    ) -> None:
        """Write the rows. Writing one again changes nothing, so that a failure in between does no harm."""
        if tasks or attempts:
            self._store.record(tasks, attempts)
        if late:
            # After the attempts that they are about, of which some may be of this batch.
            self._store.add_late_statements(late)


class _Pending(Generic[_Row]):
    """Rows of one kind that wait, the newest `PENDING_ROWS_MAX` of them."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque()
        # Since the start of the process.
        self.given_up = 0

    def add(self, row: _Row) -> None:
        self._rows.append(row)
        self._give_up_oldest()

    def take(self) -> Sequence[_Row]:
        rows, self._rows = self._rows, deque()
        return rows

    def put_back(self, rows: Sequence[_Row]) -> None:
        """Return rows that were taken and not written, ahead of what came since."""
        self._rows.extendleft(reversed(rows))
        self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        while len(self._rows) > PENDING_ROWS_MAX:
            self._rows.popleft()
            self.given_up += 1
