"""The books: accounts, transfers between them, and what is allowed. Pure.

Amounts are integer micro-credits (a credit is a million of them). A transfer
moves amounts between accounts, its legs sum to zero, and once posted it is an
entry of the journal: numbered, never changed, never taken back; an error is
mended by another entry. A caller names its transfers, so that a retry with the
same content changes nothing and one with other content is refused.

Accounts, by name:

  tenant:ID                      what a tenant may still spend; below zero where it has no budget
  granted:TENANT                 credit given to a tenant, below zero; a tenant has a budget once it was given one
  escrow:TASK                    set aside for a running task; empty and gone when it is settled
  held:OWNER:NODE:TASK:ATTEMPT   earned, and not released yet; the node signed for it
  unsigned:OWNER:NODE:TASK:ATTEMPT   the same without a statement
  earned:OWNER:NODE              released to the node's owner
  platform:revenue               what is left of list prices
  platform:failover              what failures and hedges cost, less what banned nodes forfeit
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from inference.task import NodeId, OwnerId, TaskId, TenantId

REVENUE = "platform:revenue"
FAILOVER = "platform:failover"
# Who pays for audits and canaries: never out of a budget, so that its balance tells what they cost.
VERIFICATION_TENANT = TenantId("platform:verification")
# Posted transfers whose ids are remembered here: hours of a busy fleet. Retries come within seconds;
# the database, which knows all ids, is asked about those that may come later.
RECENT_IDS_MAX = 100_000
# Amounts fit a signed 64-bit column, sums of them too.
AMOUNT_MICRO_MAX = 2**53
# Version of the canonical bytes of an entry.
ENTRY_VERSION = 1


class Kind(Enum):
    """What a transfer is for."""

    GRANT = "grant"
    RESERVE = "reserve"
    POST = "post"
    VOID = "void"
    EXPIRE = "expire"
    EARN = "earn"
    RELEASE = "release"
    FORFEIT = "forfeit"


class Leg(NamedTuple):
    account: str
    amount_micro: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Args: `facts` say what the amounts follow from: counts, outcomes and hashes, never text."""

    transfer_id: str
    kind: Kind
    at_ms: int
    legs: tuple[Leg, ...]
    # Whom it concerns, who may see it; empty for nobody.
    task_id: str = ""
    tenant_id: str = ""
    node_id: str = ""
    facts: Mapping[str, int | str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A posted transfer; `sequence` counts the journal's entries from 0, without a gap."""

    sequence: int
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Account:
    """`opened_at_ms` is when it was last empty."""

    balance_micro: int
    opened_at_ms: int


class Overdraft(Exception):
    """A transfer would take more out of an account than may be taken; nothing was posted."""

    def __init__(self, account: str, balance_micro: int, amount_micro: int) -> None:
        super().__init__(f"{account} has {balance_micro} micro-credits; {-amount_micro} cannot be taken out of it")
        self.account = account
        self.balance_micro = balance_micro


class TransferRefused(Exception):
    """A transfer is none: unbalanced, out of range, or its id stands for something else. Nothing was posted."""


def tenant_account(tenant_id: TenantId) -> str:
    return f"tenant:{tenant_id}"


def granted_account(tenant_id: TenantId) -> str:
    return f"granted:{tenant_id}"


def escrow_account(task_id: TaskId) -> str:
    return f"escrow:{task_id}"


def earned_account(owner_id: OwnerId, node_id: NodeId) -> str:
    return f"earned:{owner_id}:{node_id}"


def held_account(owner_id: OwnerId, node_id: NodeId, task_id: TaskId, attempt: int, *, signed: bool) -> str:
    return f"{'held' if signed else 'unsigned'}:{owner_id}:{node_id}:{task_id}:{attempt}"


def escrowed_task(account: str) -> TaskId | None:
    """Return the task of an escrow account; None for another account."""
    kind, _, task_id = account.partition(":")
    return TaskId(task_id) if kind == "escrow" else None


def is_transient(account: str) -> bool:
    """Return whether an account belongs to one task, and is forgotten when it is empty."""
    return account.startswith(("escrow:", "held:", "unsigned:"))


def entry_bytes(entry: Entry) -> bytes:
    """Return the bytes that stand for an entry, in the database and under the log's hashes: JSON, one form for each."""
    transfer = entry.transfer
    return json.dumps(
        {
            "version": ENTRY_VERSION,
            "sequence": entry.sequence,
            "id": transfer.transfer_id,
            "kind": transfer.kind.value,
            "at_ms": transfer.at_ms,
            "task_id": transfer.task_id,
            "tenant_id": transfer.tenant_id,
            "node_id": transfer.node_id,
            "legs": transfer.legs,
            "facts": transfer.facts,
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()


def check_repeated(body: bytes, transfer: Transfer) -> None:
    """Check that a transfer repeats the one that stands in the journal with its id.

    Raises:
        TransferRefused: it is another one.
    """
    stands = json.loads(body)
    said = json.loads(entry_bytes(Entry(stands["sequence"], replace(transfer, at_ms=stands["at_ms"]))))
    if stands != said:
        raise TransferRefused(f"the transfer {transfer.transfer_id!r} was posted with other content")


class Books:
    """All balances, and the rules. One owner; every change goes through `post`.

    Args:
        accounts: as they were when the journal had `next_sequence` entries.
    """

    def __init__(self, accounts: Mapping[str, Account], next_sequence: int) -> None:
        self._accounts = dict(accounts)
        self._recent: OrderedDict[str, Transfer] = OrderedDict()
        self.next_sequence = next_sequence

    def balance_micro(self, account: str) -> int:
        found = self._accounts.get(account)
        return 0 if found is None else found.balance_micro

    def account(self, name: str) -> Account | None:
        """Return an account; None for one that never had anything, or is transient and empty."""
        return self._accounts.get(name)

    def accounts(self) -> Iterator[tuple[str, Account]]:
        return iter(self._accounts.items())

    def post(self, transfers: Sequence[Transfer]) -> list[Entry]:
        """Post all of them or none; those that were posted before are passed over.

        Raises:
            Overdraft: an account would fall below what it may.
            TransferRefused: one is no transfer, or its id stands for other content.
        """
        new = [transfer for transfer in transfers if not self._posted(transfer)]
        changed: dict[str, Account] = {}
        for transfer in new:
            self._apply(transfer, changed)
        for name, account in changed.items():
            if account.balance_micro == 0 and is_transient(name):
                self._accounts.pop(name, None)
            else:
                self._accounts[name] = account
        entries = []
        for transfer in new:
            entries.append(Entry(self.next_sequence, transfer))
            self.next_sequence += 1
            self._recent[transfer.transfer_id] = transfer
            if len(self._recent) > RECENT_IDS_MAX:
                self._recent.popitem(last=False)
        return entries

    def _posted(self, transfer: Transfer) -> bool:
        known = self._recent.get(transfer.transfer_id)
        if known is None:
            return False
        # A retry is made later than what it repeats.
        if _content(known) != _content(transfer):
            raise TransferRefused(f"the transfer {transfer.transfer_id!r} was posted with other content")
        return True

    def _apply(self, transfer: Transfer, changed: dict[str, Account]) -> None:
        names = [leg.account for leg in transfer.legs]
        if sum(leg.amount_micro for leg in transfer.legs) != 0 or len(set(names)) != len(names):
            raise TransferRefused(f"the legs of {transfer.transfer_id!r} do not sum to zero, each account once")
        for name, amount_micro in transfer.legs:
            if abs(amount_micro) > AMOUNT_MICRO_MAX:
                raise TransferRefused(f"{transfer.transfer_id!r} moves more than {AMOUNT_MICRO_MAX} micro-credits")
            account = changed.get(name) or self._accounts.get(name) or Account(0, transfer.at_ms)
            balance_micro = account.balance_micro + amount_micro
            if amount_micro < 0 and not self._may_hold(name, balance_micro, changed):
                raise Overdraft(name, account.balance_micro, amount_micro)
            opened_at_ms = account.opened_at_ms if account.balance_micro else transfer.at_ms
            changed[name] = Account(balance_micro, opened_at_ms)

    def _may_hold(self, name: str, balance_micro: int, changed: Mapping[str, Account]) -> bool:
        """Return whether an account may stand at a balance after something was taken out of it."""
        if balance_micro >= 0 or name == FAILOVER or name.startswith("granted:"):
            return True
        kind, _, tenant_id = name.partition(":")
        # A tenant that was never given a budget is trusted to pay later.
        granted = granted_account(TenantId(tenant_id))
        return kind == "tenant" and granted not in self._accounts and granted not in changed


def _content(transfer: Transfer) -> tuple[object, ...]:
    return (
        transfer.kind,
        transfer.legs,
        transfer.task_id,
        transfer.tenant_id,
        transfer.node_id,
        dict(transfer.facts),
    )
