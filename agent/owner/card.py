"""One card as its owner's policy sees it: who else uses it, how hot it is, and how long it is left alone. Pure."""

import math
from collections import deque
from collections.abc import Sequence

from agent.cards.thermal import ThermalGuard
from agent.owner import events as oe
from agent.owner.presence import span_in_words
from agent.owner.settings import OwnerSettings
from agent.owner.vetoes import BY_HAND, OWNER_RETURNED, Cause, Veto

# Use of a card is read every few seconds, and twice a minute while nobody needs to know.
CARD_USE_STALE_S = 60.0
# As many returns within an hour mean that the owner comes and goes; from then on the cool-down doubles.
RETURNS_MANY = 3
RETURNS_WINDOW_S = 3600.0
# From a second to a day; more doublings would only overflow.
DOUBLINGS_MAX = 17
# Of the programs on a card, this many are named; a desktop with a browser has a dozen.
PROGRAMS_NAMED_MAX = 2
PROGRAM_NAME_CHARACTERS_MAX = 64
MIB = 1024 * 1024


class OwnerCard:
    """What is known of one card, apart from the machine. Begins not lent."""

    def __init__(self, name: str, settings: OwnerSettings) -> None:
        self.name = name
        # Whether the machine has it now.
        self.listed = True
        self.lent = False
        # Why it is being given back; None once that is done.
        self.giving_back: Veto | None = None
        # The last moment at which it was lent.
        self.last_lent_at: float | None = None
        self._quarantine: str | None = None
        self._use: oe.CardUseObserved | None = None
        self._use_at = -math.inf
        # Memory of others when the lending began; None until it is known.
        self._baseline_bytes: int | None = None
        self._cool_until = -math.inf
        self._cool_level = 0
        self._returns: deque[float] = deque(maxlen=RETURNS_MANY)
        self._settings = settings
        self._guard = ThermalGuard(settings.temperature_limit_c)

    def follow(self, settings: OwnerSettings) -> None:
        """Take other settings."""
        if settings.temperature_limit_c != self._settings.temperature_limit_c:
            self._guard = ThermalGuard(settings.temperature_limit_c)
        self._settings = settings

    def take(
        self, event: oe.CardUseObserved | oe.TemperatureObserved | oe.GivenBack | oe.GiveBackFailed, now: float
    ) -> None:
        match event:
            case oe.CardUseObserved():
                self._use, self._use_at = event, now
                if self.lent and self._baseline_bytes is None:
                    self._baseline_bytes = event.foreign_memory_bytes
            case oe.TemperatureObserved():
                self._guard.handle(event, now)
            case oe.GivenBack():
                self.giving_back = None
            case oe.GiveBackFailed():
                self.giving_back = None
                self._quarantine = event.detail or "processes of ours survive their kill"

    def leave(self) -> None:
        """The machine does not have it any more."""
        self.listed = False
        self._use, self._use_at = None, -math.inf

    def lend(self) -> None:
        self.lent = True
        self._baseline_bytes = None if self._use is None else self._use.foreign_memory_bytes

    def give_back(self, veto: Veto, now: float) -> None:
        """Give it back, and begin the wait for the next lending; it doubles while the owner keeps coming back."""
        self.lent, self.giving_back, self._baseline_bytes = False, veto, None
        if veto.cause in BY_HAND:
            return
        if veto.cause in OWNER_RETURNED:
            if now > self._cool_until and self._cool_level:
                # Each hour without a return after the last wait makes the next one half as long.
                self._cool_level = max(0, self._cool_level - int((now - self._cool_until) // RETURNS_WINDOW_S))
            self._returns.append(now)
            if len(self._returns) == RETURNS_MANY and now - self._returns[0] <= RETURNS_WINDOW_S:
                self._cool_level = min(self._cool_level + 1, DOUBLINGS_MAX)
        least_s, most_s = self._settings.cool_down_s, self._settings.cool_down_max_s
        self._cool_until = now + max(least_s, min(least_s * 2**self._cool_level, most_s))

    def forgive(self) -> None:
        """The owner ended the wait by hand."""
        self._cool_until = -math.inf
        self._cool_level = 0
        self._returns.clear()

    def forgettable(self, now: float) -> bool:
        """Whether it left, and nothing must be remembered of it if it comes again."""
        busy = self.lent or self.giving_back is not None or self._quarantine is not None
        return not self.listed and not busy and now >= self._cool_until

    def missing(self) -> Veto | None:
        """Return why there is nothing to lend here."""
        if self._quarantine is not None:
            reason = f"in quarantine, since a give-back failed: {self._quarantine}"
            return Veto(Cause.QUARANTINE, reason, "restart the agent, or the machine where that does not help")
        return None if self.listed else Veto(Cause.CARD_GONE, "the card has left this machine")

    def taken(self, now: float) -> Veto | None:
        """Return what keeps this card from being lent while others may be: heat, and whoever else uses it."""
        if self._guard.heat.too_hot:
            return Veto(Cause.HEAT, self._guard.heat.reason)
        use = self._use if now - self._use_at <= CARD_USE_STALE_S else None
        if use is not None:
            veto = self._others(use)
            if veto is not None:
                return veto
        if self.name == oe.CPU_CARD or self._settings.when_gpu_use_unknown == "lend":
            return None
        return self._use_unknown(use)

    def cooling(self, now: float) -> Veto | None:
        """Return the wait after the last give-back."""
        if self.lent or now >= self._cool_until:
            return None
        wait = span_in_words(self._cool_until - now)
        then = f"lending begins in {wait} at the earliest; resume ends the wait"
        return Veto(Cause.COOL_DOWN, "cooling down after the last give-back", then, self._cool_until)

    def _others(self, use: oe.CardUseObserved) -> Veto | None:
        settings = self._settings
        if settings.yield_to_programs and not isinstance(use.processes, oe.Unknown) and use.processes:
            return Veto(Cause.PROGRAM, f"{_programs(use.processes)} on the card")
        if use.foreign_memory_bytes is not None and self._baseline_bytes is not None:
            grown_mib = (use.foreign_memory_bytes - self._baseline_bytes) // MIB
            if grown_mib > settings.foreign_memory_growth_mib:
                return Veto(Cause.MEMORY, f"others took {grown_mib} MiB more of the card's memory")
        if use.free_memory_bytes is not None:
            free_mib = use.free_memory_bytes // MIB
            if free_mib < settings.free_memory_floor_mib:
                reason = f"{free_mib} MiB of the card are free, less than {settings.free_memory_floor_mib} MiB"
                return Veto(Cause.MEMORY, reason)
        return None

    def _use_unknown(self, use: oe.CardUseObserved | None) -> Veto | None:
        if use is None:
            return Veto(Cause.CARD_USE_UNKNOWN, "nobody has read lately who uses the card")
        if use.processes is oe.Unknown.BROKEN and self._settings.yield_to_programs:
            return Veto(Cause.CARD_USE_UNKNOWN, "which programs use the card cannot be read now")
        if use.processes is oe.Unknown.ABSENT and use.foreign_memory_bytes is None:
            reason = "this system tells neither which programs use the card nor how much memory they have"
            return Veto(Cause.CARD_USE_UNKNOWN, reason, 'when_gpu_use_unknown = "lend" lends it nevertheless')
        return None


def _programs(processes: Sequence[oe.ForeignProcess]) -> str:
    named = ", ".join(f"{_printable(one.name)} (pid {one.pid})" for one in processes[:PROGRAMS_NAMED_MAX])
    more = len(processes) - PROGRAMS_NAMED_MAX
    return f"{named} and {more} more" if more > 0 else named


def _printable(name: str) -> str:
    """A program chooses its own name; in a terminal it must not do more than stand there."""
    shown = "".join(character if character.isprintable() else "?" for character in name)
    return shown[:PROGRAM_NAME_CHARACTERS_MAX] or "a program"
