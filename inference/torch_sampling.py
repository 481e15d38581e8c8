"""The sampler "position-hash-v1" in torch. What it does and why is told in `inference/sampling.py`."""

from collections.abc import Sequence

import torch

from inference.sampling import LAST_SHIFT, MIX, TOKEN_STEP, UNIFORM_BITS, position_key
from inference.task import Sampling


def gumbel_noise(seed: int, position: int, vocabulary_size: int, device: torch.device) -> torch.Tensor:
    """Return the noise of every id at one position, in float64."""
    # torch has no unsigned 64-bit arithmetic; int64 wraps around to the same bits.
    value = torch.arange(vocabulary_size, dtype=torch.int64, device=device)
    value = value * _signed(TOKEN_STEP) + _signed(position_key(seed, position))
    for shift, multiplier in MIX:
        value = (value ^ _shifted(value, shift)) * _signed(multiplier)
    value = value ^ _shifted(value, LAST_SHIFT)
    uniform = (_shifted(value, 64 - UNIFORM_BITS).to(torch.float64) + 0.5) * 2.0**-UNIFORM_BITS
    return -torch.log(-torch.log(uniform))


def penalised(
    logits: torch.Tensor, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> torch.Tensor:
    """Return logits after the penalties."""
    if not sampling.penalised:
        return logits
    logits = logits.clone()
    seen = torch.tensor([*prompt_ids, *output_ids], dtype=torch.int64, device=logits.device).unique()
    values = logits[seen]
    penalty = sampling.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    output = torch.tensor(output_ids, dtype=torch.int64, device=logits.device)
    ids, counts = output.unique(return_counts=True)
    logits[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return logits


def truncated(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return logits with minus infinity for the ids outside the top k and the top-p nucleus."""
    if 0 < top_k < len(logits):
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        weights = (ordered - ordered[0]).exp()
        before = weights.cumsum(0) - weights
        logits = logits.index_fill(0, order[before >= top_p * weights.sum()], -torch.inf)
    return logits


def choose(
    logits: torch.Tensor,
    sampling: Sampling,
    position: int,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
) -> int:
    """Return the next id."""
    scores = penalised(logits.to(torch.float64), sampling, prompt_ids, output_ids)
    if sampling.greedy:
        return int(scores.argmax())
    scores = truncated(scores / sampling.temperature, sampling.top_k, sampling.top_p)
    return int((scores + gumbel_noise(sampling.seed, position, len(scores), scores.device)).argmax())


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a right shift that brings zeros in, as unsigned numbers do."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
