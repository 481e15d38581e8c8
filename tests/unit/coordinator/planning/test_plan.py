"""Whole plans on the fitted curves: files in, figures out."""

import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coordinator.__main__ import app
from coordinator.planning import cost
from coordinator.planning.catalog import PRICES, read_prices
from coordinator.planning.churn import Churn
from coordinator.planning.curve_file import read_curves
from coordinator.planning.optimise import NoPlan, SolverMissing, cheapest
from coordinator.planning.plan import (
    BreakEven,
    Plan,
    find_break_even,
    find_capacities,
    find_sensitivity,
    make_plan,
    solve,
)
from coordinator.planning.plan_input import CLASSES, Demand, PlanInput, read_plan_input
from coordinator.planning.plan_report import plan_to_json, print_plan
from coordinator.planning.rows import Configuration, read_rows
from coordinator.planning.toml_table import InputInvalid

PAPER = read_prices()
CURVES = read_curves()
QWEN_7B = "DeepSeek-R1-Distill-Qwen-7B"
QWEN_14B = "DeepSeek-R1-Distill-Qwen-14B"
EXAMPLE = f"""
[[load]]
model = "{QWEN_7B}"
class = "interactive"
requests_per_second = 12.0
prompt_tokens = 208
answer_tokens = 208
"""


def silent(_: str) -> None:
    """Progress that nobody watches."""


