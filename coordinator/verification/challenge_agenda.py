"""Which card is challenged when, and which figures count. Pure.

A card is asked alone at first: everything when its hardware, its driver or the
build of an engine on it are not what they were, a part of it in each later
boot. Cards that belong together, by owner or by network address, are then
asked together (a barrier): one card under several names takes several times as
long as alone, and what it showed alone does not count.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from coordinator.verification.challenges import Outcome, Refuted, Shown
from inference.challenge.schedule import Card, DeviceClass, barrier_groups, sharing
from inference.task import NodeId, OwnerId

if TYPE_CHECKING:
    # Only whose randomness is handed in.
    import random

# After a challenge without a figure: doubled each time. A verdict takes two false answers, so the first one is short.
RETRY_MS: Final = 15_000
RETRY_MS_MAX: Final = 3_600_000
# Challenges at once, and cards in one barrier: each may hold eight replies of 8 MiB. Of a larger group some at a time.
OPEN_MAX: Final = 8
# Barriers at which a card may have something else to do before it has held its figure beside all that count. Who always
# has is not seen beside the others.
MISSES_MAX: Final = 3
# Walks over memory that may come to nothing in one boot, and the pause after one: a machine is busy at times, and one
# that is late by nature is not to be kept busy by being asked for ever.
WALKS_MISSED_MAX: Final = 3
WALK_PAUSE_MS: Final = 3_600_000
# To compare times of challenges of different sizes.
_COMPARED_OPERATIONS: Final = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One card of a node that is connected, as it is now.

    Args:
        card_id: empty for the processor.
        hardware: a fingerprint of card and driver, as the node names them.
        build: of what engines it runs; empty while none is known.
        memory_bytes: that may be asked for at most.
        idle: the node runs nothing.
    """

    node_id: NodeId
    owner_id: OwnerId
    network: str
    boot_id: str
    card_id: str
    device_class: DeviceClass
    hardware: str
    build: str
    memory_bytes: int
    idle: bool

    @property
    def card(self) -> Card:
        return Card(self.node_id, self.card_id, self.owner_id, self.network)


@dataclass(frozen=True, slots=True)
class Asked:
    """A challenge that is to be put. Args: `together` with these, itself among them; empty where it is asked alone."""

    target: Target
    full: bool
    memory: bool
    together: tuple[Card, ...] = ()


@dataclass(frozen=True, slots=True)
class Credit:
    """The figure of a card counts."""

    card: Card
    target: Target
    shown: Shown


@dataclass(frozen=True, slots=True)
class Withhold:
    """The figure of a card counts no more."""

    card: Card
    why: str


Finding = Credit | Withhold


@dataclass(slots=True)
class _Known:
    """What is known of a card."""

    hardware: str = ""
    figure: Shown | None = None
    target: Target | None = None
    boot_id: str = ""
    build: str = ""
    failures: int = 0
    again_at_ms: int = 0
    # In this boot; and when memory is asked for once more, 0 for never. Nothing else waits for that.
    walks_missed: int = 0
    walk_at_ms: int = 0
    credited: bool = False
    # Beside which it has held its figure, and how often it did not come before it had beside all that count.
    beside: set[Card] = field(default_factory=set)
    misses: int = 0


@dataclass(slots=True)
class _Barrier:
    waiting: set[Card]
    outcomes: dict[Card, Outcome] = field(default_factory=dict)


