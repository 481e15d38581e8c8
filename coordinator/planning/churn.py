"""How much of a fleet is there, when machines are lost and come back. Pure.

A machine is there for 1/rate on the average, then away, then loads its model
again: an alternating renewal process, whose availability is the mean time up
over the mean of the whole cycle. Machines fail independently of each other; the
number that is there is then binomial.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """How often a machine is lost, and for how long.

    Args:
        losses_per_hour: of one machine while it is there. 1.1 per hour over 100 machines was published for a
            consumer fleet, that is 0.011.
        away_median_minutes: of the log-normal time away.
        away_spread: its logarithm's standard deviation.
        reload_s: from coming back to serving.
    """

    losses_per_hour: float = 0.011
    away_median_minutes: float = 20.0
    away_spread: float = 1.0
    reload_s: float = 90.0

    @property
    def availability(self) -> float:
        """The share of time that a machine serves. The mean of a log-normal time is median * exp(spread^2 / 2)."""
        away_hours = self.away_median_minutes / 60.0 * math.exp(self.away_spread**2 / 2.0)
        return 1.0 / (1.0 + self.losses_per_hour * (away_hours + self.reload_s / 3600.0))


def covered(spare: int, availability: float, probability: float, most: int) -> int:
    """Return of how many machines so many spare ones make up the losses: the largest m, up to `most`.

    Of m + spare machines, each there with that availability, at least m are there with that probability.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if at_least(middle, middle + spare, availability) >= probability:
            low = middle
        else:
            high = middle - 1
    return low


def at_least(count: int, machines: int, availability: float) -> float:
    """Return the probability that so many of the machines are there."""
    lost = 1.0 - availability
    if lost == 0.0 or count == 0:
        return 1.0
    # Logarithms, as the binomial coefficients of thousands of machines are beyond a float.
    return math.fsum(
        math.exp(
            math.lgamma(machines + 1)
            - math.lgamma(gone + 1)
            - math.lgamma(machines - gone + 1)
            + gone * math.log(lost)
            + (machines - gone) * math.log(availability)
        )
        for gone in range(machines - count + 1)
    )
