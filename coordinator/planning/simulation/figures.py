"""What a run comes to: goodput, latencies, money and energy. Arithmetic on columns, nothing else."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coordinator.planning.simulation.churn import MS_PER_HOUR
from coordinator.planning.simulation.outcome import CLASSES, Columns
from coordinator.planning.simulation.run import Simulation
from coordinator.planning.simulation.scenario import Target

QUANTILES: Final = (0.5, 0.9, 0.99)
J_PER_WMS: Final = 0.001


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Values below which half, 90 % and 99 % of all lie; none where there is nothing to see."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """One service class, tasks after the warm-up.

    Args:
        in_target: of all tasks, the failed ones included.
        good_per_s, good_tokens_per_s: tasks in target and their answers' tokens, per second of arrivals.
    """

    service_class: str
    tasks: int
    answered: int
    in_target: float
    good_per_s: float
    good_tokens_per_s: float
    first_token_ms: Quantiles
    token_ms: Quantiles
    end_to_end_s: Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """Equal nodes.

    Args:
        lent_hours: of nodes whose engine was up.
        busy: how much of it their engines computed.
        usd: node hours at their price.
        kwh: lent hours at their watts, computing or waiting.
        model_changes, fetched_gb: of open nodes: from one model to another, and what was downloaded for it.
    """

    name: str
    nodes: int
    lent_hours: float
    busy: float
    usd: float
    kwh: float
    losses: int
    crashes: int
    preemptions: int
    model_changes: int
    fetched_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A whole run. Tokens are prompts and answers of answered tasks, or the answers alone where it says so.

    Args:
        good_tokens_per_s: answers' tokens of tasks in target.
        usd_per_million, joules_per_million: of prompt and answer tokens.
        failovers: attempts that broke and were followed by another.
        recomputed_tokens: of prompts that were computed a second time: after a failover, or for want of memory.
        discarded_tokens: of answers that began again.
        ledger_micro: by kind of account, micro-credits.
    """

    virtual_hours: float
    tasks: int
    answered: int
    failed: dict[str, int]
    classes: list[ClassFigures]
    fleets: list[FleetFigures]
    tokens: int
    answer_tokens: int
    usd: float
    usd_per_million: float | None
    usd_per_million_good_answer: float | None
    joules_per_million: float | None
    failovers: int
    broken_attempts: dict[str, int]
    recomputed_tokens: int
    discarded_tokens: int
    ledger_micro: dict[str, int]
    events: int
    hash: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(simulation: Simulation) -> RunFigures:
    """Return the figures of a run that has ended."""
    scenario, outcome = simulation.scenario, simulation.outcome
    columns = outcome.table()
    answered = columns.answered
    good = in_target(columns, [scenario.targets.get(one, Target()) for one in CLASSES])
    counted = columns.submitted_ms >= 1000.0 * scenario.warm_up_s
    fleets = [_fleet(simulation, number) for number in range(len(scenario.fleet))]
    # Failed tasks may have had ids too; they count as nothing here.
    tokens = int((columns.prompt_tokens + columns.answer_tokens)[answered].sum())
    usd = sum(fleet.usd for fleet in fleets)
    good_tokens = int(columns.answer_tokens[good].sum())
    fates = np.bincount(columns.fate_number, minlength=len(outcome.fates)).tolist()
    prefilled = sum(tally.prefilled_tokens for tally in simulation.tallies)
    begun = columns.attempts > 0
    return RunFigures(
        virtual_hours=simulation.now_ms / MS_PER_HOUR,
        tasks=len(outcome),
        answered=int(answered.sum()),
        failed=dict(zip(outcome.fates[2:], fates[2:], strict=True)),
        classes=[
            one
            for number in range(len(CLASSES))
            if (one := _class(columns, counted & (columns.class_number == number), good, number)) is not None
        ],
        fleets=fleets,
        tokens=tokens,
        answer_tokens=int(columns.answer_tokens[answered].sum()),
        usd=usd,
        usd_per_million=_per_million(usd, tokens),
        usd_per_million_good_answer=_per_million(usd, good_tokens),
        joules_per_million=_per_million(3.6e6 * sum(fleet.kwh for fleet in fleets), tokens),
        failovers=int((columns.attempts[answered] - 1).sum()),
        broken_attempts=dict(sorted(outcome.broken.items())),
        recomputed_tokens=max(0, prefilled - int(columns.prompt_tokens[begun].sum())),
        discarded_tokens=outcome.discarded_tokens,
        ledger_micro=dict(sorted(simulation.settlements.sums_micro.items())),
        events=simulation.events,
        hash=outcome.digest(),
    )


