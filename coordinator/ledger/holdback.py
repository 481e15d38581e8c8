"""When earnings that are held go to the owner. Pure.

A node's last earnings are held, so that there is something to take back from
one that turns out to cheat. Work that the node signed for is held for its next
`HELD_TASKS` attempts, and for `HELD_S` at the longest, so that a node that
stops is paid too. Work without a statement is held for `UNSIGNED_HELD_S`,
whatever the count: time to complain. Nothing audits yet; once something does,
its verdict releases, and count and age become the upper bound.
"""

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.ledger.entries import Account, Kind, Leg, Transfer, earned_account
from inference.task import NodeId, OwnerId

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
    """Remembers held accounts in the order in which they were filled."""

    def __init__(self) -> None:
        # Per kind, in order of age; every account is also in its node's queue, if that has one.
        self._by_age: dict[str, OrderedDict[str, int]] = {"held": OrderedDict(), "unsigned": OrderedDict()}
        self._signed: dict[NodeId, deque[str]] = defaultdict(deque)
        # Beyond the count already, and not taken yet.
        self._beyond: deque[str] = deque()

    def add(self, account: str, opened_at_ms: int) -> None:
        """Take note of a held account; one that is known already stays where it is."""
        name = held_name(account)
        if name is None or account in self._by_age[name.kind]:
            return
        self._by_age[name.kind][account] = opened_at_ms
        if name.kind == "held":
            queue = self._signed[name.node_id]
            queue.append(account)
            if len(queue) > HELD_TASKS:
                self._beyond.append(queue.popleft())

    def take_due(self, now_ms: int, limit: int) -> list[str]:
        """Return at most `limit` accounts to be released, oldest first, and forget them."""
        due: list[str] = []
        while self._beyond and len(due) < limit:
            account = self._beyond.popleft()
            if self._by_age["held"].pop(account, None) is not None:
                due.append(account)
        for kind, held_s in (("held", HELD_S), ("unsigned", UNSIGNED_HELD_S)):
            by_age = self._by_age[kind]
            while by_age and len(due) < limit:
                account, opened_at_ms = next(iter(by_age.items()))
                if now_ms - opened_at_ms < held_s * 1000:
                    break
                del by_age[account]
                self._leave_queue(account)
                due.append(account)
        return due

    def _leave_queue(self, account: str) -> None:
        name = held_name(account)
        assert name is not None, "only held accounts are added"
        queue = self._signed.get(name.node_id)
        # The oldest of all is the oldest of its node.
        if queue and queue[0] == account:
            queue.popleft()
            if not queue:
                del self._signed[name.node_id]


def release(name: str, account: Account, now_ms: int) -> Transfer:
    """Return the transfer of a held account's balance to the owner."""
    held = held_name(name)
    assert held is not None, "only held accounts are released"
    return Transfer(
        transfer_id=f"{held.task_id}/release/{held.attempt}",
        kind=Kind.RELEASE,
        at_ms=now_ms,
        legs=(
            Leg(name, -account.balance_micro),
            Leg(earned_account(held.owner_id, held.node_id), account.balance_micro),
        ),
        task_id=held.task_id,
        node_id=held.node_id,
    )
