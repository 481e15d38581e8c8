"""Fit the curves of all measured configurations, write them to the planner's data, and print how far off they are.

Each load is predicted by a curve that was fitted without it (leave one load
out). What lies between the lowest and the highest load of a configuration is
interior; edges are extrapolations. Takes about two minutes.

    fit_curves.py > errors.md
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from coordinator.planning.benchmark import LoadFigures, predict
from coordinator.planning.calibration import MeasuredLoad, first_token_is_odd, fit_curve, measured_loads
from coordinator.planning.curve_file import write_curves
from coordinator.planning.rows import Configuration, read_rows

TOKENS_PER_SECOND_ERROR_MAX: Final = 0.10
FIRST_TOKEN_ERROR_MAX: Final = 0.25
COLUMNS: Final = (
    ("tokens/s", "tokens_per_second"),
    ("first token P50", "first_token_ms_p50"),
    ("P90", "first_token_ms_p90"),
    ("P99", "first_token_ms_p99"),
    ("ms per token", "token_ms_mean"),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A load beside what a curve that has not seen it says."""

    configuration: Configuration
    measured: MeasuredLoad
    predicted: LoadFigures
    interior: bool

    def error(self, name: str) -> float:
        """Return predicted over measured, less one."""
        return float(getattr(self.predicted, name)) / self.measured.figures[name] - 1.0

    @property
    def counts(self) -> bool:
        """Whether the target is for this one: an interior load of one card."""
        return self.interior and self.configuration.cards == 1

    @property
    def met(self) -> bool:
        return (
            abs(self.error("tokens_per_second")) <= TOKENS_PER_SECOND_ERROR_MAX
            and abs(self.error("first_token_ms_p50")) <= FIRST_TOKEN_ERROR_MAX
        )

    @property
    def note(self) -> str:
        notes = ["interior" if self.interior else "edge", "one card" if self.configuration.cards == 1 else "many cards"]
        if first_token_is_odd(self.configuration):
            notes.append("**odd first tokens, not fitted**")
        if self.counts:
            notes.append("met" if self.met else "**missed**")
        return ", ".join(notes)


def leave_one_out(configuration: Configuration, loads: dict[float, MeasuredLoad]) -> Iterator[Prediction]:
    """Predict each load from the others."""
    for requests_per_second, left_out in loads.items():
        curve = fit_curve(configuration, [load for load in loads.values() if load is not left_out])
        interior = min(loads) < requests_per_second < max(loads)
        yield Prediction(configuration, left_out, predict(curve, left_out.load), interior)


def table(predictions: Iterable[Prediction]) -> Iterator[str]:
    """Yield the lines of a markdown table: measured, predicted, error of each."""
    yield "| model | cards | requests/s | " + " | ".join(title for title, _ in COLUMNS) + " | |"
    yield "|---|---|--:|" + "--:|" * len(COLUMNS) + "---|"
    for one in predictions:
        cells = [
            f"{one.measured.figures[name]:.4g} → {getattr(one.predicted, name):.4g} ({one.error(name):+.0%})"
            for _, name in COLUMNS
        ]
        of = one.configuration
        start = f"| {of.model} | {of.cards}x{of.card} | {one.measured.load.requests_per_second:g} | "
        yield start + " | ".join(cells) + f" | {one.note} |"


def summary(predictions: Iterable[Prediction]) -> Iterator[str]:
    """Yield what the target comes to."""
    counted = [one for one in predictions if one.counts]
    yield f"Interior loads of one card within the target: {sum(one.met for one in counted)} of {len(counted)}."
    for title, name in COLUMNS:
        worst = max(counted, key=lambda one: abs(one.error(name)))
        sizes = sorted(abs(one.error(name)) for one in counted)
        at = f"{worst.configuration} at {worst.measured.load.requests_per_second:g}/s"
        yield f"- {title}: median error {sizes[len(sizes) // 2]:.1%}, worst {worst.error(name):+.1%} ({at})"


def main() -> None:
    rows = sorted(read_rows(), key=lambda row: row.configuration)
    predictions: list[Prediction] = []
    curves = []
    for configuration, of_it in groupby(rows, key=lambda row: row.configuration):
        loads = measured_loads(tuple(of_it))
        curves.append((configuration, fit_curve(configuration, list(loads.values()))))
        predictions += leave_one_out(configuration, loads)
    write_curves(curves)
    print("Times in ms; measured → predicted by a curve that was fitted without this load (error).", end="\n\n")
    print("\n".join(table(predictions)), end="\n\n")
    print("\n".join(summary(predictions)))


if __name__ == "__main__":
    main()