def in_target(columns: Columns, targets: list[Target]) -> NDArray[np.bool_]:
    """Return which tasks were answered as their class asks. Args: `targets` in the order of `CLASSES`."""
    good = columns.answered.copy()
    for number, target in enumerate(targets):
        of_class = columns.class_number == number
        for limit, values in (
            (target.first_token_ms, first_token_ms(columns)),
            (target.token_ms, token_ms(columns)),
            (None if target.end_to_end_s is None else 1000.0 * target.end_to_end_s, end_to_end_ms(columns)),
        ):
            if limit is not None:
                # An answer of one token has no pace to miss.
                good &= ~(of_class & (values > limit))
    return good


def first_token_ms(columns: Columns) -> NDArray[np.float64]:
    return columns.first_token_ms - columns.submitted_ms


def end_to_end_ms(columns: Columns) -> NDArray[np.float64]:
    return columns.ended_ms - columns.submitted_ms


def token_ms(columns: Columns) -> NDArray[np.float64]:
    """Return each answer's time per token after the first; not a number for an answer of one."""
    after_first = np.where(columns.answer_tokens > 1, columns.answer_tokens - 1, np.nan)
    return (columns.ended_ms - columns.first_token_ms) / after_first


def quantiles(values: NDArray[np.float64]) -> Quantiles:
    values = values[~np.isnan(values)]
    if not len(values):
        return Quantiles(None, None, None)
    return Quantiles(*(float(one) for one in np.quantile(values, QUANTILES)))


def _class(columns: Columns, of_class: NDArray[np.bool_], good: NDArray[np.bool_], number: int) -> ClassFigures | None:
    tasks = int(of_class.sum())
    if not tasks:
        return None
    answered = of_class & columns.answered
    good = good & of_class
    submitted_ms = columns.submitted_ms[of_class]
    span_s = max(float(submitted_ms[-1] - submitted_ms[0]) / 1000.0, 1e-9)
    return ClassFigures(
        service_class=CLASSES[number].value,
        tasks=tasks,
        answered=int(answered.sum()),
        in_target=float(good.sum()) / tasks,
        good_per_s=float(good.sum()) / span_s,
        good_tokens_per_s=float(columns.answer_tokens[good].sum()) / span_s,
        first_token_ms=quantiles(first_token_ms(columns)[answered]),
        token_ms=quantiles(token_ms(columns)[answered]),
        end_to_end_s=quantiles(end_to_end_ms(columns)[answered] / 1000.0),
    )


def _fleet(simulation: Simulation, number: int) -> FleetFigures:
    fleet, tally = simulation.scenario.fleet[number], simulation.tallies[number]
    joules = J_PER_WMS * (fleet.load_w * tally.busy_ms + fleet.idle_w * (tally.lent_ms - tally.busy_ms))
    return FleetFigures(
        name=fleet.name,
        nodes=fleet.nodes,
        lent_hours=tally.lent_ms / MS_PER_HOUR,
        busy=tally.busy_ms / tally.lent_ms if tally.lent_ms else 0.0,
        usd=fleet.usd_per_hour * tally.lent_ms / MS_PER_HOUR,
        kwh=joules / 3.6e6,
        losses=tally.losses,
        crashes=tally.crashes,
        preemptions=tally.preemptions,
        model_changes=tally.model_changes,
        fetched_gb=tally.fetched_bytes / 1e9,
    )


def _per_million(amount: float, tokens: int) -> float | None:
    return 1e6 * amount / tokens if tokens else None
