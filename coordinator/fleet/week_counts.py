"""Lent hours and losses by hour of the week, forgotten little by little; and the rhythm in them. Pure."""

import math
from array import array
from collections.abc import Sequence
from typing import Literal

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
WEEK_S = 7 * DAY_S
# Two hours tell an evening from a night, and a week of them fits in 336 bytes.
BUCKET_S = 2 * HOUR_S
BUCKETS_A_DAY = round(DAY_S / BUCKET_S)
BUCKETS = 7 * BUCKETS_A_DAY
# Unix time began on a Thursday; bucket 0 is the one that begins with Monday, UTC.
FIRST_MONDAY_S = 4 * DAY_S
# Habits change with jobs and seasons: what was seen four weeks ago counts half.
HALF_LIFE_S = 28 * DAY_S
# How many losses the opinion "as at any other hour" is worth against what was seen at an hour.
RHYTHM_PRIOR_LOSSES = 2.0
# Of the buckets next to one: nobody comes home at the same minute every day.
NEIGHBOUR_WEIGHT = 0.5


def second_of_week(at_s: float) -> float:
    """Return the seconds since Monday, 0:00 UTC."""
    return (at_s - FIRST_MONDAY_S) % WEEK_S


class WeekCounts:
    """What was seen of one node, or of all: hours that engines were lent, and engines lost meanwhile.

    Args:
        precision: "f" holds four bytes a bucket and is exact enough for one node; sums over a fleet need "d".
    """

    __slots__ = ("_aged_at_s", "lent_h", "lost")

    def __init__(self, aged_at_s: float, precision: Literal["f", "d"] = "f") -> None:
        self.lent_h = array(precision, bytes(BUCKETS * array(precision).itemsize))
        self.lost = array(precision, self.lent_h)
        self._aged_at_s = aged_at_s

    @property
    def aged_at_s(self) -> float:
        """Unix seconds as of which the counts are; what came later stands in them undiminished."""
        return self._aged_at_s

    def add_lent(self, from_s: float, to_s: float, engines: int) -> None:
        """Add a time in which so many engines were lent, each hour to its bucket."""
        weeks, rest_s = divmod(max(0.0, to_s - from_s), WEEK_S)
        if weeks:
            for bucket in range(BUCKETS):
                self.lent_h[bucket] += weeks * engines * BUCKET_S / HOUR_S
        at_s = second_of_week(from_s)
        while rest_s > 0.0:
            bucket = min(int(at_s / BUCKET_S), BUCKETS - 1)
            step_s = min(rest_s, max((bucket + 1) * BUCKET_S - at_s, 1e-6))
            self.lent_h[bucket] += step_s * engines / HOUR_S
            rest_s -= step_s
            at_s = (at_s + step_s) % WEEK_S

    def add_lost(self, at_s: float, engines: int) -> None:
        """Add losses at a moment; a negative number takes them back."""
        bucket = int(second_of_week(at_s) / BUCKET_S)
        self.lost[bucket] = max(0.0, self.lost[bucket] + engines)

    def add(self, other: "WeekCounts") -> None:
        """Add all counts of another one."""
        for bucket in range(BUCKETS):
            self.lent_h[bucket] += other.lent_h[bucket]
            self.lost[bucket] += other.lost[bucket]

    def age(self, now_s: float) -> None:
        """Forget what the time since the last call is worth; at most once a day, since less makes no difference."""
        elapsed_s = now_s - self._aged_at_s
        if elapsed_s < DAY_S:
            return
        kept = 0.5 ** (elapsed_s / HALF_LIFE_S)
        for bucket in range(BUCKETS):
            self.lent_h[bucket] *= kept
            self.lost[bucket] *= kept
        self._aged_at_s = now_s


def rhythm(lost: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Return by how much the losses in each bucket exceed those expected there, shrunk towards 1.

    First the hour of the day, over all days and with a part of the hours beside it; then the hour of the week itself,
    which with much history outweighs that. Each is a Gamma-Poisson estimate (the posterior mean of a rate ratio with
    mean 1 and `RHYTHM_PRIOR_LOSSES` losses of weight; Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.6).

    Args:
        expected: losses that a constant rate would have brought in each bucket.
    """
    lost_daily, expected_daily = _blurred(_by_hour(lost)), _blurred(_by_hour(expected))
    daily = [_shrunk(seen, awaited) for seen, awaited in zip(lost_daily, expected_daily, strict=True)]
    awaited_weekly = [one * daily[bucket % BUCKETS_A_DAY] for bucket, one in enumerate(expected)]
    weekly = [_shrunk(seen, awaited) for seen, awaited in zip(lost, awaited_weekly, strict=True)]
    return [factor * daily[bucket % BUCKETS_A_DAY] for bucket, factor in enumerate(weekly)]


def _by_hour(values: Sequence[float]) -> list[float]:
    return [math.fsum(values[hour::BUCKETS_A_DAY]) for hour in range(BUCKETS_A_DAY)]


def _blurred(values: Sequence[float]) -> list[float]:
    """Add to each a part of its neighbours, in a circle."""
    last = len(values) - 1
    return [
        values[at] + NEIGHBOUR_WEIGHT * (values[at - 1] + values[at + 1 if at < last else 0])
        for at in range(len(values))
    ]


def _shrunk(seen: float, expected: float) -> float:
    return (RHYTHM_PRIOR_LOSSES + seen) / (RHYTHM_PRIOR_LOSSES + expected)
