"""What the ledger asks of the database.

Synchronous, like all of the store: drivers call it in threads.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from coordinator.store.port import AccountRow, LedgerRow
from inference.task import TaskId
from protos.merkle import Position


class HashStore(Protocol):
    """The hashes of the log's complete subtrees. None ever changes or goes.

    They are written by whoever writes the entries, in the same transaction
    (coordinator/store/log_hashes.py: insert_hashes).
    """

    def log_size(self) -> int:
        """Return the number of entries whose hashes are stored."""
        ...

    def log_hashes(self, positions: Sequence[Position]) -> list[bytes]:
        """Return the hashes at these positions, in this order, with one query.

        Raises:
            KeyError: one of them is not stored.
        """
        ...


class LedgerStore(HashStore, Protocol):
    """The journal, the balances after it, and its hashes, as `coordinator.store.port.Store` describes them."""

    def append_ledger(
        self,
        entries: Sequence[LedgerRow],
        accounts: Sequence[AccountRow],
        closed: Sequence[str],
        hashes: Mapping[Position, bytes],
    ) -> None: ...

    def ledger_accounts(self) -> list[AccountRow]: ...

    def ledger_of_task(self, task_id: TaskId) -> list[LedgerRow]: ...

    def find_transfer(self, transfer_id: str) -> LedgerRow | None: ...