def demand(model: str, service_class: str, rate: float) -> Demand:
    return Demand(
        model=model,
        service_class=service_class,
        requests_per_second=rate,
        prompt_tokens=208.0,
        answer_tokens=208.0,
        targets=CLASSES[service_class].targets,
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    demands = (demand(QWEN_7B, "interactive", 30.0), demand(QWEN_14B, "batch", 30.0))
    return make_plan(PlanInput(demands=demands), PAPER, CURVES, silent)


def break_even(card: str, asked: PlanInput, only: set[tuple[str, int]]) -> BreakEven:
    curves = {of: curve for of, curve in CURVES.items() if (of.card, of.cards) in only}
    prices = replace(PAPER, carbon_usd_per_tonne=0.0)
    return find_break_even(asked, prices, find_capacities(asked, prices, curves, silent), card)


@pytest.mark.parametrize(("rate", "of_the_paper"), [(4.0, 0.89), (8.0, 0.67)])
def test_break_even_is_near_that_of_the_rows_at_the_papers_prices(rate: float, of_the_paper: float) -> None:
    """14B on 2x4090 against 1xH100. The rows give it by tokens/s at the same offered load, a plan in whole engines.

    Mutation that this failed on: a bisection that keeps the wrong half.
    """
    asked = PlanInput(demands=(demand(QWEN_14B, "batch", rate),), headroom=1.0)
    found = break_even("RTX-4090", asked, {("RTX-4090", 2), ("H100-PCIe", 1)})
    assert found.usd_per_hour == pytest.approx(of_the_paper, rel=0.3)


def test_break_even_of_one_engine_for_one_is_their_price_ratio() -> None:
    asked = PlanInput(demands=(demand(QWEN_7B, "batch", 1.0),), headroom=1.0)
    found = break_even("RTX-4090", asked, {("RTX-4090", 1), ("H100-PCIe", 1)})
    assert found.usd_per_hour == pytest.approx(2.00, rel=0.02)
    assert not found.unlimited
    nothing_else = break_even("RTX-4090", asked, {("RTX-4090", 1)})
    assert nothing_else.unlimited


def test_cost_of_the_measured_rows_is_what_the_paper_prints() -> None:
    """Table 2, first two lines: 14B at 1 request/s, 1.281 and 0.323 $/M tokens."""
    for card, cards, printed in (("H100-PCIe", 1, 1.281), ("RTX-4090", 2, 0.323)):
        row = next(
            one
            for one in read_rows()
            if one.configuration == Configuration(QWEN_14B, card, cards) and one.requests_per_second == 1.0
        )
        tokens_per_second = (row.prompt_tokens + row.answer_tokens) / row.duration_s
        usd = cost.usd_per_million_tokens(cards * PAPER.cards[card].usd_per_hour, tokens_per_second)
        assert usd == pytest.approx(printed, abs=0.001)


def test_no_price_makes_the_plan_cheaper_by_rising(plan: Plan) -> None:
    for one in plan.sensitivity:
        assert one.low_usd_per_hour is not None
        assert one.high_usd_per_hour is not None
        assert one.low_usd_per_hour <= plan.solution.usd_per_hour * (1 + 1e-5)
        assert one.high_usd_per_hour >= plan.solution.usd_per_hour * (1 - 1e-5)


def test_the_plan_has_the_headroom_and_serves_the_load(plan: Plan) -> None:
    for place, asked in enumerate(plan.asked.demands):
        chosen = [one for one in plan.solution.chosen if one.option.demand == place]
        assert sum(one.requests_per_second for one in chosen) == pytest.approx(asked.requests_per_second)
        for one in chosen:
            room = (one.engines - one.spare) * one.option.planned_requests_per_second
            assert one.requests_per_second * plan.asked.headroom <= room * (1 + 1e-6)


def test_losses_cost_spare_engines() -> None:
    asked = PlanInput(demands=(demand(QWEN_7B, "interactive", 100.0),), cards_max={"H100-PCIe": 0})
    capacities = find_capacities(asked, PAPER, CURVES, silent)
    costs = []
    for losses in (0.0, 0.011, 0.2):
        churned = replace(asked, churn={"RTX-4090": Churn(losses_per_hour=losses)})
        found = solve(churned, PAPER, capacities)
        assert found is not None
        costs.append(found.usd_per_hour)
        assert (sum(one.spare for one in found.chosen) > 0) == (losses > 0.0)
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_electricity_is_paid_where_the_price_leaves_it_out() -> None:
    asked = PlanInput(demands=(demand(QWEN_7B, "batch", 5.0),))
    owned = {name: replace(card, electricity_included=False) for name, card in PAPER.cards.items()}
    capacities = find_capacities(asked, PAPER, CURVES, silent)
    usd = {}
    for name, prices in (("rented", PAPER), ("owned", replace(PAPER, cards=owned))):
        found = solve(asked, prices, capacities)
        assert found is not None
        usd[name] = found.usd_per_hour
        electricity = find_sensitivity(asked, prices, capacities)[2]
        assert (electricity.low_usd_per_hour == electricity.high_usd_per_hour) == (name == "rented")
    # One card between idle and full load: 25 to 450 W.
    assert 0.025 * 0.15 < usd["owned"] - usd["rented"] < 0.450 * 0.15


def test_caps_that_are_too_small_name_the_load_and_what_it_needs() -> None:
    asked = PlanInput(
        demands=(demand(QWEN_7B, "batch", 1.0), demand(QWEN_14B, "interactive", 90.0)),
        cards_max={"H100-PCIe": 1, "RTX-4090": 2},
    )
    with pytest.raises(NoPlan, match=r"Qwen-14B, interactive: 90 requests/s.*H100-PCIe 1.*without caps.*H100-PCIe"):
        make_plan(asked, PAPER, CURVES, silent)


def test_caps_that_only_the_sum_exceeds_name_all_loads() -> None:
    asked = PlanInput(
        demands=(demand(QWEN_7B, "batch", 1.0), demand(QWEN_14B, "batch", 1.0)),
        cards_max={"H100-PCIe": 1, "RTX-4090": 0},
    )
    with pytest.raises(NoPlan, match=r"together \(.*Qwen-7B, batch; .*Qwen-14B, batch\)"):
        make_plan(asked, PAPER, CURVES, silent)


def test_targets_that_no_engine_meets_are_named() -> None:
    impossible = demand(QWEN_14B, "interactive", 1.0)
    impossible = replace(impossible, targets=replace(impossible.targets, token_ms=5.0))
    with pytest.raises(NoPlan, match=r"Qwen-14B, interactive: none of .*1xH100-PCIe.*token_ms"):
        make_plan(PlanInput(demands=(impossible,)), PAPER, CURVES, silent)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("usd_per_hour = 2.00", 'usd_per_hour = "two"', "cards.H100-PCIe: usd_per_hour must be a number, not 'two'"),
        ("usd_per_hour = 2.00", "usd_per_hour = -1", "cards.H100-PCIe: usd_per_hour must be at least 0"),
        ("usd_per_hour = 2.00", "", "cards.H100-PCIe: key 'usd_per_hour' is missing"),
        ("usd_per_hour = 2.00", "usd_per_hour = nan", "usd_per_hour must be a number"),
        ("load_watts = 350.0", "load_watts = 3.0", "load_watts must be at least 60"),
        ("consumer = true", "consumer = 1", "cards.RTX-4090: consumer must be true or false"),
        ("as_of =", "asof =", "unknown key 'asof'"),
        ("as_of =", "as_of ==", "no valid TOML"),
    ],
)
def test_a_wrong_prices_file_is_named_with_the_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(PRICES.read_text().replace(old, new, 1))
    with pytest.raises(InputInvalid) as caught:
        read_prices(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (QWEN_7B, "GPT-2", "load 1: no curve for model 'GPT-2'; there are: AceMath"),
        ("interactive", "urgent", "load 1: class must be one of interactive, standard, batch"),
        ("12.0", "0", "load 1: requests_per_second must be from 0.001"),
        ("prompt_tokens = 208", "", "load 1: key 'prompt_tokens' is missing"),
        ("answer_tokens", "answer_token", "load 1: unknown key 'answer_token'"),
        ("208\nanswer", "208\nquantile = 1.5\nanswer", "quantile must be from 0.01 to 0.999"),
        ("[[load]]", "headroom = 0.5\n[[load]]", "headroom must be from 1 to 100"),
        ("[[load]]", "[cards_max]\nRTX-4080 = 1\n[[load]]", "cards_max: unknown key 'RTX-4080'"),
        ("[[load]]", "[churn.RTX-4090]\nreload_s = -1\n[[load]]", "churn.RTX-4090: reload_s must be from 0"),
        (EXAMPLE, EXAMPLE + EXAMPLE, "has two tables [[load]]"),
        (EXAMPLE, "headroom = 2", "at least one table [[load]] is needed"),
    ],
)
def test_a_wrong_question_is_named_with_the_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "day.toml"
    path.write_text(EXAMPLE.replace(old, new, 1))
    with pytest.raises(InputInvalid) as caught:
        read_plan_input(path, {of.model for of in CURVES}, PAPER.cards)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_json_holds_what_the_table_shows(plan: Plan) -> None:
    found = json.loads(json.dumps(plan_to_json(plan, [])))
    assert set(found) == {
        "prices", "headroom", "usd_per_hour", "usd_per_million_tokens", "joules_per_million_tokens",
        "grams_co2_per_million_tokens", "engines", "break_even", "sensitivity", "simulated", "notes",
    }  # fmt: skip
    assert sum(one["usd_per_hour"] for one in found["engines"]) == pytest.approx(found["usd_per_hour"], rel=1e-6)
    tokens_per_hour = 3600.0 * 60.0 * 416.0
    assert found["usd_per_million_tokens"] == pytest.approx(found["usd_per_hour"] / tokens_per_hour * 1e6, rel=1e-6)
    assert found["prices"]["as_of"] == "2025-05-31"
    shown = StringIO()
    print_plan(plan, [], Console(file=shown, width=160))
    for text in (f"${found['usd_per_hour']:.2f}/h", "1xRTX-4090", "Break-even", "price of carbon", "2025-05-31"):
        assert text in shown.getvalue()


