"""Which engines may run now: those whose cards are all lent, and that somebody uses. Pure.

An engine is in one of three standings:

  GIVEN_BACK  the owner has one of its cards, or nobody has decided about one yet.
  UNLOADED    its cards are lent, and nobody used it for a while: an idle card with a loaded
              model draws tens of watts.
  UP          it is to run; whether it does is the supervisor's to say.

Whoever decides that a card is lent is the owner's policy (`agent.owner.policy`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from agent import events as e
from agent.owner.events import CPU_CARD

# An idle card with a context on it draws 20 to 60 W more than without; a quarter of an hour of that is the price of an
# answer without a wait. An engine on a processor that has nothing to do draws nothing, so it stays.
UNLOAD_AFTER_S = 900.0

NOT_DECIDED = "nothing has been decided about the card yet"


class Standing(Enum):
    GIVEN_BACK = "given_back"
    UNLOADED = "unloaded"
    UP = "up"


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What lending needs to know of a configured engine.

    Args:
        cards: those it is configured for; none means all cards of the machine, or its processor where it has none.
        unload_after_s: how long it may be loaded and unused; None for the usual of its kind of card.
        open: its model is left to the fleet.
        memory_share: of its cards' memory.
    """

    cards: tuple[str, ...] = ()
    unload_after_s: float | None = None
    open: bool = False
    memory_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Halt:
    """The engine must be gone at once; `reason` is for people."""

    engine_id: str
    reason: str
    # The owner wants the card: what runs on the engine is handed back.
    owner: bool


@dataclass(frozen=True, slots=True)
class Raise:
    """The engine is to run."""

    engine_id: str


Move = Halt | Raise


class Lending:
    """Cards, and what follows from them for each engine. Starts with nothing lent."""

    def __init__(self, engines: Mapping[str, EngineUse], now: float) -> None:
        self._engines = dict(engines)
        self._standing = dict.fromkeys(self._engines, Standing.GIVEN_BACK)
        self._used_at = dict.fromkeys(self._engines, now)
        self._notes: dict[str, str] = {}
        self._listed: tuple[str, ...] = ()
        self._lent: set[str] = set()
        self._withheld: dict[str, str] = {}
        # Engines whose model the owner does not accept, and why.
        self._barred: dict[str, str] = {}

    def standing(self, engine_id: str) -> Standing:
        return self._standing.get(engine_id, Standing.GIVEN_BACK)

    def note(self, engine_id: str) -> str:
        """Return why an engine is not up, in words; nothing where it is."""
        return self._notes.get(engine_id, "")

    def cards_of(self, engine_id: str) -> tuple[str, ...]:
        """Return the cards that an engine uses on this machine."""
        return self._engines[engine_id].cards or self._listed

    def lent(self, card: str) -> bool:
        return card in self._lent

    def engines_on(self, card: str) -> list[str]:
        return [engine_id for engine_id in self._engines if card in self.cards_of(engine_id)]

    def take(self, event: e.CardsListed | e.CardLent | e.CardWithdrawn, now: float) -> list[Move]:
        match event:
            case e.CardsListed():
                # Engines that name no card use all of them.
                self._listed = event.cards
            case e.CardLent():
                self._lent.add(event.card)
                self._withheld.pop(event.card, None)
            case e.CardWithdrawn():
                self._lent.discard(event.card)
                self._withheld[event.card] = event.reason
            case _:
                assert_never(event)
        return self._settle(now)

    def bar(self, engine_id: str, reason: str | None, now: float) -> list[Move]:
        """Keep an engine down whatever its cards do, because the owner does not accept its model; None ends that."""
        if reason is None:
            self._barred.pop(engine_id, None)
        else:
            self._barred[engine_id] = reason
        return self._settle(now)

    def use(self, engine_id: str, now: float) -> None:
        """Note that the engine was used, or came up, at this time."""
        self._used_at[engine_id] = now

    def want(self, engine_ids: Iterable[str], now: float) -> list[Move]:
        """Take the engines for which work waits somewhere; those unloaded come up."""
        moves: list[Move] = []
        for engine_id in engine_ids:
            if engine_id in self._engines:
                # One that is loading for work is not unused.
                self.use(engine_id, now)
            if self.standing(engine_id) is Standing.UNLOADED:
                moves.append(self._raise(engine_id, now))
        return moves

    def unload_idle(self, now: float) -> list[Move]:
        """Take down what nobody used for long enough."""
        moves: list[Move] = []
        for engine_id, standing in self._standing.items():
            patience_s = self._unload_after_s(engine_id)
            if standing is Standing.UP and patience_s is not None and now - self._used_at[engine_id] >= patience_s:
                reason = f"unused for {_duration(patience_s)}"
                self._standing[engine_id] = Standing.UNLOADED
                self._notes[engine_id] = reason
                moves.append(Halt(engine_id, reason, owner=False))
        return moves

    def _settle(self, now: float) -> list[Move]:
        moves: list[Move] = []
        for engine_id, standing in list(self._standing.items()):
            reason = self._obstacle(engine_id)
            if reason is not None:
                self._standing[engine_id] = Standing.GIVEN_BACK
                self._notes[engine_id] = reason
                if standing is not Standing.GIVEN_BACK:
                    moves.append(Halt(engine_id, reason, owner=True))
            elif standing is Standing.GIVEN_BACK:
                moves.append(self._raise(engine_id, now))
        return moves

    def _raise(self, engine_id: str, now: float) -> Raise:
        self._standing[engine_id] = Standing.UP
        self._notes.pop(engine_id, None)
        self.use(engine_id, now)
        return Raise(engine_id)

    def _obstacle(self, engine_id: str) -> str | None:
        """Return why the owner wants this engine down; None where its model is welcome and all its cards are lent."""
        if engine_id in self._barred:
            return self._barred[engine_id]
        cards = self.cards_of(engine_id)
        for card in cards:
            if card not in self._listed:
                return f"this machine has no card {card}"
            if card not in self._lent:
                return self._withheld.get(card, NOT_DECIDED)
        return None if cards else NOT_DECIDED

    def _unload_after_s(self, engine_id: str) -> float | None:
        configured = self._engines[engine_id].unload_after_s
        if configured is not None:
            return configured
        return None if CPU_CARD in self.cards_of(engine_id) else UNLOAD_AFTER_S


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:g} s"
