"""All that the report is made of: the measured rows, the benchmark on the curves, and every fleet under every load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.planning.catalog import Prices, read_prices
from coordinator.planning.curve_file import read_curves
from coordinator.planning.paper.fleets import LOADS, PaperFleet, loads_of
from coordinator.planning.paper.measured import Replay, Run, Table2Row, answers_at_once, replays, runs_of, table_2
from coordinator.planning.paper.printed import MODEL, read_table_2
from coordinator.planning.paper.sustained import Sustained, sustain
from coordinator.planning.rows import Configuration, read_rows

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What was measured and what was simulated.

    Args:
        replays: of the configurations of Table 2, by load.
        most_at_once: answers at once in any row, by configuration: beyond it a curve is extrapolated.
        sustained: by fleet and load.
    """

    prices: Prices
    runs: tuple[Run, ...]
    table: tuple[Table2Row, ...]
    replays: Mapping[Configuration, Mapping[float, Replay]]
    most_at_once: Mapping[Configuration, float]
    sustained: Mapping[tuple[PaperFleet, float], Sustained]

    def by_load(self, fleet: PaperFleet) -> list[Sustained]:
        """Return what came of a fleet at the paper's loads."""
        return [self.sustained[fleet, load] for load in LOADS if (fleet, load) in self.sustained]

    def extrapolated(self, one: Sustained) -> bool:
        """Whether an engine wrote more answers at once than in any row; only fleets of one kind of engine can tell."""
        if len(one.fleet.parts) != 1:
            return False
        (part,) = one.fleet.parts
        return one.answers_at_once > self.most_at_once[Configuration(one.fleet.model, part.card, part.cards)]


def study(fleets: Sequence[PaperFleet], progress: Progress) -> Study:
    """Read the rows, and run the fleets at their loads. Deterministic. Args: `progress` is told what begins."""
    rows = read_rows()
    prices = read_prices()
    runs = runs_of(rows, {card: price.usd_per_hour for card, price in prices.cards.items()})
    table = table_2(runs, read_table_2())
    curves = read_curves()
    progress("the benchmark's 200 requests on the curves")
    configurations = list(dict.fromkeys(row.run.configuration for row in table))
    assert all(one.model == MODEL for one in configurations), "Table 2 has one model"
    sustained = {}
    for fleet in fleets:
        for load in loads_of(fleet):
            progress(f"{fleet.model} on {fleet.name} at {load:g} requests/s")
            sustained[fleet, load] = sustain(fleet, load, prices.cards)
    return Study(
        prices=prices,
        runs=runs,
        table=table,
        replays={one: replays(rows, one, curves[one]) for one in configurations},
        most_at_once=answers_at_once(rows),
        sustained=sustained,
    )
