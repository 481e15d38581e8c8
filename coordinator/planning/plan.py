"""A plan: the cheapest fleet for a load, the card prices at which it would change, and what its cost depends on.

The break-even price of a card kind is the highest price at which the cheapest
plan still has such cards, all else equal. It is found by bisection: the number
of cards of a kind in the cheapest plan never rises with their price, as the
least cost is a minimum of functions that are linear in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.planning import cost
from coordinator.planning.capacity import largest_rate
from coordinator.planning.catalog import Prices
from coordinator.planning.churn import Churn
from coordinator.planning.curves import EngineCurve
from coordinator.planning.optimise import Chosen, NoPlan, Option, Solution, cheapest
from coordinator.planning.plan_input import CLASSES, PlanInput
from coordinator.planning.rows import Configuration
from coordinator.planning.traffic import poisson_traffic

Capacities = Mapping[tuple[int, Configuration], float]
Progress = Callable[[str], None]

SENSITIVITY_SHARE: Final = 0.25
# A break-even price is looked for from free to so many times the price, and found to a hundredth.
BREAK_EVEN_TIMES_MAX: Final = 64.0
BREAK_EVEN_PRECISION: Final = 0.01
# A kind whose price is 0 has no multiple; the search then ends at so many dollars an hour.
BREAK_EVEN_USD_MAX_OF_FREE: Final = 16.0


@dataclass(frozen=True, slots=True)
class BreakEven:
    """At most this price a card kind is part of the cheapest plan.

    Args:
        usd_per_hour: None where it is not even if it costs nothing.
        unlimited: the plan still has it at `usd_per_hour`, the end of the search.
    """

    card: str
    usd_per_hour: float | None
    unlimited: bool


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """$/h of the cheapest plan when one input is a quarter lower, and higher; None where there is no plan then."""

    what: str
    low_usd_per_hour: float | None
    high_usd_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a question, with the question."""

    asked: PlanInput
    prices: Prices
    solution: Solution
    break_even: tuple[BreakEven, ...]
    sensitivity: tuple[Sensitivity, ...]


def make_plan(
    asked: PlanInput, prices: Prices, curves: Mapping[Configuration, EngineCurve], progress: Progress
) -> Plan:
    """Return the cheapest plan and what it depends on.

    Args:
        progress: told what is being done.

    Raises:
        NoPlan: nothing serves the load.
        SolverMissing, SolverFailed: as `cheapest`.
    """
    capacities = find_capacities(asked, prices, curves, progress)
    progress("the cheapest plan")
    solution = solve(asked, prices, capacities)
    if solution is None:
        raise NoPlan(_why_capped(asked, prices, capacities))
    break_even = []
    for card in prices.cards:
        progress(f"break-even price of {card}")
        break_even.append(find_break_even(asked, prices, capacities, card))
    progress("sensitivity")
    return Plan(asked, prices, solution, tuple(break_even), find_sensitivity(asked, prices, capacities))


def find_capacities(
    asked: PlanInput, prices: Prices, curves: Mapping[Configuration, EngineCurve], progress: Progress
) -> dict[tuple[int, Configuration], float]:
    """Return requests per second by demand and configuration, of those that serve any.

    Raises:
        NoPlan: a demand that none can serve within its targets.
    """
    capacities: dict[tuple[int, Configuration], float] = {}
    for place, demand in enumerate(asked.demands):
        traffic = poisson_traffic(demand.prompt_tokens, demand.answer_tokens)
        priced = sorted(of for of in curves if of.model == demand.model and of.card in prices.cards)
        tried = [of for of in priced if demand.takes(of)]
        for configuration in tried:
            progress(f"capacity for {demand.service_class}: {configuration}")
            rate = largest_rate(curves[configuration], traffic, demand.targets)
            if rate > 0.0:
                capacities[place, configuration] = rate
        if not any(of == place for of, _ in capacities):
            kept_out = ", ".join(f"{of.cards}x{of.card}" for of in priced if of not in tried)
            raise NoPlan(
                f"{demand}: none of {', '.join(f'{of.cards}x{of.card}' for of in tried) or 'the priced cards'} meets "
                f"first_token_ms and token_ms (quantile {demand.targets.quantile:g}) at any load; loosen them"
                + (f", or let {kept_out} serve it with unfitted_first_token = true" if kept_out else "")
            )
    return capacities


def churn_of(asked: PlanInput, prices: Prices, card: str) -> Churn | None:
    """Return the churn of a card kind; None for those that stay."""
    if card in asked.churn:
        return asked.churn[card]
    return Churn() if prices.cards[card].consumer else None


def make_options(asked: PlanInput, prices: Prices, capacities: Capacities) -> list[Option]:
    """Return each way to serve each demand, priced."""
    options = []
    for (place, configuration), rate in capacities.items():
        card = prices.cards[configuration.card]
        churn = churn_of(asked, prices, configuration.card)

        def power_usd(watts: float, electricity_included: bool = card.electricity_included) -> float:
            electricity = 0.0 if electricity_included else prices.electricity_usd_per_kwh
            return cost.power_usd_per_hour(watts, electricity, prices.carbon_grams_per_kwh, prices.carbon_usd_per_tonne)

        options.append(
            Option(
                demand=place,
                configuration=configuration,
                requests_per_second=rate,
                availability=1.0 if churn is None else churn.availability,
                present_probability=CLASSES[asked.demands[place].service_class].present_probability,
                engine_usd_per_hour=configuration.cards * (card.usd_per_hour + power_usd(card.idle_watts)),
                busy_usd_per_hour=configuration.cards * power_usd(card.load_watts - card.idle_watts),
            )
        )
    return options


