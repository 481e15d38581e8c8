"""Keeps books in a real database and is gone in the middle of it; a process of its own, so that a test can end it.

Arguments: the database's URL; at which of its steps the process kills itself, 0 for never. A step is a statement that
begins, one that has ended, or a transaction that begins to commit. Prints how many there were.
"""

import asyncio
import os
import signal
import sys
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import event

from coordinator.api.testing import FakeClock
from coordinator.ledger.holdback import UNSIGNED_HELD_S
from coordinator.ledger.log import TransparencyLog
from coordinator.ledger.prices import Terms
from coordinator.ledger.service import Ledger, SettlingRecords
from coordinator.scheduler.testing import task_spec
from coordinator.scheduler.testing_driver import FakeRecords
from coordinator.store.port import AttemptRow, TaskRow
from coordinator.store.sql import SqlStore
from coordinator.verification.events import Use
from inference.task import ManifestDigest, NodeId, OwnerId, TaskId, TenantId

GRANT_MICRO = 1_000_000
ASK_ATTEMPT = AttemptRow(
    task_id=TaskId(""),
    attempt=1,
    node_id=NodeId("node"),
    lease_epoch=1,
    first_index=0,
    delivered_tokens=8,
    outcome="finished",
    statement=b"signed",
    energy_mj=None,
    energy_method=None,
    started_at_ms=0,
    ended_at_ms=0,
)


def open_books(store: SqlStore, clock: FakeClock) -> Ledger:
    """Start a ledger as a coordinator does: what is left of an earlier one is given back."""
    log = TransparencyLog("cluster", Ed25519PrivateKey.from_private_bytes(bytes(range(32))), store)
    return Ledger(store, log, clock, Terms(grant_micro=GRANT_MICRO), lambda _: OwnerId("owner"))


def end(records: SettlingRecords, name: str, now_ms: int, node: str = "node", *, signed: bool = True) -> None:
    attempt = replace(ASK_ATTEMPT, task_id=TaskId(name), node_id=NodeId(node))
    records.add_attempt(attempt if signed else replace(attempt, outcome="stopped", statement=None))
    records.add_task(
        TaskRow(
            task_id=TaskId(name),
            tenant_id=TenantId("tenant"),
            manifest_digest=ManifestDigest("digest"),
            outcome="length",
            prompt_tokens=3,
            completion_tokens=8,
            submitted_at_ms=0,
            ended_at_ms=now_ms,
        )
    )


def keep_books(store: SqlStore) -> None:
    """All that a ledger writes: grants, reservations, payments, releases, forfeits; in one batch and alone."""
    clock = FakeClock()
    ledger = open_books(store, clock)
    records = SettlingRecords(FakeRecords(), ledger)
    for name in ("one", "two", "three"):
        ledger.reserve(task_spec(name))
    ledger.write_now()
    end(records, "one", clock.now_ms())
    ledger.write_now()
    end(records, "two", clock.now_ms(), signed=False)
    end(records, "three", clock.now_ms(), node="banned")
    asyncio.run(ledger.grant("more", TenantId("tenant"), 5_000))
    ledger.standing_changed(NodeId("banned"), ManifestDigest("digest"), Use.NOTHING, "verdict-1")
    clock.advance(UNSIGNED_HELD_S)
    ledger.sweep()
    ledger.write_now()
    ledger.reserve(task_spec("four"))
    ledger.write_now()


def main(url: str, killed_at: int) -> None:
    store = SqlStore(url)
    steps = 0

    def step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("before_cursor_execute", "after_cursor_execute", "commit"):
        event.listen(store._engine, name, step)
    keep_books(store)
    store.close()
    sys.stdout.write(f"{steps}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
