"""How `slackwater ledger verify` goes about it: fetch, check, keep what held."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from slackwater import books
from slackwater._protos.checkpoint import Checkpoint
from slackwater.books import Check, Counted, JournalEntry
from slackwater.cli.ledger_state import LedgerState
from slackwater.errors import CallerError, RateLimited, VerificationError
from slackwater.fleet import LedgerAccount, LedgerEntry
from slackwater.receipts import verify_growth, verify_receipt

if TYPE_CHECKING:
    from slackwater.blocking import Client

# On a fleet that works the books move between two reads; so often are they read together again.
ROUNDS_MAX = 5
# Whoever checks many tasks meets the limit on calls; a minute is its window.
RATE_WAIT_S = 1.0
RATE_WAITS_MAX = 120

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


def verify_ledger(client: "Client", state: LedgerState, counted: Mapping[str, Counted]) -> list[Check]:
    """Check all that this key may read, and take over into `state` what held.

    The order matters: entries are read before the checkpoint that must cover them.
    """
    exported = _read_on(client, [])
    try:
        checkpoint, checks = _growth(client, state)
    except VerificationError as error:
        return [Check(name="checkpoint", outcome="fails", detail=error.why)]
    if checkpoint is None:
        return checks
    accounts, exported = _read_together(client, exported)
    try:
        entries = books.read_entries(exported)
    except VerificationError as error:
        return [*checks, Check(name="entries", outcome="fails", detail=error.why)]
    whole = books.is_whole(entries)
    reader = "all" if whole else entries[0].tenant_id if entries else ""
    history = state.histories.get(reader)
    if not entries:
        # With no entry nobody knows whose they would be; what was seen with this state must still be there.
        history = next((one for one in state.histories.values() if one.entries), None)
    whose = "of the whole fleet" if whole else f"of {reader or 'yours'}"
    checks.append(Check(name="entries", outcome="holds", detail=f"{len(entries)} entries {whose}, each in its place"))
    checks.append(books.check_history(entries, history))
    if whole or sum(1 for entry in entries if entry.sequence < checkpoint.size) == checkpoint.size:
        checks.append(books.check_whole_log(entries, checkpoint))
    else:
        # What was proven before, and is the same in a log that has only grown, need not be proven again.
        proven = history.size if history is not None and checks[-1].outcome == "holds" else 0
        checks.append(_receipts(client, state, checkpoint, entries, proven))
    checks.append(books.check_sums(entries, whole=whole))
    checks.append(books.check_balances(entries, accounts))
    checks.append(books.check_charges(entries, counted))
    if whole:
        checks.append(books.check_earnings(entries))
    if entries and not any(check.outcome == "fails" for check in checks):
        state.histories[reader] = books.history_of(entries, checkpoint.size)
    return checks


def _growth(client: "Client", state: LedgerState) -> tuple[Checkpoint | None, list[Check]]:
    """Return the newest checkpoint; None where it contradicts the one kept, which then stays.

    Raises:
        VerificationError: no key that is trusted has signed it.
    """
    seen = None if state.note is None else verify_growth(None, state.note, (), coordinator_public_keys=state.keys)
    note, proof = _patiently(client.checkpoint_note, 0 if seen is None else seen.size)
    newest = verify_growth(None, note, (), coordinator_public_keys=state.keys)
    signed = Check(
        name="checkpoint", outcome="holds", detail=f"{newest.size} entries, root {newest.root.hex()[:16]}, signed"
    )
    try:
        verify_growth(seen, note, proof, coordinator_public_keys=state.keys)
    except VerificationError as error:
        state.refused = note
        return None, [signed, Check(name="growth", outcome="fails", detail=error.why)]
    state.note, state.refused = note, None
    if seen is None:
        return newest, [signed, Check(name="growth", outcome="unknown", detail="first look: taken on trust, and kept")]
    return newest, [
        signed,
        Check(name="growth", outcome="holds", detail=f"extends the log of {seen.size} entries seen last"),
    ]


def _receipts(
    client: "Client", state: LedgerState, checkpoint: Checkpoint, entries: Sequence[JournalEntry], proven: int
) -> Check:
    """Check the inclusion of each entry by the receipt of its task, and that all receipts are of one log."""
    new = [entry for entry in entries if proven <= entry.sequence < checkpoint.size]
    shown: dict[int, bytes] = {}
    heads = {checkpoint}
    try:
        for task_id in sorted({entry.task_id for entry in new if entry.task_id}):
            for receipt in _patiently(client.receipts, task_id):
                held = verify_receipt(receipt, coordinator_public_keys=state.keys)
                shown[held.index] = held.entry
                heads.add(held.checkpoint)
        _one_log(client, state, heads)
    except VerificationError as error:
        return Check(name="inclusion", outcome="fails", detail=error.why)
    except CallerError as error:
        # Not found, or not this key's to see although it was exported.
        return Check(name="inclusion", outcome="fails", detail=f"an exported entry has no receipt: {error.message}")
    unproven = [entry.sequence for entry in new if entry.task_id and shown.get(entry.sequence) != entry.body]
    if unproven:
        return Check(name="inclusion", outcome="fails", detail=f"entry {unproven[0]} is not the one in the log")
    exported = {entry.sequence for entry in entries}
    hidden = [index for index in shown if index < checkpoint.size and index not in exported]
    if hidden:
        return Check(name="inclusion", outcome="fails", detail=f"entry {hidden[0]} has a receipt and is not exported")
    grants = sum(1 for entry in new if not entry.task_id)
    told = f"{len(new) - grants} new entries stand in the signed log"
    if grants:
        # Receipts are handed out by task.
        told += f"; {grants} without a task (grants) have no receipt, and are not shown to"
    return Check(name="inclusion", outcome="holds", detail=told)


def _one_log(client: "Client", state: LedgerState, heads: set[Checkpoint]) -> None:
    """Check that one log extends all these checkpoints.

    Raises:
        VerificationError: one of them is of another log.
    """
    for _ in range(ROUNDS_MAX):
        newest = set()
        for head in heads:
            note, proof = _patiently(client.checkpoint_note, head.size)
            newest.add(verify_growth(head, note, proof, coordinator_public_keys=state.keys))
        if len(newest) == 1:
            return
        # The log grew in between: what was shown must be one log, too.
        heads = newest
    raise VerificationError(2, f"the log grew during each of {ROUNDS_MAX} comparisons; try again in a quiet moment")


def _read_on(client: "Client", exported: list[LedgerEntry]) -> list[LedgerEntry]:
    """Return the entries with those that came since."""
    found = list(exported)
    while page := _patiently(client.ledger_entries, found[-1].sequence + 1 if found else 0):
        found += page
    return found


def _read_together(client: "Client", exported: list[LedgerEntry]) -> tuple[list[LedgerAccount], list[LedgerEntry]]:
    """Return balances and entries of one moment, or of the last try where the books never rest."""
    accounts: list[LedgerAccount] = []
    for _ in range(ROUNDS_MAX):
        before = len(exported)
        accounts = _patiently(client.ledger_accounts)
        exported = _read_on(client, exported)
        if len(exported) == before and accounts == _patiently(client.ledger_accounts):
            break
    return accounts, exported


def _patiently(call: Callable[Arguments, Value], *arguments: Arguments.args, **options: Arguments.kwargs) -> Value:
    """Return what a call returns, waiting while there were too many of them."""
    for _ in range(RATE_WAITS_MAX):
        try:
            return call(*arguments, **options)
        except RateLimited as error:
            time.sleep(error.retry_after_s or RATE_WAIT_S)
    return call(*arguments, **options)
