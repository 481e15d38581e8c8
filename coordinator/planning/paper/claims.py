"""What of each headline claim the figures bear out. Pure; verdicts.py says it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.planning.paper.fleets import (
    FOUR_PAIRS,
    HYBRIDS,
    LOADS,
    SINGLES,
    TENSOR_PARALLEL,
    PaperFleet,
    rtx_4090s,
)
from coordinator.planning.paper.measured import Energy, Run, Table2Row, as_printed, energy_of, of_configuration
from coordinator.planning.paper.printed import H100, PAPER_GRAMS_PER_KWH, PAPER_WATTS, RTX_4090, TABLE_3
from coordinator.planning.paper.study import Study
from coordinator.planning.paper.sustained import Sustained
from inference.task import ServiceClass

# The share of interactive requests in target below which a fleet does not serve them.
IN_TARGET_MIN: Final = 0.99


@dataclass(frozen=True, slots=True)
class Pair:
    """Two fleets at one load. Args: ratios are of the second to the first."""

    requests_per_second: float
    throughput: float
    usd: float
    joules: float
    both_keep_up: bool


def pairs(study: Study, first: PaperFleet, second: PaperFleet) -> list[Pair]:
    """Return two fleets beside each other at the paper's loads."""
    return [_pair(*both) for both in zip(study.by_load(first), study.by_load(second), strict=True)]


def _pair(one: Sustained, other: Sustained) -> Pair:
    return Pair(
        one.requests_per_second,
        other.tokens_per_second / one.tokens_per_second,
        other.usd_per_million_rented / one.usd_per_million_rented,
        other.joules_per_million / one.joules_per_million,
        one.kept_up and other.kept_up,
    )


def together(beside: Sequence[Pair]) -> float:
    """Return the largest load that both serve; 0 where there is none."""
    return max((pair.requests_per_second for pair in beside if pair.both_keep_up), default=0.0)


def best(study: Study, fleet: PaperFleet) -> Sustained:
    """Return the run in which a fleet served most: all that it can do, where one of its loads was too much for it."""
    runs = [one for (of, _), one in study.sustained.items() if of == fleet]
    return max(runs, key=lambda one: one.tokens_per_second)


def best_ratio(study: Study, first: PaperFleet, second: PaperFleet) -> Pair:
    """Return two fleets beside each other where each serves most."""
    return _pair(best(study, first), best(study, second))


def waits(study: Study, fleet: PaperFleet) -> list[tuple[float, float]]:
    """Return load and P99 of first tokens in ms, of the loads that a fleet serves."""
    return [
        (one.requests_per_second, one.first_token_ms.p99)
        for one in study.by_load(fleet)
        if one.kept_up and one.first_token_ms.p99 is not None
    ]


def rows_at(table: Sequence[Table2Row], cards: int, share: float) -> list[tuple[Table2Row, Table2Row]]:
    """Return which rows of so many RTX 4090 have that share of the tokens/s of which row of the H100, at any loads."""
    return [
        (row, of)
        for row in of_configuration(table, RTX_4090, cards)
        for of in of_configuration(table, H100, 1)
        if f"{row.run.tokens_per_second / of.run.tokens_per_second:.2f}" == f"{share:.2f}"
    ]


def replay_errors(study: Study) -> list[tuple[float, Run]]:
    """Return by how much tokens/s are off where the benchmark is run on the curve, for each row of Table 2."""
    return [
        (study.replays[run.configuration][run.requests_per_second].tokens_per_second / run.tokens_per_second - 1.0, run)
        for run in (row.run for row in study.table)
    ]


@dataclass(frozen=True, slots=True)
class EnergyRatio:
    """Joules per token of a row to those of an H100's row, with the paper's watts for the H100 and with NVIDIA's."""

    requests_per_second: float
    paper_watts: float
    maker_watts: float


def makers_watts(study: Study) -> dict[str, float]:
    return {name: price.load_watts for name, price in study.prices.cards.items()}


def table_3(study: Study) -> list[tuple[Table2Row, Energy, Energy]]:
    """Return the rows of the paper's Table 3 with their energy: with the paper's watts, and with the makers'."""
    by_number = {row.printed.number: row for row in study.table}
    return [
        (
            by_number[printed.row],
            energy_of(by_number[printed.row].run, PAPER_WATTS, PAPER_GRAMS_PER_KWH),
            energy_of(by_number[printed.row].run, makers_watts(study), PAPER_GRAMS_PER_KWH),
        )
        for printed in TABLE_3
    ]


def table_3_differing(study: Study) -> list[str]:
    """Return which figures the paper prints in Table 3, where they are not ours rounded to as many digits."""
    return [
        f"{text} for row {row.printed.number}'s {of}"
        for printed, (row, paper, _) in zip(TABLE_3, table_3(study), strict=True)
        for text, value, of in (
            (printed.million_tokens_per_kwh, paper.million_tokens_per_kwh, "M tokens/kWh"),
            (printed.grams_per_million, paper.grams_per_million, "gCO2/M tokens"),
        )
        if as_printed(value, text) != text
    ]


def energy_ratio(study: Study, row: Table2Row, of: Table2Row) -> EnergyRatio:
    """Return what a row takes beside one of the H100."""

    def ratio(watts: dict[str, float]) -> float:
        one, other = (energy_of(each.run, watts, PAPER_GRAMS_PER_KWH) for each in (row, of))
        return one.joules_per_million / other.joules_per_million

    return EnergyRatio(row.run.requests_per_second, ratio(dict(PAPER_WATTS)), ratio(makers_watts(study)))


def matched_energy(study: Study, cards: int) -> list[EnergyRatio]:
    """Return what so many RTX 4090 take beside the H100 at each load."""
    rows = of_configuration(study.table, RTX_4090, cards)
    return [energy_ratio(study, row, of) for row, of in zip(rows, of_configuration(study.table, H100, 1), strict=True)]


def serves(one: Sustained) -> bool:
    """Whether a fleet keeps up, and its interactive requests are in target often enough."""
    return one.kept_up and one.classes[ServiceClass.INTERACTIVE].in_target >= IN_TARGET_MIN


def cheapest(study: Study, model: str) -> list[tuple[float, Sustained | None]]:
    """Return for each load the cheapest of the fleets with both classes that serves it."""
    fleets = [fleet for fleet in HYBRIDS if fleet.model == model]
    found = []
    for load in LOADS:
        able = [one for fleet in fleets if serves(one := study.sustained[fleet, load])]
        found.append((load, min(able, key=lambda one: one.usd_per_hour, default=None)))
    return found


H100_14B: Final = TENSOR_PARALLEL[0]
PAIR_14B: Final = TENSOR_PARALLEL[1]
FOUR_14B: Final = TENSOR_PARALLEL[2]
PAIRS_14B: Final = FOUR_PAIRS


def single(model: str) -> tuple[PaperFleet, PaperFleet]:
    """Return one H100 and one RTX 4090 with a model that fits on it."""
    h100 = next(fleet for fleet in SINGLES if fleet.model == model and fleet.parts[0].card == H100)
    rtx = next(fleet for fleet in SINGLES if fleet.model == model and fleet.parts == (rtx_4090s(1),))
    return h100, rtx
