"""Requests that stand for a load: Poisson arrivals, and lengths about as the benchmark's. Deterministic.

Gaps are quantiles of the exponential distribution, lengths those of a cut
log-normal one with the given means; a fixed seed deals them out, several times
over. Quantiles and not draws, so that no mean depends on luck.
"""

import math
import random
from typing import Final

from coordinator.planning.benchmark import (
    ANSWER_SPREAD,
    ANSWER_TOKENS_MAX,
    PROMPT_SPREAD,
    PROMPT_TOKENS_MAX,
    REQUESTS,
    lengths,
)
from coordinator.planning.capacity import Arrival

# Each deals the same 200 lengths and gaps again, in another order.
DEALS: Final = 5
# Long means need a longer cut than the benchmark's; so far above the mean little of the distribution is left out.
CUT_OVER_MEAN: Final = 5


def longest(tokens_mean: float, benchmarks_max: int) -> int:
    """Return where lengths of that mean are cut."""
    return max(benchmarks_max, math.ceil(CUT_OVER_MEAN * tokens_mean))


def poisson_traffic(prompt_tokens_mean: float, answer_tokens_mean: float, seed: int = 0) -> list[Arrival]:
    """Return DEALS * REQUESTS arrivals."""
    dealing = random.Random(seed)
    prompts = lengths(prompt_tokens_mean, PROMPT_SPREAD, longest(prompt_tokens_mean, PROMPT_TOKENS_MAX))
    answers = lengths(answer_tokens_mean, ANSWER_SPREAD, longest(answer_tokens_mean, ANSWER_TOKENS_MAX))
    gaps = [-math.log(1.0 - (place + 0.5) / REQUESTS) for place in range(REQUESTS)]
    traffic: list[Arrival] = []
    for _ in range(DEALS):
        for column in (prompts, answers):
            dealing.shuffle(column)
        dealing.shuffle(gaps)
        traffic += [Arrival(*one) for one in zip(gaps, prompts, answers, strict=True)]
    return traffic