def test_the_command_answers_and_names_what_is_wrong(tmp_path: Path) -> None:
    question = tmp_path / "day.toml"
    question.write_text(EXAMPLE)
    charts = tmp_path / "charts"
    answer = CliRunner().invoke(app, ["plan", str(question), "--json", "--plots", str(charts)])
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert {one["model"] for one in found["engines"]} == {QWEN_7B}
    assert [one["holds"] for one in found["simulated"]] == [True]
    assert {path.name for path in charts.iterdir()} == {"break_even.svg", "sensitivity.svg"}
    unwritable = CliRunner().invoke(app, ["plan", str(question), "--plots", str(question)])
    assert unwritable.exit_code == 74
    assert f"cannot write charts to {question}" in unwritable.stderr
    wrong = CliRunner().invoke(app, ["plan", str(question), "--prices", str(tmp_path / "none.toml")])
    assert wrong.exit_code == 78
    assert "none.toml: cannot be read: No such file" in wrong.stderr
    question.write_text(EXAMPLE + "[cards_max]\nRTX-4090 = 0\nH100-PCIe = 0\n")
    capped = CliRunner().invoke(app, ["plan", str(question)])
    assert capped.exit_code == 65
    assert "need more cards than [cards_max] allows" in capped.stderr


def test_several_4090_serve_interactive_work_only_where_the_question_says_so(tmp_path: Path) -> None:
    """Fails when all engines may serve all classes; when the key is not read; when other classes are cut off."""
    several = Configuration(QWEN_14B, "RTX-4090", 4)
    for service_class, key, taken in (
        ("interactive", "", False),
        ("interactive", "unfitted_first_token = true", True),
        ("standard", "", True),
    ):
        path = tmp_path / "day.toml"
        path.write_text(
            EXAMPLE.replace("7B", "14B").replace("interactive", service_class)
            + f"first_token_ms = 5000\ntoken_ms = 100\n{key}"
        )
        asked = read_plan_input(path, {of.model for of in CURVES}, PAPER.cards)
        assert asked.demands[0].takes(several) is taken
        # No other engine of the model: what is kept out is named.
        curves = {several: CURVES[several]}
        if taken:
            assert {of for _, of in find_capacities(asked, PAPER, curves, silent)} == {several}
        else:
            with pytest.raises(NoPlan, match="or let 4xRTX-4090 serve it with unfitted_first_token = true"):
                find_capacities(asked, PAPER, curves, silent)


def test_without_scipy_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(SolverMissing, match=r"pip install 'slackwater-network\[planning\]'"):
        cheapest([], [], 1.0, {})
