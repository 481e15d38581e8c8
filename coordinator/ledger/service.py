"""Keeps the books of a running coordinator: decides in memory, writes in batches.

One process owns the ledger, so a reservation is decided at once, on the event
loop, without asking the database; nothing here awaits but `run`. What was
decided is written within `GROUP_COMMIT_S` and the time of a commit, many
entries in one transaction, with their hashes in the log. A batch holds the
entries of a task's end all or not at all. A reservation is not waited for
before its task is dispatched: docs/adr/0005 says why that loses nothing.

After a crash the database is the truth: what it holds in escrow belonged to
tasks that died with the process, and goes back to their tenants.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from coordinator.clock import Clock
from coordinator.errors import Reason, SlackwaterError, store_unavailable
from coordinator.ledger.entries import (
    VERIFICATION_TENANT,
    Account,
    Books,
    Entry,
    Kind,
    Leg,
    Overdraft,
    Transfer,
    check_repeated,
    entry_bytes,
    escrowed_task,
    granted_account,
    tenant_account,
)
from coordinator.ledger.holdback import Credits, Holdback, held_name
from coordinator.ledger.log import TransparencyLog
from coordinator.ledger.port import LedgerStore
from coordinator.ledger.prices import Price, Terms
from coordinator.ledger.settlement import EndedAttempt, EndedTask, Reservation, give_back, reserve, settle
from coordinator.scheduler.driver import Records
from coordinator.store.port import AccountRow, AttemptRow, LateStatementRow, LedgerRow, TaskRow
from coordinator.verification.events import Use
from inference.task import ManifestDigest, NodeId, OwnerId, TaskId, TaskSpec, TenantId

# How long an entry may wait for company. Who waits for one (a grant, a receipt) has it written at once, and a crash
# loses as much as the record of tasks does (coordinator.recorder). With 5 ms, at ten tasks a second, each was a commit
# by itself.
GROUP_COMMIT_S = 0.2
# Between attempts to write while the database does not answer.
RETRY_S = 0.5
# Entries that wait for the database: some 50 MB. Beyond it no task is taken on; none is ever given up.
PENDING_ENTRIES_MAX = 100_000
# No task runs this long; whatever is still reserved then was forgotten, and goes back.
RESERVATION_LIFETIME_S = 24 * 3600
SWEEP_INTERVAL_S = 1.0
# Releases, forfeits and expiries of one sweep: some 2 ms on the event loop.
SWEEP_TRANSFERS_MAX = 200

log = structlog.get_logger()


@dataclass(slots=True)
class _Held:
    reservation: Reservation
    reserved_at_ms: int


class Ledger:
    """The books of one coordinator. Constructing it blocks: it reads the balances and voids what a crash left.

    Args:
        owner_of: the owner of an enrolled node.
    """

    def __init__(
        self,
        store: LedgerStore,
        log_of_ledger: TransparencyLog,
        clock: Clock,
        terms: Terms,
        owner_of: Callable[[NodeId], OwnerId],
    ) -> None:
        self._store = store
        self._log = log_of_ledger
        self._clock = clock
        self._terms = terms
        self._owner_of = owner_of
        self._reservations: dict[TaskId, _Held] = {}
        self._pending: list[Entry] = []
        self._touched: set[str] = set()
        # A failed write may have been committed all the same; the next one looks.
        self._in_doubt = False
        self._woken = asyncio.Event()
        self._writing = asyncio.Lock()
        self._holdback = Holdback()
        self._credits: defaultdict[NodeId, Credits] = defaultdict(Credits)
        rows = sorted(store.ledger_accounts(), key=lambda row: row.opened_at_ms)
        accounts = {row.account: Account(row.balance_micro, row.opened_at_ms) for row in rows}
        self.books = Books(accounts, log_of_ledger.size)
        for name, account in accounts.items():
            self._count_credits(name, account.balance_micro)
            self._holdback.add(name, account.opened_at_ms)
        self._void_orphans(accounts)

    # --- tasks -----------------------------------------------------------------------------

    def reserve(self, spec: TaskSpec) -> None:
        """Set aside what a task may cost at most.

        Raises:
            SlackwaterError: BUDGET_EXCEEDED; or STORE_UNAVAILABLE, where too much waits for the database.
        """
        if len(self._pending) >= PENDING_ENTRIES_MAX:
            raise store_unavailable()
        now_ms = self._clock.now_ms()
        price = self._terms.price(spec.model)
        amount_micro = price.charge_micro(len(spec.prompt_ids), spec.max_tokens)
        reservation = Reservation(
            task_id=spec.task_id,
            tenant_id=spec.tenant_id,
            amount_micro=amount_micro,
            price=price,
            ask=self._terms.node_share(spec.model),
        )
        try:
            self._post([*self._first_grant(spec.tenant_id, now_ms), reserve(reservation, now_ms)])
        except Overdraft as overdraft:
            raise SlackwaterError(
                Reason.BUDGET_EXCEEDED,
                f"the task may cost {amount_micro} micro-credits and this API key has {overdraft.balance_micro} left; "
                "lower max_tokens, or ask the operator for credit",
                param="max_tokens",
            ) from overdraft
        self._reservations[spec.task_id] = _Held(reservation, now_ms)

    def settle(self, task: TaskRow, attempts: Sequence[AttemptRow]) -> None:
        """Post what a task's end means. Every task is reserved for before it runs."""
        reservation = self._reservations.pop(task.task_id).reservation
        ended = EndedTask(
            outcome=task.outcome,
            prompt_tokens=task.prompt_tokens,
            completion_tokens=task.completion_tokens,
            ended_at_ms=task.ended_at_ms,
            attempts=[self._ended_attempt(row) for row in attempts],
        )
        self._post(settle(reservation, ended))

    async def grant(self, transfer_id: str, tenant_id: TenantId, amount_micro: int) -> None:
        """Give a tenant credit; from the first on it has a budget. Written when it returns.

        Args:
            transfer_id: the caller's, so that a grant that is sent again is given once.

        Raises:
            TransferRefused: the id stands for another grant.
        """
        transfer = _grant(transfer_id, tenant_id, amount_micro, self._clock.now_ms())
        row = await asyncio.to_thread(self._store.find_transfer, transfer.transfer_id)
        if row is not None:
            check_repeated(row.body, transfer)
        else:
            self._post([transfer])
        await self.flush()

    def standing_changed(self, node_id: NodeId, manifest_digest: ManifestDigest, use: Use, verdict_id: str) -> None:
        """Take note of a verdict that is stored: the next sweeps hold, release or forfeit by it."""
        self._holdback.standing_changed(node_id, manifest_digest, use, verdict_id)

    def audited(self, node_id: NodeId, good_until_ms: int) -> None:
        """Take note of an audit that is stored: what the node earned until then may be released; 0 for nothing."""
        self._holdback.audited(node_id, good_until_ms)

    def credits(self, node_id: NodeId) -> Credits:
        """Return what a node has earned so far."""
        return self._credits[node_id] if node_id in self._credits else Credits()

    def summary(self) -> list[tuple[str, int]]:
        """Return the balances by name: all that is held of a node as one, all that is reserved as one."""
        sums: defaultdict[str, int] = defaultdict(int)
        for name, account in self.books.accounts():
            held = held_name(name)
            if held is not None:
                name = f"held:{held.owner_id}:{held.node_id}"
            elif escrowed_task(name) is not None:
                name = "escrow"
            sums[name] += account.balance_micro
        return sorted(sums.items())

    # --- time ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write and sweep for ever; on cancellation write once more."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_sweeping())
                while True:
                    await self._woken.wait()
                    await asyncio.sleep(GROUP_COMMIT_S)
                    # A thread cannot be cancelled; without the shield nobody would learn how it ended.
                    await asyncio.shield(self.flush())
        finally:
            # The loop is still running while this task is being cancelled.
            await self.flush()

    def sweep(self) -> None:
        """Release what was held long enough, take what is forfeited, give back what was reserved for too long."""
        now_ms = self._clock.now_ms()
        transfers = self._holdback.take_due(self.books, now_ms, SWEEP_TRANSFERS_MAX) + self._expiries(now_ms)
        if transfers:
            self._post(transfers)

    async def flush(self) -> None:
        """Write what waits; where the database fails, keep it for the next time."""
        async with self._writing:
            self._woken.clear()
            if not self._pending:
                return
            entries, touched, accounts = self._take()
            try:
                await asyncio.to_thread(self._write, entries, accounts)
            except Exception as error:
                self._pending = entries + self._pending
                self._touched |= touched
                log.error("ledger_write_failed", error=str(error), entries=len(self._pending))
                asyncio.get_running_loop().call_later(RETRY_S, self._woken.set)

    def write_now(self) -> None:
        """Write what waits. Blocks, and raises what the store raises; for when no event loop runs."""
        if self._pending:
            entries, _, accounts = self._take()
            self._write(entries, accounts)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.sweep()

    def _expiries(self, now_ms: int) -> list[Transfer]:
        transfers: list[Transfer] = []
        # In the order of their reservation.
        for held in self._reservations.values():
            if now_ms - held.reserved_at_ms < RESERVATION_LIFETIME_S * 1000 or len(transfers) >= SWEEP_TRANSFERS_MAX:
                break
            one = held.reservation
            if one.amount_micro:
                transfers.append(
                    give_back(Kind.EXPIRE, one.tenant_id, one.task_id, one.amount_micro, "too old", now_ms)
                )
                held.reservation = replace(one, amount_micro=0)
        return transfers

    # --- inside ----------------------------------------------------------------------------

    def _post(self, transfers: Sequence[Transfer]) -> None:
        entries = self.books.post(transfers)
        for entry in entries:
            for name, amount_micro in entry.transfer.legs:
                self._touched.add(name)
                self._count_credits(name, amount_micro)
                if amount_micro > 0:
                    self._holdback.add(name, entry.transfer.at_ms)
        self._pending += entries
        if entries:
            self._woken.set()

    def _count_credits(self, name: str, amount_micro: int) -> None:
        held = held_name(name)
        if held is not None:
            known = self._credits[held.node_id]
            self._credits[held.node_id] = replace(known, held_micro=known.held_micro + amount_micro)
        elif name.startswith("earned:"):
            node_id = NodeId(name.split(":")[2])
            known = self._credits[node_id]
            self._credits[node_id] = replace(known, earned_micro=known.earned_micro + amount_micro)

    def _first_grant(self, tenant_id: TenantId, now_ms: int) -> list[Transfer]:
        known = self.books.account(tenant_account(tenant_id)) is not None
        if self._terms.grant_micro is None or known or tenant_id == VERIFICATION_TENANT:
            return []
        return [_grant("first", tenant_id, self._terms.grant_micro, now_ms)]

    def _ended_attempt(self, row: AttemptRow) -> EndedAttempt:
        return EndedAttempt(
            attempt=row.attempt,
            node_id=row.node_id,
            owner_id=self._owner_of(row.node_id),
            first_index=row.first_index,
            delivered_tokens=row.delivered_tokens,
            outcome=row.outcome,
            ask=_ask(row),
            statement_sha256=hashlib.sha256(row.statement).hexdigest() if row.statement else "",
        )

    def _void_orphans(self, accounts: Mapping[str, Account]) -> None:
        transfers = []
        for name, account in accounts.items():
            task_id = escrowed_task(name)
            if task_id is None:
                continue
            tenant_id = TenantId(self._store.ledger_of_task(task_id)[0].tenant_id)
            why = Reason.COORDINATOR_RESTARTED.name
            transfers.append(give_back(Kind.VOID, tenant_id, task_id, account.balance_micro, why, self._clock.now_ms()))
        if transfers:
            self._post(transfers)
            self.write_now()
            log.info("ledger_recovered", voided=len(transfers))

    def _take(self) -> tuple[list[Entry], set[str], list[tuple[str, Account | None]]]:
        entries, self._pending = self._pending, []
        touched, self._touched = self._touched, set()
        return entries, touched, [(name, self.books.account(name)) for name in touched]

    def _write(self, entries: Sequence[Entry], accounts: Iterable[tuple[str, Account | None]]) -> None:
        """Write a batch, in a thread; the checkpoint over it is signed only then."""
        if self._in_doubt:
            known, stored = self._log.size, self._store.log_size()
            missed = [entry_bytes(entry) for entry in entries if known <= entry.sequence < stored]
            self._log.committed(self._log.extended_by(missed))
            entries = [entry for entry in entries if entry.sequence >= stored]
        self._in_doubt = True
        bodies = [entry_bytes(entry) for entry in entries]
        extension = self._log.extended_by(bodies)
        rows, closed = [], []
        for name, account in accounts:
            if account is None:
                closed.append(name)
            else:
                rows.append(
                    AccountRow(account=name, balance_micro=account.balance_micro, opened_at_ms=account.opened_at_ms)
                )
        self._store.append_ledger(
            [_row(entry, body) for entry, body in zip(entries, bodies, strict=True)], rows, closed, extension.made
        )
        self._log.committed(extension)
        self._in_doubt = False


