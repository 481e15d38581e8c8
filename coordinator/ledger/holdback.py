"""When earnings that are held go to the owner, and when they do not. Pure.

A node's last earnings are held, so that there is something to take back from
one that turns out to cheat. Work that the node signed for is held for its next
`HELD_TASKS` attempts and until an audit of the node after it was good, and for
`HELD_S` at the longest, so that a node that stops is paid too. A node that was
never audited (its model has no calibration) goes by the count alone. Work
without a statement is held for `UNSIGNED_HELD_S`, whatever the count: time to
complain.

Verdicts come before both. While a node is quarantined, with whatever model,
nothing of it is released; what has come due meanwhile follows when the
quarantine ends. What a banned node has not been paid yet is forfeited to
platform:failover, which has paid for what the node's answers were not worth.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.ledger.entries import FAILOVER, Account, Books, Kind, Leg, Transfer, earned_account
from coordinator.verification.events import Use
from inference.task import ManifestDigest, NodeId, OwnerId

# At the least audit rate of 2 %, the attempts among which two are audited on the average.
HELD_TASKS = 100
# A node that did fewer in a week is paid by age.
HELD_S = 7 * 24 * 3600
UNSIGNED_HELD_S = 72 * 3600


class HeldName(NamedTuple):
    """The parts of a held account's name."""

    kind: str
    owner_id: OwnerId
    node_id: NodeId
    task_id: str
    attempt: str


@dataclass(frozen=True, slots=True)
class Credits:
    """What a node has earned for its owner, and what of its work is not released yet, in micro-credits."""

    earned_micro: int = 0
    held_micro: int = 0


def held_name(account: str) -> HeldName | None:
    """Return the parts of a held account's name; None for another account."""
    if not account.startswith(("held:", "unsigned:")):
        return None
    kind, owner_id, node_id, task_id, attempt = account.split(":")
    return HeldName(kind, OwnerId(owner_id), NodeId(node_id), task_id, attempt)


