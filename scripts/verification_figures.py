"""Power and false alarms, computed from recorded margins within seconds. No model, no torch.

A trial is one node: attempts drawn from the record without putting back, one
after the other, until so many tokens are checked. Attempts stay whole, so that
the dependence of neighbouring tokens is in the figures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inference.calibration import Calibration, HonestBound
from inference.evidence import ALARM, combined, log_capitals
from inference.rescoring import STOP_MARGIN, Rescored
from inference.sampling import Floats
from inference.task import ManifestDigest

# 16 tokens: honest neighbours were seen to depend on each other over a few tokens, and an attempt of 120 holds seven.
BLOCK_TOKENS: Final = 16
# The small ones find 8-bit weights, the large ones a gross cheat within a few blocks.
STAKES: Final = (0.03, 0.08, 0.2, 0.5)
# One-sided 99 % quantile of a normal distribution.
QUANTILE_99: Final = 2.326
# What one measurement on one machine does not show (other cards, kernels, batch shapes), as a factor on the mean
# square. Mean squares grow with the third power of the arithmetic's error: the error may be 8 % larger.
ALLOWANCE: Final = 1.25
# A bound for variants that show hardly any margin: one of an eighth of a nat in a thousand tokens.
MEAN_SQUARE_MIN: Final = 1.5e-5


@dataclass(frozen=True, slots=True)
class Recorded:
    """One variant of the record: margins of each attempt."""

    name: str
    attempts: tuple[Floats, ...]
    temperature: float = 1.0

    @property
    def tokens(self) -> int:
        return sum(len(attempt) for attempt in self.attempts)

    @property
    def mean(self) -> float:
        return float(np.concatenate(self.attempts).mean())

    @property
    def mean_square(self) -> float:
        return float((np.concatenate(self.attempts) ** 2).mean())

    @property
    def match(self) -> float:
        """Share of ids that beat all listed rivals."""
        return float((np.concatenate(self.attempts) == 0).mean())


@dataclass(frozen=True, slots=True)
class Rate:
    """So many of so many, with Wilson's interval of 95 %."""

    hits: int
    trials: int

    @property
    def share(self) -> float:
        return self.hits / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        z, n, share = 1.96, self.trials, self.share
        centre = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.3f} ({low:.3f}-{high:.3f})"


def read_variant(folder: Path, name: str, field: str = "margins", temperature: float = 1.0) -> Recorded:
    """Return a variant's margins.

    Args:
        field: `margins`, or `wrong_seed_margins`: what the verifier would have seen had the node had another seed.
    """
    with np.load(folder / f"{name}.npz") as arrays:
        margins = arrays[field].astype(np.float64)
        ends = np.cumsum(arrays["lengths"].astype(np.int64))
    return Recorded(name, tuple(np.split(margins, ends[:-1])), temperature)


