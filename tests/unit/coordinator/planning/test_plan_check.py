"""Whether the simulation of a plan tells plans that hold from those that do not."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from coordinator.planning.catalog import read_prices
from coordinator.planning.churn import Churn
from coordinator.planning.cost import usd_per_million_tokens
from coordinator.planning.curve_file import read_curves
from coordinator.planning.plan import Plan, make_plan
from coordinator.planning.plan_check import LoadCheck, check_plan
from coordinator.planning.plan_input import CLASSES, Demand, PlanInput
from coordinator.planning.plan_plots import write_plan_plots
from coordinator.planning.plan_report import plan_to_json, print_plan

CURVES = read_curves()
QWEN_7B = "DeepSeek-R1-Distill-Qwen-7B"
# Enough to tell all from half.
REQUESTS = 600


def silent(_: str) -> None:
    """Progress that nobody watches."""


def demand(service_class: str, rate: float) -> Demand:
    targets = CLASSES[service_class].targets
    return Demand(
        model=QWEN_7B,
        service_class=service_class,
        requests_per_second=rate,
        prompt_tokens=208.0,
        answer_tokens=208.0,
        targets=targets,
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    asked = PlanInput(demands=(demand("interactive", 10.0), demand("batch", 6.0)))
    prices = read_prices()
    # So dear that its part of the cost is seen.
    cards = {card: replace(of, electricity_included=False) for card, of in prices.cards.items()}
    return make_plan(asked, replace(prices, cards=cards, electricity_usd_per_kwh=1.0), CURVES, silent)


def check(plan: Plan) -> tuple[LoadCheck, ...]:
    return check_plan(plan, CURVES, silent, REQUESTS)


def with_load(plan: Plan, factor: float) -> Plan:
    """Return the same engines under another load."""
    demands = tuple(replace(one, requests_per_second=factor * one.requests_per_second) for one in plan.asked.demands)
    return replace(plan, asked=replace(plan.asked, demands=demands))


def test_a_plan_holds_and_costs_in_simulation_what_was_planned(plan: Plan) -> None:
    """Fails when power is not paid, where rents do not hold it, and when tokens of the warm-up are left out."""
    checks = check(plan)
    assert [(one.demand, one.holds, one.asked) for one in checks] == [(0, True, 0.99), (1, True, 0.95)]
    assert all(0.8 * REQUESTS < one.requests < REQUESTS for one in checks)
    for row, one, of in zip(
        plan_to_json(plan, checks)["simulated"], plan.solution.chosen, plan.asked.demands, strict=True
    ):
        # Between power in proportion to the load, as planned, and all engines at full power all the time; the requests
        # that were drawn come a little short of the load.
        full = one.engines * (one.option.engine_usd_per_hour + one.option.busy_usd_per_hour)
        most = usd_per_million_tokens(full, of.tokens_per_second)
        assert 0.95 * row["planned_usd_per_million_tokens"] < row["usd_per_million_tokens"] < 1.2 * most


def test_engines_that_get_more_than_planned_miss_and_it_is_said_plainly(plan: Plan) -> None:
    """Fails when only answers are counted and not their times, and when a miss is not told from what holds."""
    checks = check(with_load(plan, 2.0))
    assert not checks[0].holds
    shown = StringIO()
    print_plan(plan, checks, Console(file=shown, width=160))
    assert f"MISSED in simulation: {QWEN_7B}, interactive: {checks[0].kept:.2%}" in shown.getvalue()
    assert json.loads(json.dumps(plan_to_json(plan, checks)))["simulated"][0]["holds"] is False
    held = StringIO()
    print_plan(plan, check(plan), Console(file=held, width=160))
    assert "MISSED" not in held.getvalue()


def test_machines_that_are_away_are_away_in_the_simulation(plan: Plan) -> None:
    """Fails when the simulated machines have no owners."""
    away = Churn(losses_per_hour=2.0, away_median_minutes=600.0, away_spread=0.1)
    asked = replace(plan.asked, churn=dict.fromkeys(plan.prices.cards, away))
    assert not all(one.holds for one in check(replace(plan, asked=asked)))


def test_the_same_plan_gives_the_same_figures(plan: Plan) -> None:
    """Fails when the seed is another one each time."""
    assert check(plan) == check(plan)


def test_a_large_load_gets_a_minute_within_bounds(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when every load has the same number of requests, and when it has no limit."""
    monkeypatch.setattr("coordinator.planning.plan_check.REQUESTS_MAX", 2_000)
    for factor, requests in ((2.0, 60.0 * 20.0), (10.0, 2_000.0)):
        one = check(with_load(plan, factor))[0]
        assert one.requests == pytest.approx(0.9 * requests, rel=0.1)


def test_charts_show_what_the_tables_say(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fails when a bar of either chart is left out."""
    directory = tmp_path_factory.mktemp("charts")
    written = {path.name: path.read_text() for path in write_plan_plots(plan, directory)}
    cards, inputs = len(plan.break_even), len(plan.sensitivity)
    assert written["break_even.svg"].count("<rect") == 2 * cards
    assert written["sensitivity.svg"].count("<rect") == 3 * inputs
    assert all(text in written["sensitivity.svg"] for text in ("electricity", "losses", "a quarter more"))
