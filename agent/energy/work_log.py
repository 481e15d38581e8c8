"""What the attempts of this node cost and come to: one place for the meter and the counts of the day. Pure.

`agent.state` tells it when an engine begins with an attempt and when it is over,
whatever ended it, and passes on what the cards read.
"""

from collections.abc import Collection, Mapping, Sequence

from agent.assignments import AttemptKey
from agent.attempts import Attempt
from agent.energy.card import CardSample
from agent.energy.day_counts import DayCounts
from agent.energy.meter import EnergyMeter


class WorkLog:
    """The meter and the counts of the day.

    Args:
        tdp_w: as in `EnergySettings`.
        counts: of the day that runs.
    """

    def __init__(self, tdp_w: Mapping[str, float], counts: DayCounts) -> None:
        self.meter = EnergyMeter(tdp_w)
        self.counts = counts
        self._working: set[AttemptKey] = set()

    def began(self, attempt: Attempt, cards: Sequence[str], attempts: Mapping[AttemptKey, Attempt], now: float) -> None:
        """Note that an engine has begun with an attempt, on these cards."""
        order = attempt.order
        self.meter.began(order.key, cards, order.prompt_token_count, _generated(attempts), now)
        self._working.add(order.key)

    def ended(self, attempt: Attempt, attempts: Mapping[AttemptKey, Attempt], now: float, *, whole: bool) -> None:
        """Note that an attempt works no more, and tell it what it took. May be told of any attempt, and twice.

        Args:
            attempts: all that are there, this one included.
            whole: it ended by itself.
        """
        order = attempt.order
        if order.key not in self._working:
            return
        self._working.discard(order.key)
        attempt.energy = self.meter.ended(order.key, _generated(attempts), now)
        self.counts.ended(
            order.model.name, order.prompt_token_count, len(attempt.output_ids), attempt.energy, whole=whole
        )

    def sampled(
        self,
        samples: Collection[CardSample],
        held: Collection[str],
        attempts: Mapping[AttemptKey, Attempt],
        now: float,
    ) -> None:
        """Take what the cards read.

        Args:
            held: cards on which an engine of ours is up.
        """
        generated = _generated(attempts)
        for sample in samples:
            self.meter.sampled(sample, generated, now, held=sample.card in held)
        self.counts.drew(self.meter.totals)


def _generated(attempts: Mapping[AttemptKey, Attempt]) -> dict[AttemptKey, int]:
    return {key: len(attempt.output_ids) for key, attempt in attempts.items()}