class ChallengeAgenda:
    """The challenges of one coordinator."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known] = {}
        self._open: dict[Card, Asked] = {}
        self._barriers: dict[tuple[Card, ...], _Barrier] = {}

    def remember(self, node_id: NodeId, card_id: str, hardware: str, shown: Shown, *, credited: bool = True) -> None:
        """Take what was shown before this start, and whether it counted."""
        known = self._of(node_id, card_id)
        memory = known.figure if known.figure is not None and known.hardware == hardware else Shown(0)
        known.hardware, known.credited = hardware, credited
        known.figure = _with_memory(shown, memory)

    def withheld(self, node_id: NodeId, card_id: str) -> None:
        """Take that the figure of a card counted no more before this start."""
        self._of(node_id, card_id).credited = False

    def counts(self, card: Card) -> bool:
        """Whether the figure of a card counts now."""
        return self._of(*_key(card)).credited

    def alone(self, targets: Sequence[Target], now_ms: int) -> Asked | None:
        """Return what one node is asked now; None where there is nothing."""
        for target in targets:
            if not target.idle or len(self._open) >= OPEN_MAX or self._linked(target.card):
                return None
            known = self._of(target.node_id, target.card_id)
            if now_ms < known.again_at_ms:
                continue
            same = known.hardware == target.hardware and known.figure is not None
            # The first build to be known is not another one; the next one is.
            other_build = bool(target.build) and known.build not in ("", target.build)
            walk = 0 < known.walk_at_ms <= now_ms
            if same and known.boot_id == target.boot_id and not (other_build or known.failures or walk):
                known.build = known.build or target.build
                continue
            everything = not same or other_build
            memory = everything or known.figure is None or not known.figure.memory_bytes
            asked = Asked(target, full=everything, memory=memory)
            self._open[target.card] = asked
            return asked
        return None

    def together(self, present: Sequence[Target], now_ms: int, drawing: "random.Random") -> tuple[Asked, ...]:
        """Return the challenges of a barrier that is due; nothing where none is.

        Args:
            present: every card of every node that is connected.
        """
        shown = {one.card: one for one in _linked(present) if self._stands(one)}
        for group in barrier_groups(list(shown)):
            wanted = min(len(group), OPEN_MAX)
            due = [card for card in group if len(self._of(*_key(card)).beside & set(group)) < wanted]
            ready = all(now_ms >= self._of(*_key(card)).again_at_ms for card in due)
            free = all(shown[card].idle and not self._linked(card) for card in group)
            if len(group) < 2 or not due or not ready or not free or len(self._open) + wanted > OPEN_MAX:
                continue
            others = [card for card in group if card not in due]
            drawing.shuffle(due)
            drawing.shuffle(others)
            members = tuple(sorted([*due, *others][:wanted]))
            self._barriers[members] = _Barrier(set(members))
            # All of it: what a question takes besides its work makes a part of it look slow beside the whole.
            asked = tuple(Asked(shown[card], True, False, members) for card in members)
            self._open |= {one.target.card: one for one in asked}
            return asked
        return ()

    def ended(self, asked: Asked, outcome: Outcome, present: Sequence[Target], now_ms: int) -> list[Finding]:
        """Take what came of a challenge."""
        card = asked.target.card
        self._open.pop(card, None)
        if not asked.together:
            return self._alone_ended(asked, outcome, present, now_ms)
        barrier = self._barriers[asked.together]
        barrier.outcomes[card] = outcome
        barrier.waiting.discard(card)
        if barrier.waiting:
            return []
        del self._barriers[asked.together]
        return self._judge(asked.together, barrier.outcomes, now_ms)

    # --- alone ---------------------------------------------------------------------------------

    def _alone_ended(self, asked: Asked, outcome: Outcome, present: Sequence[Target], now_ms: int) -> list[Finding]:
        target = asked.target
        known = self._of(target.node_id, target.card_id)
        other = known.hardware != target.hardware
        if not isinstance(outcome, Shown):
            known.failures += 1
            known.again_at_ms = now_ms + min(RETRY_MS << min(known.failures - 1, 16), RETRY_MS_MAX)
            refuted = isinstance(outcome, Refuted)
            why = "a false answer" if refuted else "other hardware"
            return [self._withhold(known, target.card, why)] if (refuted or other) and known.credited else []
        known.failures, known.again_at_ms = 0, 0
        before = Shown(0) if other or known.figure is None else known.figure
        walked_again = not other and known.boot_id == target.boot_id and not asked.full
        known.walks_missed = known.walks_missed if known.boot_id == target.boot_id else 0
        known.boot_id, known.build, known.hardware = target.boot_id, target.build or known.build, target.hardware
        known.figure = _walked_again(before, outcome) if walked_again else _with_memory(outcome, before)
        self._note_walk(known, outcome, now_ms)
        known.target = target
        if other:
            known.beside, known.misses = set(), 0
        group = next(one for one in barrier_groups([target.card, *self._others(target, present)]) if target.card in one)
        if len(group) > 1 and len(known.beside & set(group)) < min(len(group), OPEN_MAX):
            # It counts when the barrier has shown that it is not another one's.
            return [self._withhold(known, target.card, "other hardware")] if other and known.credited else []
        known.credited = True
        return [Credit(target.card, target, known.figure)]

    def _note_walk(self, known: _Known, outcome: Shown, now_ms: int) -> None:
        """Have memory asked for once more, where it was and could not be shown; that says nothing against a node."""
        known.walk_at_ms = 0
        if outcome.why_no_memory and known.figure is not None and not known.figure.memory_bytes:
            known.walks_missed += 1
            known.walk_at_ms = now_ms + WALK_PAUSE_MS if known.walks_missed < WALKS_MISSED_MAX else 0

    def _others(self, target: Target, present: Sequence[Target]) -> list[Card]:
        return [one.card for one in _linked(present) if one.card != target.card and self._stands(one)]

    # --- together --------------------------------------------------------------------------------

    def _judge(self, members: tuple[Card, ...], outcomes: dict[Card, Outcome], now_ms: int) -> list[Finding]:
        """Compare what each card took with what it took alone."""
        alone_ms, together_ms = {}, {}
        for card, outcome in outcomes.items():
            figure = self._of(*_key(card)).figure
            if isinstance(outcome, Shown) and figure is not None:
                alone_ms[card] = _time_ms(figure)
                together_ms[card] = _time_ms(outcome)
        slow = sharing(alone_ms, together_ms)
        owners = {card.owner_id for card in slow}
        findings: list[Finding] = []
        came: list[Card] = []
        for card in members:
            known = self._of(*_key(card))
            known.again_at_ms = now_ms + RETRY_MS
            if card in slow or card.owner_id in owners:
                known.again_at_ms = now_ms + RETRY_MS_MAX
                known.beside = set()
                findings.append(
                    self._withhold(known, card, f"shared: {len(slow)} of {len(members)} were slow together")
                )
            elif card not in together_ms:
                known.misses += 1
                if known.misses >= MISSES_MAX or isinstance(outcomes[card], Refuted):
                    known.again_at_ms = now_ms + RETRY_MS_MAX
                    findings.append(self._withhold(known, card, "did not come when it was asked together with others"))
            else:
                known.again_at_ms = 0
                known.beside |= set(together_ms)
                came.append(card)
        return findings + [credit for card in came for credit in self._held(card, members)]

    def _held(self, card: Card, members: tuple[Card, ...]) -> list[Credit]:
        """Credit a card that came, once those of the barrier that count already have come beside it, or are out.

        Before that nothing changes, nor are its own misses forgiven: the names of one card would come in turns.
        """
        known = self._of(*_key(card))
        if any(self._of(*_key(one)).credited and one not in known.beside for one in members):
            return []
        assert known.target is not None, "a barrier is of what has been shown alone"
        assert known.figure is not None, "a barrier is of what has been shown alone"
        known.misses, known.credited = 0, True
        return [Credit(card, known.target, known.figure)]

    def _withhold(self, known: _Known, card: Card, why: str) -> Withhold:
        known.credited = False
        return Withhold(card, why)

    # --- what is known -----------------------------------------------------------------------------

    def _of(self, node_id: str, card_id: str) -> _Known:
        return self._known.setdefault((node_id, card_id), _Known())

    def _stands(self, target: Target) -> bool:
        """Whether a card has shown what it does alone, as it is now."""
        known = self._of(target.node_id, target.card_id)
        return known.figure is not None and (known.hardware, known.boot_id) == (target.hardware, target.boot_id)

    def _linked(self, card: Card) -> bool:
        """Whether a card, or one that belongs to it, is being asked: alone means alone."""
        return any(
            card.node_id == one.node_id or card.owner_id == one.owner_id or card.network == one.network
            for one in self._open
        )


def _linked(present: Sequence[Target]) -> list[Target]:
    """Leave out cards that belong to nobody else's: most of a large fleet."""
    owners = Counter(one.owner_id for one in present)
    networks = Counter(one.network for one in present)
    return [one for one in present if owners[one.owner_id] > 1 or networks[one.network] > 1]


def _with_memory(shown: Shown, before: Shown) -> Shown:
    """Return what was shown, with the memory of before where none was."""
    if shown.memory_bytes:
        return shown
    return Shown(shown.operations_per_s, before.memory_bytes, before.bytes_per_s, shown.why_no_memory)


def _walked_again(before: Shown, shown: Shown) -> Shown:
    """Return what counts after memory was asked for once more in a boot.

    Who computes slower now had more time for the walk, and counts as that slow. Who computes faster was not beside the
    others so fast, and whoever is late again has shown nothing.
    """
    if not shown.memory_bytes:
        return before
    return replace(shown, operations_per_s=min(before.operations_per_s, shown.operations_per_s))


def _time_ms(shown: Shown) -> int:
    return _COMPARED_OPERATIONS // max(shown.operations_per_s, 1)


def _key(card: Card) -> tuple[NodeId, str]:
    return NodeId(card.node_id), card.card_id
