"""How many joules one card draws from sample to sample, and by which method that is known. Pure.

A window is closed by the best of:

  COUNTER            difference of the card's energy counter. Volta and later have one; it may be absent, stand
                     still for ever, start again with the driver, or jump. A difference that is not positive, or
                     more than the card can draw, is not used, nor is the one after it, which may make up for it.
  INTEGRATED_POWER   power readings integrated by the trapezoidal rule, where none is missing.
  ESTIMATE           the owner's figure for the card, or its power limit, times the time in which tasks ran.
  NONE               nothing is known; 0 joules.

What a window drew before its first task and between tasks is idle: by the
power that the card drew when it last was idle for a whole window, and by time
where that is not known.
"""

import math
from dataclasses import dataclass
from enum import Enum

from protos.slackwater.common.v1 import capability_pb2

# Shorter, and a counter that advances in steps reads 0 (see `agent.energy.meter`). A sample comes every 5 s and
# closes one.
WINDOW_S_MIN = 2.0
# Whoever was silent for longer was asleep or cut off: a laptop's card is read every 60 s at the slowest. A power that
# was known then says nothing about the time since.
WINDOW_S_MAX = 90.0
# Power between two readings is a straight line only over so long; two samples of 5 s may fail.
POWER_GAP_S_MAX = 15.0
# More than any card draws (an SXM module of 2026 is limited to 1,400 W).
POWER_W_MAX = 3000.0
# A card exceeds its limit for milliseconds; a counter's step may fall into the window before or after.
COUNTER_SLACK = 1.5
# Work that is shorter says little about the power of work.
_WORK_S_MIN = 0.5

_MJ_PER_J = 1000


class EnergyMethod(Enum):
    """How a figure came about, strongest first."""

    COUNTER = "counter"
    INTEGRATED_POWER = "integrated_power"
    ESTIMATE = "estimate"
    NONE = "none"


_RANK = {method: rank for rank, method in enumerate(EnergyMethod)}


