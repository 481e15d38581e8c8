"""What a task would cost, take and burn, said before it is submitted.

Seconds are the scheduler's (`Scheduler.quote`). Prices are those of the list.
Joules are those of the node that would be chosen, as measured when it answered
alone (coordinator/verification/rate_rounds.py), or of the mean of the nodes
with the model where none is chosen yet or the chosen one was not measured. They
are per token of the answer, those of a short prompt included, so a long prompt
takes more. No node tells the coordinator where its electricity is from, so grams of CO2 go by
one figure that the operator sets for the whole fleet.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from coordinator.clock import Clock
from coordinator.ledger.prices import Price, Terms
from coordinator.scheduler.records import Quote
from coordinator.scheduler.state import Scheduler
from coordinator.scheduler.targets import BANDS
from coordinator.store.verification_port import RateRow
from coordinator.tasks_port import ClassQuote, TaskQuote
from inference.task import ManifestDigest, NodeId, TaskSpec

JOULES_PER_KWH: Final = 3_600_000
# The share of its weight that an answer's length keeps with each answer that follows: the last fifty or so count.
LENGTH_KEPT: Final = 0.98


class MeasuredRates(Protocol):
    """Who knows what nodes did; coordinator.fleet.registry.FleetRegistry is one."""

    def rates_of(self, manifest_digest: ManifestDigest) -> Sequence[RateRow]:
        """Return those of all connected nodes."""
        ...

    def rates_on(self, node_id: NodeId, manifest_digest: ManifestDigest) -> Sequence[RateRow]: ...


class AnswerLengths:
    """How long the answers of each model were lately. Pure."""

    def __init__(self) -> None:
        # Weights and weighted tokens.
        self._sums: dict[ManifestDigest, tuple[float, float]] = {}

    def ended(self, manifest_digest: ManifestDigest, tokens: int) -> None:
        """Note an answer that was complete."""
        weight, sum_tokens = self._sums.get(manifest_digest, (0.0, 0.0))
        self._sums[manifest_digest] = (LENGTH_KEPT * weight + 1.0, LENGTH_KEPT * sum_tokens + tokens)

    def likely(self, manifest_digest: ManifestDigest, max_tokens: int) -> int:
        """Return how long an answer is likely to be: as the mean, and no longer than it may be."""
        known = self._sums.get(manifest_digest)
        return max_tokens if known is None else min(max_tokens, round(known[1] / known[0]))


class Quotes:
    """Says what tasks would come to, from what the coordinator knows at the moment.

    Args:
        grid_grams_per_kwh: of CO2 equivalent, as the operator says of the fleet's electricity.
    """

    def __init__(
        self, scheduler: Scheduler, clock: Clock, terms: Terms, rates: MeasuredRates, grid_grams_per_kwh: int
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._terms = terms
        self._rates = rates
        self._grid_grams_per_kwh = grid_grams_per_kwh
        self.lengths = AnswerLengths()

    def price(self, model: str) -> Price:
        """Return a model's list price."""
        return self._terms.price(model)

    def of(self, spec: TaskSpec) -> TaskQuote:
        """Quote a task for each service class."""
        now = self._clock.monotonic()
        likely_tokens = self.lengths.likely(spec.manifest_digest, spec.max_tokens)
        price, prompt_tokens = self.price(spec.model), len(spec.prompt_ids)
        specs = [replace(spec, service_class=service_class) for service_class in BANDS]
        quotes = [self._scheduler.quote(one, now) for one in specs]
        rates = self._rates_for(spec.manifest_digest, quotes)
        return TaskQuote(
            model=spec.model,
            prompt_tokens=prompt_tokens,
            max_tokens=spec.max_tokens,
            likely_tokens=likely_tokens,
            max_price_micro=price.charge_micro(prompt_tokens, spec.max_tokens),
            likely_price_micro=price.charge_micro(prompt_tokens, likely_tokens),
            grid_grams_per_kwh=self._grid_grams_per_kwh,
            classes=tuple(
                class_quote(one, quote, likely_tokens, rates, self._grid_grams_per_kwh)
                for one, quote in zip(specs, quotes, strict=True)
            ),
        )

    def _rates_for(self, manifest_digest: ManifestDigest, quotes: Sequence[Quote | None]) -> list[RateRow]:
        """Return what the quotes need: rates of the nodes that would be chosen, of all nodes only for a mean."""
        rates: list[RateRow] = []
        for node_id in {quote.node_id for quote in quotes if quote is not None}:
            on_node = [] if node_id is None else self._rates.rates_on(node_id, manifest_digest)
            if all(rate.energy_method == "none" for rate in on_node):
                # Ten thousand nodes take 10 ms.
                return list(self._rates.rates_of(manifest_digest))
            rates += on_node
        return rates


def class_quote(
    spec: TaskSpec, quote: Quote | None, likely_tokens: int, rates: Sequence[RateRow], grid_grams_per_kwh: int
) -> ClassQuote:
    """Put what the scheduler says of a task in the words of the edges. Pure.

    Args:
        rates: of the connected nodes with the model.
    """
    if quote is None:
        return ClassQuote(service_class=spec.service_class, target_met=False)
    answered_s = quote.first_token_s + quote.token_s * max(0, likely_tokens - 1)
    in_time = spec.deadline_s is None or answered_s <= spec.deadline_s
    # What is measured is the joules of answers; of a task without one nothing is known.
    joules, method = joules_of(rates, quote.node_id, likely_tokens) if likely_tokens else (None, "")
    return ClassQuote(
        service_class=spec.service_class,
        target_met=quote.met and in_time,
        wait_ms=quote.wait_s * 1000,
        first_token_ms=quote.first_token_s * 1000,
        # No token takes no time: it says that nobody has timed the engine yet.
        token_ms=quote.token_s * 1000 or None,
        joules=joules,
        energy_method=method,
        co2_g=None if joules is None else joules / JOULES_PER_KWH * grid_grams_per_kwh,
    )


def joules_of(rates: Sequence[RateRow], node_id: NodeId | None, tokens: int) -> tuple[float | None, str]:
    """Return what an answer takes of a node's cards, and how that is known; None and "" where nothing is. Pure.

    Args:
        node_id: that would be chosen; None for the mean of all.
    """
    # Of one answer alone, or the nearest to that: how many run beside it, nobody knows.
    alone: dict[NodeId, RateRow] = {}
    for rate in rates:
        if rate.energy_method == "none":
            continue
        known = alone.get(rate.node_id)
        if known is None or rate.streams < known.streams:
            alone[rate.node_id] = rate
    if not alone:
        return None, ""
    rows = [alone[node_id]] if node_id in alone else list(alone.values())
    methods = {row.energy_method for row in rows}
    mean = sum(row.joules_per_token for row in rows) / len(rows)
    return mean * tokens, methods.pop() if len(methods) == 1 else "mixed"
