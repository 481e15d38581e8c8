"""A run's figures as tables for people."""

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from coordinator.planning.simulation.figures import ClassFigures, FleetFigures, Quantiles, RunFigures

_HEAD: Final = ("class", "tasks", "answered", "in target", "good/s", "good tokens/s")
_TIMES: Final = ("first token ms", "ms per token", "end to end s")


def print_report(figures: RunFigures, console: Console) -> None:
    """Print what came of a run."""
    console.print(_classes(figures.classes))
    console.print(_fleets(figures.fleets))
    for line in _lines(figures):
        console.print(line, highlight=False)


def _classes(classes: Sequence[ClassFigures]) -> Table:
    table = _table((*_HEAD, *(f"{name} p50 / p90 / p99" for name in _TIMES)))
    for one in classes:
        table.add_row(
            one.service_class,
            f"{one.tasks:,}",
            f"{one.answered:,}",
            f"{one.in_target:.2%}",
            f"{one.good_per_s:,.2f}",
            f"{one.good_tokens_per_s:,.0f}",
            _quantiles(one.first_token_ms, 0),
            _quantiles(one.token_ms, 1),
            _quantiles(one.end_to_end_s, 1),
        )
    return table


def _fleets(fleets: Sequence[FleetFigures]) -> Table:
    table = _table(("nodes", "lent h", "busy", "$", "kWh", "owner back", "crashes", "preempted"))
    for one in fleets:
        table.add_row(
            f"{one.nodes:,} x {one.name}",
            f"{one.lent_hours:,.1f}",
            f"{one.busy:.1%}",
            f"{one.usd:,.2f}",
            f"{one.kwh:,.2f}",
            f"{one.losses:,}",
            f"{one.crashes:,}",
            f"{one.preemptions:,}",
        )
    return table


def _lines(figures: RunFigures) -> list[str]:
    failed = ", ".join(f"{count:,} {fate}" for fate, count in figures.failed.items()) or "none"
    broken = ", ".join(f"{count:,} {outcome}" for outcome, count in figures.broken_attempts.items()) or "none"
    credits = {name: amount / 1e6 for name, amount in figures.ledger_micro.items()}
    again = f"{figures.recomputed_tokens:,} prompt tokens computed again"
    lines = [
        f"{figures.tasks:,} tasks in {figures.virtual_hours:,.2f} h, {figures.answered:,} answered; failed: {failed}",
        f"{figures.failovers:,} failovers; attempts that broke: {broken}; {again}",
    ]
    if figures.usd_per_million is not None and figures.joules_per_million is not None:
        good = figures.usd_per_million_good_answer
        good_text = "no answer in target" if good is None else f"${good:.4f} per million answer tokens in target"
        joules = f"{figures.joules_per_million:,.0f} J"
        lines.append(
            f"${figures.usd_per_million:.4f} and {joules} per million tokens of prompt and answer; {good_text}"
        )
    earned = credits.get("held", 0.0) + credits.get("unsigned", 0.0)
    kept, failover = credits.get("platform:revenue", 0.0), credits.get("platform:failover", 0.0)
    lines.append(
        f"ledger, credits: tenants pay {-credits.get('tenant', 0.0):,.1f}, nodes earn {earned:,.1f}, "
        f"the platform keeps {kept:,.1f} and pays {abs(failover):,.1f} for failures"
    )
    lines += [
        f"{one.nodes:,} x {one.name}, open to the fleet: {one.model_changes:,} changes of model, "
        f"{one.fetched_gb:,.1f} GB downloaded"
        for one in figures.fleets
        if one.model_changes
    ]
    lines.append(f"hash {figures.hash}")
    return lines


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=False)
    return table


def _quantiles(values: Quantiles, digits: int) -> str:
    if values.p50 is None:
        return "-"
    return " / ".join(f"{value:,.{digits}f}" for value in (values.p50, values.p90, values.p99) if value is not None)
