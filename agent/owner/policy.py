"""May each card be lent now? Pure.

Slow to start, instant to stop: any single observation takes a card away in the
same call, while a lending begins only with a `Tick`, or by the owner's own hand
(`PauseChanged`, `change_settings`), since after a sleep of the machine an old
observation may be delivered before anybody knows that it slept.

What keeps a card from being lent is a veto. They are asked in a fixed order,
and the first that holds is the reason that the owner reads:

  quarantine, card gone, mode never, pause, battery, metered, hours, price,
  heat, program on the card, memory taken by others, use of the card unknown,
  busy, presence unknown, input, cool-down

Mode "always" asks neither for busy, presence nor input; the others hold in it.

An explicit resume ends the pause and every cool-down, and nothing else: whoever
types it sits at the machine, so that the wait for their absence still makes
sense. To lend while somebody works there, there is mode "always".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from agent.owner import events as oe
from agent.owner.card import OwnerCard
from agent.owner.presence import Presence, span_in_words
from agent.owner.settings import OwnerSettings
from agent.owner.vetoes import Cause, MachineVetoes, Veto

__all__ = ["CardDecision", "Cause", "DownloadDecision", "OwnerPolicy", "OwnerSettings"]

# Ticks come every second; a longer silence, or a wall clock that moved by more than the time, is a sleep or a step.
TICK_GAP_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class CardDecision:
    """How one card stands.

    Args:
        giving_back: it is not lent any more, and may not be free yet.
        cause: what keeps it; None while it is lent.
        reason: in words that an owner understands, never empty.
        since: monotonic; when lent, giving_back or cause last changed.
        next_change_at: monotonic; when `cause` ends by itself, where that is known.
    """

    lent: bool
    giving_back: bool
    cause: Cause | None
    reason: str
    since: float
    next_change_at: float | None = None


@dataclass(frozen=True, slots=True)
class DownloadDecision:
    """Whether models may be fetched now, and why (not).

    Args:
        metered: the network being paid by volume is the only objection.
    """

    allowed: bool
    reason: str
    metered: bool = False


class OwnerPolicy:
    """Decides for every card of one machine. Begins with nothing lent.

    Args:
        cards: the cards there are to lend; `CardsListed` changes them.
        now: monotonic seconds, as in every later call.
    """

    def __init__(self, settings: OwnerSettings, cards: Sequence[str], now: float) -> None:
        self._settings = settings
        self._presence = Presence(settings.continue_idle_s)
        self._machine = MachineVetoes(settings)
        self._cards = {name: OwnerCard(name, settings) for name in cards}
        # The last tick: monotonic, and Unix milliseconds.
        self._ticked: tuple[float, int] | None = None
        self._decisions: dict[str, CardDecision] = {}
        self._now = now
        self._decide(now, may_lend=False)

    @property
    def decisions(self) -> Mapping[str, CardDecision]:
        """How each card stands, by its uuid; also one that left, until it is given back and has cooled down."""
        return self._decisions

    @property
    def settings(self) -> OwnerSettings:
        return self._settings

    @property
    def downloads(self) -> DownloadDecision:
        """Whether the model store may use the network now."""
        veto = self._machine.downloading(self._now)
        if veto is not None and veto.cause is not Cause.METERED:
            return DownloadDecision(False, veto.whole)
        if self._settings.mode == "auto" and self._presence.last is not None and self._presence.active(self._now):
            return DownloadDecision(False, self._presence.last.in_words(self._now))
        if veto is not None:
            return DownloadDecision(False, veto.whole, metered=True)
        return DownloadDecision(True, "nobody needs the network now, and it is not metered")

    def handle(self, event: oe.OwnerEvent, now: float) -> list[oe.OwnerCommand]:
        """Take one event and return which cards to lend and to give back."""
        match event:
            case oe.InputObserved() | oe.BusyObserved():
                self._presence.handle(event, now)
            case (
                oe.BatteryObserved()
                | oe.MeteredObserved()
                | oe.LocalTimeObserved()
                | oe.PriceObserved()
                | oe.PauseChanged()
            ):
                self._machine.take(event, now)
                if isinstance(event, oe.PauseChanged) and not event.paused:
                    self._forgive()
            case oe.CardUseObserved() | oe.TemperatureObserved() | oe.GivenBack() | oe.GiveBackFailed():
                if event.card in self._cards:
                    self._cards[event.card].take(event, now)
            case oe.CardsListed():
                self._list(event.cards)
            case oe.Tick():
                self._tick(event.now_ms, now)
            case _:
                assert_never(event)
        return self._decide(now, may_lend=isinstance(event, oe.Tick | oe.PauseChanged))

    def change_settings(self, settings: OwnerSettings, now: float) -> list[oe.OwnerCommand]:
        """Follow new settings at once. Another mode ends the cool-downs, as a resume does."""
        if settings.mode != self._settings.mode:
            self._forgive()
        self._settings = settings
        self._presence.absence_s = settings.continue_idle_s
        self._machine.follow(settings)
        for card in self._cards.values():
            card.follow(settings)
        return self._decide(now, may_lend=True)

    def _list(self, listed: Sequence[str]) -> None:
        for name in listed:
            self._cards.setdefault(name, OwnerCard(name, self._settings)).listed = True
        for name in self._cards.keys() - set(listed):
            self._cards[name].leave()

    def _tick(self, now_ms: int, now: float) -> None:
        if self._ticked is not None:
            passed_s, wall_passed_s = now - self._ticked[0], (now_ms - self._ticked[1]) / 1000
            if passed_s > TICK_GAP_S_MAX or abs(wall_passed_s - passed_s) > TICK_GAP_S_MAX:
                self._presence.woke(now)
        self._ticked = (now, now_ms)
        self._machine.tick(now_ms, now)

    def _forgive(self) -> None:
        for card in self._cards.values():
            card.forgive()

    def _decide(self, now: float, *, may_lend: bool) -> list[oe.OwnerCommand]:
        self._now = now
        self._presence.passed(now)
        machine = self._machine.lending(now)
        commands: list[oe.OwnerCommand] = []
        decisions: dict[str, CardDecision] = {}
        for name, card in list(self._cards.items()):
            veto = self._veto(card, machine, now)
            if card.lent and veto is not None:
                card.give_back(veto, now)
                commands.append(oe.GiveBack(name, veto.reason))
            elif veto is None and not card.lent and card.giving_back is None and may_lend:
                card.lend()
                commands.append(oe.Lend(name, self._why_lent(now)))
            if card.lent:
                card.last_lent_at = now
            if card.forgettable(now):
                del self._cards[name]
            else:
                decisions[name] = self._decision(card, veto, now)
        self._decisions = decisions
        return commands

    def _decision(self, card: OwnerCard, veto: Veto | None, now: float) -> CardDecision:
        cause: Cause | None = None
        until: float | None = None
        if card.lent:
            reason = self._why_lent(now)
        elif card.giving_back is not None:
            cause, reason = card.giving_back.cause, f"being given back: {card.giving_back.reason}"
        elif veto is not None:
            cause, reason, until = veto.cause, veto.whole, veto.until
        else:
            cause, reason, until = Cause.DUE, "nothing keeps it from being lent; lending begins within seconds", now
        giving_back = card.giving_back is not None
        before = self._decisions.get(card.name)
        unchanged = before is not None and (before.lent, before.giving_back, before.cause) == (
            card.lent,
            giving_back,
            cause,
        )
        since = before.since if before is not None and unchanged else now
        return CardDecision(card.lent, giving_back, cause, reason, since, until)

    def _why_lent(self, now: float) -> str:
        if self._settings.mode == "always":
            return 'lent: mode is "always"'
        idle_since = self._presence.idle_since()
        if idle_since is None or self._presence.unknown(now) is not None:
            return 'lent although nobody can tell who is here: when_input_unknown is "lend"'
        return f"lent: no input for {span_in_words(now - idle_since)}"

    def _veto(self, card: OwnerCard, machine: Veto | None, now: float) -> Veto | None:
        """Return the first thing that keeps the card from being lent."""
        veto = card.missing() or machine or card.taken(now)
        if veto is None and self._settings.mode == "auto":
            veto = self._owner_here(card, now)
        return veto or card.cooling(now)

    def _owner_here(self, card: OwnerCard, now: float) -> Veto | None:
        busy = self._presence.busy()
        if busy is not None:
            return Veto(Cause.BUSY, busy)
        unknown = self._presence.unknown(now)
        if unknown is not None and self._settings.when_input_unknown == "wait":
            return Veto(Cause.INPUT_UNKNOWN, unknown, 'when_input_unknown = "lend" lends nevertheless')
        idle_since = self._presence.idle_since()
        wait_s = self._wait_s(card)
        if idle_since is None or now - idle_since >= wait_s:
            return None
        then = f"lending begins after {span_in_words(wait_s)} without input"
        return Veto(Cause.INPUT, self._presence.last_sign(now), then, idle_since + wait_s)

    def _wait_s(self, card: OwnerCard) -> float:
        """How long nobody must have been here: shorter where only a short visit interrupted a lending."""
        visit_at = self._presence.long_visit_at
        same_absence = card.last_lent_at is not None and (visit_at is None or visit_at <= card.last_lent_at)
        settings = self._settings
        return min(settings.start_idle_s, settings.continue_idle_s) if same_absence else settings.start_idle_s
