"""The running ledger: budgets, crashes at any point, retries, release of what is held."""

import asyncio
import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from coordinator.api.testing import FakeClock
from coordinator.errors import Reason, SlackwaterError
from coordinator.ledger.entries import FAILOVER, Books, Kind, Leg, Overdraft, Transfer, TransferRefused, tenant_account
from coordinator.ledger.holdback import HELD_S, HELD_TASKS, UNSIGNED_HELD_S, Credits
from coordinator.ledger.log import TransparencyLog
from coordinator.ledger.prices import Price, Terms
from coordinator.ledger.service import RESERVATION_LIFETIME_S, Ledger, SettlingRecords
from coordinator.ledger.testing import MemoryLedgerStore, check_books, check_journal
from coordinator.scheduler.testing import task_spec
from coordinator.scheduler.testing_driver import FakeRecords
from coordinator.store.port import AttemptRow, LateStatementRow, StoreError, TaskRow
from coordinator.verification.events import Use
from inference.task import ManifestDigest, NodeId, OwnerId, TaskId, TenantId

TENANT = TenantId("tenant")  # of task_spec
NODE = NodeId("node")
KEY = Ed25519PrivateKey.generate()
BUDGET_MICRO = 20_000


class Bench:
    """A ledger over a database that outlives it."""

    def __init__(self, grant_micro: int | None = None) -> None:
        self.terms = Terms(grant_micro=grant_micro)
        self.store = MemoryLedgerStore()
        self.clock = FakeClock()
        self.start()

    def start(self) -> None:
        """Start, as after a SIGKILL: what was not written is gone."""
        log = TransparencyLog("cluster", KEY, self.store)
        self.ledger = Ledger(self.store, log, self.clock, self.terms, lambda _: OwnerId("owner"))
        self.records = SettlingRecords(FakeRecords(), self.ledger)

    def run(self, name: str, delivered: int = 8, *, signed: bool = True) -> None:
        """Reserve for a task of three ids and at most eight, and end it after so many."""
        self.ledger.reserve(task_spec(name))
        self.end(name, delivered, signed=signed)

    def end(self, name: str, delivered: int, *, signed: bool = True, ask: Price | None = None) -> None:
        row = attempt(name, delivered, signed=signed)
        if ask is not None:
            row = replace(row, ask_prompt_micro=ask.prompt_micro, ask_completion_micro=ask.completion_micro)
        self.records.add_attempt(row)
        self.records.add_task(ended_task(name, delivered, self.clock.now_ms()))


def attempt(name: str, delivered: int, *, signed: bool) -> AttemptRow:
    return AttemptRow(
        task_id=TaskId(name),
        attempt=1,
        node_id=NODE,
        lease_epoch=1,
        first_index=0,
        delivered_tokens=delivered,
        outcome="finished" if signed else "stopped",
        statement=b"signed" if signed else None,
        energy_mj=None,
        energy_method=None,
        started_at_ms=0,
        ended_at_ms=0,
    )


def ended_task(name: str, completion_tokens: int, ended_at_ms: int) -> TaskRow:
    return TaskRow(
        task_id=TaskId(name),
        tenant_id=TENANT,
        manifest_digest=ManifestDigest("digest"),
        outcome="length",
        prompt_tokens=3,
        completion_tokens=completion_tokens,
        submitted_at_ms=0,
        ended_at_ms=ended_at_ms,
    )


def test_a_key_without_a_budget_has_no_limit() -> None:
    bench = Bench()
    for number in range(5):
        bench.run(f"task-{number}")
    assert bench.ledger.books.balance_micro(tenant_account(TENANT)) == -5 * (3 * 250 + 8 * 1000)


def test_a_budget_is_given_once_and_what_exceeds_it_is_refused_and_reserves_nothing() -> None:
    # Mutations seen to fail: _first_grant on every task; _may_hold true for every tenant.
    bench = Bench(BUDGET_MICRO)
    bench.run("one")
    bench.ledger.reserve(task_spec("two"))
    with pytest.raises(SlackwaterError) as refused:
        bench.ledger.reserve(task_spec("three"))
    assert refused.value.reason is Reason.BUDGET_EXCEEDED
    check_books(bench.ledger.books, [TaskId("two")])
    # What the second did not use is there for the third.
    bench.end("two", 1)
    bench.ledger.reserve(task_spec("three", max_tokens=5))