class SettlingRecords:
    """The driver's records: what ended is recorded, and settled when the task's last attempt is known."""

    def __init__(self, recorder: Records, ledger: Ledger) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._attempts: defaultdict[TaskId, list[AttemptRow]] = defaultdict(list)

    def add_attempt(self, row: AttemptRow) -> None:
        self._recorder.add_attempt(row)
        self._attempts[row.task_id].append(row)

    def add_late_statement(self, row: LateStatementRow) -> None:
        """A task that goes on elsewhere has not been settled: then the attempt earns as a signed one."""
        self._recorder.add_late_statement(row)
        rows = self._attempts.get(row.task_id, [])
        for place, known in enumerate(rows):
            if (known.attempt, known.node_id, known.statement) == (row.attempt, row.node_id, None):
                rows[place] = replace(known, statement=row.statement)

    def add_task(self, row: TaskRow) -> None:
        self._recorder.add_task(row)
        self._ledger.settle(row, self._attempts.pop(row.task_id, ()))


def _ask(row: AttemptRow) -> Price | None:
    """Return what an attempt was to be paid; None for what the list leaves."""
    if row.ask_prompt_micro is None or row.ask_completion_micro is None:
        return None
    return Price(row.ask_prompt_micro, row.ask_completion_micro)


def _grant(name: str, tenant_id: TenantId, amount_micro: int, now_ms: int) -> Transfer:
    return Transfer(
        transfer_id=f"{tenant_id}/grant/{name}",
        kind=Kind.GRANT,
        at_ms=now_ms,
        legs=(Leg(granted_account(tenant_id), -amount_micro), Leg(tenant_account(tenant_id), amount_micro)),
        tenant_id=tenant_id,
    )


def _row(entry: Entry, body: bytes) -> LedgerRow:
    transfer = entry.transfer
    return LedgerRow(
        sequence=entry.sequence,
        transfer_id=transfer.transfer_id,
        task_id=transfer.task_id,
        tenant_id=transfer.tenant_id,
        node_id=transfer.node_id,
        body=body,
    )
