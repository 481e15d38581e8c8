"""slackwater-coordinator simulate: a fleet in virtual time. Needs no configuration, no database and no network."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from coordinator.planning.simulation.figures import figures_of
from coordinator.planning.simulation.plots import write_plots
from coordinator.planning.simulation.report import print_report
from coordinator.planning.simulation.run import Simulation, simulation_of
from coordinator.planning.simulation.scenario import Scenario, ScenarioInvalid, read_scenario
from coordinator.startup import ExitCode, describe_os_error

# Wide enough for the tables where the output is no terminal.
PIPE_WIDTH = 180


def simulate_file(path: Path, seed: int | None, hours: float | None, trace: Path | None) -> Simulation:
    """Run a scenario to its end; what is given here stands in place of what the file says.

    Raises:
        ScenarioInvalid: scenario or trace cannot be used.
    """
    simulation = simulation_of(_changed(read_scenario(path), seed, hours), trace)
    text = TextColumn("{task.percentage:.0f} %, {task.fields[tasks]:,} tasks")
    console = Console(stderr=True)
    # To standard error, and only to a terminal: the report may be piped.
    with Progress(
        TextColumn("simulating"),
        BarColumn(),
        text,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=1.0, tasks=0)
        simulation.run(lambda share, tasks: bar.update(task, completed=share, tasks=tasks))
    return simulation


def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Fleet, owners, network, loads, targets.")],
    seed: Annotated[int | None, typer.Option(help="Of all that is drawn, in place of the scenario's.")] = None,
    hours: Annotated[float | None, typer.Option(min=0.001, help="For how long requests come.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Requests, in place of the scenario's loads.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write charts there, as SVG.")] = None,
) -> None:
    """Simulate a fleet: real scheduler, failover and settlement in virtual time, engines that follow measured curves.

    Try `slackwater-coordinator simulate coordinator/planning/scenarios/small.toml`. A line of a trace is
    {"at_s": 0.5, "model": "Meta-Llama-3-8B-Instruct", "prompt_tokens": 200, "answer_tokens": 80},
    with "service_class", "max_tokens" and "deadline_s" where they matter. The same seed gives the same hash.
    docs/simulator.md explains scenarios and figures.
    """
    try:
        simulation = simulate_file(scenario, seed, hours, trace)
    except ScenarioInvalid as error:
        raise _failed(str(error), ExitCode.BAD_DATA) from error
    figures = figures_of(simulation)
    if plots is not None:
        try:
            for path in write_plots(simulation, plots):
                typer.echo(f"wrote {path}", err=True)
        except OSError as error:
            told = describe_os_error(error, f"write charts to {plots}")
            raise _failed(str(told), told.exit_code) from error
    if as_json:
        typer.echo(json.dumps(figures.as_json()))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    print_report(figures, console)


def _failed(message: str, code: ExitCode) -> typer.Exit:
    typer.echo(f"slackwater-coordinator: {message}", err=True)
    return typer.Exit(code)


def _changed(scenario: Scenario, seed: int | None, hours: float | None) -> Scenario:
    changes = {name: value for name, value in (("seed", seed), ("hours", hours)) if value is not None}
    return msgspec.structs.replace(scenario, **changes)
