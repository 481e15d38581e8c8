"""The sampler "position-hash-v1": drawing the next id with noise that is a hash, in numpy.

The noise of an id depends on the seed, the position of the last input id and
the id itself, on nothing else: not on the batch, nor on where the prompt ends.
So an attempt resumed from prompt plus delivered ids draws as the undisturbed
one would have, and whoever has the logits can recompute every draw. An id is
drawn by adding Gumbel noise to the scaled logits and taking the largest sum,
which is a draw from their softmax.

`inference/torch_sampling.py` is the same in torch; tests hold the two together.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inference.task import Sampling

Floats = NDArray[np.float64]

MASK_64: Final = (1 << 64) - 1
# The increments keep seed, position and id apart; odd numbers with no pattern in their bits
# (2^64 divided by the golden ratio; pi's first 64 bits made odd).
POSITION_STEP: Final = 0x9E3779B97F4A7C15
TOKEN_STEP: Final = 0x3243F6A8885A308D
# The mixing steps of splitmix64: (shift, multiplier).
MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT: Final = 31
# 52 bits and a half fit a float64 exactly, so that the uniform number is never 0 or 1.
UNIFORM_BITS: Final = 52


def mix(value: int) -> int:
    """Return a 64-bit hash of a 64-bit number (splitmix64's finaliser)."""
    for shift, multiplier in MIX:
        value = ((value ^ (value >> shift)) * multiplier) & MASK_64
    return value ^ (value >> LAST_SHIFT)


def position_key(seed: int, position: int) -> int:
    """Return what the noise of all ids at one position has in common."""
    return mix((mix(seed & MASK_64) + position * POSITION_STEP) & MASK_64)


def gumbel_noise(seed: int, position: int, vocabulary_size: int) -> Floats:
    """Return the noise of every id at one position.

    Args:
        position: index in the whole sequence, prompt included, of the last id that the logits have seen.
    """
    return noise_of_ids(np.uint64(position_key(seed, position)), np.arange(vocabulary_size, dtype=np.uint64))


def noise_of_ids(keys: np.uint64 | NDArray[np.uint64], ids: NDArray[np.uint64]) -> Floats:
    """Return the noise of some ids; `keys` are `position_key`s, one or as many as fit the ids' shape."""
    value = ids * np.uint64(TOKEN_STEP) + keys
    for shift, multiplier in MIX:
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(multiplier)
    value ^= value >> np.uint64(LAST_SHIFT)
    uniform = ((value >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64) + 0.5) * 2.0**-UNIFORM_BITS
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def penalised(logits: Floats, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Floats:
    """Return logits after the penalties: repetition counts the prompt too, presence and frequency the output only."""
    if not sampling.penalised:
        return logits
    logits = logits.copy()
    seen = np.unique(np.asarray([*prompt_ids, *output_ids], dtype=np.int64))
    values = logits[seen]
    penalty = sampling.repetition_penalty
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    ids, counts = np.unique(np.asarray(output_ids, dtype=np.int64), return_counts=True)
    logits[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return logits


def truncated(logits: Floats, top_k: int, top_p: float) -> Floats:
    """Return logits with minus infinity for the ids outside the top k and the top-p nucleus.

    Ids that tie with the k-th stay. The nucleus is the fewest most likely ids that hold `top_p` together.
    """
    if 0 < top_k < len(logits):
        threshold = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits < threshold, -np.inf, logits)
    if top_p < 1.0:
        order = np.argsort(-logits, kind="stable")
        weights = np.exp(logits[order] - logits[order[0]])
        before = np.cumsum(weights) - weights
        dropped = order[before >= top_p * weights.sum()]
        logits = logits.copy()
        logits[dropped] = -np.inf
    return logits


def choose(
    logits: NDArray[np.float32],
    sampling: Sampling,
    position: int,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
) -> int:
    """Return the next id.

    Args:
        logits: one per id, as the model gave them.
        position: as in `gumbel_noise`.
        prompt_ids: of the task's first attempt; penalties alone need them.
        output_ids: the answer so far; penalties alone need them.
    """
    scores = penalised(logits.astype(np.float64), sampling, prompt_ids, output_ids)
    if sampling.greedy:
        return int(np.argmax(scores))
    scores = truncated(scores / sampling.temperature, sampling.top_k, sampling.top_p)
    return int(np.argmax(scores + gumbel_noise(sampling.seed, position, len(scores))))
