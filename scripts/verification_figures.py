"""Power and false alarms, computed from recorded margins within seconds. No model, no torch.

A trial is one node: attempts drawn from the record without putting back, one
after the other, until so many tokens are checked. Attempts stay whole, so that
the dependence of neighbouring tokens is in the figures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
STAKES: Final = (0.05, 0.12, 0.3)
# One-sided 99 % quantile of a normal distribution.
QUANTILE_99: Final = 2.326
# What one measurement on one machine does not show (other cards, kernels, batch shapes), as a factor on the mean
# square. Mean squares grow with the third power of the arithmetic's error: the error may be 8 % larger.
ALLOWANCE: Final = 1.25
# A bound for variants that show hardly any margin: one of an eighth of a nat in a thousand tokens.
MEAN_SQUARE_MIN: Final = 1.5e-5


@dataclass(frozen=True, slots=True)
class Recorded:
    """One variant of the record: for each attempt its margins, which ids were not listed, and the rates of that."""

    name: str
    attempts: tuple[Floats, ...]
    unlisted: tuple[NDArray[np.bool_], ...]
    unlisted_rates: tuple[Floats, ...]
    temperature: float = 1.0
    arithmetic: str = ""
    # As in `read_variant`.
    field: str = "margins"
    # Rivals of each id that the reference named.
    candidates: int = 20

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
    """Return a variant's attempts.

    Args:
        field: `margins`, or `wrong_seed_margins`: what the verifier would have seen had the node had another seed.
    """
    with np.load(folder / f"{name}.npz") as arrays:
        ends = np.cumsum(arrays["lengths"].astype(np.int64))[:-1]
        # Records of before there were more have no such entry.
        candidates = int(arrays["candidates"]) if "candidates" in arrays else 20
        columns = {key: tuple(np.split(arrays[key], ends)) for key in (field, "unlisted", "unlisted_rates")}
    if field != "margins" or len(columns["unlisted_rates"][0]) == 0:
        # Of another seed the rates were not recorded; at other temperatures there are none.
        columns["unlisted_rates"] = tuple(np.zeros(0) for _ in columns["unlisted"])
    margins = tuple(attempt.astype(np.float64) for attempt in columns[field])
    return Recorded(
        name,
        margins,
        columns["unlisted"],
        columns["unlisted_rates"],
        temperature,
        field=field,
        candidates=candidates,
    )


def block_means(variant: Recorded) -> Floats:
    """Return the mean squares of all whole blocks."""
    means = [
        (attempt[: len(attempt) // BLOCK_TOKENS * BLOCK_TOKENS] ** 2).reshape(-1, BLOCK_TOKENS).mean(axis=1)
        for attempt in variant.attempts
    ]
    return np.concatenate(means)


def honest_bound(variants: Sequence[Recorded]) -> HonestBound:
    """Return the bound of some honest variants at one temperature.

    Variants of one arithmetic are one population: the upper 99 % limit of its mean square, taken over whole attempts
    and over the listed ids alone, as those have the larger margins; with the allowance. And no less than any variant
    showed by itself.
    """
    limits = [MEAN_SQUARE_MIN, *(variant.mean_square for variant in variants)]
    for arithmetic in sorted({variant.arithmetic for variant in variants}):
        listed = [
            attempt[~unlisted]
            for variant in variants
            if variant.arithmetic == arithmetic
            for attempt, unlisted in zip(variant.attempts, variant.unlisted, strict=True)
        ]
        limits.append(_upper_limit(listed) * ALLOWANCE)
    worst = max(variants, key=lambda variant: variant.mean_square)
    return HonestBound(
        temperature=worst.temperature,
        mean_square=round(max(limits), 7),
        measured_square=round(worst.mean_square, 7),
        mean_margin=round(worst.mean, 6),
        block_variance=round(float(block_means(worst).var()), 10),
        tokens=sum(variant.tokens for variant in variants),
    )


def _upper_limit(attempts: Sequence[Floats]) -> float:
    """Return the upper 99 % limit of the mean square of a population, of which whole attempts were drawn."""
    tokens = np.array([len(attempt) for attempt in attempts])
    sums = np.array([(attempt**2).sum() for attempt in attempts])
    mean = float(sums.sum() / tokens.sum())
    # Of a ratio of two sums.
    error = math.sqrt(float(((sums - mean * tokens) ** 2).sum())) / float(tokens.sum())
    return mean + QUANTILE_99 * error


def calibrate(
    variants: Sequence[Recorded], *, digest: ManifestDigest, model: str, dtype: str, verifier: str
) -> Calibration:
    """Return the calibration that honest variants give; one bound for each temperature among them.

    Raises:
        ValueError: not all were scored with as many candidates; margins of longer lists are larger.
    """
    (candidates,) = {variant.candidates for variant in variants}
    temperatures = sorted({variant.temperature for variant in variants})
    return Calibration(
        manifest_digest=digest,
        model=model,
        dtype=dtype,
        verifier=verifier,
        candidates=candidates,
        block_tokens=BLOCK_TOKENS,
        stakes=STAKES,
        bounds=tuple(
            honest_bound([variant for variant in variants if variant.temperature == temperature])
            for temperature in temperatures
        ),
        variants=tuple(f"{variant.name}: {variant.tokens} tokens, mean {variant.mean:.5f}" for variant in variants),
    )


@dataclass(frozen=True, slots=True)
class Course:
    """Evidence against one node, looked at after each attempt: the largest, and the last."""

    largest: float
    last: float


class Trials:
    """Nodes made of a variant's attempts, from one seed."""

    def __init__(self, variant: Recorded, calibration: Calibration, seed: int = 1) -> None:
        self._variant, self._calibration = variant, calibration
        self._random = np.random.default_rng(seed)
        self.whole = [self._capital(index, len(attempt)) for index, attempt in enumerate(variant.attempts)]

    def courses(self, tokens: int, trials: int) -> list[Course]:
        return [self._course(tokens) for _ in range(trials)]

    def alarms(self, tokens: int, trials: int) -> Rate:
        """Return how many nodes ever reach an alarm within so many tokens."""
        return Rate(sum(course.largest >= ALARM for course in self.courses(tokens, trials)), trials)

    def _course(self, tokens: int) -> Course:
        total = np.zeros_like(self.whole[0])
        largest, left = -math.inf, tokens
        for index in self._random.permutation(len(self.whole)):
            length = len(self._variant.attempts[index])
            total = total + (self.whole[index] if length <= left else self._capital(index, left))
            evidence = combined(total.tolist())
            largest = max(largest, evidence)
            left -= min(left, length)
            if left == 0:
                return Course(largest, evidence)
        raise ValueError(f"{self._variant.name} holds {self._variant.tokens} tokens, {tokens} are asked for")

    def _capital(self, index: int, tokens: int) -> Floats:
        variant = self._variant
        rescored = Rescored(
            temperature=variant.temperature,
            margins=tuple(variant.attempts[index][:tokens].tolist()),
            unlisted=tuple(variant.unlisted[index][:tokens].tolist()),
            unlisted_rates=tuple(variant.unlisted_rates[index][:tokens].tolist()),
        )
        return np.array(log_capitals(rescored, self._calibration))


