"""Tells the owner's policy what is seen, and carries out what it decides. Decides nothing itself."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from agent import events as e
from agent.clock import monotonic_s, until_next_s, wall_ms
from agent.owner import events as o
from agent.owner.events import CPU_CARD
from agent.owner.giveback import GiveBackLadder
from agent.owner.lending import Lending
from agent.owner.pause import Pause, PauseWatch
from agent.owner.policy import CardDecision, Cause, OwnerPolicy, OwnerSettings

# A stat of one file. An owner who presses pause waits for it, out of two seconds; ten times a second would be a third
# of what an idle agent takes.
PAUSE_POLL_S = 0.25
# Cool-downs and hours are minutes long, and the policy takes a longer silence for a sleep of the machine.
OWNER_TICK_S = 1.0
# What the fleet is told of a card that is not lent. Programs and habits of the owner are nobody else's business.
FLEET_WORDS = {
    Cause.QUARANTINE: "in quarantine: a give-back failed",
    Cause.CARD_GONE: "the card has left the machine",
    Cause.MODE_NEVER: "its owner does not lend it",
    Cause.PAUSED: "paused by its owner",
    Cause.BATTERY: "the machine runs on its battery",
    Cause.METERED: "the network is metered",
    Cause.HOURS: "outside of its hours",
    Cause.PRICE: "electricity is too dear now",
    Cause.HEAT: "the card is too hot",
    Cause.PROGRAM: "its owner uses the card",
    Cause.MEMORY: "its owner uses the card",
    Cause.CARD_USE_UNKNOWN: "whether its owner uses the card cannot be told",
    Cause.BUSY: "its owner is there",
    Cause.INPUT_UNKNOWN: "whether its owner is there cannot be told",
    Cause.INPUT: "its owner is there",
    Cause.COOL_DOWN: "its owner was there a moment ago",
    Cause.DUE: "about to be lent",
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardStanding:
    """Whose a card is, for `status`.

    Args:
        state: "lent", "giving_back", "given_back" or "quarantined".
        reason: of that, in words.
        cause: of not being lent, for programs; empty while it is lent.
        since_ms: Unix milliseconds.
        giveback_ms: how long the last give-back took, from the decision until the card was free; None before the first.
    """

    card: str
    state: str
    reason: str
    cause: str
    since_ms: int
    giveback_ms: int | None


class Caps(Protocol):
    """What is asked of `agent.power.limits.PowerKeeper`."""

    def want(self, card: str) -> None: ...
    def unwant(self, card: str) -> None: ...


class OwnerDriver:
    """The owner's side of the daemon.

    Args:
        feed: takes what follows for the engines, from the event loop.
        create_task: for work that ends with the daemon.
        on_change: called when `standings` or `pause` may say something else.
    """

    def __init__(
        self,
        settings: OwnerSettings,
        *,
        state_dir: Path,
        lending: Lending,
        ladder: GiveBackLadder,
        caps: Caps,
        feed: Callable[[e.Event], None],
        create_task: Callable[[Coroutine[None, None, None]], object],
        on_change: Callable[[], None],
    ) -> None:
        self.policy = OwnerPolicy(settings, (), monotonic_s())
        self._pause = PauseWatch(state_dir)
        self._lending = lending
        self._ladder = ladder
        self._caps = caps
        self._feed = feed
        self._create_task = create_task
        self._on_change = on_change
        # By card, the cause of not being lent that the fleet knows.
        self._told: dict[str, Cause] = {}
        self._giveback_ms: dict[str, int] = {}

    async def run(self) -> None:
        """Watch the owner's pause and the time, until cancellation."""
        self._follow_pause()
        ticked_at = monotonic_s()
        while True:
            await asyncio.sleep(until_next_s(PAUSE_POLL_S))
            if self._pause.changed():
                self._follow_pause()
            # Half a look less: one that comes a little early is the one that was meant.
            if monotonic_s() - ticked_at >= OWNER_TICK_S - PAUSE_POLL_S / 2:
                ticked_at = monotonic_s()
                self.feed(o.Tick(wall_ms()))

    @property
    def pause(self) -> Pause:
        return self._pause.pause

    def _follow_pause(self) -> None:
        pause = self._pause.pause
        self._feed(e.OwnerDrainChanged(pause.draining))
        self.feed(o.PauseChanged(pause.paused, pause.until_ms))
        # One that ended while no agent ran ends with this.
        self.feed(o.Tick(wall_ms()))
        self._on_change()

    def standings(self) -> tuple[CardStanding, ...]:
        """Return how each card stands now."""
        monotonic_ms, wall = monotonic_s() * 1000, wall_ms()
        return tuple(
            CardStanding(
                card=card,
                state=_state(decision),
                reason=decision.reason,
                cause="" if decision.cause is None else decision.cause.value,
                # To the second: the two clocks drift, and a status that changes by itself is written for nothing.
                since_ms=round((wall - monotonic_ms + decision.since * 1000) / 1000) * 1000,
                giveback_ms=self._giveback_ms.get(card),
            )
            for card, decision in self.policy.decisions.items()
        )

    def list_cards(self, cards: tuple[str, ...]) -> None:
        """Tell everybody which cards there are."""
        self._feed(e.CardsListed(cards))
        self.feed(o.CardsListed(cards))
        # Lendings begin with a tick: nobody has to wait for the next.
        self.feed(o.Tick(wall_ms()))

    def change_settings(self, settings: OwnerSettings) -> None:
        self._carry_out(self.policy.change_settings(settings, monotonic_s()))

    def feed(self, event: o.OwnerEvent) -> None:
        """Have the policy handle an event, and carry out what it says. Never blocks."""
        self._carry_out(self.policy.handle(event, monotonic_s()))

    def _carry_out(self, commands: Sequence[o.OwnerCommand]) -> None:
        for command in commands:
            match command:
                case o.Lend():
                    log.info("card lent", card=command.card, reason=command.reason)
                    self._told.pop(command.card, None)
                    if command.card != CPU_CARD:
                        self._caps.want(command.card)
                    self._feed(e.CardLent(command.card))
                case o.GiveBack():
                    log.info("card wanted back", card=command.card, reason=command.reason)
                    engine_ids = self._lending.engines_on(command.card)
                    # Hands the attempts back, then begins the kill.
                    self._tell(command.card)
                    self._create_task(self._give_back(command.card, engine_ids))
        for card, decision in self.policy.decisions.items():
            if not decision.lent and self._told.get(card) is not decision.cause:
                self._tell(card)
        if commands:
            self._on_change()

    def _tell(self, card: str) -> None:
        """Say that a card is not lent, and why: at the give-back, and whenever another reason takes its place."""
        decision = self.policy.decisions.get(card)
        # The policy forgets a card that left, once nothing of it matters any more.
        cause = Cause.CARD_GONE if decision is None or decision.cause is None else decision.cause
        self._told[card] = cause
        self._feed(e.CardWithdrawn(card, FLEET_WORDS[cause]))

    async def _give_back(self, card: str, engine_ids: list[str]) -> None:
        began_at = monotonic_s()
        outcome = await self._ladder.give_back(card, engine_ids)
        # Whether or not all of it came back: the owner's limit does.
        if card != CPU_CARD:
            self._caps.unwant(card)
        if isinstance(outcome, o.GivenBack):
            self._giveback_ms[card] = took_ms = round((monotonic_s() - began_at) * 1000)
            log.info("card given back", card=card, took_ms=took_ms)
        else:
            log.error("card not given back: it is in quarantine", card=card, detail=outcome.detail)
        self.feed(outcome)
        self._on_change()


def _state(decision: CardDecision) -> str:
    if decision.cause is Cause.QUARANTINE:
        return "quarantined"
    if decision.lent:
        return "lent"
    return "giving_back" if decision.giving_back else "given_back"
