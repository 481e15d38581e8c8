"""The paper's figures follow from its rows, the report from the figures, and the committed page from the command."""

from dataclasses import replace

import paper
import pytest

from coordinator.planning.catalog import read_prices
from coordinator.planning.paper import claims
from coordinator.planning.paper.fleets import (
    COUNTED_REQUESTS_MIN,
    FLEETS,
    LLAMA_8B,
    LOADS,
    WARM_UP_S,
    PaperFleet,
    h100s,
    loads_of,
    rtx_4090s,
    scenario_of,
)
from coordinator.planning.paper.measured import of_configuration
from coordinator.planning.paper.printed import H100, RTX_4090
from coordinator.planning.paper.report import measured_part
from coordinator.planning.paper.study import Study, study
from coordinator.planning.paper.sustained import figures_of_run, sustain
from coordinator.planning.simulation.run import simulation_of
from inference.task import ServiceClass


def quiet(_: str) -> None:
    """Take no note of progress."""


@pytest.fixture(scope="module")
def rows() -> Study:
    return study((), quiet)


def test_table_2_is_what_the_rows_say_to_the_last_printed_digit(rows: Study) -> None:
    """Fails when money is divided by the answers' tokens alone, or row 17 is taken from the first repetition."""
    assert len(rows.table) == 20
    assert [(row.printed.number, row.differing) for row in rows.table if row.differing] == []


def test_ratios_are_to_the_h100_at_the_same_load(rows: Study) -> None:
    """Fails when ratios are taken to the H100's best row."""
    ratios = [round(row.throughput_ratio, 2) for row in of_configuration(rows.table, RTX_4090, 4)]
    assert ratios == [0.99, 0.95, 0.83, 0.66, 0.51]
    savings = [round(100.0 * (1.0 - row.usd_ratio)) for row in of_configuration(rows.table, RTX_4090, 2)]
    assert savings == [75, 72, 63, 54, 50]
    assert all(row.throughput_ratio == row.usd_ratio == 1.0 for row in of_configuration(rows.table, H100, 1))


def test_the_paper_s_62_percent_is_of_two_loads_and_its_78_of_none(rows: Study) -> None:
    found = {(row.printed.number, of.printed.number) for row, of in claims.rows_at(rows.table, 4, 0.62)}
    assert (11, 13) in found
    assert all(
        row.run.requests_per_second != of.run.requests_per_second for row, of in claims.rows_at(rows.table, 4, 0.62)
    )
    assert claims.rows_at(rows.table, 4, 0.78) == []


def test_energy_is_the_cards_limit_by_tokens(rows: Study) -> None:
    """Fails when the makers' watts are those of the paper."""
    (h100, of_h100, _), (pair, of_pair, _) = claims.table_3(rows)
    assert of_h100.joules_per_million / 1e6 == pytest.approx(0.232, abs=5e-4)
    assert of_pair.joules_per_million / 1e6 == pytest.approx(0.720, abs=5e-4)
    ratio = claims.energy_ratio(rows, pair, h100)
    assert ratio.paper_watts == pytest.approx(3.1, abs=0.05)
    assert ratio.maker_watts == pytest.approx(6.2, abs=0.05)


def test_the_part_from_the_rows_is_the_same_each_time(rows: Study) -> None:
    text = measured_part(rows)
    assert text == measured_part(study((), quiet))
    assert "| 4x4090 | 8 | 11 | 0.149 | 1858.57 |" in text


def test_a_sustained_load_is_served_as_offered_and_the_same_each_time() -> None:
    """Fails when throughput counts answers that end after the last request came, or those of the warm-up."""
    fleet = PaperFleet(LLAMA_8B, (h100s(), rtx_4090s(1)), 0.5)
    prices = read_prices().cards
    simulation = simulation_of(scenario_of(fleet, 1.0, prices))
    simulation.run()
    one = figures_of_run(fleet, 1.0, simulation)
    assert one == sustain(fleet, 1.0, prices)
    assert one.kept_up
    came = sum(at_ms >= 1000.0 * WARM_UP_S for at_ms in simulation.outcome.submitted_ms)
    # But for the few that were being answered at either end.
    assert one.served_per_second * COUNTED_REQUESTS_MIN == pytest.approx(came, abs=15)
    # Prompts of 208 and answers of 210 tokens on the average.
    assert one.tokens_per_second / one.served_per_second == pytest.approx(418.0, rel=0.05)
    assert one.usd_per_hour == pytest.approx(2.25)
    assert one.usd_per_million_rented == pytest.approx(2.25 / 3600.0 / one.tokens_per_second * 1e6)
    assert one.usd_per_million_worked < one.usd_per_million_rented
    assert set(one.classes) == {ServiceClass.INTERACTIVE, ServiceClass.BATCH}


def test_an_engine_with_more_answers_at_once_than_any_row_is_extrapolated(rows: Study) -> None:
    """Fails when the two are compared the other way round."""
    fleet = PaperFleet(LLAMA_8B, (rtx_4090s(1),))
    few = sustain(fleet, 1.0, rows.prices.cards)
    assert not rows.extrapolated(few)
    assert rows.extrapolated(replace(few, answers_at_once=200.0))


def test_every_fleet_is_there_at_all_loads_of_the_paper() -> None:
    assert len(FLEETS) == len(set(FLEETS))
    assert all(set(LOADS) <= set(loads_of(fleet)) for fleet in FLEETS)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_the_committed_page_and_pictures_are_what_the_command_makes() -> None:
    """Fails when any decision of the router, curve, price or word has changed: run `make paper`, and look at it."""
    differing = [
        path.name for path, text in paper.files(study(FLEETS, quiet)) if path.read_text(encoding="utf-8") != text
    ]
    assert differing == []
