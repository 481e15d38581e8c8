"""Checking the journal that a coordinator exports: pure arithmetic over its entries, without trusting it.

A tenant sees its own entries, an administrator all of them. Each function
judges one thing and returns a `Check`; nothing here asks the coordinator.
What is shown by the proofs of the log is in `slackwater.receipts`.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slackwater._protos.checkpoint import Checkpoint
from slackwater._protos.merkle import Frontier, extend
from slackwater.errors import VerificationError
from slackwater.fleet import LedgerAccount, LedgerEntry

# The kinds that end a task's reservation.
ENDS = frozenset({"post", "void", "expire"})
# Prices and asks are for so many tokens.
TOKENS_PER_PRICE = 1_000
# How many faults of one kind are told one by one.
FAULTS_TOLD_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Args: `outcome` is "holds", "fails" or "unknown", where what was had does not decide it."""

    name: str
    outcome: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """What the bytes of an entry say."""

    sequence: int
    body: bytes
    kind: str
    task_id: str
    tenant_id: str
    legs: tuple[tuple[str, int], ...]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What an earlier check has seen of a log of `size` entries: how many, and a hash over them in order."""

    size: int
    entries: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a client counted itself. Args: `prompt_tokens` is None where it has not rendered the prompt."""

    completion_tokens: int
    prompt_tokens: int | None = None


