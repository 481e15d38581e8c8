"""What the measured rows say: cost, ratios to the H100 at the same load, and energy by the paper's own method. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.planning.benchmark import LoadFigures, predict
from coordinator.planning.calibration import measured_loads
from coordinator.planning.cost import JOULES_PER_KWH, grams, joules_per_million_tokens, usd_per_million_tokens
from coordinator.planning.curves import EngineCurve
from coordinator.planning.paper.printed import H100, PrintedRow
from coordinator.planning.rows import Configuration, MeasuredRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run as the paper counts: tokens of prompts and answers, by the time of the whole run."""

    configuration: Configuration
    requests_per_second: float
    repetition: int
    usd_per_million: float
    tokens_per_second: float
    served_per_second: float
    first_token_ms_p50: float
    first_token_ms_p90: float
    first_token_ms_p99: float


@dataclass(frozen=True, slots=True)
class Table2Row:
    """A row of Table 2, computed.

    Args:
        throughput_ratio, usd_ratio: to the H100's row at the same load.
        differing: the paper's figures, where they are not ours rounded to as many digits.
    """

    printed: PrintedRow
    run: Run
    throughput_ratio: float
    usd_ratio: float
    differing: Mapping[str, str]


def runs_of(rows: Sequence[MeasuredRow], usd_per_hour: Mapping[str, float]) -> tuple[Run, ...]:
    """Return the rows in the paper's terms. Args: `usd_per_hour` is that of one card, by kind."""
    return tuple(_run(row, usd_per_hour[row.configuration.card]) for row in rows)


def _run(row: MeasuredRow, usd_per_hour: float) -> Run:
    tokens_per_second = (row.prompt_tokens + row.answer_tokens) / row.duration_s
    return Run(
        configuration=row.configuration,
        requests_per_second=row.requests_per_second,
        repetition=row.repetition,
        usd_per_million=usd_per_million_tokens(usd_per_hour * row.configuration.cards, tokens_per_second),
        tokens_per_second=tokens_per_second,
        served_per_second=row.requests / row.duration_s,
        first_token_ms_p50=row.first_token_ms_p50,
        first_token_ms_p90=row.first_token_ms_p90,
        first_token_ms_p99=row.first_token_ms_p99,
    )


def table_2(runs: Sequence[Run], printed: Sequence[PrintedRow]) -> tuple[Table2Row, ...]:
    """Return the paper's Table 2, computed from the runs that its rows are of."""
    found = {(run.configuration, run.requests_per_second, run.repetition): run for run in runs}
    pairs = [(row, found[row.configuration, row.requests_per_second, row.repetition]) for row in printed]
    h100 = {run.requests_per_second: run for _, run in pairs if run.configuration.card == H100}
    return tuple(
        Table2Row(
            row,
            run,
            run.tokens_per_second / h100[run.requests_per_second].tokens_per_second,
            run.usd_per_million / h100[run.requests_per_second].usd_per_million,
            {name: text for name, text in row.figures.items() if as_printed(getattr(run, name), text) != text},
        )
        for row, run in pairs
    )


def as_printed(value: float, printed: str) -> str:
    """Return a value with as many digits behind the point as another one has."""
    return f"{value:.{len(printed.partition('.')[2])}f}"


def of_configuration(table: Sequence[Table2Row], card: str, cards: int) -> list[Table2Row]:
    """Return a configuration's rows of Table 2, by load."""
    return [row for row in table if row.run.configuration.card == card and row.run.configuration.cards == cards]


def runs_by_load(runs: Sequence[Run], configuration: Configuration) -> dict[float, Run]:
    """Return the first repetition of each load of a configuration, ascending."""
    of_it = [run for run in runs if run.configuration == configuration and run.repetition == 0]
    return {run.requests_per_second: run for run in sorted(of_it, key=lambda run: run.requests_per_second)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy by the paper's method: the cards' limit over the whole run, per token of prompts and answers."""

    watts: float
    joules_per_million: float
    million_tokens_per_kwh: float
    grams_per_million: float


def energy_of(run: Run, card_watts: Mapping[str, float], grams_per_kwh: float) -> Energy:
    """Return what a run took if each of its cards drew its watts all along."""
    watts = card_watts[run.configuration.card] * run.configuration.cards
    joules = joules_per_million_tokens(watts, run.tokens_per_second)
    return Energy(
        watts=watts,
        joules_per_million=joules,
        million_tokens_per_kwh=JOULES_PER_KWH / joules,
        grams_per_million=grams(joules, grams_per_kwh),
    )


def answers_at_once(rows: Sequence[MeasuredRow]) -> dict[Configuration, float]:
    """Return the answers at once on the average of the row that had most, by configuration (Little's law)."""
    most: dict[Configuration, float] = {}
    for row in rows:
        at_once = row.answer_tokens_per_second * row.token_ms_mean / 1000.0
        most[row.configuration] = max(at_once, most.get(row.configuration, 0.0))
    return most


@dataclass(frozen=True, slots=True)
class Replay:
    """The benchmark of 200 requests, run on the fitted curve: as the rows' prompts were, and with none of them kept."""

    as_measured: LoadFigures
    fresh: LoadFigures
    prompts_kept: bool
    tokens_per_second: float


def replays(rows: Sequence[MeasuredRow], configuration: Configuration, curve: EngineCurve) -> dict[float, Replay]:
    """Return the benchmark's runs of a configuration as its curve has them, by load."""
    of_it = [row for row in rows if row.configuration == configuration]
    found = {}
    for requests_per_second, measured in measured_loads(of_it).items():
        load = measured.load
        as_measured = predict(curve, load)
        fresh = predict(curve, replace(load, prompts_kept=False))
        both = (load.prompt_tokens_mean + load.answer_tokens_mean) / load.answer_tokens_mean
        found[requests_per_second] = Replay(as_measured, fresh, load.prompts_kept, as_measured.tokens_per_second * both)
    return found
