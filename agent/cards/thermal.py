"""Whether a card is too hot to be lent. Pure.

NVML tells the temperature of the core only: the memory of cards with GDDR6X may
be 20 C hotter and nobody sees it. So a card is left alone some degrees before
its own limit, and long before it by default where it names none.
"""

from dataclasses import dataclass

from agent.owner.events import TemperatureObserved, Unknown

# Below the temperature at which the card slows itself down; there the answer would get slow before it gets hot.
SLOWDOWN_MARGIN_C = 5.0
# Where the card names no limit: consumer cards slow down at 83 to 90 C.
CORE_LIMIT_DEFAULT_C = 83.0
# A slowdown temperature outside of these is no temperature: drivers were seen to answer 0.
SLOWDOWN_PLAUSIBLE_C = (60.0, 130.0)
# How long the hardware may slow down because of heat before that counts: fans take seconds to follow a new load.
THROTTLED_S_MAX = 10.0
# An idle card falls by 10 C within a minute, so that less would have it lent and taken away all the time.
HYSTERESIS_C = 10.0
# As BOINC waits after a hot battery.
COOL_S = 300.0


@dataclass(frozen=True, slots=True)
class Heat:
    """What a guard made of an observation.

    Args:
        too_hot: the card is not to be lent.
        reason: in words for the owner; empty where it is not too hot.
    """

    too_hot: bool
    reason: str = ""


class ThermalGuard:
    """Watches one card, with hysteresis.

    Args:
        limit_c: the owner's own limit of the core's temperature; it can only lower the card's.
    """

    def __init__(self, limit_c: float | None = None) -> None:
        self._owner_limit_c = limit_c
        self._throttled_since: float | None = None
        self._cool_since: float | None = None
        self.heat = Heat(too_hot=False)

    def handle(self, observed: TemperatureObserved, now: float) -> bool:
        """Take one observation; return whether the card is too hot to be lent.

        A temperature that is not known neither makes a card hot nor cools a hot one.
        """
        limit_c = self._limit_c(observed.slowdown_c)
        known_c = None if isinstance(observed.temperature_c, Unknown) else observed.temperature_c
        if not observed.throttled:
            self._throttled_since = None
        elif self._throttled_since is None:
            self._throttled_since = now
        throttled_s = 0.0 if self._throttled_since is None else now - self._throttled_since
        if known_c is not None and known_c >= limit_c:
            self._cool_since = None
            self.heat = Heat(True, f"the card is at {known_c:.0f} C, its limit here is {limit_c:.0f} C")
        elif throttled_s > THROTTLED_S_MAX:
            self._cool_since = None
            self.heat = Heat(True, f"the card has slowed down because of heat for {throttled_s:.0f} s")
        elif self.heat.too_hot:
            self._cool_down(known_c, limit_c - HYSTERESIS_C, observed.throttled, now)
        return self.heat.too_hot

    def _cool_down(self, known_c: float | None, cool_c: float, throttled: bool, now: float) -> None:
        if known_c is None or known_c > cool_c or throttled:
            self._cool_since = None
            at = "at an unknown temperature" if known_c is None else f"at {known_c:.0f} C"
            self.heat = Heat(True, f"the card was too hot and is {at}; it cools down to {cool_c:.0f} C first")
            return
        if self._cool_since is None:
            self._cool_since = now
        left_s = COOL_S - (now - self._cool_since)
        if left_s > 0:
            minutes = max(1, round(left_s / 60))
            self.heat = Heat(True, f"the card was too hot; it stays cool for {minutes} min more first")
        else:
            self._cool_since = None
            self.heat = Heat(False)

    def _limit_c(self, slowdown_c: float | None) -> float:
        least, most = SLOWDOWN_PLAUSIBLE_C
        plausible = slowdown_c is not None and least <= slowdown_c <= most
        limit_c = slowdown_c - SLOWDOWN_MARGIN_C if slowdown_c is not None and plausible else CORE_LIMIT_DEFAULT_C
        return limit_c if self._owner_limit_c is None else min(limit_c, self._owner_limit_c)
