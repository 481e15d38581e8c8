"""Benchmark `simulator`: how long a million tasks take in virtual time, in a large fleet and in a busy one; and churn.

The scenarios are those of coordinator/planning/scenarios. Wall time is that of one process on one core, from the first
event to the last; the figures of the large fleet stand at the top, those of the busy one under `busy_`. Goodput under
churn is that of the same requests, at 60 % of what the fleet serves at 0.2 losses per node-hour, without any losses and
with: its quotients are told.
"""

import sys
import time
from typing import Any

import msgspec

from coordinator.planning.simulation.capacity import rates_of
from coordinator.planning.simulation.figures import RunFigures, figures_of
from coordinator.planning.simulation.run import simulation_of
from coordinator.planning.simulation.scenario import SCENARIOS, Owners, Scenario, curves_of, read_scenario

# Published for a consumer fleet (Salad, 2025: 1.1 reallocations an hour over 100 machines), and a stress.
LOSSES_PER_HOUR = (0.011, 0.2)
QUICK_TASKS = 2_000
QUICK_NODES = 50


async def run(*, quick: bool) -> dict[str, Any]:
    return {**_timed("large_fleet", "", quick), **_timed("busy_fleet", "busy_", quick), **_churn(quick)}


def _timed(name: str, prefix: str, quick: bool) -> dict[str, Any]:
    scenario = read_scenario(SCENARIOS / f"{name}.toml")
    if quick:
        scenario = msgspec.structs.replace(_smaller(scenario), tasks_max=QUICK_TASKS)
    print(f"simulator: {name}", file=sys.stderr)
    begun = time.perf_counter()
    figures = _figures(scenario)
    wall_s = time.perf_counter() - begun
    return {
        f"{prefix}nodes": sum(fleet.nodes for fleet in scenario.fleet),
        f"{prefix}tasks": figures.tasks,
        f"{prefix}answered": figures.answered,
        f"{prefix}virtual_h": round(figures.virtual_hours, 3),
        f"{prefix}wall_s": round(wall_s, 1),
        f"{prefix}hash": figures.hash,
    }


def _churn(quick: bool) -> dict[str, Any]:
    scenario = read_scenario(SCENARIOS / "churn.toml")
    rates = rates_of(scenario, curves_of(scenario))
    load = tuple(
        msgspec.structs.replace(one, capacity_share=None, requests_per_second=rate)
        for one, rate in zip(scenario.load, rates, strict=True)
    )
    scenario = msgspec.structs.replace(scenario, load=load, hours=0.1 if quick else scenario.hours)
    print("simulator: churn", file=sys.stderr)
    calm = _goodput(_owned(scenario, Owners()))
    return {
        f"goodput_at_{losses:g}_losses_per_hour": round(
            _goodput(_owned(scenario, Owners(losses_per_hour=losses))) / calm, 4
        )
        for losses in LOSSES_PER_HOUR
    }


def _figures(scenario: Scenario) -> RunFigures:
    simulation = simulation_of(scenario)
    simulation.run()
    return figures_of(simulation)


def _goodput(scenario: Scenario) -> float:
    return sum(one.good_tokens_per_s for one in _figures(scenario).classes)


def _owned(scenario: Scenario, owners: Owners) -> Scenario:
    return msgspec.structs.replace(
        scenario, fleet=tuple(msgspec.structs.replace(fleet, owners=owners) for fleet in scenario.fleet)
    )


def _smaller(scenario: Scenario) -> Scenario:
    return msgspec.structs.replace(
        scenario,
        fleet=tuple(msgspec.structs.replace(fleet, nodes=min(fleet.nodes, QUICK_NODES)) for fleet in scenario.fleet),
    )