@dataclass(frozen=True, slots=True)
class HonestVariant:
    name: str
    arithmetic: str
    temperature: float = 1.0


HONEST_VARIANTS: Final = (
    HonestVariant("honest-bf16", "bf16"),
    HonestVariant("honest-bf16-8-rows", "bf16"),
    HonestVariant("honest-resumed-bf16", "bf16"),
    HonestVariant("honest-vllm-bf16", "bf16"),
    HonestVariant("honest-fp16", "fp16"),
    HonestVariant("honest-fp32", "fp32"),
    HonestVariant("honest-greedy-bf16", "bf16", 0.0),
    HonestVariant("honest-t0.3-bf16", "bf16", 0.3),
    HonestVariant("honest-t0.7-top-p-bf16", "bf16", 0.7),
)


def honest_pool(folder: Path) -> list[Recorded]:
    """Return every honest variant that is in a folder."""
    return [
        replace(read_variant(folder, item.name, temperature=item.temperature), arithmetic=item.arithmetic)
        for item in HONEST_VARIANTS
        if (folder / f"{item.name}.npz").exists()
    ]


def threshold_at_one_percent(honest: Sequence[Course]) -> float:
    """Return the evidence beyond which 1 % of these honest nodes end.

    For one look after a number of tokens fixed before; an alarm that may be raised at any time needs more.
    """
    ends = sorted((course.last for course in honest), reverse=True)
    return ends[len(ends) // 100]


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