@pytest.mark.parametrize(("node", "kind"), [(NODE, "held"), (NodeId("another"), "unsigned")])
def test_an_attempt_whose_proof_came_late_earns_as_a_signed_one_while_its_task_goes_on(node: NodeId, kind: str) -> None:
    # Mutations seen to fail: the row is left as it was; the node is not compared.
    bench = Bench()
    bench.ledger.reserve(task_spec("one"))
    bench.records.add_attempt(attempt("one", 8, signed=False))
    bench.records.add_late_statement(
        LateStatementRow(
            task_id=TaskId("one"), attempt=1, node_id=node, statement=b"late", energy_mj=None, energy_method=None
        )
    )
    bench.records.add_task(ended_task("one", 8, bench.clock.now_ms()))
    bench.ledger.write_now()
    [account] = [row.account for row in bench.store.ledger_accounts() if ":one:" in row.account]
    assert account.startswith(f"{kind}:")


def test_what_a_crash_left_reserved_goes_back_to_its_tenant() -> None:
    # Mutation seen to fail: _void_orphans left out.
    bench = Bench()
    bench.ledger.reserve(task_spec("lost"))
    bench.ledger.write_now()
    bench.ledger.reserve(task_spec("never written"))
    bench.start()
    assert bench.ledger.books.balance_micro(tenant_account(TENANT)) == 0
    last = json.loads(bench.store.entries[-1].body)
    assert (last["kind"], last["task_id"], last["facts"]) == ("void", "lost", {"why": "COORDINATOR_RESTARTED"})
    bench.start()
    assert len(bench.store.entries) == 2, "voided twice"


@pytest.mark.parametrize("lost_answer", [False, True])
async def test_a_database_that_fails_loses_nothing_and_doubles_nothing(lost_answer: bool) -> None:
    # Mutations seen to fail: entries not put back; _in_doubt never set.
    bench = Bench()
    bench.store.failures, bench.store.lost_answer = [StoreError("disk full")], lost_answer
    bench.run("one")
    await bench.ledger.flush()
    bench.run("two")
    await bench.ledger.flush()
    check_journal(bench.store)
    ids = [row.transfer_id for row in bench.store.entries]
    assert ids == [f"{task}/{what}" for task in ("one", "two") for what in ("reserve", "post", "earn/1")]
    before = dict(bench.ledger.books.accounts())
    bench.start()
    assert dict(bench.ledger.books.accounts()) == before


async def test_entries_are_written_by_itself_and_at_the_end() -> None:
    bench = Bench()
    running = asyncio.create_task(bench.ledger.run())
    bench.run("one")
    await bench.store.appended.wait()
    bench.run("two")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(bench.store.entries) == 6


async def test_a_grant_that_is_sent_again_is_given_once_also_after_a_restart() -> None:
    # Mutation seen to fail: grant without find_transfer.
    bench = Bench()
    await bench.ledger.grant("g1", TENANT, 100)
    bench.start()
    bench.clock.advance(60)
    await bench.ledger.grant("g1", TENANT, 100)
    assert bench.ledger.books.balance_micro(tenant_account(TENANT)) == 100
    with pytest.raises(TransferRefused):
        await bench.ledger.grant("g1", TENANT, 101)


def test_earnings_are_held_for_a_count_or_an_age_and_the_unsigned_for_an_age_alone() -> None:
    # Mutations seen to fail: HELD_TASKS + 1 in the comparison; "unsigned" counted like "held".
    bench = Bench()
    one = 3 * 200 + 8 * 800
    bench.run("unsigned", signed=False)
    for number in range(HELD_TASKS):
        bench.run(f"task-{number}")
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE) == Credits(earned_micro=0, held_micro=(HELD_TASKS + 1) * one)
    bench.run("another")
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE) == Credits(earned_micro=one, held_micro=(HELD_TASKS + 1) * one)
    bench.ledger.write_now()
    bench.start()
    bench.clock.advance(UNSIGNED_HELD_S)
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE).earned_micro == 2 * one
    bench.clock.advance(HELD_S - UNSIGNED_HELD_S)
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE) == Credits(earned_micro=(HELD_TASKS + 2) * one, held_micro=0)


def test_what_is_beyond_the_count_waits_for_a_good_audit_after_it_or_for_a_week() -> None:
    """Mutations seen to fail here: audits are not looked at; any audit speaks for all; a bad one speaks too; what was
    let go at the start, before anybody told of audits."""
    bench = Bench()
    for number in range(HELD_TASKS + 2):
        if number == 1:
            first_ms = bench.clock.now_ms()
            bench.clock.advance(10)
        bench.run(f"task-{number}")
    bench.ledger.audited(NODE, 0)
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE).earned_micro == 0
    bench.ledger.audited(NODE, first_ms + 1)
    bench.ledger.audited(NODE, 0)
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE).earned_micro == 0, "a bad audit ends what the good one before it allowed"
    bench.ledger.audited(NODE, first_ms + 1)
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE).earned_micro == ONE_MICRO
    bench.ledger.write_now()
    bench.start()
    bench.run("after the start")
    bench.ledger.audited(NODE, first_ms + 1)
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE).earned_micro == ONE_MICRO
    bench.ledger.audited(NODE, bench.clock.now_ms())
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE) == Credits(3 * ONE_MICRO, HELD_TASKS * ONE_MICRO)
    bench.ledger.audited(NODE, 0)
    bench.clock.advance(HELD_S)
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE).held_micro == 0


