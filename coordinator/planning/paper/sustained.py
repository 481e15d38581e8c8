"""A fleet of the paper under a sustained load: run by the simulator, and what came of it.

Throughput is that of answers which end between the warm-up and the last
arrival: what comes after, while batches empty, belongs to no load. Latencies
and shares are of requests that came in that time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.planning.catalog import CardPrice
from coordinator.planning.cost import joules_per_million_tokens, usd_per_million_tokens
from coordinator.planning.paper.fleets import PaperFleet, scenario_of
from coordinator.planning.simulation.churn import MS_PER_HOUR
from coordinator.planning.simulation.figures import Quantiles, first_token_ms, in_target, quantiles, token_ms
from coordinator.planning.simulation.outcome import CLASSES, Columns
from coordinator.planning.simulation.run import Simulation, simulation_of
from coordinator.planning.simulation.scenario import Target
from inference.task import ServiceClass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassShare:
    """One service class. Args: `in_target` is of all its requests, those that were not answered included."""

    in_target: float
    first_token_ms: Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """What came of a fleet under a load.

    Args:
        tokens_per_second, served_per_second: of prompts and answers; requests.
        unserved: the share of requests that were refused, or waited too long.
        usd_per_million_rented: machines are paid by the hour, whatever they do.
        usd_per_million_worked: they are paid for the time in which their engines compute.
        joules_per_million: the cards' limit while an engine computes, the idle watts else.
        answers_at_once: that an engine writes on the average (Little's law), all engines alike.
        busy: how much of the time the engines of each part compute.
    """

    fleet: PaperFleet
    requests_per_second: float
    tokens_per_second: float
    served_per_second: float
    unserved: float
    first_token_ms: Quantiles
    token_ms: Quantiles
    classes: Mapping[ServiceClass, ClassShare]
    usd_per_hour: float
    usd_per_million_rented: float
    usd_per_million_worked: float
    joules_per_million: float
    answers_at_once: float
    busy: tuple[float, ...]

    @property
    def kept_up(self) -> bool:
        """Whether every request was answered."""
        return self.unserved == 0.0


def sustain(fleet: PaperFleet, requests_per_second: float, prices: Mapping[str, CardPrice]) -> Sustained:
    """Run a fleet under a load. Deterministic."""
    simulation = simulation_of(scenario_of(fleet, requests_per_second, prices))
    simulation.run()
    return figures_of_run(fleet, requests_per_second, simulation)


def figures_of_run(fleet: PaperFleet, requests_per_second: float, simulation: Simulation) -> Sustained:
    """Return the figures of a run that has ended."""
    scenario, columns = simulation.scenario, simulation.outcome.table()
    start_ms, end_ms = 1000.0 * scenario.warm_up_s, scenario.hours * MS_PER_HOUR
    answered = columns.answered
    came = columns.submitted_ms >= start_ms
    ended = answered & (columns.ended_ms >= start_ms) & (columns.ended_ms < end_ms)
    span_s = (end_ms - start_ms) / 1000.0
    answer_tokens_per_second = float(columns.answer_tokens[ended].sum()) / span_s
    tokens_per_second = answer_tokens_per_second + float(columns.prompt_tokens[ended].sum()) / span_s
    busy = [tally.busy_ms / tally.lent_ms for tally in simulation.tallies]
    parts = list(zip(scenario.fleet, busy, strict=True))
    usd_per_hour = sum(part.nodes * part.usd_per_hour for part, _ in parts)
    worked = sum(part.nodes * part.usd_per_hour * share for part, share in parts)
    watts = sum(part.nodes * (part.load_w * share + part.idle_w * (1.0 - share)) for part, share in parts)
    writing_ms = float(np.nansum((columns.ended_ms - columns.first_token_ms)[ended]))
    good = in_target(columns, [scenario.targets.get(one, Target()) for one in CLASSES])
    return Sustained(
        fleet=fleet,
        requests_per_second=requests_per_second,
        tokens_per_second=tokens_per_second,
        served_per_second=float(ended.sum()) / span_s,
        unserved=1.0 - float(answered[came].mean()),
        first_token_ms=quantiles(first_token_ms(columns)[came & answered]),
        token_ms=quantiles(token_ms(columns)[came & answered]),
        classes={
            one: _class(columns, of_class, good)
            for number, one in enumerate(CLASSES)
            if (of_class := came & (columns.class_number == number)).any()
        },
        usd_per_hour=usd_per_hour,
        usd_per_million_rented=usd_per_million_tokens(usd_per_hour, tokens_per_second),
        usd_per_million_worked=usd_per_million_tokens(worked, tokens_per_second),
        joules_per_million=joules_per_million_tokens(watts, tokens_per_second),
        answers_at_once=writing_ms / 1000.0 / span_s / sum(part.nodes for part, _ in parts),
        busy=tuple(busy),
    )


def _class(columns: Columns, of_class: NDArray[np.bool_], good: NDArray[np.bool_]) -> ClassShare:
    return ClassShare(
        in_target=float(good[of_class].mean()),
        first_token_ms=quantiles(first_token_ms(columns)[of_class & columns.answered]),
    )
