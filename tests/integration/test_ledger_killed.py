"""Books in a real database whose keeper gets SIGKILL at every single step of writing them."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from network_settings import ROOT

from coordinator.api.testing import FakeClock
from coordinator.ledger.log import TransparencyLog
from coordinator.ledger.prices import Terms
from coordinator.ledger.service import Ledger
from coordinator.ledger.testing import check_books
from coordinator.store.sql import SqlStore
from inference.task import OwnerId

PROGRAM = Path(__file__).with_name("killed_ledger.py")
# The program makes fewer.
ENTRIES_MAX = 100


def keep_books(path: Path, killed_at: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(PROGRAM), f"sqlite:///{path}", str(killed_at)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def check_after(path: Path) -> int:
    """Start on what a killed keeper has left; return how many entries there are then."""
    store = SqlStore(f"sqlite:///{path}")
    ledger = Ledger(
        store,
        TransparencyLog("cluster", Ed25519PrivateKey.from_private_bytes(bytes(range(32))), store),
        FakeClock(),
        Terms(),
        lambda _: OwnerId("owner"),
    )
    # Of tasks that died with it nothing stays reserved.
    check_books(ledger.books, [])
    ledger.write_now()
    bodies = [json.loads(row.body) for row in store.ledger_page(0, ENTRIES_MAX)]
    assert [body["sequence"] for body in bodies] == list(range(len(bodies)))
    sums: Counter[str] = Counter()
    for body in bodies:
        assert sum(amount_micro for _, amount_micro in body["legs"]) == 0
        for account, amount_micro in body["legs"]:
            sums[account] += amount_micro
    stored = {row.account: row.balance_micro for row in store.ledger_accounts() if row.balance_micro}
    assert stored == {account: amount_micro for account, amount_micro in sums.items() if amount_micro}
    store.close()
    return len(bodies)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wherever_it_is_killed_the_books_balance_and_hold_nothing_of_the_dead(tmp_path: Path) -> None:
    """Mutations seen to fail here: entries and balances in two transactions; a Ledger without _void_orphans."""
    whole = keep_books(tmp_path / "whole.db", 0)
    assert whole.returncode == 0, whole.stderr
    steps, entries = int(whole.stdout), check_after(tmp_path / "whole.db")
    assert steps > 50
    left = []
    for killed_at in range(1, steps + 1):
        path = tmp_path / f"killed-{killed_at}.db"
        killed = keep_books(path, killed_at)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        left.append(check_after(path))
    # Before the first entry, before the last one was committed (which the next start voids again), and in between.
    assert (left[0], left[-1]) == (0, entries - 2)
    assert left == sorted(left)
    assert len(set(left)) > 4