class Holdback:
    """Remembers held accounts, and which nodes' verdicts stand in the way of their release."""

    def __init__(self) -> None:
        # Every held account by its node, with the time at which it was filled; oldest first.
        self._held: defaultdict[NodeId, dict[str, int]] = defaultdict(dict)
        # Per kind a heap by age; may name accounts that are gone.
        self._by_age: dict[str, list[tuple[int, str]]] = {"held": [], "unsigned": []}
        # Within the count.
        self._signed: defaultdict[NodeId, deque[str]] = defaultdict(deque)
        # When the last good audit of each node that is audited was; 0 before the first.
        self._audited_ms: dict[NodeId, int] = {}
        # Nodes of which more is within the count than the count.
        self._over: set[NodeId] = set()
        # Beyond the count and audited; may name accounts that are gone.
        self._beyond: deque[str] = deque()
        # The manifests with which a node is quarantined.
        self._quarantined: dict[NodeId, set[ManifestDigest]] = {}
        # The verdicts by which nodes are banned.
        self._banned: dict[NodeId, str] = {}

    def add(self, account: str, opened_at_ms: int) -> None:
        """Take note of a held account; one that is known already stays where it is."""
        name = held_name(account)
        if name is None or account in self._held.get(name.node_id, ()):
            return
        self._held[name.node_id][account] = opened_at_ms
        self._queue(name, account, opened_at_ms)

    def standing_changed(self, node_id: NodeId, manifest_digest: ManifestDigest, use: Use, verdict_id: str) -> None:
        """Take note of a verdict; told again, it changes nothing. No verdict takes a ban back."""
        if use is Use.NOTHING:
            self._banned.setdefault(node_id, verdict_id)
        quarantined = self._quarantined.get(node_id, set())
        if use is Use.CANARIES_ONLY:
            self._quarantined[node_id] = quarantined | {manifest_digest}
        elif manifest_digest in quarantined:
            left = quarantined - {manifest_digest}
            if left:
                self._quarantined[node_id] = left
            else:
                del self._quarantined[node_id]
                self._queue_again(node_id)

    def audited(self, node_id: NodeId, good_until_ms: int) -> None:
        """Take note of an audit, which speaks for what the node did until then.

        One that speaks against it, told as 0, ends what an earlier one has allowed: nothing is released until the next.
        """
        self._audited_ms[node_id] = good_until_ms

    def take_due(self, books: Books, now_ms: int, limit: int) -> list[Transfer]:
        """Return at most `limit` releases and forfeits, and forget their accounts."""
        for node_id in tuple(self._over):
            self._let_go(node_id)
        due: list[Transfer] = []
        for name, verdict_id in self._forfeited(limit):
            due.append(_empty(name, _account(books, name), now_ms, forfeited_by=verdict_id))
        for name in self._released(now_ms, limit - len(due)):
            due.append(_empty(name, _account(books, name), now_ms))
        return due

    def _forfeited(self, limit: int) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for node_id, verdict_id in self._banned.items():
            accounts = self._held.get(node_id)
            if accounts:
                found += [(account, verdict_id) for account in list(accounts)[: limit - len(found)]]
        for account, _ in found:
            self._forget(account)
        return found

    def _released(self, now_ms: int, limit: int) -> Iterator[str]:
        left = limit
        while left > 0 and (account := self._pop_due(now_ms)) is not None:
            if self._may_be_released(account):
                self._forget(account)
                left -= 1
                yield account

    def _pop_due(self, now_ms: int) -> str | None:
        if self._beyond:
            return self._beyond.popleft()
        for kind, held_s in (("held", HELD_S), ("unsigned", UNSIGNED_HELD_S)):
            by_age = self._by_age[kind]
            if by_age and now_ms - by_age[0][0] >= held_s * 1000:
                return heapq.heappop(by_age)[1]
        return None

    def _may_be_released(self, account: str) -> bool:
        name = _held_name(account)
        return account in self._held.get(name.node_id, ()) and not (
            name.node_id in self._quarantined or name.node_id in self._banned
        )

    def _queue(self, name: HeldName, account: str, opened_at_ms: int) -> None:
        heapq.heappush(self._by_age[name.kind], (opened_at_ms, account))
        if name.kind == "held":
            queue = self._signed[name.node_id]
            queue.append(account)
            if len(queue) > HELD_TASKS:
                self._over.add(name.node_id)

    def _let_go(self, node_id: NodeId) -> None:
        """Move what is beyond the count, and was followed by an audit, to what is due."""
        queue, audited_ms = self._signed.get(node_id, deque()), self._audited_ms.get(node_id)
        while len(queue) > HELD_TASKS and (audited_ms is None or self._held[node_id][queue[0]] <= audited_ms):
            self._beyond.append(queue.popleft())
        if len(queue) <= HELD_TASKS:
            self._over.discard(node_id)

    def _queue_again(self, node_id: NodeId) -> None:
        """What came due during the quarantine was passed over, and is in no queue any more."""
        self._signed.pop(node_id, None)
        for account, opened_at_ms in self._held.get(node_id, {}).items():
            self._queue(_held_name(account), account, opened_at_ms)

    def _forget(self, account: str) -> None:
        node_id = _held_name(account).node_id
        del self._held[node_id][account]
        queue = self._signed.get(node_id)
        if queue and account in queue:
            queue.remove(account)
        if not self._held[node_id]:
            del self._held[node_id]
            self._signed.pop(node_id, None)


def _held_name(account: str) -> HeldName:
    name = held_name(account)
    assert name is not None, "only held accounts are added"
    return name


def _account(books: Books, name: str) -> Account:
    account = books.account(name)
    assert account is not None, "a held account is emptied by its release or its forfeit alone"
    return account


def _empty(name: str, account: Account, now_ms: int, *, forfeited_by: str | None = None) -> Transfer:
    """Return the transfer of a held account's balance: to the owner, or by a verdict to the platform."""
    held = _held_name(name)
    kind = Kind.RELEASE if forfeited_by is None else Kind.FORFEIT
    goes_to = earned_account(held.owner_id, held.node_id) if forfeited_by is None else FAILOVER
    return Transfer(
        transfer_id=f"{held.task_id}/{kind.value}/{held.attempt}",
        kind=kind,
        at_ms=now_ms,
        legs=(Leg(name, -account.balance_micro), Leg(goes_to, account.balance_micro)),
        task_id=held.task_id,
        node_id=held.node_id,
        facts={} if forfeited_by is None else {"verdict_id": forfeited_by},
    )
