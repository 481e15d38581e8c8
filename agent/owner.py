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

An explicit resume ends the pause and every cool-down, and nothing else: whoever
types it sits at the machine, so that a wait for their absence still makes
sense. To lend while somebody works there, there is mode "always".
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, assert_never

import msgspec
from msgspec import Meta

from agent import owner_events as oe
from agent.presence import Presence, span_in_words
from agent.schedule import parse_schedule
from agent.thermal import ThermalGuard

# Ticks come every second; a longer silence, or a wall clock that moved by more than the time, is a sleep or a step.
TICK_GAP_S_MAX = 30.0
# Use of a card is read every few seconds, and twice a minute while nobody needs to know.
CARD_USE_STALE_S = 60.0
# As many returns within an hour mean that the owner comes and goes; from then on the cool-down doubles.
RETURNS_MANY = 3
RETURNS_WINDOW_S = 3600.0
# Of the programs on a card, this many are named; a desktop with a browser has a dozen.
PROGRAMS_NAMED_MAX = 2
PROGRAM_NAME_CHARACTERS_MAX = 64
MIB = 1024 * 1024


class OwnerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[owner]`: when this machine may be lent."""

    mode: Annotated[
        Literal["auto", "always", "never"],
        Meta(description="auto: while nobody is here; always: also while somebody works here; never: nothing is lent"),
    ] = "auto"
    # HTCondor's StartIdleTime and ContinueIdleTime.
    start_idle_s: Annotated[float, Meta(ge=0, le=86_400, description="without input before the first lending")] = 900.0
    continue_idle_s: Annotated[
        float, Meta(ge=0, le=86_400, description="without input before the next lending of the same absence")
    ] = 300.0
    when_input_unknown: Annotated[
        Literal["wait", "lend"],
        Meta(description='where nothing can see input, or a reader broke; "lend" is for machines without a seat'),
    ] = "wait"
    when_gpu_use_unknown: Annotated[
        Literal["wait", "lend"], Meta(description="where nobody can tell who else uses a card (WSL)")
    ] = "wait"
    lend_on_battery: Annotated[bool, Meta(description="a desktop behind a UPS may look like a battery")] = False
    lend_on_metered: Annotated[bool, Meta(description="answers are small; downloads wait on a metered network")] = True
    yield_to_programs: Annotated[bool, Meta(description="give a card back when another program uses it")] = True
    foreign_memory_growth_mib: Annotated[
        int, Meta(ge=1, le=1_048_576, description="give a card back when others take this much more of it")
    ] = 512
    free_memory_floor_mib: Annotated[
        int, Meta(ge=0, le=1_048_576, description="give a card back when less of it is free")
    ] = 256
    temperature_limit_c: (
        Annotated[
            float, Meta(ge=40, le=110, description="lower than the card's own limit, where it is too loud or hot")
        ]
        | None
    ) = None
    hours: Annotated[
        tuple[str, ...], Meta(description='windows as "22:00-07:00" or "mon-fri 22:00-07:00"; none: always')
    ] = ()
    price_ceiling_per_kwh: Annotated[float, Meta(ge=0, le=1000, description="nothing is lent above it")] | None = None
    cool_down_s: Annotated[float, Meta(ge=0, le=86_400, description="after a give-back, before the next lending")] = (
        300.0
    )
    cool_down_max_s: Annotated[float, Meta(ge=0, le=86_400, description="while the owner comes and goes")] = 3600.0

    def __post_init__(self) -> None:
        parse_schedule(self.hours)


class Cause(StrEnum):
    """What keeps a card from being lent, or took it away."""

    QUARANTINE = "quarantine"
    CARD_GONE = "card_gone"
    MODE_NEVER = "mode_never"
    PAUSED = "paused"
    BATTERY = "battery"
    METERED = "metered"
    HOURS = "hours"
    PRICE = "price"
    HEAT = "heat"
    PROGRAM = "program"
    MEMORY = "memory"
    CARD_USE_UNKNOWN = "card_use_unknown"
    BUSY = "busy"
    INPUT_UNKNOWN = "input_unknown"
    INPUT = "input"
    COOL_DOWN = "cool_down"
    # No veto: the next tick lends it.
    DUE = "due"


# The owner came back; the cool-down after these grows while that happens often.
OWNER_RETURNED = frozenset({Cause.INPUT, Cause.BUSY, Cause.PROGRAM, Cause.MEMORY})
# The owner's own hand: ended by it too, and at once.
BY_HAND = frozenset({Cause.PAUSED, Cause.MODE_NEVER})


@dataclass(frozen=True, slots=True)
class CardDecision:
    """How one card stands.

    Args:
        giving_back: it is not lent any more, and may not be free yet.
        cause: what keeps it; None while it is lent.
        reason: in words that an owner understands, never empty.
        since: monotonic; when lent, giving_back or cause last changed.
        next_change_at: monotonic; when `reason` ends by itself, where that is known.
    """

    lent: bool
    giving_back: bool
    cause: Cause | None
    reason: str
    since: float
    next_change_at: float | None = None


@dataclass(frozen=True, slots=True)
class DownloadDecision:
    """Whether models may be fetched now."""

    allowed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Veto:
    cause: Cause
    reason: str
    # What ends it, and when, where that is known.
    then: str = ""
    until: float | None = None


class _Card:
    """What is known of one card, apart from the machine."""

    def __init__(self, temperature_limit_c: float | None, now: float) -> None:
        self.listed_at: float | None = now
        self.lent = False
        self.giving_back: _Veto | None = None
        self.quarantine: str | None = None
        self.guard = ThermalGuard(temperature_limit_c)
        self.use: oe.CardUseObserved | None = None
        self.use_at = -math.inf
        # Memory of others when the lending began; None until it is known.
        self.baseline_bytes: int | None = None
        self.last_lent_at: float | None = None
        self.cool_until = -math.inf
        self.cool_level = 0
        self.returns: deque[float] = deque(maxlen=RETURNS_MANY)

    def cool_down(self, cause: Cause, settings: OwnerSettings, now: float) -> None:
        """Begin the wait after a give-back; it doubles while the owner keeps coming back, and halves by the hour."""
        if cause in OWNER_RETURNED:
            if self.returns:
                self.cool_level = max(0, self.cool_level - int((now - self.returns[-1]) // RETURNS_WINDOW_S))
            self.returns.append(now)
            if len(self.returns) == RETURNS_MANY and now - self.returns[0] <= RETURNS_WINDOW_S:
                self.cool_level += 1
        most_s = max(settings.cool_down_s, settings.cool_down_max_s)
        # More doublings than from a second to a day would only overflow.
        self.cool_until = now + min(settings.cool_down_s * 2 ** min(self.cool_level, 20), most_s)

    def forgive(self) -> None:
        """The owner ended the cool-down by hand."""
        self.cool_until = -math.inf
        self.cool_level = 0
        self.returns.clear()


class OwnerPolicy:
    """Decides for every card of one machine. Begins with nothing lent.

    Args:
        cards: the cards there are to lend; `CardsListed` changes them.
        now: monotonic seconds, as in every later call.
    """

    def __init__(self, settings: OwnerSettings, cards: Sequence[str], now: float) -> None:
        self._settings = settings
        self._schedule = parse_schedule(settings.hours)
        self._presence = Presence(settings.continue_idle_s)
        self._cards = {card: _Card(settings.temperature_limit_c, now) for card in cards}
        self._pause: oe.PauseChanged | None = None
        self._on_battery: bool | oe.Unknown = False
        self._metered: bool | oe.Unknown = False
        self._local_time: oe.LocalTimeObserved | None = None
        self._local_time_at = now
        self._price: float | oe.Unknown = oe.Unknown.ABSENT
        # The last tick: monotonic, and Unix milliseconds.
        self._ticked: tuple[float, int] | None = None
        self._decisions: dict[str, CardDecision] = {}
        self._now = now
        self._decide(now, may_lend=False)

    @property
    def decisions(self) -> Mapping[str, CardDecision]:
        """How each card stands, by its uuid."""
        return self._decisions

    @property
    def settings(self) -> OwnerSettings:
        return self._settings

    @property
    def downloads(self) -> DownloadDecision:
        """Whether the model store may use the network now."""
        for veto in (self._forbidden(self._now), self._battery()):
            if veto is not None:
                return DownloadDecision(False, veto.reason)
        if self._metered is True:
            return DownloadDecision(False, "the network is metered")
        if self._metered is oe.Unknown.BROKEN:
            return DownloadDecision(False, "whether the network is metered cannot be read")
        if self._settings.mode == "auto" and self._presence.active(self._now):
            assert self._presence.last is not None
            return DownloadDecision(False, self._presence.last.in_words(self._now))
        return DownloadDecision(True, "nobody works here, and the network is not metered")

    def handle(self, event: oe.OwnerEvent, now: float) -> list[oe.OwnerCommand]:
        """Take one event and return which cards to lend and to give back."""
        self._take(event, now)
        return self._decide(now, may_lend=isinstance(event, oe.Tick | oe.PauseChanged))

    def change_settings(self, settings: OwnerSettings, now: float) -> list[oe.OwnerCommand]:
        """Follow new settings at once. Another mode ends the cool-downs, as a resume does."""
        if settings.mode != self._settings.mode:
            self._forgive_all()
        if settings.temperature_limit_c != self._settings.temperature_limit_c:
            for card in self._cards.values():
                card.guard = ThermalGuard(settings.temperature_limit_c)
        self._settings = settings
        self._schedule = parse_schedule(settings.hours)
        self._presence.absence_s = settings.continue_idle_s
        return self._decide(now, may_lend=True)

    # ---- taking events in

    def _take(self, event: oe.OwnerEvent, now: float) -> None:
        match event:
            case oe.InputObserved() | oe.BusyObserved():
                self._presence.handle(event, now)
            case oe.BatteryObserved():
                self._on_battery = event.on_battery
            case oe.MeteredObserved():
                self._metered = event.metered
            case oe.LocalTimeObserved():
                self._local_time, self._local_time_at = event, now
            case oe.PriceObserved():
                self._price = event.price_per_kwh
            case oe.CardUseObserved():
                self._card_use(event, now)
            case oe.TemperatureObserved():
                if event.card in self._cards:
                    self._cards[event.card].guard.handle(event, now)
            case oe.PauseChanged():
                self._pause = event if event.paused else None
                if not event.paused:
                    self._forgive_all()
            case oe.CardsListed():
                self._cards_listed(event.cards, now)
            case oe.GivenBack():
                if event.card in self._cards:
                    self._cards[event.card].giving_back = None
            case oe.GiveBackFailed():
                if event.card in self._cards:
                    card = self._cards[event.card]
                    card.giving_back, card.quarantine = None, event.detail or "its processes survive"
            case oe.Tick():
                self._tick(event.now_ms, now)
            case _:
                assert_never(event)

    def _card_use(self, event: oe.CardUseObserved, now: float) -> None:
        card = self._cards.get(event.card)
        if card is None:
            return
        card.use, card.use_at = event, now
        if card.lent and card.baseline_bytes is None:
            card.baseline_bytes = event.foreign_memory_bytes

    def _cards_listed(self, listed: Sequence[str], now: float) -> None:
        for name in listed:
            card = self._cards.setdefault(name, _Card(self._settings.temperature_limit_c, now))
            if card.listed_at is None:
                card.listed_at = now
        for name in self._cards.keys() - set(listed):
            card = self._cards[name]
            card.listed_at, card.use, card.use_at = None, None, -math.inf

    def _tick(self, now_ms: int, now: float) -> None:
        if self._ticked is not None:
            ticked_at, ticked_ms = self._ticked
            passed_s = now - ticked_at
            wall_passed_s = (now_ms - ticked_ms) / 1000
            if passed_s > TICK_GAP_S_MAX or abs(wall_passed_s - passed_s) > TICK_GAP_S_MAX:
                self._presence.woke(now)
        self._ticked = (now, now_ms)
        if self._pause is not None and self._pause.until_ms is not None and now_ms >= self._pause.until_ms:
            self._pause = None

    def _forgive_all(self) -> None:
        for card in self._cards.values():
            card.forgive()

    # ---- deciding

    def _decide(self, now: float, *, may_lend: bool) -> list[oe.OwnerCommand]:
        self._now = now
        self._presence.passed(now)
        machine = self._machine_veto(now)
        commands: list[oe.OwnerCommand] = []
        decisions: dict[str, CardDecision] = {}
        for name, card in list(self._cards.items()):
            veto = self._card_veto(name, card, machine, now)
            if card.lent and veto is not None:
                self._take_back(card, veto, now)
                commands.append(oe.GiveBack(name, veto.reason))
            elif veto is None and not card.lent and card.giving_back is None and may_lend:
                card.lent = True
                card.baseline_bytes = None if card.use is None else card.use.foreign_memory_bytes
                commands.append(oe.Lend(name, self._why_lent(now)))
            if card.lent:
                card.last_lent_at = now
            if self._forgettable(card, now):
                del self._cards[name]
            else:
                decisions[name] = self._decision(name, card, veto, now)
        self._decisions = decisions
        return commands

    def _take_back(self, card: _Card, veto: _Veto, now: float) -> None:
        card.lent, card.giving_back, card.baseline_bytes = False, veto, None
        if veto.cause not in BY_HAND:
            card.cool_down(veto.cause, self._settings, now)

    @staticmethod
    def _forgettable(card: _Card, now: float) -> bool:
        """A card that left, and of which nothing must be remembered if it comes again."""
        return card.listed_at is None and card.giving_back is None and not card.quarantine and now >= card.cool_until

    def _decision(self, name: str, card: _Card, veto: _Veto | None, now: float) -> CardDecision:
        if card.lent:
            cause, reason, until = None, self._why_lent(now), None
        elif card.giving_back is not None:
            back = card.giving_back
            cause, reason, until = back.cause, f"being given back: {back.reason}", None
        elif veto is not None:
            cause, until = veto.cause, veto.until
            reason = f"{veto.reason}; {veto.then}" if veto.then else veto.reason
        else:
            cause, reason, until = Cause.DUE, "nothing keeps it from being lent; lending begins within seconds", now
        before = self._decisions.get(name)
        giving_back = card.giving_back is not None
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
        if self._presence.unknown(now) is not None:
            return 'lent although nobody can tell who is here: when_input_unknown is "lend"'
        assert idle_since is not None  # a source that can see has seen something
        return f"lent: no input for {span_in_words(now - idle_since)}"

    # ---- vetoes of the machine

    def _machine_veto(self, now: float) -> _Veto | None:
        return (
            self._forbidden(now) or self._battery() or self._metered_network() or self._hours(now) or self._price_high()
        )

    def _forbidden(self, now: float) -> _Veto | None:
        if self._settings.mode == "never":
            return _Veto(Cause.MODE_NEVER, 'mode is "never"')
        if self._pause is None:
            return None
        until_ms = self._pause.until_ms
        if until_ms is None:
            return _Veto(Cause.PAUSED, "paused by the owner", "until resumed by hand")
        if self._ticked is None:
            return _Veto(Cause.PAUSED, "paused by the owner")
        ticked_at, ticked_ms = self._ticked
        until = ticked_at + (until_ms - ticked_ms) / 1000
        return _Veto(Cause.PAUSED, "paused by the owner", f"for {span_in_words(until - now)} more", until)

    def _battery(self) -> _Veto | None:
        if self._settings.lend_on_battery or self._on_battery in (False, oe.Unknown.ABSENT):
            return None
        if self._on_battery is oe.Unknown.BROKEN:
            return _Veto(Cause.BATTERY, "whether the machine runs on its battery cannot be read")
        return _Veto(Cause.BATTERY, "the machine runs on its battery", "lending begins again on mains power")

    def _metered_network(self) -> _Veto | None:
        if self._settings.lend_on_metered or self._metered in (False, oe.Unknown.ABSENT):
            return None
        if self._metered is oe.Unknown.BROKEN:
            return _Veto(Cause.METERED, "whether the network is metered cannot be read")
        return _Veto(Cause.METERED, "the network is metered")

    def _hours(self, now: float) -> _Veto | None:
        local = self._local_time
        if not self._schedule.windows:
            return None
        if local is None:
            return _Veto(Cause.HOURS, "the local time is not known yet, and hours are set")
        # The reader of the clock tells every minute; in between the time goes on.
        minute = local.weekday * 1440 + local.minute + int((now - self._local_time_at) // 60)
        weekday, minute = minute // 1440 % 7, minute % 1440
        if self._schedule.open_at(weekday, minute):
            return None
        wait = self._schedule.minutes_until_change(weekday, minute)
        if wait is None:
            return _Veto(Cause.HOURS, "outside of the hours set")
        then = f"lending begins in {span_in_words(wait * 60)}"
        return _Veto(Cause.HOURS, "outside of the hours set", then, now + wait * 60)

    def _price_high(self) -> _Veto | None:
        ceiling = self._settings.price_ceiling_per_kwh
        if ceiling is None:
            return None
        if isinstance(self._price, oe.Unknown):
            return _Veto(Cause.PRICE, f"the price of electricity is not known, and a ceiling of {ceiling:g} is set")
        if self._price <= ceiling:
            return None
        return _Veto(Cause.PRICE, f"electricity costs {self._price:g} per kWh, above the ceiling of {ceiling:g}")

    # ---- vetoes of one card

    def _card_veto(self, name: str, card: _Card, machine: _Veto | None, now: float) -> _Veto | None:
        if card.quarantine is not None:
            reason = f"in quarantine, since a give-back failed: {card.quarantine}"
            return _Veto(Cause.QUARANTINE, reason, "restart the agent, or the machine where that does not help")
        if card.listed_at is None:
            return _Veto(Cause.CARD_GONE, "the card has left this machine")
        veto = machine or self._heat(card) or self._others(name, card, now)
        if veto is None and self._settings.mode == "auto":
            veto = self._owner_here(card, now)
        if veto is None and not card.lent and now < card.cool_until:
            then = f"lending begins in {span_in_words(card.cool_until - now)} at the earliest; resume ends the wait"
            veto = _Veto(Cause.COOL_DOWN, "cooling down after the last give-back", then, card.cool_until)
        return veto

    @staticmethod
    def _heat(card: _Card) -> _Veto | None:
        return _Veto(Cause.HEAT, card.guard.heat.reason) if card.guard.heat.too_hot else None

    def _others(self, name: str, card: _Card, now: float) -> _Veto | None:
        """Whether somebody else uses the card."""
        use = card.use if now - card.use_at <= CARD_USE_STALE_S else None
        settings = self._settings
        programs = () if use is None or isinstance(use.processes, oe.Unknown) else use.processes
        if programs and settings.yield_to_programs:
            return _Veto(Cause.PROGRAM, f"{_programs(programs)} on the card")
        if use is not None and use.foreign_memory_bytes is not None and card.baseline_bytes is not None:
            grown_mib = (use.foreign_memory_bytes - card.baseline_bytes) // MIB
            if grown_mib > settings.foreign_memory_growth_mib:
                return _Veto(Cause.MEMORY, f"others took {grown_mib} MiB more of the card's memory")
        if use is not None and use.free_memory_bytes is not None:
            free_mib = use.free_memory_bytes // MIB
            if free_mib < settings.free_memory_floor_mib:
                reason = f"{free_mib} MiB of the card are free, less than {settings.free_memory_floor_mib} MiB"
                return _Veto(Cause.MEMORY, reason)
        if name == oe.CPU_CARD or settings.when_gpu_use_unknown == "lend":
            return None
        return self._use_unknown(use)

    def _use_unknown(self, use: oe.CardUseObserved | None) -> _Veto | None:
        if use is None:
            return _Veto(Cause.CARD_USE_UNKNOWN, "nobody has read lately who uses the card")
        if use.processes is oe.Unknown.BROKEN and self._settings.yield_to_programs:
            return _Veto(Cause.CARD_USE_UNKNOWN, "which programs use the card cannot be read now")
        if use.processes is oe.Unknown.ABSENT and use.foreign_memory_bytes is None:
            reason = "this system tells neither which programs use the card nor how much memory they have"
            return _Veto(Cause.CARD_USE_UNKNOWN, reason, 'when_gpu_use_unknown = "lend" lends it nevertheless')
        return None

    def _owner_here(self, card: _Card, now: float) -> _Veto | None:
        presence = self._presence
        busy = presence.busy()
        if busy is not None:
            return _Veto(Cause.BUSY, busy)
        unknown = presence.unknown(now)
        if unknown is not None and self._settings.when_input_unknown == "wait":
            return _Veto(Cause.INPUT_UNKNOWN, unknown, 'when_input_unknown = "lend" lends nevertheless')
        idle_since = presence.idle_since()
        if idle_since is None:
            return None
        wait_s = self._wait_s(card)
        if now - idle_since >= wait_s:
            return None
        then = f"lending begins after {span_in_words(wait_s)} without input"
        if presence.last is not None and presence.last.at >= idle_since:
            reason = presence.last.in_words(now)
        else:
            reason = f"the machine slept or its clock jumped {span_in_words(now - idle_since)} ago"
        return _Veto(Cause.INPUT, reason, then, idle_since + wait_s)

    def _wait_s(self, card: _Card) -> float:
        """How long nobody must have been here: shorter where only a short visit interrupted a lending."""
        visit_at = self._presence.long_visit_at
        same_absence = card.last_lent_at is not None and (visit_at is None or visit_at <= card.last_lent_at)
        settings = self._settings
        return min(settings.start_idle_s, settings.continue_idle_s) if same_absence else settings.start_idle_s


def _programs(processes: Sequence[oe.ForeignProcess]) -> str:
    named = ", ".join(f"{_printable(one.name)} (pid {one.pid})" for one in processes[:PROGRAMS_NAMED_MAX])
    more = len(processes) - PROGRAMS_NAMED_MAX
    return f"{named} and {more} more" if more > 0 else named


def _printable(name: str) -> str:
    """A program chooses its own name; in a terminal it must not do more than stand there."""
    shown = "".join(character if character.isprintable() else "?" for character in name)
    return shown[:PROGRAM_NAME_CHARACTERS_MAX] or "a program"