def solve(asked: PlanInput, prices: Prices, capacities: Capacities) -> Solution | None:
    """Return the cheapest plan, or None where the caps allow none."""
    loads = [demand.requests_per_second for demand in asked.demands]
    return cheapest(make_options(asked, prices, capacities), loads, asked.headroom, asked.cards_max)


def find_break_even(asked: PlanInput, prices: Prices, capacities: Capacities, card: str) -> BreakEven:
    """Return the highest price of a card kind at which the cheapest plan has such cards."""

    def used(usd_per_hour: float) -> bool:
        solution = solve(asked, _with_card_price(prices, card, usd_per_hour), capacities)
        return solution is not None and any(one.option.configuration.card == card for one in solution.chosen)

    if not used(0.0):
        return BreakEven(card, None, False)
    now = prices.cards[card].usd_per_hour
    low, high = 0.0, now * BREAK_EVEN_TIMES_MAX or BREAK_EVEN_USD_MAX_OF_FREE
    if used(high):
        return BreakEven(card, high, True)
    # Most are within a factor of four, so look there first.
    if now and not used(4.0 * now):
        high = 4.0 * now
    while high - low > BREAK_EVEN_PRECISION * high:
        middle = (low + high) / 2.0
        if used(middle):
            low = middle
        else:
            high = middle
    return BreakEven(card, low, False)


def find_sensitivity(asked: PlanInput, prices: Prices, capacities: Capacities) -> tuple[Sensitivity, ...]:
    """Return what the cheapest plan costs when each input is a quarter lower and higher; the plan may change."""

    def usd(changed: PlanInput, priced: Prices) -> float | None:
        solution = solve(changed, priced, capacities)
        return None if solution is None else solution.usd_per_hour

    factors = (1.0 - SENSITIVITY_SHARE, 1.0 + SENSITIVITY_SHARE)
    found = []
    for card, of in prices.cards.items():
        costs = [usd(asked, _with_card_price(prices, card, of.usd_per_hour * factor)) for factor in factors]
        found.append(Sensitivity(f"price of {card}", *costs))
    electricity = [factor * prices.electricity_usd_per_kwh for factor in factors]
    costs = [usd(asked, replace(prices, electricity_usd_per_kwh=price)) for price in electricity]
    found.append(Sensitivity("price of electricity", *costs))
    carbon = [factor * prices.carbon_usd_per_tonne for factor in factors]
    costs = [usd(asked, replace(prices, carbon_usd_per_tonne=price)) for price in carbon]
    found.append(Sensitivity("price of carbon", *costs))
    found.append(Sensitivity("load", *(usd(_with_load(asked, factor), prices) for factor in factors)))
    found.append(Sensitivity("losses", *(usd(_with_losses(asked, prices, factor), prices) for factor in factors)))
    return tuple(found)


def _with_card_price(prices: Prices, card: str, usd_per_hour: float) -> Prices:
    return replace(prices, cards={**prices.cards, card: replace(prices.cards[card], usd_per_hour=usd_per_hour)})


def _with_load(asked: PlanInput, factor: float) -> PlanInput:
    demands = [replace(one, requests_per_second=factor * one.requests_per_second) for one in asked.demands]
    return replace(asked, demands=tuple(demands))


def _with_losses(asked: PlanInput, prices: Prices, factor: float) -> PlanInput:
    churn = {card: of for card in prices.cards if (of := churn_of(asked, prices, card)) is not None}
    changed = {card: replace(of, losses_per_hour=factor * of.losses_per_hour) for card, of in churn.items()}
    return replace(asked, churn=changed)


def _why_capped(asked: PlanInput, prices: Prices, capacities: Capacities) -> str:
    """Say which demand the caps leave unserved, and how many cards would do. Without caps there is always a plan."""
    free = solve(replace(asked, cards_max={}), prices, capacities)
    need = "" if free is None else f"; without caps the cheapest plan has {cards_text(free.chosen)}"
    caps = ", ".join(f"{card} {most}" for card, most in asked.cards_max.items())
    for place, demand in enumerate(asked.demands):
        alone = {key: rate for key, rate in capacities.items() if key[0] == place}
        only = replace(asked, demands=(demand,))
        if solve(only, prices, {(0, of): rate for (_, of), rate in alone.items()}) is None:
            rate = f"{demand.requests_per_second:g} requests/s"
            return f"{demand}: {rate} need more cards than [cards_max] allows ({caps}){need}"
    names = "; ".join(str(demand) for demand in asked.demands)
    return f"the loads together ({names}) need more cards than [cards_max] allows ({caps}){need}"


def cards_text(chosen: Sequence[Chosen]) -> str:
    """Return how many cards of each kind, in words."""
    counts: dict[str, int] = {}
    for one in chosen:
        of = one.option.configuration
        counts[of.card] = counts.get(of.card, 0) + one.engines * of.cards
    return " and ".join(f"{count} {card}" for card, count in sorted(counts.items()))
