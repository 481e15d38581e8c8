"""Stores of the ledger and of its log in memory, and what must hold for books at any moment. For tests only."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from coordinator.ledger.entries import FAILOVER, Books, escrowed_task
from coordinator.store.port import AccountRow, Conflict, LedgerRow
from inference.task import TaskId
from protos.merkle import Frontier, Position, extend


class MemoryHashStore:
    """Keeps to `coordinator.ledger.port.HashStore`, and counts the hashes that are read."""

    def __init__(self) -> None:
        self._hashes: dict[Position, bytes] = {}
        self.hashes_read = 0

    def insert(self, hashes: Mapping[Position, bytes]) -> None:
        for position, value in hashes.items():
            if self._hashes.setdefault(position, value) != value:
                raise ValueError(f"another hash is stored at {position}")

    def log_size(self) -> int:
        return sum(1 for position in self._hashes if position.level == 0)

    def log_hashes(self, positions: Sequence[Position]) -> list[bytes]:
        self.hashes_read += len(positions)
        return [self._hashes[position] for position in positions]


class MemoryLedgerStore(MemoryHashStore):
    """Keeps to `coordinator.ledger.port.LedgerStore`.

    `failures` are raised by the next calls of `append_ledger`, after the
    append where `lost_answer` is set: as when the connection breaks at the
    commit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[LedgerRow] = []
        self.accounts: dict[str, AccountRow] = {}
        self.appended = asyncio.Event()
        self.failures: list[Exception] = []
        self.lost_answer = False

    def append_ledger(
        self,
        entries: Sequence[LedgerRow],
        accounts: Sequence[AccountRow],
        closed: Sequence[str],
        hashes: Mapping[Position, bytes],
    ) -> None:
        if self.failures and not self.lost_answer:
            raise self.failures.pop(0)
        known = {row.transfer_id for row in self.entries}
        for row in entries:
            if row.sequence != len(self.entries) or row.transfer_id in known:
                raise Conflict(f"the journal has {row.transfer_id} already, or lacks what comes before")
            self.entries.append(row)
        self.accounts |= {row.account: row for row in accounts}
        for name in closed:
            self.accounts.pop(name, None)
        self.insert(hashes)
        self.appended.set()
        if self.failures:
            raise self.failures.pop(0)

    def ledger_accounts(self) -> list[AccountRow]:
        return list(self.accounts.values())

    def ledger_of_task(self, task_id: TaskId) -> list[LedgerRow]:
        return [row for row in self.entries if row.task_id == task_id]

    def find_transfer(self, transfer_id: str) -> LedgerRow | None:
        return next((row for row in self.entries if row.transfer_id == transfer_id), None)


def check_books(books: Books, running: Iterable[TaskId]) -> None:
    """Assert what holds for books at every moment: nothing made or lost, nobody below zero, escrow for what runs."""
    accounts = dict(books.accounts())
    assert sum(account.balance_micro for account in accounts.values()) == 0
    for name, account in accounts.items():
        if not name.startswith(("tenant:", "granted:", FAILOVER)):
            assert account.balance_micro >= 0, f"{name} has {account.balance_micro}"
        if name.startswith("granted:"):
            assert books.balance_micro(f"tenant:{name.partition(':')[2]}") >= 0, "a budget is overdrawn"
    assert {task_id for name in accounts if (task_id := escrowed_task(name))} == set(running)


def check_journal(store: MemoryLedgerStore) -> None:
    """Assert that the stored balances follow from the stored entries."""
    sums: Counter[str] = Counter()
    for row in store.entries:
        legs = json.loads(row.body)["legs"]
        assert sum(amount for _, amount in legs) == 0
        for name, amount in legs:
            sums[name] += amount
    stored = {name: row.balance_micro for name, row in store.accounts.items()}
    assert {name: amount for name, amount in sums.items() if amount} == {k: v for k, v in stored.items() if v}


def filled_store(entries: Iterable[bytes]) -> tuple[MemoryHashStore, Frontier]:
    """Return a store that holds the log of these entries, and its frontier."""
    store = MemoryHashStore()
    extension = extend(Frontier(), entries)
    store.insert(extension.made)
    return store, extension.frontier
