"""What keeps a machine from lending: the reasons, and those that hold for every card alike. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from agent.owner import events as oe
from agent.owner.presence import span_in_words
from agent.owner.schedule import DAY_MINUTES, parse_schedule
from agent.owner.settings import OwnerSettings


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
# The owner's own hand: ended by it too, and then at once.
BY_HAND = frozenset({Cause.PAUSED, Cause.MODE_NEVER})


@dataclass(frozen=True, slots=True)
class Veto:
    """One thing that keeps a card from being lent now.

    Args:
        reason: in words that an owner understands.
        then: what ends it, in words; empty where nothing is to be said.
        until: monotonic; when it ends by itself, where that is known.
    """

    cause: Cause
    reason: str
    then: str = ""
    until: float | None = None

    @property
    def whole(self) -> str:
        """The reason, and what ends it."""
        return f"{self.reason}; {self.then}" if self.then else self.reason


class MachineVetoes:
    """The owner's pause, and what the whole machine says: power, network, hours and price."""

    def __init__(self, settings: OwnerSettings) -> None:
        self._pause: oe.PauseChanged | None = None
        self._on_battery: bool | oe.Unknown = False
        self._metered: bool | oe.Unknown = False
        self._local_time: tuple[oe.LocalTimeObserved, float] | None = None
        self._price: float | oe.Unknown = oe.Unknown.ABSENT
        # The last tick: monotonic, and Unix milliseconds.
        self._ticked: tuple[float, int] | None = None
        self.follow(settings)

    def follow(self, settings: OwnerSettings) -> None:
        """Take other settings."""
        self._settings = settings
        self._schedule = parse_schedule(settings.hours)

    def take(
        self,
        event: oe.BatteryObserved | oe.MeteredObserved | oe.LocalTimeObserved | oe.PriceObserved | oe.PauseChanged,
        now: float,
    ) -> None:
        match event:
            case oe.BatteryObserved():
                self._on_battery = event.on_battery
            case oe.MeteredObserved():
                self._metered = event.metered
            case oe.LocalTimeObserved():
                self._local_time = (event, now)
            case oe.PriceObserved():
                self._price = event.price_per_kwh
            case oe.PauseChanged():
                self._pause = event if event.paused else None

    def tick(self, now_ms: int, now: float) -> None:
        """Take the time; a pause whose end has come is over for good."""
        self._ticked = (now, now_ms)
        if self._pause is not None and self._pause.until_ms is not None and now_ms >= self._pause.until_ms:
            self._pause = None

    def lending(self, now: float) -> Veto | None:
        """Return what keeps every card from being lent now."""
        lends_on_metered = self._settings.lend_on_metered
        return (
            self._forbidden(now)
            or self._battery()
            or (None if lends_on_metered else self._metered_network())
            or self._hours(now)
            or self._price_high()
        )

    def downloading(self, now: float) -> Veto | None:
        """Return what keeps models from being fetched now."""
        return self._forbidden(now) or self._battery() or self._metered_network()

    def _forbidden(self, now: float) -> Veto | None:
        if self._settings.mode == "never":
            return Veto(Cause.MODE_NEVER, 'mode is "never"')
        if self._pause is None:
            return None
        until_ms = self._pause.until_ms
        if until_ms is None:
            return Veto(Cause.PAUSED, "paused by the owner", "until resumed by hand")
        if self._ticked is None:
            return Veto(Cause.PAUSED, "paused by the owner")
        ticked_at, ticked_ms = self._ticked
        until = ticked_at + (until_ms - ticked_ms) / 1000
        return Veto(Cause.PAUSED, "paused by the owner", f"for {span_in_words(until - now)} more", until)

    def _battery(self) -> Veto | None:
        if self._settings.lend_on_battery or self._on_battery in (False, oe.Unknown.ABSENT):
            return None
        if self._on_battery is oe.Unknown.BROKEN:
            return Veto(Cause.BATTERY, "whether the machine runs on its battery cannot be read")
        return Veto(Cause.BATTERY, "the machine runs on its battery", "lending begins again on mains power")

    def _metered_network(self) -> Veto | None:
        if self._metered in (False, oe.Unknown.ABSENT):
            return None
        if self._metered is oe.Unknown.BROKEN:
            return Veto(Cause.METERED, "whether the network is metered cannot be read")
        return Veto(Cause.METERED, "the network is metered")

    def _hours(self, now: float) -> Veto | None:
        if not self._schedule.windows:
            return None
        if self._local_time is None:
            return Veto(Cause.HOURS, "the local time is not known yet, and hours are set")
        # The clock may be read once a minute only; in between the time goes on.
        local, read_at = self._local_time
        minute = local.weekday * DAY_MINUTES + local.minute + int((now - read_at) // 60)
        weekday, minute = minute // DAY_MINUTES % 7, minute % DAY_MINUTES
        if self._schedule.open_at(weekday, minute):
            return None
        wait = self._schedule.minutes_until_change(weekday, minute)
        if wait is None:
            return Veto(Cause.HOURS, "outside of the hours set")
        then = f"lending begins in {span_in_words(wait * 60)}"
        return Veto(Cause.HOURS, "outside of the hours set", then, now + wait * 60)

    def _price_high(self) -> Veto | None:
        ceiling = self._settings.price_ceiling_per_kwh
        if ceiling is None:
            return None
        if isinstance(self._price, oe.Unknown):
            return Veto(Cause.PRICE, f"the price of electricity is not known, and a ceiling of {ceiling:g} is set")
        if self._price <= ceiling:
            return None
        return Veto(Cause.PRICE, f"electricity costs {self._price:g} per kWh, above the ceiling of {ceiling:g}")
