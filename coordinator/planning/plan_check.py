"""Whether a plan holds: each load simulated on the engines that the plan has for it, with the real scheduler.

The plan knows an engine's queue and how many engines are there; the simulation
also has routing, the network, failovers, and machines that are away when the
requests come. Drawn from one seed, so that the same plan always gives the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.planning import cost
from coordinator.planning.benchmark import ANSWER_TOKENS_MAX, PROMPT_TOKENS_MAX
from coordinator.planning.curves import EngineCurve
from coordinator.planning.optimise import Chosen
from coordinator.planning.plan import Plan, Progress, churn_of
from coordinator.planning.plan_input import Demand
from coordinator.planning.rows import Configuration
from coordinator.planning.simulation.arrivals import poisson
from coordinator.planning.simulation.figures import in_target
from coordinator.planning.simulation.outcome import CLASSES, Columns
from coordinator.planning.simulation.run import Simulation
from coordinator.planning.simulation.scenario import Fleet, Load, Owners, Scenario, Target
from coordinator.planning.traffic import longest
from inference.task import ServiceClass

SEED: Final = 1
# Of each load: a share of 0.99 is then known to 0.2 %, and three loads take some ten seconds.
REQUESTS: Final = 3_000
# A large load gets more, so that its engines have been full for a while, within bounds.
SECONDS_MIN: Final = 60.0
REQUESTS_MAX: Final = 20_000
# Of the run: engines that are still empty flatter.
WARM_UP_SHARE: Final = 0.1
# The simulation takes the logarithm of the time away.
_AWAY_MINUTES_MIN: Final = 1e-3


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """What became of one load in the simulation.

    Args:
        demand: its place in the list of loads.
        requests: counted, those after the warm-up; they came within `seconds`.
        kept: the share of them that kept the target which the fewest kept, unanswered ones included.
        asked: the share that should.
        usd_per_million_tokens: all engines for all of the run, over the tokens of answered requests; None without any.
    """

    demand: int
    requests: int
    seconds: float
    kept: float
    asked: float
    usd_per_million_tokens: float | None

    @property
    def holds(self) -> bool:
        return self.kept >= self.asked


def check_plan(
    plan: Plan, curves: Mapping[Configuration, EngineCurve], progress: Progress, requests: int = REQUESTS
) -> tuple[LoadCheck, ...]:
    """Simulate each load of a plan; return what became of it. Args: `requests`: of each load, about."""
    checks = []
    for place, demand in enumerate(plan.asked.demands):
        chosen = [one for one in plan.solution.chosen if one.option.demand == place]
        scenario = _scenario(plan, demand, chosen, requests)
        arrivals = poisson(scenario.load, [demand.requests_per_second], scenario.seed)
        simulation = Simulation(scenario, [curves[one.option.configuration] for one in chosen], arrivals)
        said = f"simulating {demand}"
        simulation.run(lambda share, tasks, said=said: progress(f"{said}: {share:.0%}, {tasks:,} requests"))  # type: ignore[misc]
        checks.append(_check(place, demand, chosen, simulation))
    return tuple(checks)


def _scenario(plan: Plan, demand: Demand, chosen: Sequence[Chosen], requests: int) -> Scenario:
    rate = demand.requests_per_second
    seconds = max(requests, min(SECONDS_MIN * rate, REQUESTS_MAX)) / rate
    service_class = ServiceClass(demand.service_class)
    targets = demand.targets
    return Scenario(
        hours=seconds / 3600.0,
        fleet=tuple(_fleet(plan, one) for one in chosen),
        load=(
            Load(
                model=demand.model,
                service_class=service_class,
                requests_per_second=rate,
                prompt_tokens_mean=demand.prompt_tokens,
                answer_tokens_mean=demand.answer_tokens,
                prompt_tokens_max=longest(demand.prompt_tokens, PROMPT_TOKENS_MAX),
                answer_tokens_max=longest(demand.answer_tokens, ANSWER_TOKENS_MAX),
            ),
        ),
        seed=SEED,
        warm_up_s=WARM_UP_SHARE * seconds,
        targets={service_class: Target(first_token_ms=targets.first_token_ms, token_ms=targets.token_ms)},
    )


def _fleet(plan: Plan, one: Chosen) -> Fleet:
    configuration = one.option.configuration
    card = plan.prices.cards[configuration.card]
    churn = churn_of(plan.asked, plan.prices, configuration.card)
    owners = Owners()
    if churn is not None:
        owners = Owners(
            losses_per_hour=churn.losses_per_hour,
            away_median_min=max(churn.away_median_minutes, _AWAY_MINUTES_MIN),
            away_spread=churn.away_spread,
            reload_s=churn.reload_s,
        )
    return Fleet(
        model=configuration.model,
        card=configuration.card,
        cards=configuration.cards,
        nodes=one.engines,
        usd_per_hour=one.option.engine_usd_per_hour,
        idle_w=configuration.cards * card.idle_watts,
        load_w=configuration.cards * card.load_watts,
        owners=owners,
    )


def _check(place: int, demand: Demand, chosen: Sequence[Chosen], simulation: Simulation) -> LoadCheck:
    columns = simulation.outcome.table()
    counted = columns.submitted_ms >= 1000.0 * simulation.scenario.warm_up_s
    hours = simulation.scenario.hours
    usd = 0.0
    for one, tally in zip(chosen, simulation.tallies, strict=True):
        # Time away is paid for, as planned; power follows the time that engines computed.
        usd += one.engines * one.option.engine_usd_per_hour * hours
        usd += one.option.busy_usd_per_hour * tally.busy_ms / 3.6e6
    tokens = int((columns.prompt_tokens + columns.answer_tokens)[columns.answered].sum())
    return LoadCheck(
        demand=place,
        requests=int(counted.sum()),
        seconds=3600.0 * hours - simulation.scenario.warm_up_s,
        kept=_kept(columns, counted, demand),
        asked=demand.targets.quantile,
        usd_per_million_tokens=cost.usd_per_million_tokens(usd / hours, tokens / (3600.0 * hours)) if tokens else None,
    )


def _kept(columns: Columns, counted: NDArray[np.bool_], demand: Demand) -> float:
    """Return the share that kept the target which the fewest kept; where none is set, the share answered."""
    targets = demand.targets
    each = [Target(first_token_ms=targets.first_token_ms), Target(token_ms=targets.token_ms)]
    return min(float(in_target(columns, [one] * len(CLASSES))[counted].mean()) for one in each)