ONE_MICRO = 3 * 200 + 8 * 800
A, B = ManifestDigest("a"), ManifestDigest("b")


def test_nothing_of_a_quarantined_node_is_released_until_its_last_quarantine_ends() -> None:
    """Mutations seen to fail: _quarantined as one flag a node; no _queue_again; quarantine not looked at."""
    bench = Bench()
    bench.run("unsigned", signed=False)
    for number in range(HELD_TASKS + 1):
        bench.run(f"task-{number}")
    held_micro = (HELD_TASKS + 2) * ONE_MICRO
    for digest in (A, B):
        bench.ledger.standing_changed(NODE, digest, Use.CANARIES_ONLY, "verdict-1")
    bench.clock.advance(UNSIGNED_HELD_S)
    bench.ledger.sweep()
    bench.ledger.standing_changed(NODE, A, Use.PUBLIC_ONLY, "verdict-2")
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE) == Credits(earned_micro=0, held_micro=held_micro)
    # Another node's earnings do not wait for it.
    bench.ledger.reserve(task_spec("other"))
    bench.records.add_attempt(replace(attempt("other", 8, signed=False), node_id=NodeId("other")))
    bench.records.add_task(ended_task("other", 8, bench.clock.now_ms()))
    bench.clock.advance(UNSIGNED_HELD_S)
    bench.ledger.sweep()
    assert bench.ledger.credits(NodeId("other")) == Credits(earned_micro=ONE_MICRO, held_micro=0)
    assert bench.ledger.credits(NODE).earned_micro == 0
    bench.ledger.standing_changed(NODE, B, Use.PUBLIC_ONLY, "verdict-3")
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE) == Credits(2 * ONE_MICRO, HELD_TASKS * ONE_MICRO)
    bench.clock.advance(HELD_S)
    bench.ledger.sweep()
    assert bench.ledger.credits(NODE) == Credits(held_micro, 0)


def test_what_is_held_of_a_banned_node_is_forfeited_once_with_the_verdict_that_says_so() -> None:
    """Mutation seen to fail: a forfeit goes to earned_account."""
    bench = Bench()
    bench.run("released", signed=False)
    bench.clock.advance(UNSIGNED_HELD_S)
    bench.ledger.sweep()
    bench.ledger.reserve(task_spec("runs"))
    bench.run("ended")
    bench.ledger.standing_changed(NODE, A, Use.CANARIES_ONLY, "verdict-1")
    bench.ledger.standing_changed(NODE, A, Use.NOTHING, "verdict-2")
    bench.ledger.sweep()
    bench.end("runs", 8)
    bench.ledger.write_now()
    # Killed before the next sweep; verification tells all verdicts again at the start.
    bench.start()
    bench.ledger.standing_changed(NODE, A, Use.NOTHING, "verdict-2")
    bench.ledger.sweep()
    bench.clock.advance(HELD_S)
    bench.ledger.sweep()
    bench.ledger.write_now()
    assert bench.ledger.credits(NODE) == Credits(earned_micro=ONE_MICRO, held_micro=0)
    assert bench.ledger.books.balance_micro(FAILOVER) == 2 * ONE_MICRO
    bodies = [json.loads(row.body) for row in bench.store.entries]
    forfeits = [body for body in bodies if body["kind"] == "forfeit"]
    assert [(body["task_id"], body["facts"]) for body in forfeits] == [
        ("ended", {"verdict_id": "verdict-2"}),
        ("runs", {"verdict_id": "verdict-2"}),
    ]
    check_books(bench.ledger.books, ())
    check_journal(bench.store)


def test_a_reservation_that_was_forgotten_goes_back_and_its_task_ends_at_the_platforms_cost() -> None:
    # Mutation seen to fail: the reservation's amount left as it was.
    bench = Bench()
    bench.ledger.reserve(task_spec("old"))
    bench.clock.advance(RESERVATION_LIFETIME_S)
    bench.ledger.sweep()
    bench.end("old", 8)
    assert bench.ledger.books.balance_micro(tenant_account(TENANT)) == 0
    assert bench.ledger.books.balance_micro(FAILOVER) == -(3 * 200 + 8 * 800)


