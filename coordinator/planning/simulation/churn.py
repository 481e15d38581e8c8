"""When owners come back and for how long, when nodes vanish, and how far away they are: all of it drawn."""

import math
from random import Random
from typing import Final

from coordinator.planning.simulation.capacity import lent_share
from coordinator.planning.simulation.scenario import HOURS_A_DAY, Network, Owners

MS_PER_HOUR: Final = 3_600_000.0


class Churn:
    """The draws of one run.

    Args:
        start_hour: of the day, at time 0.
    """

    def __init__(self, seed: int, start_hour: int) -> None:
        self._random = Random(f"{seed}/owners")
        self._start_hour = start_hour

    def time_zone(self, owners: Owners) -> int:
        return self._random.choice(owners.time_zones)

    def lent_ms(self, owners: Owners, at_ms: float, time_zone: int) -> float:
        """Return how long a node is lent from now on: exponential, at the rate of each hour it lives through."""
        per_hour = owners.losses_per_hour + owners.crashes_per_hour
        day = sum(owners.rhythm)
        if per_hour == 0.0 or day == 0.0:
            return math.inf
        hazard = self._random.expovariate(1.0)
        if len(set(owners.rhythm)) == 1:
            return hazard / per_hour * MS_PER_HOUR
        hour = at_ms / MS_PER_HOUR
        began = hour
        while True:
            local = math.floor(hour) + self._start_hour + time_zone
            rate = per_hour * owners.rhythm[local % HOURS_A_DAY] * HOURS_A_DAY / day
            end = math.floor(hour) + 1.0
            if hazard <= rate * (end - hour):
                return (hour - began + hazard / rate) * MS_PER_HOUR
            hazard -= rate * (end - hour)
            hour = end

    def is_crash(self, owners: Owners) -> bool:
        """Return whether a loss is a node that vanishes, and not an owner who comes back."""
        per_hour = owners.losses_per_hour + owners.crashes_per_hour
        return self._random.random() * per_hour < owners.crashes_per_hour

    def away_ms(self, owners: Owners) -> float:
        return 60_000.0 * self._random.lognormvariate(math.log(owners.away_median_min), owners.away_spread)

    def away_at_start_ms(self, owners: Owners) -> float:
        """Return after which time a node is lent for the first time, in a fleet that has been going for long; mostly 0.

        Whoever is away at some moment is away for longer than the others: times are drawn in proportion to their
        length, which for a log-normal moves its logarithm by the spread squared. Some part of it is over.
        """
        if self._random.random() < lent_share(owners):
            return 0.0
        median_min = owners.away_median_min * math.exp(owners.away_spread**2)
        away_ms = 60_000.0 * self._random.lognormvariate(math.log(median_min), owners.away_spread)
        return self._random.random() * (away_ms + 1000.0 * owners.reload_s)

    def silence_s(self, heartbeat_s: float, silence_s: float) -> float:
        """Return how long after a node vanished it is noticed: counted from its last heartbeat."""
        return silence_s - heartbeat_s * self._random.random()


def one_way_ms(network: Network, random: Random) -> float:
    """Return how long a message takes to a node, or from it."""
    delay_ms = network.one_way_ms * random.lognormvariate(0.0, network.spread)
    return delay_ms * network.slow_factor if random.random() < network.slow_share else delay_ms