def block_means(variant: Recorded) -> Floats:
    """Return the mean squares of all whole blocks."""
    means = [
        (attempt[: len(attempt) // BLOCK_TOKENS * BLOCK_TOKENS] ** 2).reshape(-1, BLOCK_TOKENS).mean(axis=1)
        for attempt in variant.attempts
    ]
    return np.concatenate(means)


def honest_bound(variants: Sequence[Recorded]) -> HonestBound:
    """Return the bound of some honest variants at one temperature: of the worst, its mean square's upper 99 % limit,
    taken over whole attempts, with an allowance."""
    bounds = []
    for variant in variants:
        attempts = np.array([(attempt**2).mean() for attempt in variant.attempts])
        error = attempts.std(ddof=1) / math.sqrt(len(attempts))
        limit = max((variant.mean_square + QUANTILE_99 * error) * ALLOWANCE, MEAN_SQUARE_MIN)
        bounds.append((limit, variant))
    limit, worst = max(bounds, key=lambda bound: bound[0])
    return HonestBound(
        temperature=worst.temperature,
        mean_square=round(float(limit), 7),
        measured_square=round(worst.mean_square, 7),
        mean_margin=round(worst.mean, 6),
        block_variance=round(float(block_means(worst).var()), 10),
        tokens=sum(variant.tokens for variant in variants),
    )


def calibrate(
    variants: Sequence[Recorded], *, digest: ManifestDigest, model: str, dtype: str, verifier: str
) -> Calibration:
    """Return the calibration that honest variants give; one bound for each temperature among them."""
    temperatures = sorted({variant.temperature for variant in variants})
    return Calibration(
        manifest_digest=digest,
        model=model,
        dtype=dtype,
        verifier=verifier,
        block_tokens=BLOCK_TOKENS,
        stakes=STAKES,
        bounds=tuple(
            honest_bound([variant for variant in variants if variant.temperature == temperature])
            for temperature in temperatures
        ),
        variants=tuple(f"{variant.name}: {variant.tokens} tokens, mean {variant.mean:.5f}" for variant in variants),
    )


def as_rescored(margins: Floats, temperature: float) -> Rescored:
    return Rescored(temperature=temperature, margins=tuple(margins.tolist()))


class Trials:
    """Nodes made of a variant's attempts, from one seed."""

    def __init__(self, variant: Recorded, calibration: Calibration, seed: int = 1) -> None:
        self._variant, self._calibration = variant, calibration
        self._random = np.random.default_rng(seed)
        self._capitals = [self._capital(attempt) for attempt in variant.attempts]

    def evidence(self, tokens: int) -> float:
        """Return the largest evidence that a node's first so many tokens ever reach, looked at after each attempt."""
        total = np.zeros(len(self._calibration.stakes))
        best, left = -math.inf, tokens
        for index in self._random.permutation(len(self._capitals)):
            attempt = self._variant.attempts[index]
            total = total + (self._capitals[index] if len(attempt) <= left else self._capital(attempt[:left]))
            best = max(best, combined(total.tolist()))
            left -= min(left, len(attempt))
            if left == 0:
                return best
        raise ValueError(f"{self._variant.name} holds {self._variant.tokens} tokens, {tokens} are asked for")

    def alarms(self, tokens: int, trials: int, threshold: float = ALARM) -> Rate:
        return Rate(sum(self.evidence(tokens) >= threshold for _ in range(trials)), trials)

    def _capital(self, margins: Floats) -> NDArray[np.float64]:
        return np.array(log_capitals(as_rescored(margins, self._variant.temperature), self._calibration))


# Honest variants and the temperatures they were drawn at.
CALIBRATION_BY_NAME: Final = (
    ("honest-bf16", 1.0),
    ("honest-fp16", 1.0),
    ("honest-fp32", 1.0),
    ("honest-vllm-bf16", 1.0),
    ("honest-bf16-8-rows", 1.0),
    ("honest-resumed-bf16", 1.0),
    ("honest-greedy-bf16", 0.0),
    ("honest-t0.3-bf16", 0.3),
    ("honest-t0.7-top-p-bf16", 0.7),
)


def honest_pool(folder: Path) -> list[Recorded]:
    """Return every honest variant of a record."""
    return [read_variant(folder, name, temperature=temperature) for name, temperature in CALIBRATION_BY_NAME]


def false_stops(folder: Path) -> Rate:
    """Return how many honest answers, each cut once at a place of chance and ended with a stop, show a false stop."""
    random = np.random.default_rng(5)
    found = trials = 0
    for name in ("honest-bf16", "honest-fp16"):
        with np.load(folder / f"{name}.npz") as arrays:
            stops, lengths = arrays["stop_margins"].astype(np.float64), arrays["lengths"].astype(np.int64)
        for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
            # Not the last place, where an answer may really end.
            place = int(random.integers(0, max(int(length) - 1, 1)))
            found += bool(stops[start + place] > STOP_MARGIN)
            trials += 1
    return Rate(found, trials)
