"""The power cap: which limit a lent card gets, and that its owner's own limit comes back. Pure.

Theory of operation. NVML has no call that resets a limit, and a limit outlives
the process that set it. So the owner's limit is on the disk before ours is on
the card, and leaves the disk only when it is back on the card, or when somebody
else has set a third one, which is then theirs. Each set names the limit that
is believed to be there; whoever carries it out compares first. A card is in
one of five stages:

  FREE         no limit of ours. What it has is its owner's.
  REMEMBERING  the owner's limit is on its way to the disk.
  CAPPING      ours is on its way to the card.
  CAPPED       ours is on the card.
  RESTORING    the owner's is on its way to the card, or waits for the card to answer.

After a crash a card begins in RESTORING. Where no cap can be set, fewer
sequences run instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import msgspec

from agent.power.settings import WATTS_MAX, PowerSettings

# Drivers round a limit to what the card's regulator can do.
LIMIT_TOLERANCE_W = 1.0
# A card that did not answer is asked again no sooner: each try may hang for seconds and cost a child.
RETRY_S = 60.0
# Where the cap is in watts and the card tells no default, the fallback is a share that owners of such cards can live
# with: it is the default cap's.
SHARE_DEFAULT = 0.8
# Fewer sequences than this share would serve nobody.
SHARE_MIN = 0.25


# ---- what happens


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSeen:
    """A card's limits as it tells them; None for what it does not tell.

    Args:
        read_at: when it was asked; what was read before a limit was set says nothing about it.
    """

    card: str
    read_at: float
    limit_w: float | None
    min_w: float | None
    max_w: float | None
    default_w: float | None


@dataclass(frozen=True, slots=True)
class CapWanted:
    """The card is lent from now on."""

    card: str


@dataclass(frozen=True, slots=True)
class CapUnwanted:
    """The card goes back to its owner, or the agent ends."""

    card: str


@dataclass(frozen=True, slots=True)
class Remembered:
    """Outcome of Remember: on the disk."""

    card: str


@dataclass(frozen=True, slots=True)
class RememberFailed:
    """Outcome of Remember: the disk does not take it."""

    card: str
    detail: str


@dataclass(frozen=True, slots=True)
class LimitSet:
    """Outcome of SetLimit.

    Args:
        result: as in `agent.cards.details.LimitOutcome`.
        limit_w: as the card tells it afterwards.
    """

    card: str
    result: str
    limit_w: float | None = None
    detail: str = ""


PowerEvent = LimitSeen | CapWanted | CapUnwanted | Remembered | RememberFailed | LimitSet


# ---- what to do about it


class OwnersLimit(msgspec.Struct, frozen=True):
    """What is remembered of a card: the limit it had, and the one that we put in its place."""

    original_w: float
    cap_w: float


@dataclass(frozen=True, slots=True)
class Remember:
    """Put on the disk what a card's limit was, before it is changed; outcome Remembered or RememberFailed."""

    card: str
    limit: OwnersLimit


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove it from the disk. No outcome: what is not forgotten is checked again at the next start."""

    card: str


@dataclass(frozen=True, slots=True)
class SetLimit:
    """Set a limit, if it is `expected_w` now; outcome LimitSet."""

    card: str
    limit_w: float
    expected_w: float


PowerCommand = Remember | Forget | SetLimit


class Stage(Enum):
    FREE = "free"
    REMEMBERING = "remembering"
    CAPPING = "capping"
    CAPPED = "capped"
    RESTORING = "restoring"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapStatus:
    """How a card stands, for people and for whoever counts its sequences.

    Args:
        cap_w: in force; None without one.
        original_w: comes back when the card does; None without a cap.
        sequences_share: of an engine's slots, this part is to be used; 1 where the cap works or none is wanted.
        note: why a wanted cap is not in force, in words; empty where it is, or none is wanted.
    """

    stage: Stage
    cap_w: float | None
    original_w: float | None
    sequences_share: float
    note: str


class _Card:
    def __init__(self) -> None:
        self.stage = Stage.FREE
        self.wanted = False
        self.seen: LimitSeen | None = None
        # On the disk, or on its way there.
        self.owners: OwnersLimit | None = None
        self.note = ""
        self.share = 1.0
        # No cap is tried again before the card is lent anew: it was refused, or somebody else set another limit.
        self.given_up = False
        # The settings changed while a cap by the old ones was on its way.
        self.outdated = False
        # A set is under way.
        self.setting = False
        self.retry_at = self.changed_at = float("-inf")


class PowerCap:
    """The caps of all cards of a machine.

    Args:
        remembered: what an earlier run left on the disk, by card.
    """

    def __init__(self, settings: PowerSettings, remembered: Mapping[str, OwnersLimit]) -> None:
        self._settings = settings
        self._cards: dict[str, _Card] = {}
        for card, owners in remembered.items():
            left = self._card(card)
            left.stage, left.owners = Stage.RESTORING, owners
            left.note = f"an earlier run left a cap of {owners.cap_w:.0f} W; it is undone when the card answers"

    @property
    def settled(self) -> bool:
        """Whether no outcome is waited for."""
        return not any(card.setting or card.stage is Stage.REMEMBERING for card in self._cards.values())

    def status(self, card: str) -> CapStatus:
        one = self._cards.get(card) or _Card()
        return CapStatus(
            stage=one.stage,
            cap_w=one.owners.cap_w if one.owners is not None and one.stage is Stage.CAPPED else None,
            original_w=None if one.owners is None else one.owners.original_w,
            sequences_share=one.share,
            note=one.note,
        )

    @property
    def cards(self) -> tuple[str, ...]:
        return tuple(self._cards)

    def handle(self, event: PowerEvent, now: float) -> list[PowerCommand]:
        """Take one event and return what to do about it, in order."""
        name, card = event.card, self._card(event.card)
        match event:
            case LimitSeen():
                if card.setting or event.read_at <= card.changed_at:
                    return []
                card.seen = event
                return self._compare(name, card, now)
            case CapWanted():
                if not card.wanted:
                    card.wanted, card.given_up = True, False
                return self._begin(name, card) if card.stage is Stage.FREE else []
            case CapUnwanted():
                card.wanted, card.share = False, 1.0
                if card.stage is Stage.FREE:
                    card.note = ""
                return self._restore(name, card) if card.stage is Stage.CAPPED else []
            case Remembered():
                return self._remembered(name, card)
            case RememberFailed():
                return self._give_up(name, card, f"no cap: the owner's limit cannot be kept on disk ({event.detail})")
            case LimitSet():
                card.setting, card.changed_at = False, now
                done = self._capped if card.stage is Stage.CAPPING else self._restored
                return done(name, card, event, now)

    def change_settings(self, settings: PowerSettings) -> list[PowerCommand]:
        """Follow other settings: a card whose cap is another one gets its owner's limit first, and then the new cap."""
        before, self._settings = self._settings, settings
        commands: list[PowerCommand] = []
        for name, card in self._cards.items():
            if settings.cap_of(name) == before.cap_of(name):
                continue
            card.given_up, card.share = False, 1.0
            if card.stage is Stage.CAPPED:
                commands += self._restore(name, card)
            elif card.stage is Stage.FREE:
                card.note = ""
                commands += self._begin(name, card)
            else:
                card.outdated = card.stage is not Stage.RESTORING
        return commands

    def _card(self, name: str) -> _Card:
        return self._cards.setdefault(name, _Card())

    # ---- towards a cap

    def _begin(self, name: str, card: _Card) -> list[PowerCommand]:
        cap = self._settings.cap_of(name)
        seen = card.seen
        if cap is None or seen is None or not card.wanted or card.given_up:
            return []
        if seen.limit_w is None or seen.min_w is None or seen.max_w is None:
            return self._give_up(name, card, "no cap: the card does not tell its power limit and its range")
        if not 0 < seen.min_w <= seen.max_w <= WATTS_MAX:
            reason = f"no cap: the card tells a range that cannot be, {seen.min_w:.0f} to {seen.max_w:.0f} W"
            return self._give_up(name, card, reason)
        asked_w = cap.watts if cap.watts is not None else (cap.share or 1.0) * (seen.default_w or seen.limit_w)
        target_w = min(max(asked_w, seen.min_w), seen.max_w)
        if target_w >= seen.limit_w - LIMIT_TOLERANCE_W:
            # The owner's own limit is as low. It is never raised.
            card.note = ""
            return []
        card.owners, card.outdated = OwnersLimit(seen.limit_w, target_w), False
        card.stage = Stage.REMEMBERING
        return [Remember(name, card.owners)]

    def _remembered(self, name: str, card: _Card) -> list[PowerCommand]:
        if card.stage is not Stage.REMEMBERING or card.owners is None:
            # Of a cap that came out other than it was asked for: it is on the card already.
            return []
        if not card.wanted or card.outdated:
            return [*self._forget(name, card, ""), *self._begin(name, card)]
        card.stage, card.setting = Stage.CAPPING, True
        return [SetLimit(name, card.owners.cap_w, card.owners.original_w)]

    def _capped(self, name: str, card: _Card, event: LimitSet, now: float) -> list[PowerCommand]:
        assert card.owners is not None
        if event.result == "ok":
            card.stage, card.note, card.share = Stage.CAPPED, "", 1.0
            commands: list[PowerCommand] = []
            if event.limit_w is not None and not _near(event.limit_w, card.owners.cap_w):
                # Rounded by the driver: what is there is what will be looked for.
                card.owners = OwnersLimit(card.owners.original_w, event.limit_w)
                commands.append(Remember(name, card.owners))
            return commands if card.wanted and not card.outdated else [*commands, *self._restore(name, card)]
        if event.result in ("lost", "timeout", "error"):
            # It may have been set all the same, so the owner's limit stays remembered until the card has been seen.
            card.stage, card.retry_at = Stage.RESTORING, now + RETRY_S
            card.given_up = True
            return self._fall_back(name, card, f"no cap: {event.detail}")
        return self._give_up(name, card, f"no cap: {event.detail}")

    def _give_up(self, name: str, card: _Card, note: str) -> list[PowerCommand]:
        """Do without a cap until the card is lent anew; fewer sequences run instead."""
        if card.stage is Stage.CAPPED:
            # Only the record of a rounded cap failed: this run knows it, and puts the owner's limit back.
            return []
        commands = self._forget(name, card, note)
        card.given_up = True
        return [*commands, *self._fall_back(name, card, note)]

    def _fall_back(self, name: str, card: _Card, note: str) -> list[PowerCommand]:
        cap = self._settings.cap_of(name)
        if not card.wanted or cap is None:
            return []
        share = cap.share
        default_w = card.seen.default_w if card.seen is not None else None
        if share is None:
            share = cap.watts / default_w if cap.watts is not None and default_w else SHARE_DEFAULT
        card.share = min(1.0, max(SHARE_MIN, share))
        card.note = f"{note}; {card.share:.0%} of the sequences run instead"
        return []

    # ---- back to the owner's limit

    def _compare(self, name: str, card: _Card, now: float) -> list[PowerCommand]:
        """Hold what is seen of a card against what is believed."""
        limit_w = card.seen.limit_w if card.seen is not None else None
        owners = card.owners
        if card.stage is Stage.FREE:
            return self._begin(name, card)
        if owners is None or limit_w is None or card.stage not in (Stage.CAPPED, Stage.RESTORING):
            return []
        if _near(limit_w, owners.cap_w):
            return self._restore(name, card) if card.stage is Stage.RESTORING and now >= card.retry_at else []
        if card.stage is Stage.RESTORING and _near(limit_w, owners.original_w):
            return [*self._forget(name, card, card.note if card.given_up else ""), *self._begin(name, card)]
        card.given_up = True
        return self._forget(name, card, f"somebody else set the power limit to {limit_w:.0f} W; it is left so")

    def _restore(self, name: str, card: _Card) -> list[PowerCommand]:
        assert card.owners is not None
        card.stage, card.setting = Stage.RESTORING, True
        return [SetLimit(name, card.owners.original_w, card.owners.cap_w)]

    def _restored(self, name: str, card: _Card, event: LimitSet, now: float) -> list[PowerCommand]:
        if card.stage is not Stage.RESTORING or card.owners is None:
            return []
        if event.result == "ok":
            return [*self._forget(name, card, ""), *self._begin_from(name, card, event.limit_w)]
        if event.result == "changed":
            limit = "another one" if event.limit_w is None else f"{event.limit_w:.0f} W"
            return self._forget(name, card, f"somebody else set the power limit to {limit}; it is left so")
        card.retry_at = now + RETRY_S
        card.note = (
            f"the owner's limit of {card.owners.original_w:.0f} W could not be put back: {event.detail}; "
            f"it is tried again"
        )
        return []

    def _begin_from(self, name: str, card: _Card, limit_w: float | None) -> list[PowerCommand]:
        """Cap a card that was lent again while the owner's limit came back."""
        if card.seen is None or limit_w is None:
            return []
        card.seen = replace(card.seen, limit_w=limit_w)
        return self._begin(name, card)

    def _forget(self, name: str, card: _Card, note: str) -> list[PowerCommand]:
        known = card.owners is not None
        card.stage, card.owners, card.note = Stage.FREE, None, note
        return [Forget(name)] if known else []


def _near(one_w: float, other_w: float) -> bool:
    return abs(one_w - other_w) <= LIMIT_TOLERANCE_W
