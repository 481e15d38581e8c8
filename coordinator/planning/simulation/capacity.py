"""What an engine serves at most, and how much of the time it is there. Pure.

A fluid figure: with all places taken, each request takes its prompt and its
share of the steps that write its answer,

    prompt * prefill + answer * step(batch) / batch

and the batch is what slots or memory allow. A request that is being answered
holds its prompt and half of its answer on the average over its own time, and
long answers are there for longer: what one holds at some moment is

    E[prompt] + E[answer^2] / (2 E[answer])

Queues need some room below the figure: at 100 % of it they have no end. And an
engine whose memory is the limit answers less, by a tenth or so, as it computes
again what it had to give up (preemption).
"""

from collections.abc import Sequence
from statistics import fmean

from coordinator.planning.churn import Churn
from coordinator.planning.curves import EngineCurve
from coordinator.planning.simulation.scenario import Fleet, Load, Owners, Scenario


def requests_per_second(curve: EngineCurve, slots: int, prompts: Sequence[int], answers: Sequence[int]) -> float:
    """Return how many requests an engine answers at most. Args: `prompts`, `answers`: lengths, each as likely."""
    prompt_tokens, answer_tokens = fmean(prompts), fmean(answers)
    held = prompt_tokens + fmean(answer**2 for answer in answers) / (2.0 * answer_tokens)
    batch = max(1, min(slots, int(curve.kv_tokens_max / held)))
    step_ms = curve.step_ms(batch, batch * held)
    return 1000.0 / (prompt_tokens * curve.prefill_token_ms + answer_tokens * step_ms / batch)


def lent_share(owners: Owners) -> float:
    """Return how much of the time a node's engine is up."""
    churn = Churn(
        losses_per_hour=owners.losses_per_hour + owners.crashes_per_hour,
        away_median_minutes=owners.away_median_min,
        away_spread=owners.away_spread,
        reload_s=owners.reload_s,
    )
    return churn.availability


def fleet_requests_per_second(fleet: Fleet, curve: EngineCurve, load: Load) -> float:
    """Return how many requests of a load some equal nodes answer at most, while their owners come and go."""
    each = requests_per_second(curve, fleet.slots_of(curve), load.prompt_lengths(), load.answer_lengths())
    return fleet.nodes * lent_share(fleet.owners) * each


def rates_of(scenario: Scenario, curves: Sequence[EngineCurve]) -> list[float]:
    """Return the requests per second of each load."""
    rates = []
    for load in scenario.load:
        rate = load.requests_per_second
        if load.capacity_share is not None:
            rate = load.capacity_share * sum(
                fleet_requests_per_second(fleet, curve, load)
                for fleet, curve in zip(scenario.fleet, curves, strict=True)
                if fleet.model == load.model
            )
        assert rate is not None, "a load has one of the two"
        rates.append(rate)
    return rates
