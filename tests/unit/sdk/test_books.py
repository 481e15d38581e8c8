"""`slackwater ledger verify` against the coordinator's own ledger: what is changed, left out or rewritten is found."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from slackwater import Client, LedgerAccount, LedgerEntry, Receipt
from slackwater.books import Counted
from slackwater.cli.ledger_check import verify_ledger
from slackwater.cli.ledger_state import LedgerState, default_path, parse_keys, read_counted, read_state, write_state
from slackwater.cli.session import UsageError
from slackwater.errors import TaskNotFound

from coordinator.api.testing import FakeClock
from coordinator.ledger.entries import granted_account, tenant_account
from coordinator.ledger.log import TransparencyLog
from coordinator.ledger.prices import Terms
from coordinator.ledger.service import Ledger, SettlingRecords
from coordinator.ledger.testing import MemoryLedgerStore
from coordinator.scheduler.testing import task_spec
from coordinator.scheduler.testing_driver import FakeRecords
from coordinator.store.port import AttemptRow, LedgerRow, TaskRow
from inference.task import ManifestDigest, NodeId, OwnerId, TaskId, TenantId
from protos.merkle import Frontier, extend

TENANT, OTHER = TenantId("tenant"), TenantId("other")
KEY = Ed25519PrivateKey.generate()
KEYS = (KEY.public_key().public_bytes_raw(),)


class Desk:
    """The coordinator's own ledger, asked as a client asks it; `of` is the tenant that asks, None for all.

    `export` is what a coordinator that lies does to the entries it lists.
    """

    def __init__(self, of: TenantId | None = TENANT) -> None:
        self.of = of
        self.store = MemoryLedgerStore()
        self.clock = FakeClock()
        self.export: Callable[[list[LedgerRow]], list[LedgerRow]] = lambda rows: rows
        self.receipts_of: Callable[[list[LedgerRow]], list[LedgerRow]] = lambda rows: rows
        self.start()

    def start(self) -> None:
        self.log = TransparencyLog("cluster", KEY, self.store)
        self.ledger = Ledger(self.store, self.log, self.clock, Terms(grant_micro=100_000), lambda _: OwnerId("owner"))
        self.records = SettlingRecords(FakeRecords(), self.ledger)

    def reserve(self, name: str, tenant_id: TenantId = TENANT) -> None:
        self.ledger.reserve(replace(task_spec(name), tenant_id=tenant_id))
        self.ledger.write_now()

    def run(self, name: str, tenant_id: TenantId = TENANT) -> None:
        self.reserve(name, tenant_id)
        self.records.add_attempt(
            AttemptRow(
                task_id=TaskId(name),
                attempt=1,
                node_id=NodeId("node"),
                lease_epoch=1,
                first_index=0,
                delivered_tokens=5,
                outcome="finished",
                statement=b"signed",
                energy_mj=None,
                energy_method=None,
                started_at_ms=0,
                ended_at_ms=0,
            )
        )
        self.records.add_task(ended(name, tenant_id, self.clock.now_ms()))
        self.ledger.write_now()

    def rewrite(self, old: bytes, new: bytes) -> None:
        """Change what stands in the books, and every hash that follows from it."""
        self.store.entries = [replace(row, body=row.body.replace(old, new)) for row in self.store.entries]
        self.store._hashes = {}
        self.store.insert(extend(Frontier(), (row.body for row in self.store.entries)).made)
        self.start()

    # --- as slackwater.Client --------------------------------------------------------------

    def ledger_entries(self, from_sequence: int = 0) -> list[LedgerEntry]:
        rows = [row for row in self.store.entries if row.sequence >= from_sequence and self._mine(row)]
        return [LedgerEntry(sequence=row.sequence, entry=row.body) for row in self.export(rows)][:3]

    def ledger_accounts(self) -> list[LedgerAccount]:
        own = {tenant_account(TENANT), granted_account(TENANT)}
        return [
            LedgerAccount(account=name, balance_micro=amount)
            for name, amount in self.ledger.summary()
            if self.of is None or name in own
        ]

    def checkpoint_note(self, old_size: int) -> tuple[bytes, tuple[bytes, ...]]:
        update = self.log.update(old_size)
        return update.checkpoint, tuple(update.consistency_proof)

    def receipts(self, task_id: str) -> list[Receipt]:
        rows = [row for row in self.store.entries if row.task_id == task_id and row.tenant_id == self.of]
        found = self.log.receipts([(row.sequence, row.body) for row in self.receipts_of(rows)])
        if not found:
            raise TaskNotFound("no entry of yours")
        return [Receipt.from_bytes(one.SerializeToString()) for one in found]

    def _mine(self, row: LedgerRow) -> bool:
        return self.of is None or row.tenant_id == self.of


def ended(name: str, tenant_id: TenantId, at_ms: int) -> TaskRow:
    return TaskRow(
        task_id=TaskId(name),
        tenant_id=tenant_id,
        manifest_digest=ManifestDigest("digest"),
        outcome="length",
        prompt_tokens=3,
        completion_tokens=5,
        submitted_at_ms=0,
        ended_at_ms=at_ms,
    )


def outcomes(desk: Desk, state: LedgerState, **counted: Counted) -> dict[str, str]:
    checks = verify_ledger(cast(Client, desk), state, counted)
    return {check.name: check.outcome for check in checks}


def failed(desk: Desk, state: LedgerState, **counted: Counted) -> set[str]:
    return {name for name, outcome in outcomes(desk, state, **counted).items() if outcome == "fails"}


@pytest.fixture(params=[TENANT, None], ids=["tenant", "administrator"])
def desk(request: pytest.FixtureRequest) -> Desk:
    """A ledger of two tenants that has been looked at by nobody."""
    desk = Desk(request.param)
    desk.run("mine")
    desk.run("theirs", OTHER)
    return desk


def new_state() -> LedgerState:
    return LedgerState(keys=KEYS)


def test_honest_books_hold_at_the_first_look_and_at_each_later_one(desk: Desk) -> None:
    """Mutation seen to fail: `proven` not limited to what has been seen, the second look shows nothing new."""
    state, own = new_state(), Counted(completion_tokens=5, prompt_tokens=3)
    assert outcomes(desk, state) == {
        **dict.fromkeys(("checkpoint", "entries", "inclusion", "sums", "balances"), "holds"),
        **dict.fromkeys(("growth", "history", "charges"), "unknown"),
        **({"earnings": "holds"} if desk.of is None else {}),
    }
    desk.run("later")
    desk.reserve("runs")
    asyncio.run(desk.ledger.grant("more", TENANT, 7))
    assert set(outcomes(desk, state, mine=own, later=own).values()) == {"holds"}
    assert outcomes(desk, state, runs=own)["charges"] == "unknown"


def test_an_entry_that_is_changed_in_the_export_is_found(desk: Desk) -> None:
    """Mutations seen to fail: the shown entry not compared with the exported one; the root not compared."""
    # A grant has no receipt: an entry of a task.
    desk.export = lambda rows: [replace(row, body=row.body.replace(b'"at_ms":', b'"at_ms":1')) for row in rows]
    assert failed(desk, new_state()) == {"inclusion"}


def test_an_entry_that_is_left_out_is_found(desk: Desk) -> None:
    """Mutation seen to fail: check_balances always holds (a tenant), check_whole_log without the missing one."""
    posted = [row.transfer_id for row in desk.store.entries].index("mine/post")
    desk.export = lambda rows: [row for row in rows if row.sequence != posted]
    assert failed(desk, new_state()) >= {"inclusion", "balances"}


def test_an_entry_that_is_left_out_everywhere_is_found_by_who_has_seen_it_before() -> None:
    """Mutation seen to fail: check_history counts the entries of today."""
    desk, state = Desk(), new_state()
    desk.run("mine")
    assert failed(desk, state) == set()
    desk.run("later")
    # The coordinator hides a whole task, also from receipts and from the balance.
    hide: Callable[[list[LedgerRow]], list[LedgerRow]] = lambda rows: [row for row in rows if row.task_id != "mine"]  # noqa: E731
    desk.export = desk.receipts_of = hide
    assert "history" in failed(desk, state)
    desk.export = lambda rows: []
    assert "history" in failed(desk, state)


def test_a_log_that_is_rewritten_or_rolled_back_is_found_and_the_evidence_is_kept(desk: Desk) -> None:
    """Mutation seen to fail: the note that is refused takes the place of the one kept."""
    state = new_state()
    assert failed(desk, state) == set()
    kept = state.note
    desk.rewrite(b'"completion_tokens":5', b'"completion_tokens":4')
    # By itself the new log is a log: only who has seen the old one knows.
    assert "growth" not in failed(desk, new_state())
    for _ in range(2):
        assert failed(desk, state) == {"growth"}
        assert state.note == kept
        assert state.refused not in (None, kept)
    desk.run("later")
    assert failed(desk, state) == {"growth"}


def test_a_checkpoint_by_another_key_is_refused(desk: Desk) -> None:
    state = LedgerState(keys=(Ed25519PrivateKey.generate().public_key().public_bytes_raw(),))
    assert outcomes(desk, state) == {"checkpoint": "fails"}


def test_receipts_of_another_log_than_the_checkpoint_are_refused() -> None:
    """Mutation seen to fail: _one_log not called."""
    # Two logs that differ in what this tenant does not see.
    desk, other, state = Desk(), Desk(), new_state()
    for one, theirs in ((desk, "a"), (other, "b")):
        one.run("mine")
        one.run(theirs, OTHER)
    desk.receipts = other.receipts  # type: ignore[method-assign]
    assert failed(desk, state) == {"inclusion"}


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        (b'["platform:revenue",', b'["platform:revenue",1', {"sums", "balances"}),
        (b'"charge_micro":', b'"charge_micro":1', {"charges"}),
        (b'"price_completion_micro":', b'"price_completion_micro":1', {"charges"}),
        (b'"ask_completion_micro":', b'"ask_completion_micro":1', {"earnings"}),
        (b'"ask_prompt_micro":', b'"ask_prompt_micro":1', {"earnings"}),
        (b'"price_prompt_micro":250000', b'"price_prompt_micro":199999', {"charges", "earnings"}),
        (b'"delivered_tokens":5', b'"delivered_tokens":6', {"earnings"}),
        (b'"kind":"reserve"', b'"kind":"post"', {"sums", "charges"}),
        (b'"kind":"earn"', b'"kind":"void"', {"sums"}),
        (b'"kind":"earn","legs":[["escrow:mine"', b'"kind":"earn","legs":[["platform:x"', {"sums", "balances"}),
    ],
)
def test_books_that_are_signed_and_wrong_are_found(old: bytes, new: bytes, wrong: set[str]) -> None:
    """The log proves that an entry stands there, not that it is right.

    Mutations seen to fail: legs not summed; facts not compared with legs; two ends of a task
    allowed; what is left in an escrow not looked at; a charge not held against its price; an
    ask not held against the price, or against what was earned.
    """
    desk = Desk(None)
    desk.run("mine")
    desk.rewrite(old, new)
    assert failed(desk, new_state()) == wrong


@pytest.mark.parametrize("own", [Counted(completion_tokens=4), Counted(completion_tokens=5, prompt_tokens=2)])
def test_a_charge_for_what_the_client_did_not_get_is_found(desk: Desk, own: Counted) -> None:
    assert failed(desk, new_state(), mine=own) == {"charges"}


def test_bytes_that_are_no_entry_are_refused(desk: Desk) -> None:
    desk.export = lambda rows: [replace(row, body=b"[]") for row in rows]
    assert failed(desk, new_state()) == {"entries"}


def test_a_tenant_without_entries_has_nothing_to_check() -> None:
    desk = Desk()
    desk.run("theirs", OTHER)
    assert failed(desk, new_state()) == set()


def test_the_state_comes_back_as_it_was_and_only_its_user_can_read_it(tmp_path: Path) -> None:
    """Mutation seen to fail: the file written with open()."""
    desk, state, path = Desk(), new_state(), tmp_path / "new" / "state.json"
    assert read_state(path) == LedgerState()
    desk.run("mine")
    assert failed(desk, state) == set()
    write_state(path, state)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_state(path) == state
    path.write_text("{}")
    with pytest.raises(UsageError, match="name another file"):
        read_state(path)


def test_settings_that_cannot_be_used_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path("[::1]:84/3") == tmp_path / "slackwater" / "ledger-___1__84_3.json"
    for bad in ("zz", "00"):
        with pytest.raises(UsageError, match="64 hexadecimal digits"):
            parse_keys([bad])
    counts = tmp_path / "counts"
    counts.write_text(json.dumps({"task_id": "a", "completion_tokens": 3}) + "\n")
    assert read_counted(counts) == {"a": Counted(completion_tokens=3)}
    counts.write_text("3\n")
    with pytest.raises(UsageError, match="one JSON object a line"):
        read_counted(counts)
