"""Do a node's scores of a text come from that model? Pure.

Whoever scores the answers of others could spare itself the work and make its
numbers up: an audit would believe them. Of the text of a canary the scores are
known. At each position the reference's candidates and all other ids together
make a distribution, and so do the node's numbers for the same ids. Their *total
variation*, half the sum of the differences, is between 0 and 1; its mean over
the positions is the *distance*.
"""

import math
from collections.abc import Sequence
from typing import Final

from inference.task import PositionLogprobs

# A model's own limit is so many times the distance of its farthest honest text, and is measured with its calibration.
HONEST_MULTIPLE: Final = 5.0
# Where nobody has measured it: five times SmolLM2's (0.021, bf16 against float32), half of the nearest text that
# nothing was computed for (0.21), and below each of a model with a layer less (0.12) or 4-bit weights (0.16):
# docs/verification.md. Beyond twice of it made-up numbers would pass.
DISTANCE_MAX: Final = 0.1
# A bet: who fails loses 5,000 to 1, who passes wins a half. It is fair where an honest node fails once in 10,000 texts;
# 0.1 is twenty standard deviations from the honest mean.
FAILED_LOG: Final = math.log(5_000)
PASSED_LOG: Final = math.log(0.5)


def score_distance(claimed: Sequence[PositionLogprobs], reference: Sequence[PositionLogprobs]) -> float:
    """Return how far a node's scores are from the reference's of the same ids, in [0, 1]; 1 where they are of others.

    Raises:
        ValueError: there is no reference.
    """
    if not reference:
        raise ValueError("nothing to compare with")
    if [one.chosen.token_id for one in claimed] != [one.chosen.token_id for one in reference]:
        return 1.0
    return sum(map(_total_variation, claimed, reference)) / len(reference)


def score_evidence(distance: float, distance_max: float) -> float:
    """Return the log of the e-value of a distance, by the model's limit."""
    return FAILED_LOG if distance > distance_max else PASSED_LOG


def _total_variation(claimed: PositionLogprobs, reference: PositionLogprobs) -> float:
    said = {one.token_id: _probability(one.logprob) for one in (*claimed.top, claimed.chosen)}
    known = {one.token_id: _probability(one.logprob) for one in reference.top}
    differences = [abs(said.get(token_id, 0.0) - probability) for token_id, probability in known.items()]
    others = abs(sum(said.get(token_id, 0.0) for token_id in known) - sum(known.values()))
    return min(1.0, (sum(differences) + others) / 2)


def _probability(logprob: float) -> float:
    """What is no log-probability claims certainty, and is wrong about it unless the reference is as sure."""
    return 1.0 if math.isnan(logprob) else math.exp(min(logprob, 0.0))