def test_books_take_no_transfer_in_part() -> None:
    # Mutation seen to fail: _apply writing into the accounts themselves.
    books = Books({}, 0)
    good = Transfer(
        transfer_id="a", kind=Kind.GRANT, at_ms=0, legs=(Leg("granted:t", -5), Leg("tenant:t", 5)), tenant_id="t"
    )
    spend = Transfer(transfer_id="b", kind=Kind.RESERVE, at_ms=0, legs=(Leg("tenant:t", -6), Leg("escrow:x", 6)))
    with pytest.raises(Overdraft):
        books.post([good, spend])
    assert (dict(books.accounts()), books.next_sequence) == ({}, 0)
    books.post([good])
    assert books.post([replace(good, at_ms=9)]) == []
    with pytest.raises(TransferRefused):
        books.post([replace(good, legs=(Leg("granted:t", -6), Leg("tenant:t", 6)))])
    with pytest.raises(TransferRefused):
        books.post([replace(good, transfer_id="c", legs=(Leg("granted:t", -6), Leg("tenant:t", 5)))])


# None, nothing, and all that the list leaves.
ASKS = (None, Price(0, 0), Price(123_457, 654_321), Terms().node_share("model"))


def test_a_late_proof_changes_nothing_about_what_an_attempt_is_paid() -> None:
    """Mutation seen to fail: the row without its ask."""
    bench = Bench()
    bench.ledger.reserve(task_spec("one"))
    row = replace(attempt("one", 8, signed=False), ask_prompt_micro=100_000, ask_completion_micro=200_000)
    bench.records.add_attempt(row)
    bench.records.add_late_statement(
        LateStatementRow(
            task_id=TaskId("one"), attempt=1, node_id=NODE, statement=b"late", energy_mj=None, energy_method=None
        )
    )
    bench.records.add_task(ended_task("one", 8, bench.clock.now_ms()))
    assert bench.ledger.credits(NODE) == Credits(earned_micro=0, held_micro=3 * 100 + 8 * 200)


class LedgerMachine(RuleBasedStateMachine):
    """Tasks, writes, failures of the database, crashes and time, in any order."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(100_000)
        self.open: set[TaskId] = set()
        self.count = 0
        self.use = Use.PUBLIC_ONLY

    @rule(use=st.sampled_from(Use))
    def verdict(self, use: Use) -> None:
        # A ban is for ever.
        self.use = self.use if self.use is Use.NOTHING else use
        self.bench.ledger.standing_changed(NODE, A, self.use, "verdict")

    @rule(good=st.booleans())
    def audit(self, good: bool) -> None:
        self.bench.ledger.audited(NODE, self.bench.clock.now_ms() if good else 0)

    @rule(target=running)
    def reserve(self) -> object:
        self.count += 1
        name = f"task-{self.count}"
        try:
            self.bench.ledger.reserve(task_spec(name))
        except SlackwaterError:
            return multiple()
        self.open.add(TaskId(name))
        return name

    @rule(name=consumes(running), delivered=st.integers(0, 8), signed=st.booleans(), ask=st.sampled_from(ASKS))
    def end(self, name: str, delivered: int, signed: bool, ask: Price | None) -> None:
        if TaskId(name) in self.open:
            self.bench.end(name, delivered, signed=signed, ask=ask)
            self.open.remove(TaskId(name))

    @rule(lost_answer=st.booleans())
    def fail_to_write(self, lost_answer: bool) -> None:
        self.bench.store.failures, self.bench.store.lost_answer = [StoreError("no")], lost_answer
        asyncio.run(self.bench.ledger.flush())
        self.bench.store.failures = []

    @rule()
    def write(self) -> None:
        self.bench.ledger.write_now()

    @rule()
    def crash(self) -> None:
        self.open.clear()
        self.bench.start()
        self.bench.ledger.standing_changed(NODE, A, self.use, "verdict")

    @rule(hours=st.integers(1, 200))
    def wait(self, hours: int) -> None:
        self.bench.clock.advance(hours * 3600)
        earned_micro = self.bench.ledger.credits(NODE).earned_micro
        self.bench.ledger.sweep()
        after = self.bench.ledger.credits(NODE)
        if self.use in (Use.CANARIES_ONLY, Use.NOTHING):
            assert after.earned_micro == earned_micro, "a node that is not trusted was paid"
        if self.use is Use.NOTHING or hours * 3600 >= HELD_S:
            assert self.use is Use.CANARIES_ONLY or after.held_micro == 0

    @invariant()
    def books_balance(self) -> None:
        escrowed = [name for name in self.open if self.bench.ledger.books.account(f"escrow:{name}")]
        check_books(self.bench.ledger.books, escrowed)
        check_journal(self.bench.store)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
