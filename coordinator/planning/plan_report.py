"""A plan for people (tables) and for programs (JSON)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from coordinator.planning import cost
from coordinator.planning.optimise import Chosen
from coordinator.planning.plan import Plan, cards_text
from coordinator.planning.plan_check import LoadCheck

FITTED_ON_ONE = (
    "First-token times of several RTX 4090 in one machine were not fitted (their rows contradict each other): "
    "measure before relying on those engines for interactive work."
)


def plan_to_json(plan: Plan, checks: Sequence[LoadCheck]) -> dict[str, Any]:
    """Return the plan and what the simulation says of it as JSON values. Million tokens count prompts and answers."""
    return {
        "prices": asdict(plan.prices),
        "headroom": plan.asked.headroom,
        "usd_per_hour": plan.solution.usd_per_hour,
        **_figures(plan, plan.solution.chosen),
        "engines": [_engine_row(plan, one) for one in plan.solution.chosen],
        "break_even": [asdict(one) for one in plan.break_even],
        "sensitivity": [asdict(one) for one in plan.sensitivity],
        "simulated": [_check_row(plan, one) for one in checks],
        "notes": notes(plan),
    }


def notes(plan: Plan) -> list[str]:
    """Return what must be known before the plan is relied on."""
    used = [one.option.configuration for one in plan.solution.chosen]
    return [FITTED_ON_ONE] if any(not of.first_token_fitted for of in used) else []


def print_plan(plan: Plan, checks: Sequence[LoadCheck], console: Console) -> None:
    """Print the fleet, whether it holds in simulation, break-even prices and sensitivity."""
    total = _figures(plan, plan.solution.chosen)
    fleet = Table()
    fleet.add_column("model", overflow="fold")
    fleet.add_column("class")
    fleet.add_column("engine", no_wrap=True)
    for heading in ("engines", "spare", "req/s", "max/engine", "$/h", "$/M tok", "kJ/M tok", "gCO2/M tok"):
        fleet.add_column(heading, justify="right")
    for one in plan.solution.chosen:
        row = _engine_row(plan, one)
        fleet.add_row(
            row["model"],
            row["class"],
            f"{row['cards']}x{row['card']}",
            str(row["engines"]),
            str(row["spare"]),
            f"{row['requests_per_second']:.2f}",
            f"{row['requests_per_second_per_engine']:.2f}",
            f"{row['usd_per_hour']:.2f}",
            *_figure_cells(row),
        )
    fleet.add_section()
    fleet.add_row("all", "", "", "", "", "", "", f"{plan.solution.usd_per_hour:.2f}", *_figure_cells(total))
    counts = cards_text(plan.solution.chosen)
    _say(console, f"Cheapest fleet: {counts}, ${plan.solution.usd_per_hour:.2f}/h")
    console.print(fleet)
    _say(console, "The same loads simulated, each on the engines that the plan has for it")
    console.print(_check_table(plan, checks))
    for line in _misses(plan, checks):
        _say(console, line)
    _say(console, "Break-even: the highest card price at which the cheapest fleet has such cards")
    console.print(_break_even_table(plan))
    _say(console, "$/h of the cheapest fleet if one input differs")
    console.print(_sensitivity_table(plan))
    _say(console, f"Prices as of {plan.prices.as_of}: {plan.prices.source}")
    for note in notes(plan):
        _say(console, note)


def _say(console: Console, line: str) -> None:
    """Print a line that a narrow terminal does not break up. Names come from files, so nothing in it is markup."""
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def _figure_cells(figures: dict[str, Any]) -> list[str]:
    values = (
        (figures["usd_per_million_tokens"], 1.0, "{:.3f}"),
        (figures["joules_per_million_tokens"], 1000.0, "{:.0f}"),
        (figures["grams_co2_per_million_tokens"], 1.0, "{:.1f}"),
    )
    # An engine that is there for another's sake serves nothing, so nothing can be divided by its tokens.
    return ["-" if value is None else form.format(value / unit) for value, unit, form in values]


def _engine_row(plan: Plan, one: Chosen) -> dict[str, Any]:
    configuration = one.option.configuration
    demand = plan.asked.demands[one.option.demand]
    return {
        "model": configuration.model,
        "class": demand.service_class,
        "card": configuration.card,
        "cards": configuration.cards,
        "engines": one.engines,
        "spare": one.spare,
        "requests_per_second": one.requests_per_second,
        "requests_per_second_per_engine": one.option.requests_per_second,
        "availability": one.option.availability,
        "usd_per_hour": _usd_per_hour(one),
        **_figures(plan, [one]),
    }


def _figures(plan: Plan, chosen: Sequence[Chosen]) -> dict[str, Any]:
    tokens_per_second = sum(_tokens_per_second(plan, one) for one in chosen)
    if tokens_per_second <= 0.0:
        nothing = ("usd_per_million_tokens", "joules_per_million_tokens", "grams_co2_per_million_tokens")
        return dict.fromkeys(nothing)
    joules = cost.joules_per_million_tokens(sum(_watts(plan, one) for one in chosen), tokens_per_second)
    return {
        "usd_per_million_tokens": cost.usd_per_million_tokens(
            sum(_usd_per_hour(one) for one in chosen), tokens_per_second
        ),
        "joules_per_million_tokens": joules,
        "grams_co2_per_million_tokens": cost.grams(joules, plan.prices.carbon_grams_per_kwh),
    }


def _busy_engines(one: Chosen) -> float:
    return one.requests_per_second / one.option.requests_per_second


def _tokens_per_second(plan: Plan, one: Chosen) -> float:
    demand = plan.asked.demands[one.option.demand]
    return one.requests_per_second * (demand.prompt_tokens + demand.answer_tokens)


def _usd_per_hour(one: Chosen) -> float:
    return one.engines * one.option.engine_usd_per_hour + _busy_engines(one) * one.option.busy_usd_per_hour


def _watts(plan: Plan, one: Chosen) -> float:
    card = plan.prices.cards[one.option.configuration.card]
    idle = one.engines * card.idle_watts
    return one.option.configuration.cards * (idle + _busy_engines(one) * (card.load_watts - card.idle_watts))


def _check_row(plan: Plan, check: LoadCheck) -> dict[str, Any]:
    demand = plan.asked.demands[check.demand]
    chosen = [one for one in plan.solution.chosen if one.option.demand == check.demand]
    return {
        "model": demand.model,
        "class": demand.service_class,
        "requests": check.requests,
        "seconds": check.seconds,
        "in_target": check.kept,
        "quantile": check.asked,
        "holds": check.holds,
        "usd_per_million_tokens": check.usd_per_million_tokens,
        "planned_usd_per_million_tokens": _figures(plan, chosen)["usd_per_million_tokens"],
    }


def _check_table(plan: Plan, checks: Sequence[LoadCheck]) -> Table:
    table = Table()
    table.add_column("model", overflow="fold")
    table.add_column("class")
    for heading in ("requests", "in target", "asked", "$/M tok", "planned"):
        table.add_column(heading, justify="right")
    for check in checks:
        row = _check_row(plan, check)
        costs = (row["usd_per_million_tokens"], row["planned_usd_per_million_tokens"])
        table.add_row(
            row["model"],
            row["class"],
            str(row["requests"]),
            f"{row['in_target']:.2%}",
            f"{row['quantile']:.1%}",
            *("-" if usd is None else f"{usd:.3f}" for usd in costs),
        )
    return table


def _misses(plan: Plan, checks: Sequence[LoadCheck]) -> list[str]:
    """Say of which loads the plan does not hold."""
    return [
        f"MISSED in simulation: {plan.asked.demands[one.demand]}: {one.kept:.2%} of the requests in target, "
        f"{one.asked:.1%} asked; plan with more headroom"
        for one in checks
        if not one.holds
    ]


def _break_even_table(plan: Plan) -> Table:
    table = Table()
    table.add_column("card", no_wrap=True)
    table.add_column("$/h now", justify="right")
    table.add_column("$/h at most", justify="right")
    for one in plan.break_even:
        if one.usd_per_hour is None:
            most = "not even free"
        else:
            most = f"over {one.usd_per_hour:.2f}" if one.unlimited else f"{one.usd_per_hour:.2f}"
        table.add_row(one.card, f"{plan.prices.cards[one.card].usd_per_hour:.2f}", most)
    return table


def _sensitivity_table(plan: Plan) -> Table:
    table = Table()
    table.add_column("input", no_wrap=True)
    for heading in ("-25 %", "as given", "+25 %"):
        table.add_column(heading, justify="right")
    for one in plan.sensitivity:
        low, high = (
            "no plan" if usd is None else f"{usd:.2f}" for usd in (one.low_usd_per_hour, one.high_usd_per_hour)
        )
        table.add_row(one.what, low, f"{plan.solution.usd_per_hour:.2f}", high)
    return table
