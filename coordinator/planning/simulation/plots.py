"""A run as charts: latencies of each service class, and the fleet over time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.planning.charts import Axis, Line, draw_lines
from coordinator.planning.simulation.churn import MS_PER_HOUR
from coordinator.planning.simulation.figures import end_to_end_ms, first_token_ms, token_ms
from coordinator.planning.simulation.outcome import CLASSES, Outcome
from coordinator.planning.simulation.run import Simulation

# Points of a curve of quantiles: every half percent.
_SHARES: Final = np.linspace(0.0, 1.0, 201)


def write_plots(simulation: Simulation, directory: Path) -> list[Path]:
    """Write the charts of a run that has ended; return their files.

    Raises:
        OSError: the directory cannot be made or written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, svg in _plots(simulation):
        path = directory / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        written.append(path)
    return written


def _plots(simulation: Simulation) -> Iterator[tuple[str, str]]:
    columns = simulation.outcome.table()
    counted = columns.answered & (columns.submitted_ms >= 1000.0 * simulation.scenario.warm_up_s)
    for name, title, label, values in (
        ("first_token", "Time to first token", "ms", first_token_ms(columns)),
        ("token", "Time per token after the first", "ms", token_ms(columns)),
        ("end_to_end", "Time to the end of an answer", "s", end_to_end_ms(columns) / 1000.0),
    ):
        lines = [
            Line(service_class.value, _distribution(values[of_class]))
            for number, service_class in enumerate(CLASSES)
            if (of_class := counted & (columns.class_number == number)).any()
        ]
        x, y = Axis(label=label, log=True), Axis(label="share of answers at most as long", high=1.0, percent=True)
        yield name, draw_lines(title, x, y, lines)
    yield "fleet", _fleet(simulation.outcome)


def _distribution(values: NDArray[np.float64]) -> list[tuple[float, float]]:
    values = values[~np.isnan(values)]
    if not len(values):
        return []
    return list(zip(np.quantile(values, _SHARES).tolist(), _SHARES.tolist(), strict=True))


def _fleet(outcome: Outcome) -> str:
    hours = [sample.at_ms / MS_PER_HOUR for sample in outcome.samples]
    lines = [
        Line(label, list(zip(hours, values, strict=True)))
        for label, values in (
            ("nodes lent", [float(sample.lent_nodes) for sample in outcome.samples]),
            ("tasks running", [float(sample.running) for sample in outcome.samples]),
            ("tasks waiting", [float(sample.queued) for sample in outcome.samples]),
        )
    ]
    return draw_lines("Fleet and tasks over time", Axis(label="hours"), Axis(label="nodes, tasks"), lines)
