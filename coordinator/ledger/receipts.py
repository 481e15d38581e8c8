"""What of the ledger goes out, and to whom: receipts, and checkpoints with the proof that the log only grew.

A tenant gets the entries about its own tasks, a node those about its own
attempts. Checkpoints are for everybody: they hold a size and a hash.
"""

import asyncio
from collections.abc import Awaitable, Callable

from coordinator.errors import Reason, SlackwaterError
from coordinator.ledger.log import TransparencyLog
from coordinator.store.port import LedgerRow, Store
from inference.task import NodeId, TaskId, TenantId
from protos.slackwater.common.v1 import receipt_pb2


class ReceiptDesk:
    """Hands out what the ledger holds.

    Args:
        flush: writes what waits for a group commit: who asks sees what was decided before.
    """

    def __init__(self, store: Store, log: TransparencyLog, flush: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._log = log
        self._flush = flush

    async def for_tenant(self, tenant_id: TenantId, task_id: TaskId) -> list[receipt_pb2.Receipt]:
        """Return the entries about a task of this tenant, in the ledger's order.

        Raises:
            SlackwaterError: TASK_NOT_FOUND.
        """
        return await self._receipts(task_id, lambda row: row.tenant_id == tenant_id)

    async def for_node(self, node_id: NodeId, task_id: TaskId) -> list[receipt_pb2.Receipt]:
        """Return the entries about this node's attempts at a task, in the ledger's order.

        Raises:
            SlackwaterError: TASK_NOT_FOUND.
        """
        return await self._receipts(task_id, lambda row: row.node_id == node_id)

    async def update(self, old_size: int) -> receipt_pb2.CheckpointUpdate:
        """Return the newest checkpoint, and the proof that it extends the log of `old_size` entries."""
        return await asyncio.to_thread(self._log.update, old_size)

    async def _receipts(self, task_id: TaskId, concerns: Callable[[LedgerRow], bool]) -> list[receipt_pb2.Receipt]:
        await self._flush()
        return await asyncio.to_thread(self._read, task_id, concerns)

    def _read(self, task_id: TaskId, concerns: Callable[[LedgerRow], bool]) -> list[receipt_pb2.Receipt]:
        rows = [row for row in self._store.ledger_of_task(task_id) if task_id and concerns(row)]
        receipts = self._log.receipts([(row.sequence, row.body) for row in rows])
        if not receipts:
            # Of somebody else's task no more is said than of one that never was.
            raise SlackwaterError(Reason.TASK_NOT_FOUND, f"the ledger has no entry of yours about task {task_id!r} yet")
        return receipts