def read_entries(exported: Iterable[LedgerEntry]) -> list[JournalEntry]:
    """Return what the entries say, after checking that each is well-formed and stands in its place.

    1. An entry's bytes can be read.
    2. The number in its bytes is the one it was given under, and they ascend.

    Raises:
        VerificationError: with the entry's number.
    """
    entries: list[JournalEntry] = []
    for one in exported:
        try:
            said = json.loads(one.entry)
            entry = JournalEntry(
                sequence=int(said["sequence"]),
                body=one.entry,
                kind=str(said["kind"]),
                task_id=str(said["task_id"]),
                tenant_id=str(said["tenant_id"]),
                legs=tuple((str(account), _integer(amount)) for account, amount in said["legs"]),
                facts=dict(said["facts"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise VerificationError(1, f"entry {one.sequence} cannot be read: {error!r}") from error
        if entry.sequence != one.sequence or (entries and entry.sequence <= entries[-1].sequence):
            raise VerificationError(2, f"entry {one.sequence} calls itself {entry.sequence}, or stands out of order")
        entries.append(entry)
    return entries


def is_whole(entries: Sequence[JournalEntry]) -> bool:
    """Return whether these are an administrator's: entries that no single tenant could have been given."""
    return any(entry.tenant_id != entries[0].tenant_id or not entry.tenant_id for entry in entries)


def history_of(entries: Sequence[JournalEntry], size: int) -> History:
    """Return what to keep of the entries that a checkpoint of `size` covers, for `check_history`."""
    covered = [entry for entry in entries if entry.sequence < size]
    digest = hashlib.sha256()
    for entry in covered:
        # The hash of each, so that no bytes can move from one to the next.
        digest.update(hashlib.sha256(entry.body).digest())
    return History(size=size, entries=len(covered), sha256=digest.hexdigest())


def check_history(entries: Sequence[JournalEntry], history: History | None) -> Check:
    """Check that what an earlier check had seen is exported again, unchanged and complete."""
    if history is None:
        return _check("history", "unknown", "first look at these entries: nothing to compare with")
    now = history_of(entries, history.size)
    if now == history:
        return _check("history", "holds", f"the {now.entries} entries seen before are the same")
    return _check(
        "history",
        "fails",
        f"{history.entries} entries were seen before and {now.entries} of that time are exported now"
        + ("" if now.entries != history.entries else ", at least one of them changed"),
    )


def check_whole_log(entries: Sequence[JournalEntry], checkpoint: Checkpoint) -> Check:
    """Check that the log holds these entries and no others: all hashes made again lead to the signed root."""
    covered = [entry for entry in entries if entry.sequence < checkpoint.size]
    if len(covered) < checkpoint.size:
        present = {entry.sequence for entry in covered}
        missing = next(number for number in range(checkpoint.size) if number not in present)
        return _check("inclusion", "fails", f"entry {missing} is missing; the checkpoint covers {checkpoint.size}")
    if extend(Frontier(), (entry.body for entry in covered)).frontier.root() != checkpoint.root:
        return _check("inclusion", "fails", f"the {checkpoint.size} entries do not have the root that is signed")
    return _check("inclusion", "holds", f"all {checkpoint.size} entries of the log, hashed again, have its root")


def check_sums(entries: Sequence[JournalEntry], *, whole: bool) -> Check:
    """Check that every entry sums to zero, and that each task was reserved for once, ended once, and left nothing.

    Where not all entries are seen, what a task's escrow still holds is what nodes have earned of it: at least nothing.
    """
    faults = [f"entry {e.sequence} sums to {_sum(e)}" for e in entries if _sum(e)]
    tasks: defaultdict[str, list[JournalEntry]] = defaultdict(list)
    for entry in entries:
        if entry.task_id:
            tasks[entry.task_id].append(entry)
    open_tasks = 0
    for task_id, mine in tasks.items():
        kinds = Counter(entry.kind for entry in mine)
        escrow = sum(amount for entry in mine for account, amount in entry.legs if account == f"escrow:{task_id}")
        ends = sum(kinds[kind] for kind in ENDS)
        if kinds["reserve"] > 1 or ends > 1 or (ends and not kinds["reserve"]):
            faults.append(f"task {task_id} has {kinds['reserve']} reservations and {ends} ends")
        elif ends and (escrow < 0 or (whole and escrow)):
            faults.append(f"{escrow} micro-credits of task {task_id} are left over")
        open_tasks += bool(kinds["reserve"] and not ends)
    told = f"{len(entries)} entries and {len(tasks)} tasks sum to zero; {open_tasks} of the tasks run still"
    return _judged("sums", faults, told)


def check_charges(entries: Sequence[JournalEntry], counted: Mapping[str, Counted]) -> Check:
    """Check that each charge is what left the tenant's account and what the tokens cost by the list price that stands
    with it, and the counts those that the client made itself.
    """
    paid: Counter[str] = Counter()
    for entry in entries:
        if entry.task_id and entry.kind in ENDS | {"reserve"}:
            paid[entry.task_id] -= sum(amount for account, amount in entry.legs if account.startswith("tenant:"))
    faults, compared = [], set()
    for entry in entries:
        if entry.kind != "post":
            continue
        if entry.facts.get("charge_micro") != paid[entry.task_id]:
            faults.append(f"task {entry.task_id} cost {paid[entry.task_id]}, not {entry.facts.get('charge_micro')}")
        elif (cost := _cost(entry.facts, "price", "completion_tokens")) not in (None, paid[entry.task_id]):
            faults.append(f"task {entry.task_id} cost {paid[entry.task_id]}, by the list price {cost}")
        own = counted.get(entry.task_id)
        if own is None:
            continue
        compared.add(entry.task_id)
        told = (entry.facts.get("prompt_tokens"), entry.facts.get("completion_tokens"))
        if told != (told[0] if own.prompt_tokens is None else own.prompt_tokens, own.completion_tokens):
            faults.append(
                f"task {entry.task_id} is charged for {told[0]} and {told[1]} tokens; "
                f"counted were {'?' if own.prompt_tokens is None else own.prompt_tokens} and {own.completion_tokens}"
            )
    if faults or (counted and len(compared) == len(counted)):
        return _judged("charges", faults, f"{len(compared)} tasks are charged for what the client counted")
    if not counted:
        return _check("charges", "unknown", "every charge is what was paid; no counts of the client to compare with")
    return _check("charges", "unknown", f"{len(counted) - len(compared)} tasks that were counted have no charge yet")


def check_earnings(entries: Sequence[JournalEntry]) -> Check:
    """Check that each attempt earned what its tokens come to by the ask of its order, and that no ask is above a price.

    Entries of a coordinator that wrote no asks yet are passed over. Only an administrator sees what nodes earn.
    """
    prices = {entry.task_id: entry.facts for entry in entries if "price_prompt_micro" in entry.facts}
    faults, attempts = [], 0
    for entry in entries:
        ordered = _cost(entry.facts, "ask", "delivered_tokens", up=False) if entry.kind == "earn" else None
        if ordered is None:
            continue
        attempts += 1
        who = f"attempt {entry.facts.get('attempt')} at task {entry.task_id}"
        earned = sum(amount for account, amount in entry.legs if account.startswith(("held:", "unsigned:")))
        if earned != ordered:
            faults.append(f"{who} earned {earned}, by its ask {ordered}")
        price = prices.get(entry.task_id)
        if price is not None and any(
            entry.facts[f"ask_{part}_micro"] > price[f"price_{part}_micro"] for part in ("prompt", "completion")
        ):
            faults.append(f"{who} was promised more than the list price")
    return _judged("earnings", faults, f"{attempts} attempts earned what their orders say, none above the list price")


def check_balances(entries: Sequence[JournalEntry], accounts: Iterable[LedgerAccount]) -> Check:
    """Check that the balances shown are those that follow from the entries."""
    shown = {one.account: one.balance_micro for one in accounts}
    sums: Counter[str] = Counter()
    for entry in entries:
        for account, amount in entry.legs:
            sums[_shown_as(account)] += amount
    tenants = {name for name in sums if name.startswith(("tenant:", "granted:"))}
    names = (set(shown) | set(sums)) if is_whole(entries) else tenants | set(shown)
    faults = [
        f"{name} is shown with {shown.get(name, 0)} micro-credits and has {sums[name]}"
        for name in sorted(names)
        if shown.get(name, 0) != sums[name]
    ]
    return _judged("balances", faults, f"{len(names)} balances follow from the entries")


def _shown_as(account: str) -> str:
    """Return the line under which an account is shown: what is held of a node as one, what is reserved as one."""
    kind, *rest = account.split(":")
    if kind in ("held", "unsigned"):
        return ":".join(("held", *rest[:2]))
    return "escrow" if kind == "escrow" else account


def _cost(facts: Mapping[str, Any], what: str, completion: str, *, up: bool = True) -> int | None:
    """Return what an entry's tokens come to by the price or ask that stands with them; None where none does."""
    names = (f"{what}_prompt_micro", "prompt_tokens", f"{what}_completion_micro", completion)
    if any(type(facts.get(name)) is not int for name in names):
        return None
    prompt_micro, prompt, completion_micro, delivered = (facts[name] for name in names)
    scaled: int = prompt_micro * prompt + completion_micro * delivered
    return -(-scaled // TOKENS_PER_PRICE) if up else scaled // TOKENS_PER_PRICE


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _sum(entry: JournalEntry) -> int:
    return sum(amount for _, amount in entry.legs)


def _check(name: str, outcome: str, detail: str) -> Check:
    return Check(name=name, outcome=outcome, detail=detail)


def _judged(name: str, faults: Sequence[str], otherwise: str) -> Check:
    if not faults:
        return _check(name, "holds", otherwise)
    more = len(faults) - FAULTS_TOLD_MAX
    return _check(
        name, "fails", "; ".join(faults[:FAULTS_TOLD_MAX]) + (f"; and {more} more like it" if more > 0 else "")
    )
