"""How many slots are kept free for interactive answers whose engine will be lost. Pure.

What is lost has to find room at once, somewhere where its readers keep their
pace. How much may be lost is a matter of chance: of the engines with readers on
them each is lost, while one is replaced, with the probability that the churn
model finds in this hour. So the reserve is a quantile of a binomial
distribution (sparing to a probability of sufficiency, as in MIL-HDBK-338B,
section 10), and none where nobody reads. Engines are taken for independent.
"""

import math
from collections.abc import Iterable
from typing import Final

from coordinator.scheduler.records import Group

# What is kept suffices in so many of the times in which an engine is replaced.
SUFFICIENCY: Final = 0.99


def reserve_slots(answers: int, engines: int, lost_share: float) -> int:
    """Return how many slots to keep.

    Args:
        answers: that are read as they come, on so many engines.
        lost_share: the probability that an engine is lost until it is replaced.
    """
    if not answers:
        return 0
    lost = binomial_quantile(engines, lost_share, SUFFICIENCY)
    return min(answers, lost * -(-answers // engines))


def room(groups: Iterable[Group], token_s: float, enough: int) -> int:
    """Return how many answers more the engines take while a token takes `token_s` at most; counted up to `enough`."""
    slots = 0
    for group in groups:
        base_s, sequence_s = group.rate.step_base_s, group.rate.step_sequence_s
        most = (token_s - base_s) / sequence_s if sequence_s > 0.0 else math.inf if base_s <= token_s else 0.0
        for running, engines in group.levels.items():
            if running + 1 > most:
                continue
            for engine in engines.values():
                slots += int(min(most, engine.view.slots)) - running
                if slots >= enough:
                    return enough
    return slots


def binomial_quantile(trials: int, probability: float, quantile: float) -> int:
    """Return the smallest count that is exceeded with a probability of at most 1 - quantile."""
    if trials == 0 or probability <= 0.0:
        return 0
    if probability >= 1.0:
        return trials
    log_odds = math.log(probability) - math.log1p(-probability)
    log_none = trials * math.log1p(-probability)
    log_choices, total = 0.0, 0.0
    for count in range(trials):
        total += math.exp(log_choices + count * log_odds + log_none)
        if total >= quantile:
            return count
        log_choices += math.log((trials - count) / (count + 1))
    return trials
