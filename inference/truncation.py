"""Which candidates top-k and top-p let through, as far as a list of the most likely ones can tell. Pure.

The cut of top-k or top-p falls between ids that another engine's arithmetic may
order the other way round. So there are three kinds of ids: those that every
honest engine lets through, those that none does, and those near the cut, which
count neither as rivals nor as excluded.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inference.sampling import Floats
from inference.task import Sampling

# By how much two engines' log-probabilities of one id may differ: bf16 engines were seen 0.32 apart
# (vllm issue 18352).
ENGINES_DIFFER_NATS: Final = 0.5
# An id so far below the lowest that may be let through is no matter of arithmetic.
CLEAR_NATS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Allowed:
    """What is let through.

    Attributes:
        certain: which candidates every honest engine lets through; where two are nearly as likely and one is let
            through, that may be neither.
        cutoff: for each position the log-probability of the lowest id that may be let through; -inf where the list
            does not reach so far.
    """

    certain: NDArray[np.bool_]
    cutoff: Floats

    def clearly_excluded(self, logprobs: Floats) -> NDArray[np.bool_]:
        """Return which ids, given by log-probability, one for each position, no honest engine lets through."""
        return logprobs < self.cutoff - CLEAR_NATS


def allowed_candidates(logprobs: Floats, unlisted_most: Floats, sampling: Sampling) -> Allowed:
    """Judge candidates.

    Args:
        logprobs: one line for each position, from the most likely down, after penalties and before temperature.
        unlisted_most: for each position the largest log-probability that an id outside the list may have.
    """
    lines, width = logprobs.shape
    certain = np.ones((lines, width), dtype=np.bool_)
    cutoff = np.full(lines, -np.inf)
    cuts = sampling.top_k > 0 or sampling.top_p < 1.0
    if sampling.greedy or width == 0 or not cuts:
        return Allowed(certain, cutoff)
    kept = logprobs
    highest_cut = unlisted_most
    if 0 < sampling.top_k <= width:
        # An id from outside can only raise the cut.
        cutoff = logprobs[:, sampling.top_k - 1]
        highest_cut = np.maximum(cutoff, unlisted_most)
        kept = np.where(np.arange(width) < sampling.top_k, logprobs, -np.inf)
    if sampling.top_k > 0 or sampling.penalised:
        certain = logprobs >= highest_cut[:, None] + ENGINES_DIFFER_NATS
    if sampling.top_p < 1.0:
        rest_counts = sampling.penalised or not 0 < sampling.top_k <= width
        inside, lowest = _nucleus(kept, logprobs, sampling, rest_counts)
        certain &= inside
        cutoff = np.maximum(cutoff, lowest)
    return Allowed(certain, cutoff)


def _nucleus(kept: Floats, logprobs: Floats, sampling: Sampling, with_rest: bool) -> tuple[NDArray[np.bool_], Floats]:
    """Return which candidates surely are in the top-p nucleus, and the log-probability of the last that may be.

    Args:
        with_rest: ids outside the list count as well; how much they weigh is known between bounds only.
    """
    weights = np.exp((kept - kept[:, :1]) / sampling.temperature)
    listed = weights.sum(axis=1)
    rest_low, rest_high = _rest(logprobs, sampling) if with_rest else (np.zeros(len(kept)), np.zeros(len(kept)))
    before_at_most = _weight_ahead(kept, weights, -ENGINES_DIFFER_NATS)
    before_at_least = _weight_ahead(kept, weights, ENGINES_DIFFER_NATS)
    inside = before_at_most < (_shifted(sampling.top_p, -ENGINES_DIFFER_NATS) * (listed + rest_low))[:, None]
    possible = before_at_least < (_shifted(sampling.top_p, ENGINES_DIFFER_NATS) * (listed + rest_high))[:, None]
    possible &= np.isfinite(kept)
    count = possible.sum(axis=1)
    lowest = np.take_along_axis(kept, np.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    # Where the whole list may be in, so may be ids behind it.
    if with_rest:
        lowest = np.where(count == kept.shape[1], -np.inf, lowest)
    return inside, lowest


def _weight_ahead(kept: Floats, weights: Floats, lead_nats: float) -> Floats:
    """Return for each candidate the weight of the others that are more likely by a lead, which may be negative."""
    ahead = kept[:, None, :] > kept[:, :, None] + lead_nats
    ahead &= ~np.eye(kept.shape[1], dtype=np.bool_)
    total: Floats = np.where(ahead, weights[:, None, :], 0.0).sum(axis=2)
    return total


def _rest(logprobs: Floats, sampling: Sampling) -> tuple[Floats, Floats]:
    """Return bounds of what the unlisted ids weigh, in units of the most likely one's weight.

    Each of them is at most as likely as the last listed, p. So a weight q^(1/T) is at most q p^(1/T - 1) for T <= 1,
    and at least that for T > 1; the unlisted q sum to what the list leaves over.
    """
    power = 1.0 / sampling.temperature
    left_over = np.maximum(1.0 - np.exp(logprobs).sum(axis=1), 0.0)
    bound = left_over * np.exp(logprobs[:, -1] * (power - 1.0) - logprobs[:, 0] * power)
    nothing, anything = np.zeros_like(bound), np.full_like(bound, np.inf)
    if sampling.penalised:
        # Penalties moved what is listed; how they moved the rest is not known.
        return nothing, anything
    if sampling.top_k > 0:
        # Only as many of the rest as top-k lets through count, and which they are the list does not say.
        return nothing, bound if power >= 1.0 else anything
    if power == 1.0:
        return bound, bound
    return (nothing, bound) if power > 1.0 else (bound, anything)


def _shifted(share: float, nats: float) -> float:
    """Return a share whose odds are shifted by so many nats: what an error of one id's logit may make of it."""
    odds = share / (1.0 - share) * float(np.exp(nats))
    return odds / (1.0 + odds)
