"""A plan as charts: break-even prices, and what its cost depends on."""

from pathlib import Path
from typing import Final

from coordinator.planning.charts import Axis, Bars, draw_bars
from coordinator.planning.plan import Plan

# Bars stand close together: what the names of inputs have in common goes without saying.
_PRICE_OF: Final = "price of "


def write_plan_plots(plan: Plan, directory: Path) -> list[Path]:
    """Write both charts; return their files.

    Raises:
        OSError: the directory cannot be made or written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, svg in (("break_even", _break_even(plan)), ("sensitivity", _sensitivity(plan))):
        path = directory / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        written.append(path)
    return written


def _break_even(plan: Plan) -> str:
    cards = [
        f"{one.card} (or more)"
        if one.unlimited
        else one.card
        if one.usd_per_hour is not None
        else f"{one.card} (never)"
        for one in plan.break_even
    ]
    now = [plan.prices.cards[one.card].usd_per_hour for one in plan.break_even]
    most = [one.usd_per_hour or 0.0 for one in plan.break_even]
    return draw_bars(
        "Highest card price at which the cheapest fleet has such cards",
        # Where only one kind serves a load its price has no end, and would leave nothing to see of the others.
        Axis(label="$/h of one card", log=True),
        cards,
        [Bars("price now", now), Bars("break-even", most)],
    )


def _sensitivity(plan: Plan) -> str:
    groups = [one.what.removeprefix(_PRICE_OF) for one in plan.sensitivity]
    now = plan.solution.usd_per_hour
    # No bar where there is no plan: it has no cost.
    return draw_bars(
        "Cost of the cheapest fleet if one price, the load or the losses differ",
        Axis(label="$/h"),
        groups,
        [
            Bars("a quarter less", [one.low_usd_per_hour or 0.0 for one in plan.sensitivity]),
            Bars("as given", [now] * len(groups)),
            Bars("a quarter more", [one.high_usd_per_hour or 0.0 for one in plan.sensitivity]),
        ],
    )
