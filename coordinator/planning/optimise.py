"""The cheapest number of engines per configuration and demand: a mixed integer program, solved by HiGHS. Pure.

For each way to serve a demand (an option) the program chooses

    m  engines that are counted on (integer)       y_k  the k-th spare engine is there (binary)
    r  requests per second that they get (real)

and minimises  sum of  engine price * (m + sum y)  +  busy price * r / capacity,  so that

    sum of r over a demand's options = its load
    headroom * r <= capacity * m
    m <= covered(0) + sum_k (covered(k) - covered(k - 1)) * y_k,  y_k >= y_(k+1)    (churn.py)
    sum of cards * (m + sum y) over the options on a card kind <= its cap

Where work can wait, capacity is multiplied by the availability and nothing is spare.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.planning.churn import covered
from coordinator.planning.rows import Configuration

# HiGHS stops when no better plan by more than this share can exist. Its default, 1e-4, would blur break-even prices.
GAP: Final = 1e-6
SOLVE_S_MAX: Final = 60.0
# Of scipy.optimize.milp's statuses: solved, and proved that nothing satisfies the constraints.
_SOLVED: Final = 0
_INFEASIBLE: Final = 2


class SolverMissing(Exception):
    """scipy is not installed."""


class SolverFailed(Exception):
    """HiGHS gave up; the message is its own."""


class NoPlan(Exception):
    """No fleet serves the load within targets and caps; the message says which demand, why, and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One configuration for one demand.

    Args:
        demand: its place in the list of loads.
        requests_per_second: that one engine serves within the targets while it is there.
        availability: the share of time that it is there.
        present_probability: that as many as are counted on are there at any time; 0: the mean is enough.
        engine_usd_per_hour: of an engine with nothing to do.
        busy_usd_per_hour: added at its capacity.
    """

    demand: int
    configuration: Configuration
    requests_per_second: float
    availability: float
    present_probability: float
    engine_usd_per_hour: float
    busy_usd_per_hour: float

    @property
    def waits(self) -> bool:
        return self.present_probability == 0.0

    @property
    def planned_requests_per_second(self) -> float:
        """What an engine that is counted on serves."""
        return self.requests_per_second * (self.availability if self.waits else 1.0)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What of an option a plan takes: engines in all, those of them that are spare, and what they serve."""

    option: Option
    engines: int
    spare: int
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The cheapest plan."""

    usd_per_hour: float
    chosen: tuple[Chosen, ...]


def cheapest(
    options: Sequence[Option], loads: Sequence[float], headroom: float, cards_max: Mapping[str, int]
) -> Solution | None:
    """Return the cheapest plan, or None where none satisfies the constraints.

    Args:
        loads: requests per second of each demand.
        cards_max: by card kind; those that are not named are not limited.

    Raises:
        SolverMissing: scipy is not installed.
        SolverFailed: it found no answer within SOLVE_S_MAX.
    """
    try:
        from scipy.optimize import milp
    except ImportError as error:
        raise SolverMissing(
            "planning needs scipy, which is not installed; install it with: pip install 'slackwater-network[planning]'"
        ) from error
    program = _Program(options, loads, headroom, cards_max)
    result = milp(
        program.prices,
        integrality=program.integrality,
        bounds=(0.0, program.upper),
        constraints=(program.rows, program.row_least, program.row_most),
        options={"mip_rel_gap": GAP, "time_limit": SOLVE_S_MAX},
    )
    if result.status == _INFEASIBLE:
        return None
    if result.status != _SOLVED:
        raise SolverFailed(f"the solver found no plan: {result.message}")
    return Solution(float(result.fun), program.chosen([float(value) for value in result.x]))


class _Program:
    """The program in the solver's form: columns are variables, rows are constraints with a least and a most."""

    def __init__(
        self, options: Sequence[Option], loads: Sequence[float], headroom: float, cards_max: Mapping[str, int]
    ) -> None:
        self.prices: list[float] = []
        self.integrality: list[int] = []
        self.upper: list[float] = []
        self._options = options
        self._sparse: list[tuple[dict[int, float], float, float]] = []
        # Of each option: its columns m, r, and those of its spares.
        self._columns: list[tuple[int, int, list[int]]] = []
        for option in options:
            self._add_option(option, loads[option.demand], headroom)
        for demand, load in enumerate(loads):
            served = {r: 1.0 for option, (_, r, _) in self._each() if option.demand == demand}
            self._sparse.append((served, load, load))
        for card, most in cards_max.items():
            cards = {
                column: float(option.configuration.cards)
                for option, (m, _, spares) in self._each()
                if option.configuration.card == card
                for column in (m, *spares)
            }
            self._sparse.append((cards, 0.0, float(most)))

    @property
    def rows(self) -> list[list[float]]:
        return [[row.get(column, 0.0) for column in range(len(self.prices))] for row, _, _ in self._sparse]

    @property
    def row_least(self) -> list[float]:
        return [least for _, least, _ in self._sparse]

    @property
    def row_most(self) -> list[float]:
        return [most for _, _, most in self._sparse]

    def chosen(self, values: Sequence[float]) -> tuple[Chosen, ...]:
        found = []
        for option, (m, r, spares) in self._each():
            spare = sum(round(values[column]) for column in spares)
            engines = round(values[m]) + spare
            if engines:
                found.append(Chosen(option, engines, spare, max(0.0, values[r])))
        return tuple(found)

    def _each(self) -> list[tuple[Option, tuple[int, int, list[int]]]]:
        return list(zip(self._options, self._columns, strict=False))

    def _column(self, price: float, upper: float, integer: bool) -> int:
        self.prices.append(price)
        self.upper.append(upper)
        self.integrality.append(int(integer))
        return len(self.prices) - 1

    def _add_option(self, option: Option, load: float, headroom: float) -> None:
        most = math.ceil(headroom * load / option.planned_requests_per_second)
        m = self._column(option.engine_usd_per_hour, float(most), True)
        r = self._column(option.busy_usd_per_hour / option.requests_per_second, load, False)
        spares: list[int] = []
        self._sparse.append(({r: headroom, m: -option.planned_requests_per_second}, -math.inf, 0.0))
        if not option.waits:
            row = {m: 1.0}
            without = reached = covered(0, option.availability, option.present_probability, most)
            while reached < most:
                now = covered(len(spares) + 1, option.availability, option.present_probability, most)
                spares.append(self._column(option.engine_usd_per_hour, 1.0, True))
                row[spares[-1]] = float(reached - now)
                reached = now
            self._sparse.append((row, -math.inf, float(without)))
            for earlier, later in itertools.pairwise(spares):
                self._sparse.append(({earlier: 1.0, later: -1.0}, 0.0, 1.0))
        self._columns.append((m, r, spares))