def weaker(one: EnergyMethod, other: EnergyMethod) -> EnergyMethod:
    return max(one, other, key=_RANK.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSample:
    """Readings of one card at one moment; None for those that failed.

    Args:
        energy_mj: counter, since the driver was loaded.
        limit_w: power limit in force.
    """

    card: str
    energy_mj: float | None = None
    power_w: float | None = None
    limit_w: float | None = None


def card_sample(gpu: capability_pb2.Gpu) -> CardSample | None:
    """Return the readings of a card; None for one whose uuid is not known."""
    uuid = gpu.uuid
    if uuid.status != capability_pb2.READING_STATUS_OK:
        return None
    return CardSample(
        card=uuid.value,
        energy_mj=_value(gpu.energy_mj, math.inf),
        power_w=_value(gpu.power_draw_w, POWER_W_MAX),
        limit_w=_value(gpu.power_limit_w, POWER_W_MAX),
    )


def _value(reading: capability_pb2.NumberReading, most: float) -> float | None:
    # NVML hands out -1 and 2**32 - 1 for "not available" in places; NaN fails the comparison as well.
    known = reading.status == capability_pb2.READING_STATUS_OK and 0 <= reading.value < most
    return reading.value if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a card drew over a time: `work_mj` while tasks ran, `idle_mj` while none did.

    Args:
        work_s: how long tasks ran.
        task_s: how long each of them ran, added up.
    """

    work_mj: int
    idle_mj: int
    work_s: float
    task_s: float
    method: EnergyMethod


class CardEnergy:
    """The windows of one card.

    Args:
        rated_w: the owner's figure for the card under load.
    """

    def __init__(self, rated_w: float | None, now: float) -> None:
        self.opened_at = now
        # As last read, or as the mean of the newest window.
        self.watts: float | None = None
        # The owner may change it at any time; it holds for the window that is open then.
        self.rated_w = rated_w
        self._limit_w: float | None = None
        # The highest limit in the window: a cap may be lowered in the middle of it.
        self._limit_max_w = 0.0
        # Counter when the window was opened.
        self._counter_mj: float | None = None
        self._counter_trusted = True
        self._power_at: tuple[float, float] | None = None
        self._integral_j = 0.0
        # Whether the integral covers the window so far.
        self._integral_whole = False
        self._running = 0
        self._running_since = now
        self._work_s = 0.0
        self._task_s = 0.0
        # Mean power of the newest window in which tasks ran, and of the newest in which none did.
        self._work_w: tuple[float, EnergyMethod] | None = None
        self._idle_w: float | None = None

    def running_changed(self, running: int, now: float) -> None:
        """Note how many tasks run on the card from now on."""
        self._pass_time(now)
        self._running = running

    def sampled(self, sample: CardSample, now: float) -> Window | None:
        """Take readings; return the window that they close, if they do."""
        self._pass_time(now)
        if sample.power_w is not None:
            self._integrate(sample.power_w, now)
            self.watts = sample.power_w
        if sample.limit_w:
            self._limit_w = sample.limit_w
            self._limit_max_w = max(self._limit_max_w, sample.limit_w)
        if now == self.opened_at:
            self._open(sample.energy_mj, now)
            return None
        if now - self.opened_at < WINDOW_S_MIN:
            return None
        if sample.energy_mj is None and sample.power_w is None and now - self.opened_at <= WINDOW_S_MAX:
            # A later reading of the counter may still tell what was drawn meanwhile.
            return None
        return self._close(sample.energy_mj, now)

    def lapsed(self, now: float) -> Window:
        """Close a window for which no sample came."""
        self._pass_time(now)
        self.watts = None
        return self._close(None, now)

    @property
    def work_s(self) -> float:
        """How long tasks have run in the open window."""
        return self._work_s

    def extrapolate(self, now: float) -> tuple[int, EnergyMethod]:
        """Return what tasks have taken in the open window, millijoules, by the power of earlier work.

        A window longer than WINDOW_S_MAX is to be closed first (`lapsed`).
        """
        self._pass_time(now)
        if self._work_w is not None:
            watts, method = self._work_w
            return round(watts * self._work_s * _MJ_PER_J), method
        return self._estimate()

    def _pass_time(self, now: float) -> None:
        passed_s = now - self._running_since
        self._running_since = now
        if self._running:
            self._work_s += passed_s
            self._task_s += passed_s * self._running

    def _integrate(self, watts: float, now: float) -> None:
        if self._power_at is not None and now - self._power_at[0] <= POWER_GAP_S_MAX:
            self._integral_j += (self._power_at[1] + watts) / 2 * (now - self._power_at[0])
        else:
            # What was drawn since the last reading is not in the integral.
            self._integral_whole = False
        self._power_at = (now, watts)

    def _close(self, counter_mj: float | None, now: float) -> Window:
        duration_s = now - self.opened_at
        total_mj, method = self._measure(counter_mj, duration_s, now)
        if total_mj is None:
            work_mj, method = self._estimate() if duration_s <= WINDOW_S_MAX else (0, EnergyMethod.NONE)
            idle_mj = 0
        else:
            idle_mj = self._idle_part(total_mj, duration_s)
            work_mj = total_mj - idle_mj
            self._learn(work_mj, idle_mj, method, duration_s)
        window = Window(work_mj=work_mj, idle_mj=idle_mj, work_s=self._work_s, task_s=self._task_s, method=method)
        self._open(counter_mj, now)
        return window

    def _open(self, counter_mj: float | None, now: float) -> None:
        self.opened_at = now
        self._limit_max_w = self._limit_w or 0.0
        self._counter_mj = counter_mj
        self._integral_j = 0.0
        self._integral_whole = self._power_at is not None and self._power_at[0] == now
        self._work_s = self._task_s = 0.0

    def _measure(self, counter_mj: float | None, duration_s: float, now: float) -> tuple[int | None, EnergyMethod]:
        if counter_mj is not None and self._counter_mj is not None:
            delta_mj = counter_mj - self._counter_mj
            most_w = self._limit_max_w or POWER_W_MAX
            sound = 0 < delta_mj <= most_w * duration_s * _MJ_PER_J * COUNTER_SLACK
            trusted, self._counter_trusted = self._counter_trusted, sound
            if sound and trusted:
                return round(delta_mj), EnergyMethod.COUNTER
        if self._integral_whole and self._power_at is not None and self._power_at[0] == now:
            return round(self._integral_j * _MJ_PER_J), EnergyMethod.INTEGRATED_POWER
        return None, EnergyMethod.NONE

    def _estimate(self) -> tuple[int, EnergyMethod]:
        watts = self.rated_w or self._limit_w
        if watts is None:
            return 0, EnergyMethod.NONE
        return round(watts * self._work_s * _MJ_PER_J), EnergyMethod.ESTIMATE

    def _idle_part(self, total_mj: int, duration_s: float) -> int:
        if self._work_s == 0:
            return total_mj
        idle_s = duration_s - self._work_s
        # A card draws no less at work than idle, so a share by time is the most that idling can have been.
        by_time_mj = int(total_mj * idle_s / duration_s)
        if self._idle_w is None:
            return by_time_mj
        return min(by_time_mj, round(self._idle_w * idle_s * _MJ_PER_J))

    def _learn(self, work_mj: int, idle_mj: int, method: EnergyMethod, duration_s: float) -> None:
        self.watts = (work_mj + idle_mj) / duration_s / _MJ_PER_J
        if self._work_s >= _WORK_S_MIN:
            self._work_w = (work_mj / self._work_s / _MJ_PER_J, method)
        elif self._work_s == 0:
            self._idle_w = self.watts


def apportion(whole: int, weights: list[int], most: list[int]) -> list[int]:
    """Split a whole number by weights into whole numbers that add up to it, none above its `most`.

    Where the bounds leave no room, what is left is split by weights over those that reached theirs last.
    """
    parts = [0] * len(weights)
    unbound = list(range(len(weights)))
    while True:
        shares = _by_weight(whole - sum(parts), [weights[place] for place in unbound])
        over = [place for place, share in zip(unbound, shares, strict=True) if share > most[place]]
        if not over or len(over) == len(unbound):
            for place, share in zip(unbound, shares, strict=True):
                parts[place] = share
            return parts
        for place in over:
            parts[place] = most[place]
        unbound = [place for place in unbound if place not in over]


def _by_weight(whole: int, weights: list[int]) -> list[int]:
    """Split by weights, with the largest remainders rounded up; 0 for weight 0."""
    total = sum(weights)
    if total == 0:
        return [0] * len(weights)
    parts = [whole * weight // total for weight in weights]
    left = whole - sum(parts)
    # Stable, so that of equal remainders the first is rounded up.
    by_remainder = sorted(range(len(weights)), key=lambda place: whole * weights[place] % total, reverse=True)
    for place in by_remainder[:left]:
        parts[place] += 1
    return parts
